"""What each API accepts, as numbered rules from its documentation; `judge.py` and `targets.py` apply them."""
