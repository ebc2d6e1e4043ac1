"""Search: by words, and by meaning if there is an embedder."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from heapq import nlargest
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from refold.core import codec
from refold.core.codec import Entry
from refold.core.errors import RefoldError, SettingError, StoreError
from refold.core.event import Line, Replaced, Said
from refold.core.expiry import OWN_TOOLS
from refold.core.message import CompactionMarker, Media, Message, Part, Text, ToolCall, ToolResult
from refold.core.query import Query, SearchText, excerpt, parse_query
from refold.policies.shorten import quoted
from refold.session.embedding import pieces_of, unit_vectors
from refold.session.inspect import parse
from refold.session.results import Hit
from refold.session.validate import require_int
from refold.stores.nearest import nearest
from refold.stores.record import Record
from refold.stores.store import FEW_RESULTS, FoundPlace, Key, Scope, SearchIndex, Store

if TYPE_CHECKING:
    from refold.session.embedding import Embedder

MOST_HITS = 1_000
EXCERPT_CHARS = 240
TOOL_CHARS = 4_000
"""Of all hits together, for a model."""
CANDIDATES = 50
"""From each of the two lists that are merged."""
MIN_COSINE = 0.25
SPARE = 10
"""Found in addition, since some may have been erased or undone."""
RANK_CONSTANT = 60
"""Of reciprocal rank fusion."""


def limit_of(limit: object) -> int:
    """Raises SettingError if the limit is out of range."""
    if not 1 <= require_int("limit", limit) <= MOST_HITS:
        raise SettingError("limit", f"expected 1 to {MOST_HITS:,}, got {limit}")
    return require_int("limit", limit)


def search(
    store: Store, scope: Scope, query: str, limit: int, tick: Callable[[int], None] = lambda n: None
) -> list[Hit]:
    """Messages of one conversation, or of all of an owner, that match a query; the best first.

    Raises:
        SettingError: the query is empty, or the limit is out of range.
    """
    parsed = parse_query(query)
    most = limit_of(limit)
    return hits(store, parsed, find(store, scope, parsed, most, tick=tick), most)


def find(
    store: Store,
    scope: Scope,
    query: Query,
    limit: int,
    embedder: "Embedder | None" = None,
    tick: Callable[[int], None] = lambda n: None,
) -> list[FoundPlace]:
    """The best places, and a few more than `limit`. New messages are indexed before; `tick` is called with
    the number of events that were.

    A store without an index is read from end to end; so is one whose index of words cannot be written now.
    """
    limit += SPARE
    by_words = _by_words(store, scope, query, max(limit, CANDIDATES if embedder else 0), tick)
    if embedder is None or not query.text:
        return by_words[:limit]
    try:
        by_meaning = _by_meaning(store, scope, query, embedder, tick)
    except RefoldError:
        raise
    except Exception as error:  # an embedder may raise anything; the search by words does not need it
        warnings.warn(f"Searched by words only: the embedder failed ({error!r})", stacklevel=3)
        return by_words[:limit]
    allowed = [found for found in by_meaning if _is_allowed(store, query, found)]
    return _merged(by_words, allowed)[:limit]


def _by_words(
    store: Store, scope: Scope, query: Query, limit: int, tick: Callable[[int], None]
) -> list[FoundPlace]:
    if isinstance(store, SearchIndex):
        try:
            for n in store.index(scope, words):
                tick(n)
            return store.search(scope, query, limit)
        except StoreError:
            pass  # read-only, or locked: it can still be read
    return _scanned(store, scope, query, limit, tick)


def _scanned(
    store: Store, scope: Scope, query: Query, limit: int, tick: Callable[[int], None]
) -> list[FoundPlace]:
    """Messages with all words, and if those are few, messages with some of them."""
    found = list[tuple[bool, FoundPlace]]()
    for key, entry in _entries(store, scope):
        tick(1)
        text = words(entry)
        if text is not None and query.matches(text, any_word=True):
            found.append((query.matches(text), FoundPlace(key, entry.at, query.weight(text))))
    with_all_words = sum(has_all for has_all, _ in found)
    if with_all_words >= min(limit, FEW_RESULTS):
        limit = min(limit, with_all_words)
    best = nlargest(limit, found, key=lambda one: (one[0], one[1].score, one[1].at))
    return [place for _, place in best]


def _entries(store: Store, scope: Scope) -> Iterator[tuple[Key, Entry]]:
    """Each once: what a fork shares with a parent of the same owner is found in the parent."""
    if isinstance(scope, Key):
        for link in store.read(scope):
            yield scope, link.entry
        return
    for row in store.conversations(scope):
        is_shared = row.parent is not None and row.parent.owner == scope
        for link in store.read(row.key, row.fork_at if is_shared else 0):
            yield row.key, link.entry


def words(entry: Entry) -> SearchText | None:
    """The searchable text of a recorded message or correction, without refold's own tools."""
    said = _message_of(entry)
    if said is None:
        return None
    tools = tuple(tool for tool in said.line.tools if tool not in OWN_TOOLS)
    text = text_of(said)
    return SearchText.of(text, tools, said.line.role) if text or tools else None


class SearchedMessage(NamedTuple):
    """A recorded message, or one that a person shows in the place of another."""

    line: Line
    message: Message
    time: float


def _message_of(entry: Entry) -> SearchedMessage | None:
    if entry.kind not in ("said", "replaced"):
        return None
    try:
        event = codec.decode(entry, parse)
        if isinstance(event, Replaced) and event.kind == "correct":
            line = next(line for line in event.lines if line.at == event.at and line.place in event.span)
            message = event.shown[line.n]
            return SearchedMessage(line, message, event.time) if isinstance(message, Message) else None
    except Exception:  # damaged, or written by a newer refold: the others can still be found
        return None
    return SearchedMessage(event.line, event.message, event.time) if isinstance(event, Said) else None


