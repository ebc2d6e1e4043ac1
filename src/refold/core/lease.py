"""Leases: answers of refold's own tools are shown whole for a few steps."""

from refold.core.event import Line

EXPAND, SEARCH = "refold_expand", "refold_search"
OWN = frozenset((EXPAND, SEARCH))


def is_own(line: Line) -> bool:
    """True for an answer of one of these tools, and for a message that calls nothing else."""
    return bool(line.tools) and OWN.issuperset(line.tools)


def lease_of(line: Line) -> int | None:
    """Steps for which an answer of these tools is shown whole; None for any other message."""
    if line.answers is None or not is_own(line):
        return None
    expiry = line.expiry
    return expiry.after_steps if expiry is not None and expiry.mode == "remove" else None


def is_leased(line: Line, step: int) -> bool:
    """True while only the last rung may make it shorter."""
    steps = lease_of(line)
    return steps is not None and step - line.step <= steps


def has_ended(line: Line, step: int) -> bool:
    """True if only its name has to stay: its lease is over."""
    steps = lease_of(line)
    return steps is not None and step - line.step > steps
