"""What can be found in PostgreSQL: full-text search for words, vectors for meaning; both follow the streams.

The index narrows a search to entries that have all the terms, in whatever order; the words of the newest of
these decide, by the query's own definition of what matches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

from refold.core.codec import Entry, to_bytes
from refold.core.errors import CorruptError
from refold.core.query import Query, SearchTerm, SearchText
from refold.stores.nearest import nearest
from refold.stores.packing import unpack
from refold.stores.postgres_pool import PostgresPool, PostgresQueries
from refold.stores.store import FEW_RESULTS, FoundPlace, Key, Scope

T = TypeVar("T")
RowPlace: TypeAlias = tuple[int, int]
"""A conversation's row and the place in it."""

BATCH, BATCH_BYTES = 100, 1 << 20
"""What is taken in at a time: entries, and their bodies as stored."""
POOL, POOL_BYTES = 1_000, 8 << 20
"""Of all that matches, the newest so many are ranked, as long as their words are not longer than this."""
MOST_TERMS_BYTES = 400_000
"""Of the different terms of an entry; one with more is looked through whenever something is searched."""
LONGEST_TOOL = 500
"""Bytes of a tool's name that narrow a search."""
TOOL, ROLE, OWNER, LONG, PLACE = "\ue100", "\ue101", "\ue102", "\ue103", "\ue104"
"""How terms begin that no text has."""


class _TextSearch(NamedTuple):
    """A query as PostgreSQL has it."""

    match: str
    phrases: str
    """What must stand in the words besides: a line each, and any of the forms in a line."""
    whole: str
    """The same, where the entry has so many terms that none are in the index."""


