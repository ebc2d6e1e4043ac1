"""Benchmarks for users: what is kept (`retention`), what it costs (`cost`), how fast it is (`speed`).

`commands.py` declares the commands. `recorded.py` reads conversations, `probes.py` finds the values that
later calls needed, `replay.py` replays a conversation through a session.
"""
