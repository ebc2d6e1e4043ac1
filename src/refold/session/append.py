"""Stores messages that are parsed and counted, and learns from the usage that they report."""

import time
from collections.abc import Sequence

from refold.core.draft import PART, Draft, number
from refold.core.errors import ConflictError
from refold.core.event import Event, Said
from refold.session.conversation import Conversation
from refold.session.tools import Toolbox


def append_drafts(
    chat: Conversation, toolbox: Toolbox, drafts: Sequence[Draft], after: int | None = None
) -> list[int]:
    """Stores drafts and returns their places; a message whose id is known is stored once.

    `after` is the number of messages that the conversation must have until then.

    Raises:
        ConflictError: it has more or fewer messages; nothing was stored.
    """
    record = chat.record
    ids = [draft.message.id for draft in drafts if draft.message.id is not None]
    known: dict[str, int] = {}

    def build() -> Sequence[Event]:
        if after not in (None, record.live.state.index):
            raise ConflictError(f"{record.key.conversation!r} no longer has {after} messages")
        known.clear()
        if ids:
            known.update(record.store.find(record.key, ids))
        new = _without_known(drafts, known)
        return toolbox.leased(number(new, record.live.state, chat.last, time.time()))

    measured = record.live.state.measured
    recorded = [event for event in record.append(build) if isinstance(event, Said)]
    chat.note_dialect(drafts)
    for event in recorded:
        if event.message.usage is not None:
            chat.learn(event.message.usage, measured)
    places = known | {event.message.id: event.at for event in recorded if event.message.id is not None}
    unnamed = iter([event.at for event in recorded if event.message.id is None])
    found = list[int]()
    for draft in drafts:
        id = draft.message.id
        if id is None:
            found.append(next(unnamed))
        else:
            found.append(places.get(id, places.get(id.partition(PART)[0], 0)))
    return found


def _without_known(drafts: Sequence[Draft], known: dict[str, int]) -> list[Draft]:
    """The drafts with a new id, or without any; of several with the same id, the first."""
    new = list[Draft]()
    seen = set(known)
    for draft in drafts:
        id = draft.message.id
        if id is None:
            new.append(draft)
        elif id not in seen and id.partition(PART)[0] not in known:
            new.append(draft)
            seen.add(id)
    return new