class PostgresIndex:
    def __init__(self, ask: PostgresPool) -> None:
        self._ask = ask

    # Following

    def index(self, scope: Scope, words: Callable[[Entry], SearchText | None]) -> Iterator[int]:
        def put(run: PostgresQueries, taken: Sequence[tuple[RowPlace, bytes, SearchText | None]]) -> None:
            some = [(place, owner, one) for place, owner, one in taken if one is not None]
            columns = {
                "cids": [place[0] for place, _, _ in some],
                "ats": [place[1] for place, _, _ in some],
                "terms": [_terms(one, place[0], owner) for place, owner, one in some],
                "words": [f" {one.text} \n {one.parts} " for _, _, one in some],
                "tools": [" ".join(to_bytes(tool).hex() for tool in one.tools) for _, _, one in some],
                "roles": [to_bytes(one.role) for _, _, one in some],
            }
            if some:
                run("add_words", **columns)

        return self._follow(scope, b"", lambda entries: list(map(words, entries)), put)

    def embed(
        self, scope: Scope, embedder: str, vectors: Callable[[Sequence[Entry]], Sequence[Sequence[bytes]]]
    ) -> Iterator[int]:
        what = _what(embedder)

        def put(run: PostgresQueries, taken: Sequence[tuple[RowPlace, bytes, Sequence[bytes]]]) -> None:
            rows = [(*place, n, one) for place, _, some in taken for n, one in enumerate(some)]
            if rows:
                cids, ats, ns, made = map(list, zip(*rows, strict=True))
                run("add_vectors", what=what, cids=cids, ats=ats, ns=ns, vectors=made)

        return self._follow(scope, what, vectors, put)

    def _follow(
        self,
        scope: Scope,
        what: bytes,
        take: Callable[[Sequence[Entry]], Sequence[T]],
        put: Callable[[PostgresQueries, Sequence[tuple[RowPlace, bytes, T]]], None],
    ) -> Iterator[int]:
        """What `take` makes of entries is stored; nothing is locked while it is made."""
        behind = self._ask("behind", **_scope(scope), what=what)
        owners = {cid: owner for cid, _, owner in behind}
        todo = {cid: start for cid, start, _ in behind}
        while todo:
            some = dict(islice(todo.items(), BATCH))
            cids, starts = list(some), list(some.values())
            rows = self._ask("read_behind", cids=cids, starts=starts, rows=BATCH, bytes=BATCH_BYTES)
            ends = {cid: at + 1 for cid, at, *_ in rows}
            is_whole = len(rows) < BATCH and sum(len(row[5]) for row in rows) < BATCH_BYTES
            left = {} if is_whole else {rows[-1][0]: ends[rows[-1][0]]}
            left |= {} if is_whole else {cid: start for cid, start in some.items() if cid not in ends}
            whole = [((cid, row[0]), entry) for cid, *row in rows if (entry := _read(row)) is not None]
            taken = take([entry for _, entry in whole])
            made = [(place, owners[place[0]], one) for (place, _), one in zip(whole, taken, strict=True)]
            read = [(cid, start, ends[cid]) for cid, start in some.items() if cid in ends]
            passed = self._put(what, read, made, put)
            todo = left | passed | {cid: start for cid, start in todo.items() if cid not in some}
            if count := sum(cid not in passed for cid, *_ in rows):
                yield count

    def _put(
        self,
        what: bytes,
        read: Sequence[tuple[int, int, int]],
        made: Sequence[tuple[RowPlace, bytes, T]],
        put: Callable[[PostgresQueries, Sequence[tuple[RowPlace, bytes, T]]], None],
    ) -> dict[int, int]:
        """Stores what was made of what was read; the rest, which somebody else took in meanwhile, is
        returned, with the places where he is.
        """

        def work(run: PostgresQueries) -> dict[int, int]:
            cids, starts, nexts = map(list, zip(*read, strict=True))
            was = run("follow", what=what, cids=cids, starts=starts, nexts=nexts)
            mine = {cid for cid, (followed,) in zip(cids, was, strict=True) if followed}
            put(run, [one for one in made if one[0][0] in mine])
            return {cid: run("followed", cid=cid, what=what)[0][0] for cid in cids if cid not in mine}

        return self._ask.transact(work) if read else {}

    # Finding

    def search(self, scope: Scope, query: Query, limit: int) -> list[FoundPlace]:
        names = [_text_search(query, by_name=True)] if any(one.name for one in query.wanted) else []
        best = self._best(scope, query, [*names, _text_search(query)], limit, POOL)
        if len(best) < min(limit, FEW_RESULTS) and query.can_relax:
            words = [one for one in query.wanted if not one.must]
            each = [_text_search(query, one) for one in words]
            known = {found[:2] for found in best}
            others = self._best(scope, query, each, limit, POOL // len(words), any_word=True)
            best += [found for found in others if found[:2] not in known]
        return best[:limit]

    def _best(
        self,
        scope: Scope,
        query: Query,
        asked: Sequence[_TextSearch],
        limit: int,
        pool: int,
        *,
        any_word: bool = False,
    ) -> list[FoundPlace]:
        matches, phrases, wholes = map(list, zip(*asked, strict=True))
        terms = {"place": PLACE, "owned": OWNER + _scope(scope)["owner_key"].hex(), "long": LONG}
        most = {"limit": limit, "pool": max(pool, limit), "bytes": POOL_BYTES}
        values = {"matches": matches, "phrases": phrases, "wholes": wholes}
        found = dict[RowPlace, FoundPlace]()
        for cid, at, owner, name, text, tools, role in self._ask(
            "search", **_scope(scope), **terms, **values, **most
        ):
            first, second = text.split("\n")
            words = SearchText(first[1:-1], second[1:-1], tuple(map(to_text, tools)), to_text(role))
            if (cid, at) not in found and query.matches(words, any_word=any_word):
                key = Key(to_text(owner), to_text(name))
                found[cid, at] = FoundPlace(key, at, query.weight(words))
        order = sorted(found, key=lambda place: (found[place].score, place), reverse=True)
        return [found[place] for place in order]

    def nearest(self, scope: Scope, embedder: str, vector: bytes, limit: int) -> list[FoundPlace]:
        rows = self._ask("vectors", **_scope(scope), what=_what(embedder))
        keys = {cid: (owner, name) for cid, _, owner, name, _ in rows}
        best = nearest(vector, (((cid, at), blob) for cid, at, *_, blob in rows), limit)
        return [FoundPlace(Key(*map(to_text, keys[cid])), at, score) for (cid, at), score in best]


def _scope(scope: Scope) -> dict[str, Any]:
    if isinstance(scope, Key):
        return {"key": key_digest(scope), "owner_key": owner_digest(scope.owner)}
    return {"key": None, "owner_key": owner_digest(scope)}


def _what(embedder: str) -> bytes:
    return blake2b(to_bytes(embedder), digest_size=16).digest()


def _read(row: Sequence[Any]) -> Entry | None:
    try:
        return to_entry(row)
    except CorruptError:  # `refold doctor` says so, the others are found
        return None


def _terms(words: SearchText, cid: int, owner: bytes) -> str:
    """All terms of an entry, each once, as a tsvector is written."""
    about = [
        *map(_tool, words.tools),
        ROLE + to_bytes(words.role).hex(),
        OWNER + owner.hex(),
        f"{PLACE}{cid}",
    ]
    terms = " ".join({*words.text.split(), *words.parts.split()})
    return " ".join([LONG if len(terms.encode()) > MOST_TERMS_BYTES else terms, *about])


def _tool(name: str) -> str:
    """A name as one term, whatever is in it."""
    return TOOL + to_bytes(name.casefold())[:LONGEST_TOOL].hex()


def _role(name: str) -> str:
    return ROLE + to_bytes(name).hex()


def _text_search(query: Query, only: SearchTerm | None = None, *, by_name: bool = False) -> _TextSearch:
    """With `only`, of the words that need not be there just this one; `by_name`, names of several pieces as
    a whole.
    """
    needed, phrases, whole = list[str](), list[str](), list[str]()
    for one in query.wanted:
        if only is None or one.must or one is only:
            forms = (
                [(one.name,)] if by_name and one.name else [some for some in (one.terms, one.parts) if some]
            )
            goes_on, end = (":*", "") if one.is_prefix else ("", " ")
            needed.append(" | ".join([*(f"({_all(form)}{goes_on})" for form in forms), LONG]))
            whole.append("\t".join(f" {' '.join(form)}{end}" for form in forms))
            phrases += whole[-1:] if any(len(form) > 1 for form in forms) else []
    if query.tools:
        needed.append(
            " | ".join(_tool(one[:-1]) + ":*" if one.endswith("*") else _tool(one) for one in query.tools)
        )
    if query.roles:
        needed.append(" | ".join(ROLE + to_bytes(role).hex() for role in query.roles))
    return _TextSearch(" & ".join(f"({one})" for one in needed), "\n".join(phrases), "\n".join(whole))


def _all(terms: Iterable[str]) -> str:
    return " & ".join(f"'{term}'" for term in terms)


@lru_cache(10_000)
def owner_digest(owner: str) -> bytes:
    return blake2b(to_bytes(owner), digest_size=16).digest()


@lru_cache(10_000)
def key_digest(key: Key) -> bytes:
    """What a conversation is found by, whatever is in its name and however long that is."""
    return blake2b(to_bytes(key.conversation), digest_size=16, key=owner_digest(key.owner)).digest()


def to_entry(row: Sequence[Any]) -> Entry:
    """
    Raises:
        CorruptError: it was altered.
    """
    at, kind, id, head, body, *_ = row
    return Entry(at, to_text(kind), None if id is None else to_text(id), head, unpack(body))


def to_text(data: bytes) -> str:
    """
    Raises:
        CorruptError: it was altered.
    """
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptError(f"A stored name or id is no text: {data!r}") from error
