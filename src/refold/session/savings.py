"""What edits were expected to save, beside what the provider's own numbers say that they did."""

from collections.abc import Iterable, Iterator

import msgspec

from refold.core.cache_cost import Prices
from refold.core.event import Event, Measured, Replaced, Said, Worth


class EditSavings(msgspec.Struct, frozen=True):
    """Of the edits that were made together, up to the next ones or to now."""

    at: int
    """The first of them."""
    kind: str
    why: str
    worth: Worth
    calls: int = 0
    """Calls since that the provider reported."""
    read: int = 0
    """Tokens of those that its cache had."""
    missed: int = 0
    """Tokens of those that it had not."""
    rewritten: int | None = None
    """Tokens of the first call after it that had been sent before and were not in the cache any more."""
    saved: float | None = None
    """USD by now, at the model's prices; below zero, it has not paid for itself yet."""


def edit_savings(events: Iterable[Event], view: str, prices: Prices | None) -> Iterator[EditSavings]:
    """One for each edit that was weighed, in order."""
    newest: EditSavings | None = None
    fresh = 0
    for event in events:
        match event:
            case Said(line=line):
                fresh += line.tokens
            case Replaced(worth=Worth() as worth) if event.view == view:
                if newest is not None:
                    yield newest
                newest = EditSavings(event.at, event.kind, event.why, worth)
            case Measured() if event.view == view and event.usage.input:
                if newest is not None:
                    newest = _told(newest, event, fresh, prices)
                fresh = 0
    if newest is not None:
        yield newest


def _told(outcome: EditSavings, measured: Measured, fresh: int, prices: Prices | None) -> EditSavings:
    usage = measured.usage
    missed = max(0, usage.input - usage.cache_read)
    rewritten = max(0, missed - fresh) if outcome.rewritten is None else outcome.rewritten
    calls = outcome.calls + 1
    saved = None
    if prices is not None:
        again = rewritten * (prices.write - prices.read)
        saved = round((calls * outcome.worth.removed * prices.read - again) / 1e6 - outcome.worth.cost, 6)
    return msgspec.structs.replace(
        outcome,
        calls=calls,
        read=outcome.read + usage.cache_read,
        missed=outcome.missed + missed,
        rewritten=rewritten,
        saved=saved,
    )
