"""The APIs' message formats: how each is parsed, rendered, checked and repaired. Pure.

`dialect.py` defines a dialect, `registry.py` lists them and recognizes messages; one module per API parses,
renders and repairs. `rules/` says what each API accepts, on the base of `rules/request.py`. `replies.py` and
`chunks.py` read replies and streams.
"""
