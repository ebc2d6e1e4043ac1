"""Conversations in AWS Bedrock AgentCore Memory: a batch is an event, with its exact bytes and its messages.

What the service learns from the messages is available as memories.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from refold.core.codec import GENESIS, Entry, Link, chain, to_bytes
from refold.core.errors import ConflictError, MessageError, NotFoundError, SettingError, StoreError
from refold.stores.agentcore_client import ActorSession, AgentCoreClient, Branch, digest
from refold.stores.agentcore_events import (
    Ancestor,
    ConversationCache,
    Json,
    KnownConversation,
    StoredEvent,
    ancestors,
    conversational,
    packed,
    payload,
    stored_event,
)
from refold.stores.store import Ability, ConversationInfo, Key, Lease, Memory, SpokenMessage, require_next
from refold.stores.url import shown_url

SALTS = 1_000
"""How many client tokens are tried, where those before were used for something that was erased since."""
HOUR = 3_600
"""Seconds after which those that begin a conversation are others, so that few of them are used up."""
MOST_SALTS = 10_000
LOOKS = 6
"""How often an event that was created is looked for in the list, less and less often."""
DELETERS = 8
"""Events that are deleted at the same time."""
REFUSAL_CODES = ("ValidationException", "InvalidInputException", "ResourceNotFoundException")
"""What the service says of a branch whose root is gone, among other things."""
OPTIONS = ("region", "long_term", "namespace", "timeout_s")


class _ExclusiveEvent(NamedTuple):
    """An event that must be the only one of its kind."""

    home: ActorSession
    branch: Branch | None
    after: int
    head: Json
    body: list[Json]
    words: tuple[str, ...]
    """The same for all who claim the same: of these, the service takes the first."""
    holder: Callable[[KnownConversation | None], str | None]
    """The nonce of what stands there, in a conversation as it is known now; None is nothing."""


class AgentCoreStore:
    """One memory at AgentCore, for all owners. Safe to use from many threads.

    The owner is the actor and the conversation the session. Where an `actor` is given, it is that of the
    default owner, and others are actors of their own (`ACTOR:OWNER`).

    The service's limits: a text is cut after 100,000 characters for the service, not in the record; a batch
    whose texts or bytes are more than 1 MB takes several events and counts with the last; events expire after
    the days (7 to 365) that the memory was created with, and the record with them.
    """

    cannot: ClassVar[Mapping[Ability, str]] = {
        "compare-and-append": "AgentCore Memory has no compare-and-append: writers of the same place send the"
        " same client token, of which the service says that it ignores the second, and read back what stands"
        " there; but how long it remembers tokens, and whether it lists at once what was just written, is not"
        " documented, so have one writer for a conversation at a time"
    }

    def __init__(
        self,
        memory_id: str,
        actor: str | None = None,
        *,
        region: str | None = None,
        client: Any = None,
        long_term: bool = False,
        namespace: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """`client` is boto3's for bedrock-agentcore, if you have one. With `long_term`, models are shown what
        the service learned; `namespace` is where that is, as the memory's strategies name it, such as
        `/facts/{actorId}/`. One request takes `timeout_s` at most, all its tries together; a client that was
        given has times and tries of its own.
        """
        self._service = AgentCoreClient(
            memory_id, actor, region=region, client=client, namespace=namespace, timeout_s=timeout_s
        )
        self._long_term = long_term
        self._spoken: Callable[[Entry], SpokenMessage | None] | None = None
        self._reading = ConversationCache(self._service)
        self._salts: dict[tuple[str, ...], int] = {}

    # Appending and reading

    def append(
        self, key: Key, entries: Sequence[Entry], /, *, after: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        place = self._service.place(key)
        with self._reading.locked(place):
            known = self._reading.known(place) or self._reading.fresh(place, key)
            try:
                _demand(key, known, entries, after)
            except ConflictError:  # or is it that others wrote since it was read?
                known = self._reading.fresh(place, key)
                _demand(key, known, entries, after)
            return self._add(place, key, known, entries) if entries else _digest(known)

    def _add(
        self, place: ActorSession, key: Key, known: KnownConversation | None, entries: Sequence[Entry]
    ) -> bytes:
        at, last = entries[0].at, _digest(known)
        head = _head("batch", key, known.stream if known else token_hex(8))
        head |= {"at": at, "previous": last.hex(), "root": known is None or known.begun.kind == "batch"}
        for entry in entries:
            last = chain(last, entry)
        said = () if self._spoken is None else filter(None, map(self._spoken, entries))
        *parts, (texts, data) = packed(entries, said)
        head |= {"last": last.hex(), "parts": len(parts)}
        home, branch, since = (known.home, known.branch, _ms(known.tip)) if known else (place, None, 0)
        ids = []
        for n, part in enumerate(parts):
            token, body = digest(to_bytes(head["nonce"]), b"%d" % n), head | {"kind": "part", "n": n}
            ids.append(self._service.create(home, payload(body, *part), token, since, branch))

        def holder(now: KnownConversation | None) -> str | None:
            if known is None:
                return _begun(now)
            if now is None or now.stream != known.stream:
                return "whoever erased it"
            mark = now.mark(at)
            return mark and mark.nonce

        words = (known.stream, f"{at}", head["previous"]) if known else _beginning()
        claim = _ExclusiveEvent(home, branch, since, head, payload(head, texts, data), words, holder)
        if not self._win(place, key, claim):
            for id in ids:
                self._service.delete(home, id)
            raise ConflictError(f"{key.conversation!r}: another writer appended at {at}, or erased it")
        return last

    def _win(self, place: ActorSession, key: Key, claim: _ExclusiveEvent) -> bool:
        """Creates the event, unless another stands in its place."""
        nonce, words = claim.head["nonce"], (*claim.home, *claim.words)
        for salt in range(self._salts.get(words, 0), SALTS):
            token = digest(*map(to_bytes, words), b"%d" % salt)
            try:
                id = self._service.create(claim.home, claim.body, token, claim.after, claim.branch)
            except StoreError as error:  # is it that the branch is no longer there?
                if self._service.code(error) in REFUSAL_CODES and claim.holder(
                    self._reading.fresh(place, key)
                ):
                    return False
                raise
            for look in range(LOOKS):
                time.sleep(look and 0.01 * 4**look)
                held = claim.holder(self._reading.fresh(place, key))
                if held == nonce:
                    return True
                is_ours = self._nonce(claim.home, id) == nonce
                if held is not None:
                    if is_ours:
                        self._service.delete(claim.home, id)
                    return False
                if not is_ours:
                    self._skip(words, salt)
                    break
            else:
                raise StoreError(f"Event {id} was created, but AgentCore Memory does not list it yet; retry")
        raise StoreError(f"{key.conversation!r} was erased {SALTS} times in an hour; wait, then retry")

    def _skip(self, words: tuple[str, ...], salt: int) -> None:
        """The token is of something that was erased; nobody need try it again."""
        if len(self._salts) > MOST_SALTS:
            self._salts = {}
        self._salts[words] = salt + 1

    def _nonce(self, home: ActorSession, id: str) -> str | None:
        event = self._service.event(home, id)
        ours = event and stored_event(event)
        return ours.head.get("nonce") if ours else None

    def read(
        self, key: Key, start: int = 0, stop: int | None = None, /, *, but: str | None = None
    ) -> Iterator[Link]:
        """What is before `stop` and was read before is not asked for again: a place never changes."""
        place = self._service.place(key)
        with self._reading.locked(place):
            known = self._reading.known(place)
            if known is None or stop is None or stop > len(known.links):
                known = self._reading.fresh(place, key)
            links = known.links[max(0, start) : stop] if known else []
        return (link for link in links if link.entry.kind != but)

    def find(self, key: Key, ids: Collection[str], /) -> dict[str, int]:
        known = self._reading.fresh(self._service.place(key), key)
        return {id: known.places[id] for id in ids if id in known.places} if known else {}

    def conversations(self, owner: str | None = None, /) -> Iterator[ConversationInfo]:
        actors = self._service.actors() if owner is None else [self._service.place(Key(owner, "")).actor]
        places = (
            ActorSession(actor, session) for actor in actors for session in self._service.sessions(actor)
        )
        all = [known for place in places if (known := self._reading.fresh(place)) is not None]
        alive = {known.stream for known in all}
        for one in sorted(all, key=lambda one: one.begun.head["time"], reverse=True):
            if owner is None or one.key.owner == owner:
                near = next((up for up in one.of if up.stream in alive), None)
                parent, fork_at = (near.key, near.fork_at) if near else (None, 0)
                yield ConversationInfo(one.key, one.begun.head["time"], len(one.links), parent, fork_at)

    # Forking and erasing

    def fork(self, key: Key, new: Key, at: int, /) -> None:
        """On a branch of the session where the past is; one that shares nothing is on its own."""
        place = self._service.place(new)
        parent = self._reading.fresh(self._service.place(key), key)
        if self._reading.fresh(place, new) is not None:
            raise ConflictError(f"Conversation {new.conversation!r} already exists")
        if parent is None or not 0 <= at <= len(parent.links):
            raise NotFoundError(f"{key.conversation!r} has no place {at}")
        head = _head("fork", new, token_hex(8))
        mark = parent.mark(at - 1) if at else None
        branch = Branch(f"fork-{head['stream']}", mark.id) if mark else None
        home = parent.home if branch else place
        nearest = Ancestor(key, parent.stream, at, parent.home)
        of = (nearest, *(up._replace(fork_at=min(at, up.fork_at)) for up in parent.of))
        head |= {"home": home, "branch": branch, "line": parent.line_until(at), "of": of}
        heirs = dict[ActorSession, str]()
        try:
            for where in {up.home for up in of}:  # first: so that nobody erases what it is about to share
                token = digest(to_bytes(head["nonce"]), *map(to_bytes, where))
                body, on = payload(head | {"kind": "heir"}), branch if where == home else None
                heirs[where] = self._service.create(where, body, token, _ms(parent.tip), on)
            won = self._win(
                place, new, _ExclusiveEvent(place, None, 0, head, payload(head), _beginning(), _begun)
            )
            is_shared = self._is(parent) and all(self._service.event(*heir) for heir in heirs.items())
        except StoreError as error:
            if self._service.code(error) not in REFUSAL_CODES or self._is(parent):
                raise
            won = is_shared = False
        if won and is_shared:
            return
        if won and (made := self._reading.fresh(place, new)) is not None:
            self._service.delete(place, made.begun.id)
        for heir in heirs.items():
            self._service.delete(*heir)
        if is_shared:
            raise ConflictError(f"Conversation {new.conversation!r} already exists")
        raise NotFoundError(f"{key.conversation!r} was erased in the meantime")

    def _is(self, known: KnownConversation) -> bool:
        """Whether a conversation is still the same."""
        now = self._reading.fresh(self._service.place(known.key), known.key)
        return now is not None and now.stream == known.stream

    def erase(self, key: Key, /, *, with_forks: bool = False) -> list[Key]:
        """Events are deleted one by one; the first deletion makes the conversation invisible."""
        place = self._service.place(key)
        known = self._reading.fresh(place, key)
        if known is None:
            self._sweep(place, set())  # what an erasure that was interrupted has left
            return []
        heirs = self._heirs(known)
        alive = {known.stream, *(heir.stream for heir in heirs)}
        nearest = {heir.key: next(up.stream for up in heir.of if up.stream in alive) for heir in heirs}
        doomed = [*heirs, known] if with_forks else [known]  # what is interrupted can be repeated
        for one in doomed:
            self._hide(one)
        places = [self._service.place(one.key) for one in doomed]
        homes = (home for one in doomed for home in (one.home, *(up.home for up in one.of)))
        for home in dict.fromkeys((*places, *homes)):
            self._sweep(home, {one.stream for one in doomed})
        for gone in places:
            self._service.forget_records(gone)
        return [] if with_forks else [heir for heir, stream in nearest.items() if stream == known.stream]

    def _heirs(self, known: KnownConversation) -> list[KnownConversation]:
        """The forks of a conversation, and theirs."""
        told = [one for one in self._reading.ours(known.home) if one.kind == "heir"]
        found = (self._heir(one) for one in told if known.stream in {up.stream for up in ancestors(one)})
        return [heir for heir in found if heir is not None]

    def _heir(self, told: StoredEvent) -> KnownConversation | None:
        """The fork that an event tells of, if it is still there."""
        found = self._reading.fresh(self._service.place(told.key), told.key)
        return found if found is not None and found.stream == told.stream else None

    def _hide(self, known: KnownConversation) -> None:
        """Makes the conversation invisible."""
        place = self._service.place(known.key)
        if known.begun.kind == "fork":
            self._service.delete(place, known.begun.id)
        else:  # others may need the event that it began with
            grave = payload(_head("grave", known.key, known.stream))
            token = digest(b"grave", to_bytes(known.stream))
            self._service.create(place, grave, token, _ms(known.tip))
        self._reading.forget(place)

    def _sweep(self, place: ActorSession, dead: set[str]) -> None:
        """Deletes what no conversation needs any more of a session; `dead` are streams that were buried now.

        Of a conversation that was buried now, the session's other events go too, whoever wrote them.
        """
        events = {event["eventId"]: stored_event(event) for event in self._service.events(place)}
        ours = {id: one for id, one in events.items() if one is not None}
        here = self._reading.fresh(place)
        told = [(id, self._heir(one)) for id, one in ours.items() if one.kind == "heir"]
        heirs = {id: heir for id, heir in told if heir is not None and heir.stream not in dead}
        living = [one for one in (here, *heirs.values()) if one is not None and one.stream not in dead]
        streams = {one.stream for one in living if one.home == place}
        needed = {id for id, one in ours.items() if one.kind in ("batch", "part") and one.stream in streams}
        needed |= {id for one in living for mark in one.marks for id in (mark.id, *mark.parts)}
        needed |= {*heirs, *(one.begun.id for one in living)}
        if not any(self._service.place(one.key) == place and one.stream in dead for one in ours.values()):
            needed |= events.keys() - ours.keys()
        kept = {one.stream for id, one in ours.items() if id in needed}
        needed |= {id for id, one in ours.items() if one.kind == "grave" and one.stream in kept}
        with ThreadPoolExecutor(DELETERS) as pool:
            doomed = [id for id in events if id not in needed]
            list(pool.map(lambda id: self._service.delete(place, id), doomed))
        if here is not None and here.stream in dead:
            self._reading.forget(place)

    # What the service learns

    def listen(self, spoken: Callable[[Entry], SpokenMessage | None], /) -> None:
        self._spoken = spoken

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> list[Memory]:
        return self._service.memories(key, query, limit, namespace)

    @property
    def recalls(self) -> bool:
        return self._long_term

    def close(self) -> None:
        self._service.close()


class AgentCoreMemorizer:
    """What was said, an event without a blob for each message; the same handed in again is one event."""

    def __init__(self, service: AgentCoreClient, *, long_term: bool = True) -> None:
        self._service = service
        self.recalls = long_term
        """Whether models are to be shown what was learned, unasked."""

    @property
    def name(self) -> str:
        return f"agentcore://{self._service.memory_id}/{self._service.actor or ''}"

    def remember(self, key: Key, said: Sequence[SpokenMessage], /) -> None:
        place = self._service.place(key)
        for one in said:
            token = digest(*map(to_bytes, (*place, *key, f"{one.at} {one.time!r}")))  # erased, it is another
            try:
                if texts := list(conversational([one])):
                    self._service.create(place, texts, token, 0)
            except StoreError as error:
                if self._service.code(error) in ("ValidationException", "InvalidInputException", "413"):
                    raise MessageError(f"message {one.at} of {key.conversation!r}", str(error)) from error
                raise

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> list[Memory]:
        return self._service.memories(key, query, limit, namespace)

    def forget(self, key: Key, /) -> None:
        """The events, and the records whose namespace has `{sessionId}`; other records are the actor's."""
        place = self._service.place(key)
        for event in list(self._service.events(place)):
            self._service.delete(place, event["eventId"])
        self._service.forget_records(place)

    def close(self) -> None:
        self._service.close()


