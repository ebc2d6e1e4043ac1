"""Two views side by side: of one conversation at two moments, or of two that have a past in common."""

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from refold.core import codec
from refold.core.event import Line, Said
from refold.core.message import Message
from refold.core.view import Item
from refold.session.results import Change, ComparedView, Diff, MessageSummary, Sign
from refold.stores.record import Record


def compare(old: Record, new: Record, at: int | None, to: int | None) -> Diff:
    """
    Raises:
        NotFoundError: there is no such place.
    """
    shared = None if old is new else _shared(old, new)
    before, after = _shown(old, at), _shown(new, to)
    keys = [[_key(line, seen, shared) for line, seen in side] for side in (before, after)]
    matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    changes = tuple(_changes([seen for _, seen in before], [seen for _, seen in after], matcher))
    moments = _compared(old, at, before, shared), _compared(new, to, after, shared)
    return Diff(*moments, changes, None if shared is None else shared - 1)


def _compared(
    record: Record, at: int | None, shown: Sequence[tuple[Line, MessageSummary]], shared: int | None
) -> ComparedView:
    said = () if shared is None else tuple(_said_since(record, shared, at))
    return ComparedView(record.key.conversation, at, len(shown), sum(seen.tokens for _, seen in shown), said)


def _shown(record: Record, at: int | None) -> list[tuple[Line, MessageSummary]]:
    live = record.live if at is None else record.as_of(at)
    items = record.with_words(live.freeze()).items
    return [(line, _seen(item, line)) for item in items for line in item.lines]


def _seen(item: Item, line: Line) -> MessageSummary:
    """By the place where it was said, also where it is shortened or corrected."""
    in_place = len(item.span) == len(item.lines) == 1 and not line.summary
    at = item.span.start if in_place else line.place
    edit = None if line.at in item.span else line.at
    return MessageSummary(at, line.role, line.tokens, item.words(line), line.tools, edit)


def _key(line: Line, seen: MessageSummary, shared: int | None) -> tuple[object, ...]:
    """What makes two lines the same: their place, or, where two conversations part, what they say."""
    if shared is None or line.at < shared:
        return (line.at, line.n)
    return (line.role, codec.dumps(_words(seen.message)))


def _words(message: Message) -> Message:
    """Without what differs though the same is said."""
    return Message(message.role, message.parts, name=message.name)


def _shared(one: Record, other: Record) -> int:
    """How many events two conversations have in common: the digest of an event stands for all before it."""
    low, high = 0, min(one.live.state.next, other.live.state.next)
    while low < high:
        middle = (low + high + 1) // 2
        if one.digest_before(middle) == other.digest_before(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _said_since(record: Record, shared: int, at: int | None) -> Iterator[MessageSummary]:
    for one in record.events(shared, None if at is None else record.end_of(at)):
        if isinstance(one, Said):
            yield MessageSummary(one.at, one.line.role, one.line.tokens, one.message, one.line.tools)


def _changes(
    before: Sequence[MessageSummary],
    after: Sequence[MessageSummary],
    matcher: SequenceMatcher[tuple[object, ...]],
) -> Iterator[Change]:
    for tag, i, j, k, m in matcher.get_opcodes():
        sides: list[tuple[Sign, Sequence[MessageSummary]]] = [
            ("-", before[i:j]),
            ("+", after[k:m]),
        ]
        if tag == "equal":
            sides = [(" ", after[k:m])]
        yield from (Change(sign, seen) for sign, side in sides for seen in side)
