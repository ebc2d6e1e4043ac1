"""Benchmarks for users: what is kept (`retention`), what it costs (`cost`), how fast it is (`speed`).

`commands.py` declares the commands. `trace.py` has recorded conversations and the values that later calls
needed, `recorded.py` reads them, `replay.py` replays one through a session.
"""
