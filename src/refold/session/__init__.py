"""A conversation that an agent is having: append, fit, edit, expand, search, export.

`session.py` is what users call. `intake.py` takes messages in; `fit.py` builds the next request with
`triggers.py` (whether to compact), `reduce.py` (making the view smaller) and `render.py` (writing it in a
dialect); `edits.py` has what people change by hand.
"""

from refold.session.session import Session

__all__ = ["Session"]
