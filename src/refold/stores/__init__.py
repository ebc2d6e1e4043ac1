"""Where conversations are kept: the `Store` protocol and one file or a few for each engine.

Begin with `store.py` (the protocol, and `open_store`), then `memory.py`, the smallest engine, and
`sqlite.py`, the default. `record.py` is one conversation of a store in this process: it catches up and
appends.
"""
