"""What each API accepts, as numbered rules from its documentation; `targets.py` applies them."""
