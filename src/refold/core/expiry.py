"""Several wishes when a message may be reduced, made one."""

from collections.abc import Iterable, Sequence
from typing import Any

from refold.core.event import Expiry

HARDEST_FIRST: dict[str, Sequence[str]] = {
    "mode": ("remove", "compact", "none"),
    "compact_mode": ("first-n-chars", "skeleton", "ai-summary"),
    "strategy": ("age", "relevance"),
}


def layered(*expiries: Expiry) -> Expiry:
    """Later ones beat earlier ones, field by field; what is unset in one is as before.

    >>> layered(Expiry(after_steps=3, length=500), Expiry(after_steps=0)).length
    500
    """
    return Expiry(**{name: value for one in expiries for name, value in _given(one).items()})


def most_aggressive(expiries: Iterable[Expiry]) -> Expiry:
    """What results that came in one message share: the soonest and the most, of those that expire at all.

    >>> both = most_aggressive([Expiry(after_steps=2, length=900), Expiry(after_steps=5, mode="remove")])
    >>> both.after_steps, both.mode, both.length
    (2, 'remove', 900)
    """
    expiring = [_given(one) for one in expiries if one.after_steps is not None and one.mode != "none"]
    said = {name: [one[name] for one in expiring if name in one] for name in Expiry.__struct_fields__}
    return Expiry(**{name: _hardest(name, values) for name, values in said.items() if values})


def _given(expiry: Expiry) -> dict[str, Any]:
    """What is set in it."""
    values = {name: getattr(expiry, name) for name in expiry.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


def _hardest(name: str, values: Sequence[Any]) -> Any:
    if name in HARDEST_FIRST:
        return min(values, key=HARDEST_FIRST[name].index)
    if name == "prompt":  # none is harder than another
        return values[0]
    return max(values) if name == "threshold" else min(values)
