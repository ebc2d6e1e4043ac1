"""The APIs' message formats: how each is parsed, rendered, checked and repaired. Pure.

`dialect.py` defines a dialect, `registry.py` lists them and recognizes messages; one module per API parses,
renders and repairs. `rules/` says what each API accepts; `rules/request.py` is the base of them. `replies.py` and `chunks.py` read replies and
streams.
"""
