"""What can be found in a SQLite file: FTS5 for words, vectors for meaning; both follow the streams."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias, TypeVar

from refold.core.codec import Entry, to_bytes
from refold.core.errors import CorruptError
from refold.core.query import Query, SearchTerm, SearchText
from refold.stores.nearest import nearest
from refold.stores.sqlite_file import SQLiteFile, SQLiteQueries
from refold.stores.store import FEW_RESULTS, FoundPlace, Key, Scope

T = TypeVar("T")
PLACES = 32
"""Bits of a row's key that are the place; the rest is the conversation."""
BATCH, BATCH_BYTES = 100, 1 << 20
"""What is taken in at a time, so that nobody who writes waits long: entries, and their bodies as stored."""
POOL = 1_000
"""Of all that matches, the newest so many are ranked."""
PAGES = 200
"""Of the index, that are rewritten at a time."""
MOST_MERGES = 10_000


class Segment(NamedTuple):
    """The places of a conversation that are in one row of the table of conversations."""

    cid: int
    low: int
    high: int


Segments: TypeAlias = Callable[[SQLiteQueries, Key], Sequence[Segment]]


class SQLiteIndex:
    def __init__(
        self,
        file: SQLiteFile,
        segments: Segments,
        entry: Callable[[Any], Entry],
        text: Callable[[bytes], str],
    ) -> None:
        self._file, self._segments, self._entry, self._text = file, segments, entry, text

    # Following

    def index(self, scope: Scope, words: Callable[[Entry], SearchText | None]) -> Iterator[int]:
        def put(run: SQLiteQueries, place: int, owner: bytes, one: SearchText | None) -> None:
            if one is not None:
                about = (*map(_tool_term, one.tools), _role_term(one.role), _owner_term(owner))
                run("add_words", place=place, text=one.text, parts=one.parts, about=" ".join(about))

        return self._follow(scope, b"", lambda entries: list(map(words, entries)), put)

    def embed(
        self, scope: Scope, embedder: str, vectors: Callable[[Sequence[Entry]], Sequence[Sequence[bytes]]]
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
        take: Callable[[Sequence[Entry]], Sequence[T]],
        put: Callable[[SQLiteQueries, int, bytes, T], None],
    ) -> Iterator[int]:
        """What `take` makes of entries is stored; nothing is locked while it is made."""
        with self._file.read() as run:
            todo = deque(self._behind(run, scope, what))
        while todo:
            rows, read = list[Any](), list[tuple[int, int, int]]()
            with self._file.read() as run:
                while todo and len(rows) < BATCH and sum(map(_size, rows)) < BATCH_BYTES:
                    cid, start = todo.popleft()
                    more = run("read", low=start, high=(cid + 1) << PLACES, but=None, limit=BATCH)
                    more = more[: _so_many(more)]
                    if more:
                        rows += more
                        read.append((cid, start, more[-1][0] + 1))
                        todo.appendleft((cid, more[-1][0] + 1))
            whole = [(row[0], entry) for row in rows if (entry := self._read(row)) is not None]
            taken = take([entry for _, entry in whole])
            self._put(what, read, zip((place for place, _ in whole), taken, strict=True), put)
            if rows:
                yield len(rows)

    def _put(
        self,
        what: bytes,
        read: Sequence[tuple[int, int, int]],
        taken: Iterable[tuple[int, T]],
        put: Callable[[SQLiteQueries, int, bytes, T], None],
    ) -> None:
        """Of what was read, all that nobody else took in meanwhile, or erased."""
        with self._file.write(durable=False, wait=True) as run:
            left = dict[int, tuple[int, bytes]]()
            for cid, start, next in read:
                known = run("followed", cid=cid, what=what)
                if known and start <= known[0][0] < next:
                    left.setdefault(cid, known[0])
                    run("follow", cid=cid, what=what, next=next)
            for place, one in taken:
                first, owner = left.get(place >> PLACES, (place + 1, b""))
                if place >= first:
                    put(run, place, owner, one)

    def _read(self, row: Sequence[Any]) -> Entry | None:
        try:
            return self._entry(row)
        except (
            CorruptError,
            TypeError,
            ValueError,
        ):  # damaged: `refold doctor` says so, the others are found
            return None

    def _behind(self, run: SQLiteQueries, scope: Scope, what: bytes) -> list[tuple[int, int]]:
        """Conversations with entries that were not taken in yet, and the places where these begin."""
        if isinstance(scope, Key):
            cids = [segment.cid for segment in self._segments(run, scope)]
            found = list[tuple[int, int]]()
        else:
            owner = to_bytes(scope)
            found = [(cid, next) for cid, next in run("behind", owner=owner, what=what)]
            cids = [cid for cid, *_ in run("inherited", owner=owner)]
        known = {cid for cid, _ in found}
        for cid in dict.fromkeys(cids):
            start = run("followed", cid=cid, what=what)[0][0]
            if cid not in known and run("last", low=start, high=(cid + 1) << PLACES):
                found.append((cid, start))
        return found

    def forget(self, run: SQLiteQueries, low: int, high: int) -> None:
        """What is found at places that are erased."""
        run("erase_words", low=low, high=high)
        run("erase_vectors", low=low, high=high)

    def shred(self) -> None:
        """Words that were forgotten leave the file: the index is rewritten without them, in small steps."""
        for _ in range(MOST_MERGES):
            with self._file.write(durable=False, wait=True) as run:
                before = run.changes
                run("merge_words", pages=-PAGES)
                if run.changes - before < 2:
                    return

    # Finding

    def search(self, scope: Scope, query: Query, limit: int) -> list[FoundPlace]:
        with self._file.read() as run:
            by_name = any(one.name for one in query.wanted)
            best = self._best(run, scope, _all_of(query, by_name=True), limit, POOL) if by_name else []
            if len(best) < limit:
                score = float(not by_name) if query.is_phrase else None
                best = _more(best, self._best(run, scope, _all_of(query), limit, POOL, score))
            if len(best) < min(limit, FEW_RESULTS) and query.can_relax:
                best = _more(best, self._any_of(run, scope, query))
        return best[:limit]

    def _any_of(self, run: SQLiteQueries, scope: Scope, query: Query) -> list[FoundPlace]:
        """Each word is looked for alone, so that a common one does not push a rare one out."""
        words = [one for one in query.wanted if not one.must]
        scores = dict[tuple[Key, int], float]()
        for one in words:
            for key, at, score in self._best(run, scope, _all_of(query, one), POOL, POOL // len(words)):
                scores[key, at] = scores.get((key, at), 0.0) + score
        best = sorted(scores.items(), key=lambda one: one[1], reverse=True)
        return [FoundPlace(*place, score) for place, score in best]

    def _best(
        self, run: SQLiteQueries, scope: Scope, match: str, limit: int, pool: int, score: float | None = None
    ) -> list[FoundPlace]:
        """By rank; with a `score` that all have, the newest first: to rank a phrase, FTS5 reads it twice."""
        rows, shared = list[tuple[int, float]](), self._shared(run, scope)
        most = {"pool": pool if score is None else limit, "limit": limit, "score": score}
        if not isinstance(scope, Key):
            owner = to_bytes(scope)
            only = f" AND {_owner_term(owner)}" if run("several_owners")[0][0] else ""
            rows += run("match_owned", match=f"({match}){only}", owner=owner, **most)
        for segment, _ in shared:
            rows += run("match", match=match, **_range(segment), **most)
        rows.sort(key=lambda row: (-row[1], -row[0]))
        return self._found(run, rows[:limit], shared)

    def nearest(self, scope: Scope, embedder: str, vector: bytes, limit: int) -> list[FoundPlace]:
        name, rows = to_bytes(embedder), list[tuple[int, bytes]]()
        with self._file.read() as run:
            shared = self._shared(run, scope)
            if not isinstance(scope, Key):
                rows += run("vectors_owned", owner=to_bytes(scope), embedder=name)
            for segment, _ in shared:
                rows += run("vectors", embedder=name, **_range(segment))
            return self._found(run, nearest(vector, rows, limit), shared)

    def _shared(self, run: SQLiteQueries, scope: Scope) -> list[tuple[Segment, Key]]:
        """All segments of a conversation. Of an owner, only what forks share with conversations that are
        erased, or somebody else's.
        """
        if isinstance(scope, Key):
            return [(segment, scope) for segment in self._segments(run, scope)]
        found = dict[int, tuple[Segment, Key]]()
        for cid, high, name in run("inherited", owner=to_bytes(scope)):
            if cid not in found:  # the longest comes first
                found[cid] = (Segment(cid, 0, high), Key(scope, self._text(name)))
        return list(found.values())

    def _found(
        self, run: SQLiteQueries, rows: Sequence[tuple[int, float]], shared: Sequence[tuple[Segment, Key]]
    ) -> list[FoundPlace]:
        keys = {segment.cid: key for segment, key in shared}
        for cid in {place >> PLACES for place, _ in rows} - keys.keys():
            _, owner, name, *_ = run("row", cid=cid)[0]
            keys[cid] = Key(self._text(owner), self._text(name))
        return [
            FoundPlace(keys[place >> PLACES], place & ((1 << PLACES) - 1), score) for place, score in rows
        ]


def _range(segment: Segment) -> dict[str, int]:
    return {"low": (segment.cid << PLACES) + segment.low, "high": (segment.cid << PLACES) + segment.high}


def _size(row: Sequence[Any]) -> int:
    return len(row[4]) if isinstance(row[4], bytes) else 0


def _so_many(rows: Sequence[Any]) -> int:
    """How many of these rows are taken in at a time."""
    total = 0
    for n, row in enumerate(rows, 1):
        total += _size(row)
        if total >= BATCH_BYTES:
            return n
    return len(rows)


def _more(best: list[FoundPlace], others: Sequence[FoundPlace]) -> list[FoundPlace]:
    known = {found[:2] for found in best}
    return best + [found for found in others if found[:2] not in known]


def _all_of(query: Query, only: SearchTerm | None = None, *, by_name: bool = False) -> str:
    """The query as FTS5 has it; with `only`, of the words that need not be there just this one; `by_name`,
    names of several pieces as a whole.
    """
    wanted = [one for one in query.wanted if only is None or one.must or one is only]
    needed = [f'"{one.name}"' if by_name and one.name else f"({_any_form(one)})" for one in wanted]
    if query.tools:
        needed.append(f"({' OR '.join(map(_tool_filter, query.tools))})")
    if query.roles:
        needed.append(f"({' OR '.join(map(_role_term, query.roles))})")
    return " AND ".join(needed)


def _any_form(wanted: SearchTerm) -> str:
    forms = [some for some in (wanted.terms, wanted.parts) if some]
    end = " *" if wanted.is_prefix else ""
    return " OR ".join(f'"{" ".join(some)}"{end}' for some in forms)


def _tool_term(tool: str) -> str:
    """A name as one term, whatever is in it, and one that no text has."""
    return "\ue100" + to_bytes(tool.casefold()).hex()


def _tool_filter(tool: str) -> str:
    return f'"{_tool_term(tool[:-1])}" *' if tool.endswith("*") else _tool_term(tool)


def _role_term(role: str) -> str:
    return "\ue101" + role


def _owner_term(owner: bytes) -> str:
    return "\ue102" + blake2b(owner, digest_size=8).hexdigest()
