"""Benchmarks for users: what is kept (`retention`), what it costs (`cost`), how fast it is (`speed`).

`commands.py` registers them. `recorded.py`, `own.py` and `made.py` find or make conversations, `replay.py`
replays one through a session, `score.py` looks for the values that were needed later.
"""
