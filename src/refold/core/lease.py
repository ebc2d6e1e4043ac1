"""What refold's own tools answered: shown for a few steps, then only named."""

from refold.core.event import Line

EXPAND, SEARCH = "refold_expand", "refold_search"
OWN = frozenset((EXPAND, SEARCH))


def is_own(line: Line) -> bool:
    """It is an answer of one of them, or a call to nothing else."""
    return bool(line.tools) and OWN.issuperset(line.tools)


def is_leased(line: Line, step: int) -> bool:
    """It may not be made shorter yet, unless there is no other way."""
    after = line.expiry.after_steps if line.expiry is not None and line.answers is not None else None
    return after is not None and step - line.step <= after and is_own(line)
