"""What a model takes and costs: its limits, its prices, and how many tokens a message has.

`limits.py` finds a model in `models.json`; `count.py` counts, with the overheads of `framing.py`,
`images.py` and `schemas.py`; `calibrate.py` corrects the counts by what providers report.
"""
