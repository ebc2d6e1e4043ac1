"""Policies: pure functions from a view and a budget to a plan, one idea per file.

Begin with `prune.py`, a small one, and `ladder.py`, which runs them until the view fits. `summarize.py` and
`selection.py` choose what is summarized; `extract.py` writes a summary by rule and `evidence.py` checks a
model's. What they ask of a text (its words, exact values and demands) is in `text.py`.
"""
