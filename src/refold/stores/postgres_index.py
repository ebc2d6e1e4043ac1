"""Search in PostgreSQL: full-text search for words, vectors for meaning. Both indexes follow the entries.

The index narrows a search to entries that contain all terms, in any order; of these, `Query.matches` decides.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias, TypeVar

from refold.core.codec import Entry, to_bytes
from refold.core.errors import CorruptError
from refold.core.query import Query, SearchTerm, SearchText
from refold.stores.nearest import nearest
from refold.stores.packing import to_text, unpack
from refold.stores.postgres_pool import PostgresPool, PostgresQueries
from refold.stores.store import FEW_RESULTS, FoundPlace, Key, Scope

T = TypeVar("T")
RowPlace: TypeAlias = tuple[int, int]
"""The row id of a conversation, and a place in it."""

BATCH, BATCH_BYTES = 100, 1 << 20
"""Entries and stored bytes indexed in one transaction."""
RANKED, RANKED_BYTES = 1_000, 8 << 20
"""Only the newest matches are ranked: so many, or so many bytes of their words."""
MAX_TERMS_BYTES = 400_000
"""Entries with more distinct terms than this are not in the index: each search scans them."""
MAX_TOOL_BYTES = 500
TOOL, ROLE, OWNER, LONG, PLACE = "\ue100", "\ue101", "\ue102", "\ue103", "\ue104"
"""Prefixes of terms that no text contains."""


class _TextSearch(NamedTuple):
    """A query in PostgreSQL's syntax."""

    match: str
    phrases: str
    """Phrases that the words must contain: one per line, alternatives separated by tabs."""
    whole: str
    """All words as such phrases, for entries that are not in the index."""


@lru_cache(10_000)
def owner_digest(owner: str) -> bytes:
    return blake2b(to_bytes(owner), digest_size=16).digest()


@lru_cache(10_000)
def key_digest(key: Key) -> bytes:
    """The database's key of a conversation."""
    return blake2b(to_bytes(key.conversation), digest_size=16, key=owner_digest(key.owner)).digest()


def to_entry(row: Sequence[Any]) -> Entry:
    at, kind, id, head, body, *_ = row
    return Entry(at, to_text(kind), None if id is None else to_text(id), head, unpack(body))


