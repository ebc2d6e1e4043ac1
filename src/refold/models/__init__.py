"""Limits and prices of models, and token counts of messages.

`limits.py` finds a model in `models.json`; `count.py` counts, with the overheads of `framing.py`,
`images.py` and `schemas.py`; `calibrate.py` corrects the counts by what providers report.
"""