def from_url(url: str) -> AgentCoreStore:
    """The store behind `agentcore://MEMORY_ID/ACTOR`; without an actor, it is the owner.

    Options: `?region=us-west-2`, `?long_term=1` (models are shown what the service learned),
    `?namespace=/facts/{actorId}/` (where that is), `?timeout_s=10`. The endpoint and the credentials are from
    the SDK's own variables and files.
    """
    memory_id, actor, options = _options(url, long_term="0")
    return AgentCoreStore(memory_id, actor, **options)


def memorizer(url: str) -> AgentCoreMemorizer:
    """What a hybrid store puts beside a record, by the same URL; models are shown what it learned unless
    `long_term=0` says otherwise.
    """
    memory_id, actor, options = _options(url, long_term="1")
    shown = options.pop("long_term")
    return AgentCoreMemorizer(AgentCoreClient(memory_id, actor, **options), long_term=shown)


def _options(url: str, *, long_term: str) -> tuple[str, str | None, dict[str, Any]]:
    where, parts = f"store {shown_url(url)!r}", urlsplit(url)
    memory_id, actor = unquote(parts.netloc), unquote(parts.path.strip("/")) or None
    options: dict[str, Any] = {"timeout_s": "10", "long_term": long_term}
    options |= parse_qsl(parts.query, keep_blank_values=True)
    is_one = parts.scheme == "agentcore" and memory_id and "@" not in memory_id
    if not is_one or not options.keys() <= set(OPTIONS):
        known = ", ".join(OPTIONS)
        raise SettingError(where, f"expected agentcore://MEMORY_ID/ACTOR; its options are {known}")
    if options["long_term"] not in ("0", "1"):
        raise SettingError(where, "long_term is 0 or 1")
    if not options["timeout_s"].replace(".", "", 1).isdecimal() or not float(options["timeout_s"]):
        raise SettingError(where, "timeout_s is a number of seconds")
    options |= {"timeout_s": float(options["timeout_s"]), "long_term": options["long_term"] == "1"}
    return memory_id, actor, options


def _begun(now: KnownConversation | None) -> str | None:
    return None if now is None else now.nonce


def _beginning() -> tuple[str, ...]:
    return "begin", f"{int(time.time() // HOUR)}"


def _demand(key: Key, known: KnownConversation | None, entries: Sequence[Entry], after: bytes | None) -> None:
    require_next(key, entries, len(known.links) if known else 0, _digest(known), after)


def _digest(known: KnownConversation | None) -> bytes:
    return GENESIS if known is None else known.digest


def _head(kind: str, key: Key, stream: str) -> Json:
    head = {"kind": kind, "owner": key.owner, "conversation": key.conversation, "stream": stream}
    return head | {"nonce": token_hex(8), "time": time.time()}


def _ms(id: str) -> int:
    """The time that an event's id begins with."""
    return int(id.partition("#")[0])