class PostgresIndex:
    """The searching half of `PostgresStore`."""

    def __init__(self, pool: PostgresPool) -> None:
        self.pool = pool

    # Indexing

    def index(self, scope: Scope, words: Callable[[Entry], SearchText | None], /) -> Iterator[int]:
        def put(run: PostgresQueries, new: Sequence[tuple[RowPlace, bytes, SearchText | None]]) -> None:
            some = [(place, owner, one) for place, owner, one in new if one is not None]
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
        self, scope: Scope, embedder: str, vectors: Callable[[Sequence[Entry]], Sequence[Sequence[bytes]]], /
    ) -> Iterator[int]:
        what = _what(embedder)

        def put(run: PostgresQueries, new: Sequence[tuple[RowPlace, bytes, Sequence[bytes]]]) -> None:
            rows = [(*place, n, one) for place, _, some in new for n, one in enumerate(some)]
            if rows:
                cids, ats, ns, stored = map(list, zip(*rows, strict=True))
                run("add_vectors", what=what, cids=cids, ats=ats, ns=ns, vectors=stored)

        return self._follow(scope, what, vectors, put)

    def _follow(
        self,
        scope: Scope,
        what: bytes,
        convert: Callable[[Sequence[Entry]], Sequence[T]],
        put: Callable[[PostgresQueries, Sequence[tuple[RowPlace, bytes, T]]], None],
    ) -> Iterator[int]:
        """Stores what `convert` makes of new entries; nothing is locked while it runs."""
        first = 0
        while behind := self.pool("behind", **_scope(scope), what=what, first=first, limit=BATCH):
            owners = {cid: owner for cid, _, owner in behind}
            starts = {cid: start for cid, start, _ in behind}
            where = {"cids": list(starts), "starts": list(starts.values())}
            rows = self.pool("read_behind", **where, rows=BATCH, bytes=BATCH_BYTES)
            ends = {cid: at + 1 for cid, at, *_ in rows}
            first = max(ends, default=max(starts) + 1)  # the last one may be read in part
            readable = dict[RowPlace, Entry]()
            for cid, *row in rows:
                with suppress(CorruptError):  # `refold doctor` reports it; the others stay searchable
                    readable[cid, row[0]] = to_entry(row)
            converted = convert(list(readable.values()))
            new = [(place, owners[place[0]], one) for place, one in zip(readable, converted, strict=True)]
            followed = self._put(what, starts, ends, new, put) if ends else set()
            if count := sum(cid in followed for cid, *_ in rows):
                yield count

    def _put(
        self,
        what: bytes,
        starts: Mapping[int, int],
        ends: Mapping[int, int],
        new: Sequence[tuple[RowPlace, bytes, T]],
        put: Callable[[PostgresQueries, Sequence[tuple[RowPlace, bytes, T]]], None],
    ) -> set[int]:
        """Returns the conversations that were followed, and not by another process meanwhile."""

        def work(run: PostgresQueries) -> set[int]:
            where = {"cids": list(ends), "starts": [starts[cid] for cid in ends]}
            rows = run("follow", what=what, **where, nexts=list(ends.values()))
            followed = {cid for cid, (is_followed,) in zip(ends, rows, strict=True) if is_followed}
            put(run, [one for one in new if one[0][0] in followed])
            return followed

        return self.pool.transact(work)

    # Searching

    def search(self, scope: Scope, query: Query, limit: int, /) -> list[FoundPlace]:
        names = [_text_search(query, by_name=True)] if any(one.name for one in query.wanted) else []
        best = self._best(scope, query, [*names, _text_search(query)], limit, RANKED)
        if len(best) < min(limit, FEW_RESULTS) and query.can_relax:
            words = [one for one in query.wanted if not one.must]
            each = [_text_search(query, one) for one in words]
            known = {found[:2] for found in best}
            others = self._best(scope, query, each, limit, RANKED // len(words), any_word=True)
            best += [found for found in others if found[:2] not in known]
        return best[:limit]

    def _best(
        self,
        scope: Scope,
        query: Query,
        searches: Sequence[_TextSearch],
        limit: int,
        ranked: int,
        *,
        any_word: bool = False,
    ) -> list[FoundPlace]:
        matches, phrases, wholes = map(list, zip(*searches, strict=True))
        terms = {"place": PLACE, "owned": OWNER + _scope(scope)["owner_key"].hex(), "long": LONG}
        most = {"limit": limit, "pool": max(ranked, limit), "bytes": RANKED_BYTES}
        values = {"matches": matches, "phrases": phrases, "wholes": wholes}
        found = dict[RowPlace, FoundPlace]()
        for cid, at, owner, name, text, tools, role in self.pool(
            "search", **_scope(scope), **terms, **values, **most
        ):
            first, second = text.split("\n")
            words = SearchText(first[1:-1], second[1:-1], tuple(map(to_text, tools)), to_text(role))
            if (cid, at) not in found and query.matches(words, any_word=any_word):
                key = Key(to_text(owner), to_text(name))
                found[cid, at] = FoundPlace(key, at, query.weight(words))
        order = sorted(found, key=lambda place: (found[place].score, place), reverse=True)
        return [found[place] for place in order]

    def nearest(self, scope: Scope, embedder: str, vector: bytes, limit: int, /) -> list[FoundPlace]:
        rows = self.pool("vectors", **_scope(scope), what=_what(embedder))
        keys = {cid: (owner, name) for cid, _, owner, name, _ in rows}
        best = nearest(vector, (((cid, at), blob) for cid, at, *_, blob in rows), limit)
        return [FoundPlace(Key(*map(to_text, keys[cid])), at, score) for (cid, at), score in best]


def _scope(scope: Scope) -> dict[str, Any]:
    if isinstance(scope, Key):
        return {"key": key_digest(scope), "owner_key": owner_digest(scope.owner)}
    return {"key": None, "owner_key": owner_digest(scope)}


def _what(embedder: str) -> bytes:
    return blake2b(to_bytes(embedder), digest_size=16).digest()


def _terms(words: SearchText, cid: int, owner: bytes) -> str:
    """All terms of an entry, each once, in the syntax of a tsvector."""
    about = [
        *map(_tool, words.tools),
        ROLE + to_bytes(words.role).hex(),
        OWNER + owner.hex(),
        f"{PLACE}{cid}",
    ]
    terms = " ".join({*words.text.split(), *words.parts.split()})
    return " ".join([LONG if len(terms.encode()) > MAX_TERMS_BYTES else terms, *about])


def _tool(name: str) -> str:
    """A name as one term, whatever is in it."""
    return TOOL + to_bytes(name.casefold())[:MAX_TOOL_BYTES].hex()


def _text_search(query: Query, only: SearchTerm | None = None, *, by_name: bool = False) -> _TextSearch:
    """`only` keeps just this optional word; `by_name` matches names of several words as a whole."""
    needed = list[str]()
    phrases = list[str]()
    whole = list[str]()
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
