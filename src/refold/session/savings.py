"""Compares what edits were expected to save with the usage that the provider reported since."""

from collections.abc import Iterable, Iterator

import msgspec

from refold.core.cache_cost import Prices
from refold.core.event import Event, Measured, Replaced, Said, Worth


class EditSavings(msgspec.Struct, frozen=True):
    """Expected and actual savings of edits that were made together, up to the next ones or to now."""

    at: int
    """Place of the first edit."""
    kind: str
    why: str
    worth: Worth
    calls: int = 0
    """Calls since, as far as the provider reported them."""
    read: int = 0
    """Input tokens of those calls that the provider's cache had."""
    missed: int = 0
    """Input tokens that it did not have."""
    rewritten: int | None = None
    """Tokens of the first call that had been sent before and were no longer in the cache."""
    saved: float | None = None
    """USD by now, at the model's prices; below zero, it has not paid for itself yet."""


def edit_savings(events: Iterable[Event], view: str, prices: Prices | None) -> Iterator[EditSavings]:
    """One for each batch of edits that has an estimate, in order."""
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
                    newest = _with_call(newest, event, fresh, prices)
                fresh = 0
    if newest is not None:
        yield newest


def _with_call(outcome: EditSavings, measured: Measured, fresh: int, prices: Prices | None) -> EditSavings:
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
