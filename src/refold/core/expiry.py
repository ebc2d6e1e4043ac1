"""Several wishes when a message may be reduced, made one."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from refold.core.event import Expiry

HARDEST_FIRST: dict[str, Sequence[str]] = {
    "mode": ("remove", "compact", "none"),
    "compact_mode": ("first-n-chars", "skeleton", "ai-summary"),
    "strategy": ("age", "relevance"),
}


def expiry_for(tool: str, settings: Mapping[str, Expiry]) -> Expiry:
    """What settings by name or pattern say of a tool: field by field, the most specific name wins."""
    return layered(*(settings[name] for name in names_for(tool, settings)))


def names_for(tool: str, names: Iterable[str]) -> list[str]:
    """The names and patterns that match a tool, the most specific last.

    The exact name is the most specific, then the pattern with the most characters besides `*` and `?`.

    >>> names_for("web_search", ["web_search", "*", "web_*", "grep", "w*"])
    ['*', 'w*', 'web_*', 'web_search']
    """
    found = [name for name in names if name == tool or fnmatchcase(tool, name)]
    if len(found) > 1:
        found.sort(key=lambda name: (name == tool, _literals(name), name))
    return found


def _literals(pattern: str) -> int:
    return sum(character not in "*?" for character in pattern)


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