def text_of(said: Said | SearchedMessage) -> str:
    """The searchable text of a message."""
    is_own = said.line.answers is not None and not OWN_TOOLS.isdisjoint(said.line.tools)
    texts: list[str] = []
    for part in said.message.parts:
        texts += _texts(part, is_own)
    return "\n".join(texts)


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
            if name:
                yield name
            if url and not url.startswith("data:"):
                yield url


# By meaning


def _by_meaning(
    store: Store,
    scope: Scope,
    query: Query,
    embedder: "Embedder",
    tick: Callable[[int], None],
) -> list[FoundPlace]:
    class_name = getattr(embedder, "__qualname__", type(embedder).__qualname__)
    name = str(getattr(embedder, "name", "") or class_name)

    def vectors(entries: Sequence[Entry]) -> list[list[bytes]]:
        pieces: list[list[str]] = []
        for entry in entries:
            said = _message_of(entry)
            pieces.append(pieces_of(text_of(said)) if said is not None else [])
        made = iter(unit_vectors(embedder, list(chain.from_iterable(pieces))))
        return [list(filter(None, islice(made, len(some)))) for some in pieces]

    rows: list[tuple[tuple[Key, int], bytes]] = []
    if isinstance(store, SearchIndex):
        for n in store.embed(scope, name, vectors):
            tick(n)
    else:
        entries = list(_entries(store, scope))
        for (key, entry), some in zip(entries, vectors([entry for _, entry in entries]), strict=True):
            rows += [((key, entry.at), one) for one in some]
    (vector,) = unit_vectors(embedder, [query.text])
    if vector is None:
        return []
    if isinstance(store, SearchIndex):
        found = store.nearest(scope, name, vector, CANDIDATES)
    else:
        found = [FoundPlace(*place, score) for place, score in nearest(vector, rows, CANDIDATES)]
    return [one for one in found if one.score >= MIN_COSINE]


def _is_allowed(store: Store, query: Query, found: FoundPlace) -> bool:
    if not (query.tools or query.roles):
        return True
    said = _read(store, found.key, found.at)
    return said is not None and query.allows(said.line.tools, said.line.role)


def _merged(*lists: Sequence[FoundPlace]) -> list[FoundPlace]:
    """Reciprocal rank fusion: what is high in either list is high, what is in both is higher."""
    scores: dict[tuple[Key, int], float] = {}
    for ranked in lists:
        for rank, found in enumerate(ranked, 1):
            place = (found.key, found.at)
            scores[place] = scores.get(place, 0.0) + 1 / (RANK_CONSTANT + rank)
    best = sorted(scores.items(), key=lambda one: one[1], reverse=True)
    return [FoundPlace(*place, score) for place, score in best]


# Results


def hits(
    store: Store, query: Query, found: Sequence[FoundPlace], limit: int, record: Record | None = None
) -> list[Hit]:
    """What was found, with an excerpt, and whether it is in view; `record` is one that is open already.

    A correction is listed at the place of the message that it corrects, unless it was undone.
    """
    records: dict[Key, Record | None] = {} if record is None else {record.key: record}
    view = "main" if record is None else record.view
    results: list[Hit] = []
    for key, at, score in found:
        if len(results) == limit:
            break
        said = _read(store, key, at)
        if said is None:
            continue  # erased meanwhile
        if key not in records:
            records[key] = _open(store, key, view)
        line = said.line
        is_shown = None
        is_corrected = False
        if known := records[key]:
            correction = known.live.state.corrected.get(line.place)
            if correction is None and line.corrects is not None:
                continue  # undone, or of another view
            is_corrected = correction is not None and correction.at != at
            is_shown = _is_shown(known, line)
        text = excerpt(text_of(said), query, EXCERPT_CHARS)
        time = datetime.fromtimestamp(said.time, UTC)
        where = (key.conversation, line.place, line.role, line.tools)
        results.append(Hit(*where, text, score, is_shown, time, is_corrected))
    return results


def _read(store: Store, key: Key, at: int) -> SearchedMessage | None:
    link = next(store.read(key, at, at + 1), None)
    return None if link is None else _message_of(link.entry)


def _open(store: Store, key: Key, view: str) -> Record | None:
    """Another conversation; None if it is damaged."""
    try:
        return Record(store, key, view, parse)
    except RefoldError:
        return None


def _is_shown(record: Record, line: Line) -> bool:
    item = record.live.item_at(line.place)
    return item is not None and any((one.at, one.place) == (line.at, line.place) for one in item.lines)


def as_tool_text(hits: Sequence[Hit], *, handles: bool = True, most_chars: int = TOOL_CHARS) -> str:
    """Hits for a model, one per line. Without `handles`, none of them can be expanded."""
    if not hits:
        return "Nothing was found. Try fewer or other words, or the beginning of one, as in data*."
    lines: list[str] = []
    left = most_chars
    for hit in hits:
        place = f"#{hit.at} " if handles else ""
        note = ""
        if hit.is_corrected:
            note = " (before it was corrected)"
        elif hit.in_view:
            note = " (shown above)"
        line = f"{place}{hit.author}{note}: {quoted(hit.excerpt)}"
        left -= len(line) + 1
        if left < 0 and lines:
            lines.append(f"… and {len(hits) - len(lines):,} more: ask for something more specific.")
            break
        lines.append(line[:most_chars])
    return "\n".join(lines)
