"""Messages, events and the view: the definitions that everything else rests on. Pure: no clock, no files.

`message.py` and `event.py` are what is stored; `view.py` has `fold`, which defines the view, and `live.py`
keeps the same view up to date. Then `budget.py` and `plan.py` (how much fits, what a policy proposes) and
`codec.py`.
"""
