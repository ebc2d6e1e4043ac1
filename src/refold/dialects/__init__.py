"""The APIs' message formats: how each is parsed, rendered, checked and repaired. Pure.

`registry.py` lists them and picks one; one file per API parses and renders. `rules/` says what each API
accepts, `repairs/` mends what it would refuse; `replies.py` and `chunks.py` read answers and streams.
"""
