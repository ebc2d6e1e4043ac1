"""Finding what was said: by its words, and by its meaning where there is an embedder."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from heapq import nlargest
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from refold.core import codec
from refold.core.codec import Entry, Parse
from refold.core.errors import RefoldError, SettingError, StoreError
from refold.core.event import Line, Replaced, Said
from refold.core.expiry import OWN_TOOLS
from refold.core.message import CompactionMarker, Media, Message, Part, Text, ToolCall, ToolResult
from refold.core.query import Query, SearchText, excerpt
from refold.policies.shorten import quoted
from refold.session.embedding import pieces_of, unit_vectors
from refold.session.results import Hit
from refold.session.validate import require_int
from refold.stores.record import Record
from refold.stores.store import FEW_RESULTS, FoundPlace, Key, Scope, SearchIndex, Snapshots, Store, Vectors

if TYPE_CHECKING:
    from refold.session.embedding import Embedder

MOST_HITS = 1_000
EXCERPT_CHARS = 240
TOOL_CHARS = 4_000
"""Of all hits together, for a model."""
CANDIDATES = 50
"""Of each kind, that are merged."""
NEAR = 0.25
"""Cosine from which on a text has to do with another."""
LONG = 2_000
"""Events that are not read only to know what is in view."""
SPARE = 10
"""FoundPlace besides, for those that turn out not to stand any more."""
RANK = 60
"""How little the first of a list counts for more than the second, where two lists are merged."""


def limit_of(limit: object) -> int:
    """
    Raises:
        SettingError: so many hits cannot be asked for.
    """
    if not 1 <= require_int("limit", limit) <= MOST_HITS:
        raise SettingError("limit", f"expected 1 to {MOST_HITS:,}, got {limit}")
    return require_int("limit", limit)


def find(
    store: Store,
    scope: Scope,
    query: Query,
    limit: int,
    parse: Parse,
    embedder: "Embedder | None" = None,
    tick: Callable[[int], None] = lambda n: None,
) -> list[FoundPlace]:
    """Places, the best first, with a few to spare. What is not in the index yet is taken in before; `tick`
    hears how much.

    A store that has no index, or whose index cannot be written now, is read from end to end.
    """
    limit += SPARE
    by_words = _by_words(store, scope, query, max(limit, CANDIDATES if embedder else 0), parse, tick)
    if embedder is None or not query.text or not isinstance(store, Vectors):
        return by_words[:limit]
    try:
        by_meaning = _by_meaning(store, scope, query, embedder, parse, tick)
    except RefoldError:
        raise
    except Exception as error:  # whatever an embedder makes of it: words are found without it
        warnings.warn(f"Searched by words only: the embedder failed ({error!r})", stacklevel=3)
        return by_words[:limit]
    return _merged(by_words, [found for found in by_meaning if _allowed(store, query, found, parse)])[:limit]


def _by_words(
    store: Store, scope: Scope, query: Query, limit: int, parse: Parse, tick: Callable[[int], None]
) -> list[FoundPlace]:
    if isinstance(store, SearchIndex):
        try:
            for n in store.index(scope, lambda entry: words(entry, parse)):
                tick(n)
            return store.search(scope, query, limit)
        except StoreError:
            pass  # read-only, or locked: it can still be read
    return _scanned(store, scope, query, limit, parse, tick)


def _scanned(
    store: Store, scope: Scope, query: Query, limit: int, parse: Parse, tick: Callable[[int], None]
) -> list[FoundPlace]:
    every, some = list[FoundPlace](), list[FoundPlace]()
    for key, entry in _entries(store, scope):
        tick(1)
        known = words(entry, parse)
        if known is not None and query.matches(known):
            every.append(FoundPlace(key, entry.at, query.weight(known)))
        elif known is not None and query.can_relax and query.matches(known, any_word=True):
            some.append(FoundPlace(key, entry.at, query.weight(known)))
    best = nlargest(limit, every, key=lambda found: (found.score, found.at))
    if len(best) < min(limit, FEW_RESULTS):
        best += nlargest(limit - len(best), some, key=lambda found: (found.score, found.at))
    return best


def _entries(store: Store, scope: Scope) -> Iterator[tuple[Key, Entry]]:
    """Each once: what a fork shares with a parent of the same owner is found in the parent."""
    keys = [(scope, 0)] if isinstance(scope, Key) else []
    for row in () if isinstance(scope, Key) else store.conversations(scope):
        is_shared = row.parent is not None and row.parent.owner == scope
        keys.append((row.key, row.fork_at if is_shared else 0))
    return chain.from_iterable(((key, link.entry) for link in store.read(key, at)) for key, at in keys)


def words(entry: Entry, parse: Parse) -> SearchText | None:
    """What can be found of an entry: what was said or corrected, but for refold's own tools and what they
    answered.
    """
    said = _said(entry, parse)
    if said is None:
        return None
    tools = tuple(tool for tool in said.line.tools if tool not in OWN_TOOLS)
    text = text_of(said)
    return SearchText.of(text, tools, said.line.role) if text or tools else None


class Corrected(NamedTuple):
    """What somebody put in the place of a message."""

    line: Line
    message: Message
    time: float


def _said(entry: Entry, parse: Parse) -> Said | Corrected | None:
    if entry.kind not in ("said", "replaced"):
        return None
    try:
        event = codec.decode(entry, parse)
        if isinstance(event, Replaced) and event.kind == "correct":
            line = next(line for line in event.lines if line.at == event.at and line.place in event.span)
            shown = event.shown[line.n]
            return Corrected(line, shown, event.time) if isinstance(shown, Message) else None
    except Exception:  # damaged, or of a newer refold: the others can be found
        return None
    return event if isinstance(event, Said) else None


def text_of(said: Said | Corrected) -> str:
    """What can be found of a message, as it was said."""
    is_own = said.line.answers is not None and not OWN_TOOLS.isdisjoint(said.line.tools)
    return "\n".join(text for part in said.message.parts for text in _texts(part, is_own))


def _texts(part: Part, is_own: bool) -> Iterator[str]:
    match part:
        case Text(text=text) | CompactionMarker(text=text):
            yield text
        case ToolResult(output=str(text)) if not is_own:
            yield text
        case ToolResult(output=tuple(inner)) if not is_own:
            for one in inner:
                yield from _texts(one, is_own)
        case ToolCall(tool=tool, input=input) if tool not in OWN_TOOLS:
            yield f"{tool} {input}"
        case Media(name=name, url=url):
            yield from filter(None, (name, None if url is None or url.startswith("data:") else url))


# By meaning


def _by_meaning(
    store: Vectors,
    scope: Scope,
    query: Query,
    embedder: "Embedder",
    parse: Parse,
    tick: Callable[[int], None],
) -> list[FoundPlace]:
    name = str(
        getattr(embedder, "name", "") or getattr(embedder, "__qualname__", type(embedder).__qualname__)
    )

    def vectors(entries: Sequence[Entry]) -> list[list[bytes]]:
        pieces = [_pieces(entry, parse) for entry in entries]
        made = iter(unit_vectors(embedder, [piece for some in pieces for piece in some]))
        return [[vector for _ in some if (vector := next(made)) is not None] for some in pieces]

    for n in store.embed(scope, name, vectors):
        tick(n)
    (asked,) = unit_vectors(embedder, [query.text])
    near = [] if asked is None else store.nearest(scope, name, asked, CANDIDATES)
    return [found for found in near if found.score >= NEAR]


def _pieces(entry: Entry, parse: Parse) -> list[str]:
    said = _said(entry, parse)
    return pieces_of(text_of(said)) if said is not None else []


def _allowed(store: Store, query: Query, found: FoundPlace, parse: Parse) -> bool:
    if not (query.tools or query.roles):
        return True
    link = next(store.read(found.key, found.at, found.at + 1), None)
    said = _said(link.entry, parse) if link else None
    return said is not None and query.allows(said.line.tools, said.line.role)


def _merged(*lists: Sequence[FoundPlace]) -> list[FoundPlace]:
    """By reciprocal rank: what is high in either list is high, what is in both is higher."""
    scores = dict[tuple[Key, int], float]()
    for some in lists:
        for rank, found in enumerate(some, 1):
            scores[found[:2]] = scores.get(found[:2], 0.0) + 1 / (RANK + rank)
    best = sorted(scores.items(), key=lambda one: one[1], reverse=True)
    return [FoundPlace(*place, score) for place, score in best]


# What is told


def hits(
    store: Store, query: Query, found: Sequence[FoundPlace], limit: int, parse: Parse, *known: Record
) -> list[Hit]:
    """What was found, with its words, and whether it is in view; `known` are records that are open.

    A correction is told at the place of what it corrects, unless it was taken back.
    """
    records: dict[Key, Record | None] = {record.key: record for record in known}
    view = known[0].view if known else "main"
    told = list[Hit]()
    for key, at, score in found:
        if len(told) == limit:
            break
        link = next(store.read(key, at, at + 1), None)
        said = _said(link.entry, parse) if link else None
        if said is None:
            continue  # erased meanwhile
        if key not in records:
            records[key] = _record(store, key, view, parse)
        line, record = said.line, records[key]
        stands = _stands(record, line)
        if stands is None and line.corrects is not None and record is not None:
            continue  # taken back, or of another view
        text, when = excerpt(text_of(said), query, EXCERPT_CHARS), datetime.fromtimestamp(said.time, UTC)
        what = (line.place, line.role, line.tools, text, score, _is_shown(record, line), when)
        told.append(Hit(key.conversation, *what, is_corrected=stands not in (None, at)))
    return told


def _record(store: Store, key: Key, view: str, parse: Parse) -> Record | None:
    """Another conversation, unless it is damaged, or long and without a snapshot to start from."""
    try:
        has_snapshot = isinstance(store, Snapshots) and view in store.saved(key)
        if not has_snapshot and next(store.read(key, LONG, LONG + 1), None) is not None:
            return None
        return Record(store, key, view, parse)
    except RefoldError:
        return None


def _stands(record: Record | None, line: Line) -> int | None:
    """Place of the correction that stands for a message."""
    correction = record.live.state.corrected.get(line.place) if record is not None else None
    return None if correction is None else correction.at


def _is_shown(record: Record | None, line: Line) -> bool | None:
    item = record.live.item_at(line.place) if record is not None else None
    lines = item.lines if item is not None else ()
    return None if record is None else any((one.at, one.place) == (line.at, line.place) for one in lines)


def as_tool_text(hits: Sequence[Hit], *, handles: bool = True, most_chars: int = TOOL_CHARS) -> str:
    """Hits for a model, one a line. Without `handles`, nothing in it can be expanded."""
    if not hits:
        return "Nothing was found. Try fewer or other words, or the beginning of one, as in data*."
    lines, left = list[str](), most_chars
    for hit in hits:
        who = " ".join((hit.role, *hit.tools)) if hit.role == "tool" else hit.role
        place = f"#{hit.at} " if handles else ""
        note = "before it was corrected" if hit.is_corrected else "shown above" if hit.in_view else ""
        line = f"{place}{who}{f' ({note})' if note else ''}: {quoted(hit.excerpt)}"
        left -= len(line) + 1
        if left < 0 and lines:
            lines.append(f"… and {len(hits) - len(lines):,} more: ask for something more special.")
            break
        lines.append(line[:most_chars])
    return "\n".join(lines)
