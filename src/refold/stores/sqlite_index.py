"""Search in a SQLite file: FTS5 for words, vectors for meaning. Both indexes follow the stored entries."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from refold.core.codec import Entry, to_bytes
from refold.core.errors import CorruptError
from refold.core.query import Query, SearchTerm, SearchText
from refold.stores.nearest import nearest
from refold.stores.packing import to_text, unpack
from refold.stores.sqlite_file import SQLiteFile, SQLiteQueries
from refold.stores.store import FEW_RESULTS, FoundPlace, Key, Scope

T = TypeVar("T")
PLACE_BITS = 32
"""The lower bits of an entry's row id are its place; the upper ones are the conversation's row id."""
BATCH, BATCH_BYTES = 100, 1 << 20
"""Entries and stored bytes indexed in one transaction: small, so that writers do not wait long."""
MAX_RANKED = 1_000
MERGED_PAGES = 200
MAX_MERGES = 10_000


class Segment(NamedTuple):
    """The places of a conversation that one row of the conversation table owns."""

    cid: int
    low: int
    high: int

    @property
    def row_ids(self) -> dict[str, int]:
        return {"low": row_id(self.cid, self.low), "high": row_id(self.cid, self.high)}


def row_id(cid: int, place: int) -> int:
    return (cid << PLACE_BITS) + place


def place_of(row_id: int) -> int:
    return row_id & ((1 << PLACE_BITS) - 1)


def to_entry(row: Sequence[Any]) -> Entry:
    at, kind, id, head, body, *_ = row
    return Entry(place_of(at), kind, None if id is None else to_text(id), head, unpack(body))


class SQLiteIndex:
    """The searching half of `SQLiteStore`."""

    def __init__(self, file: SQLiteFile) -> None:
        self._file = file

    def _segments(self, run: SQLiteQueries, key: Key) -> list[Segment]:
        """In the order of places: those of the ancestors first."""
        rows = run("segments", owner=to_bytes(key.owner), name=to_bytes(key.conversation))
        return [Segment(*row) for row in rows]

    # Indexing

    def index(self, scope: Scope, words: Callable[[Entry], SearchText | None], /) -> Iterator[int]:
        def put(run: SQLiteQueries, place: int, owner: bytes, one: SearchText | None) -> None:
            if one is not None:
                about = (*map(_tool_term, one.tools), _role_term(one.role), _owner_term(owner))
                run("add_words", place=place, text=one.text, parts=one.parts, about=" ".join(about))

        return self._follow(scope, b"", lambda entries: list(map(words, entries)), put)

    def embed(
        self, scope: Scope, embedder: str, vectors: Callable[[Sequence[Entry]], Sequence[Sequence[bytes]]], /
    ) -> Iterator[int]:
        name = to_bytes(embedder)

        def put(run: SQLiteQueries, place: int, owner: bytes, some: Sequence[bytes]) -> None:
            for n, vector in enumerate(some):
                run("add_vector", place=place, embedder=name, n=n, vector=vector)

        return self._follow(scope, name, vectors, put)

    def _follow(
        self,
        scope: Scope,
        what: bytes,
        convert: Callable[[Sequence[Entry]], Sequence[T]],
        put: Callable[[SQLiteQueries, int, bytes, T], None],
    ) -> Iterator[int]:
        """Stores what `convert` makes of new entries; the file is not locked while it runs."""
        with self._file.read() as run:
            if isinstance(scope, Key):
                cids = [segment.cid for segment in self._segments(run, scope)]
            else:
                rows = run("behind", owner=to_bytes(scope), what=what)
                rows += run("inherited", owner=to_bytes(scope))
                cids = list(dict.fromkeys(row[0] for row in rows))
        while unread := self._unread(cids, what):
            starts = dict[int, int]()
            ends = dict[int, int]()
            size = 0
            readable: list[tuple[int, Entry]] = []
            for row in unread:
                cid = row[0] >> PLACE_BITS
                starts.setdefault(cid, row[0])
                ends[cid] = row[0] + 1
                with suppress(CorruptError, TypeError, ValueError):  # `refold doctor` reports it
                    readable.append((row[0], to_entry(row)))
                    size += len(readable[-1][1].body)
                if size >= BATCH_BYTES:
                    break
            cids = cids[cids.index(cid) :]  # the last one may be read in part
            converted = convert([entry for _, entry in readable])
            owners = dict[int, bytes]()
            with self._file.write(durable=False, wait=True) as run:
                for cid, start in starts.items():
                    for followed, owner in run("followed", cid=cid, what=what):
                        if followed <= start:  # no other process was faster
                            run("follow", cid=cid, what=what, next=ends[cid])
                            owners[cid] = owner
                for (place, _), one in zip(readable, converted, strict=True):
                    if place >> PLACE_BITS in owners:
                        put(run, place, owners[place >> PLACE_BITS], one)
            yield sum(ends[cid] - starts[cid] for cid in owners)

    def _unread(self, cids: Sequence[int], what: bytes) -> list[Any]:
        """The next entries to index, of as many conversations as fill a batch."""
        rows = list[Any]()
        with self._file.read() as run:
            for cid in cids:
                for start, _ in run("followed", cid=cid, what=what):  # none if it was erased
                    rows += run("read", low=start, high=row_id(cid + 1, 0), but=None, limit=BATCH - len(rows))
                if len(rows) == BATCH:
                    break
        return rows

    def _purge_index(self) -> None:
        """Rewrites the index in small steps, so that erased words leave the file."""
        for _ in range(MAX_MERGES):
            with self._file.write(durable=False, wait=True) as run:
                before = run.connection.total_changes()
                run("merge_words", pages=-MERGED_PAGES)
                if run.connection.total_changes() - before < 2:
                    return

    # Searching

    def search(self, scope: Scope, query: Query, limit: int, /) -> list[FoundPlace]:
        has_names = any(one.name for one in query.wanted)
        best = list[FoundPlace]()
        with self._file.read() as run:
            if has_names:
                best = self._best(run, scope, _match(query, by_name=True), limit, MAX_RANKED)
            if len(best) < limit:
                score = float(not has_names) if query.is_phrase else None
                best = _merge(best, self._best(run, scope, _match(query), limit, MAX_RANKED, score))
            if len(best) < min(limit, FEW_RESULTS) and query.can_relax:
                best = _merge(best, self._any_word(run, scope, query))
        return best[:limit]

    def _any_word(self, run: SQLiteQueries, scope: Scope, query: Query) -> list[FoundPlace]:
        """Searches for each word alone, so that a common one does not push a rare one out."""
        words = [one for one in query.wanted if not one.must]
        scores = dict[tuple[Key, int], float]()
        for word in words:
            for key, at, score in self._best(
                run, scope, _match(query, word), MAX_RANKED, MAX_RANKED // len(words)
            ):
                scores[key, at] = scores.get((key, at), 0.0) + score
        best = sorted(scores.items(), key=lambda one: one[1], reverse=True)
        return [FoundPlace(*place, score) for place, score in best]

    def _best(
        self,
        run: SQLiteQueries,
        scope: Scope,
        match: str,
        limit: int,
        ranked: int,
        score: float | None = None,
    ) -> list[FoundPlace]:
        """By rank, or newest first with one `score` for all: to rank a phrase, FTS5 reads it twice."""
        rows = list[tuple[int, float]]()
        shared = self._shared(run, scope)
        most = {"pool": ranked if score is None else limit, "limit": limit, "score": score}
        if not isinstance(scope, Key):
            owner = to_bytes(scope)
            only = f" AND {_owner_term(owner)}" if run("several_owners")[0][0] else ""
            rows += run("match_owned", match=f"({match}){only}", owner=owner, **most)
        for segment in shared:
            rows += run("match", match=match, **segment.row_ids, **most)
        rows.sort(key=lambda row: (-row[1], -row[0]))
        return self._found(run, rows[:limit], shared)

    def nearest(self, scope: Scope, embedder: str, vector: bytes, limit: int, /) -> list[FoundPlace]:
        name = to_bytes(embedder)
        rows = list[tuple[int, bytes]]()
        with self._file.read() as run:
            shared = self._shared(run, scope)
            if not isinstance(scope, Key):
                rows += run("vectors_owned", owner=to_bytes(scope), embedder=name)
            for segment in shared:
                rows += run("vectors", embedder=name, **segment.row_ids)
            return self._found(run, nearest(vector, rows, limit), shared)

    def _shared(self, run: SQLiteQueries, scope: Scope) -> dict[Segment, Key]:
        """All segments of a conversation. Of an owner, only those that forks share with conversations that
        were erased or belong to another owner.
        """
        if isinstance(scope, Key):
            return dict.fromkeys(self._segments(run, scope), scope)
        found = dict[int, tuple[Segment, Key]]()
        for cid, high, name in run("inherited", owner=to_bytes(scope)):  # the longest first
            found.setdefault(cid, (Segment(cid, 0, high), Key(scope, to_text(name))))
        return dict(found.values())

    def _found(
        self, run: SQLiteQueries, rows: Sequence[tuple[int, float]], shared: dict[Segment, Key]
    ) -> list[FoundPlace]:
        keys = {segment.cid: key for segment, key in shared.items()}
        for cid in {at >> PLACE_BITS for at, _ in rows} - keys.keys():
            _, owner, name, *_ = run("row", cid=cid)[0]
            keys[cid] = Key(to_text(owner), to_text(name))
        return [FoundPlace(keys[at >> PLACE_BITS], place_of(at), score) for at, score in rows]


def _merge(best: list[FoundPlace], others: Sequence[FoundPlace]) -> list[FoundPlace]:
    known = {found[:2] for found in best}
    return best + [found for found in others if found[:2] not in known]


def _match(query: Query, only: SearchTerm | None = None, *, by_name: bool = False) -> str:
    """The query in FTS5's syntax. `only` keeps just this one of the optional words; `by_name` matches names
    of several words as a whole.
    """
    needed = list[str]()
    for one in query.wanted:
        if only is not None and not one.must and one is not only:
            continue
        if by_name and one.name:
            needed.append(f'"{one.name}"')
        else:
            end = " *" if one.is_prefix else ""
            forms = [f'"{" ".join(form)}"{end}' for form in (one.terms, one.parts) if form]
            needed.append(f"({' OR '.join(forms)})")
    if query.tools:
        needed.append(f"({' OR '.join(map(_tool_filter, query.tools))})")
    if query.roles:
        needed.append(f"({' OR '.join(map(_role_term, query.roles))})")
    return " AND ".join(needed)


def _tool_term(tool: str) -> str:
    """A name as one term, whatever is in it; no text contains such a term."""
    return "\ue100" + to_bytes(tool.casefold()).hex()


def _tool_filter(tool: str) -> str:
    return f'"{_tool_term(tool[:-1])}" *' if tool.endswith("*") else _tool_term(tool)


def _role_term(role: str) -> str:
    return "\ue101" + role


def _owner_term(owner: bytes) -> str:
    return "\ue102" + blake2b(owner, digest_size=8).hexdigest()
