"""When messages may be reduced: merging expiry settings, and leases of refold's own tool results.

A lease is an expiry that `expand` sets on the result of one of refold's own tools: the result is shown whole
for some steps, then only its name stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from msgspec.structs import asdict

from refold.core.event import Expiry, Line

EXPAND = "refold_expand"
SEARCH = "refold_search"
OWN_TOOLS = frozenset((EXPAND, SEARCH))

MOST_AGGRESSIVE_FIRST: dict[str, Sequence[str]] = {
    "mode": ("remove", "compact", "none"),
    "compact_mode": ("first-n-chars", "skeleton", "ai-summary"),
    "strategy": ("age", "relevance"),
}


def expiry_for(tool: str, settings: Mapping[str, Expiry]) -> Expiry:
    """Merge the settings whose name or pattern matches a tool; the most specific name wins per field."""
    return merge_expiries(*(settings[name] for name in matching_names(tool, settings)))


def matching_names(tool: str, names: Iterable[str]) -> list[str]:
    """The names and patterns that match a tool, the most specific last.

    The exact name is the most specific, then the pattern with the most characters besides `*` and `?`.

    >>> matching_names("web_search", ["web_search", "*", "web_*", "grep", "w*"])
    ['*', 'w*', 'web_*', 'web_search']
    """

    def specificity(name: str) -> tuple[bool, int, str]:
        literals = sum(character not in "*?" for character in name)
        return (name == tool, literals, name)

    found = [name for name in names if name == tool or fnmatchcase(tool, name)]
    return sorted(found, key=specificity) if len(found) > 1 else found


def merge_expiries(*expiries: Expiry) -> Expiry:
    """Later ones override earlier ones, field by field.

    >>> merge_expiries(Expiry(after_steps=3, length=500), Expiry(after_steps=0)).length
    500
    """
    merged: dict[str, Any] = {}
    for expiry in expiries:
        merged.update(_set_fields(expiry))
    return Expiry(**merged)


def most_aggressive(expiries: Iterable[Expiry]) -> Expiry:
    """The expiry that results of one message share: the soonest and strongest of those that expire at all.

    >>> both = most_aggressive([Expiry(after_steps=2, length=900), Expiry(after_steps=5, mode="remove")])
    >>> both.after_steps, both.mode, both.length
    (2, 'remove', 900)
    """
    values: dict[str, list[Any]] = {}
    for expiry in expiries:
        if expiry.after_steps is not None and expiry.mode != "none":
            for name, value in _set_fields(expiry).items():
                values.setdefault(name, []).append(value)
    return Expiry(**{name: _most_aggressive_value(name, found) for name, found in values.items()})


def _set_fields(expiry: Expiry) -> dict[str, Any]:
    return {name: value for name, value in asdict(expiry).items() if value is not None}


def _most_aggressive_value(name: str, values: Sequence[Any]) -> Any:
    if name in MOST_AGGRESSIVE_FIRST:
        return min(values, key=MOST_AGGRESSIVE_FIRST[name].index)
    if name == "prompt":  # no prompt is more aggressive than another
        return values[0]
    return max(values) if name == "threshold" else min(values)


def uses_own_tools(line: Line) -> bool:
    """True for a result of refold's own tools, and for a message that calls no other tool."""
    return bool(line.tools) and OWN_TOOLS.issuperset(line.tools)


def lease_steps(line: Line) -> int | None:
    """For how many steps a result of refold's own tools is shown whole; None for any other message."""
    if line.answers is None or not uses_own_tools(line):
        return None
    expiry = line.expiry
    return expiry.after_steps if expiry is not None and expiry.mode == "remove" else None


def is_leased(line: Line, step: int) -> bool:
    """True while only the last stage of the ladder may shorten it."""
    steps = lease_steps(line)
    return steps is not None and step - line.step <= steps


def lease_has_ended(line: Line, step: int) -> bool:
    steps = lease_steps(line)
    return steps is not None and step - line.step > steps
