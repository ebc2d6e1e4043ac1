"""How other tools keep requests small."""

from collections.abc import Sequence

from refold.cli.bench.cost import SUMMARY_TOKENS, Charges, NextRequest, Way
from refold.cli.bench.trace import Json

TRIGGER = 20_000
"""Tokens from which on these tools reduce a request."""
KEEP_RESULTS = 3
KEEP_MESSAGES = 20
CLEARED = "[cleared]"


def mask_results(charges: Charges) -> NextRequest:
    """Clears all but the newest results, in every request."""
    return lambda messages: _cleared(messages, len(messages))


def newest_messages(charges: Charges) -> NextRequest:
    """Sends the system text, the first request of the user and the newest messages."""

    def newest(messages: Sequence[Json]) -> Sequence[Json]:
        head = _head(messages)
        first = _whole_step(messages, max(len(head), len(messages) - KEEP_MESSAGES))
        return [*head, *messages[first:]]

    return newest


class ClearResults:
    """Clears old results all at once, whenever the request is too large."""

    def __init__(self, charges: Charges) -> None:
        self._charges = charges
        self._until = 0

    def __call__(self, messages: Sequence[Json]) -> Sequence[Json]:
        shown = _cleared(messages, self._until)
        if self._charges.size(shown) > TRIGGER:
            self._until = len(messages)
            shown = _cleared(messages, self._until)
        return shown


class SummarizeOldest:
    """Summarizes all but the newest messages, whenever the request is too large."""

    def __init__(self, charges: Charges) -> None:
        self._charges = charges
        self._summary: list[Json] = []
        self._from = 0

    def __call__(self, messages: Sequence[Json]) -> Sequence[Json]:
        head = _head(messages)
        shown = [*head, *self._summary, *messages[max(len(head), self._from) :]]
        if self._charges.size(shown) <= TRIGGER:
            return shown
        self._charges.summarize(shown)
        words = " ".join(f"word{len(messages)}x{n}" for n in range(SUMMARY_TOKENS // 4))
        self._summary = [{"role": "user", "content": f"What happened before: {words}"}]
        self._from = _whole_step(messages, max(len(head), len(messages) - KEEP_MESSAGES // 2))
        return [*head, *self._summary, *messages[self._from :]]


def _head(messages: Sequence[Json]) -> list[Json]:
    """The messages up to the first one of the user."""
    task = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
    return [*messages[: task + 1]]


def _whole_step(messages: Sequence[Json], first: int) -> int:
    """The first message from there on that is no result: its call would be missing."""
    while first < len(messages) and messages[first]["role"] == "tool":
        first += 1
    return first


def _cleared(messages: Sequence[Json], until: int) -> list[Json]:
    results = [n for n, message in enumerate(messages[:until]) if message["role"] == "tool"]
    old = {*results[:-KEEP_RESULTS]}
    return [{**message, "content": CLEARED} if n in old else message for n, message in enumerate(messages)]


OTHERS = [
    Way("mask old results in every step", mask_results),
    Way(f"the newest {KEEP_MESSAGES} messages", newest_messages),
    Way(f"clear old results above {TRIGGER:,}", ClearResults),
    Way(f"summarize above {TRIGGER:,}", SummarizeOldest),
]
