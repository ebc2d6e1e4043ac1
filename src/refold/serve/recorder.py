"""What the gateway keeps of a request and its answer, and what it sends instead. For threads."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from refold.core import codec
from refold.core.draft import Draft
from refold.core.errors import ConflictError, NotFoundError, SettingError, StoreError
from refold.core.event import Said
from refold.core.expiry import OWN_TOOLS
from refold.core.message import Message, ToolCall, ToolResult
from refold.dialects import replies
from refold.dialects.registry import FORMATS
from refold.dialects.shape import APART
from refold.serve.cache_control import marked
from refold.serve.history import NEAR, apart, newest_mark, overlap, units_said
from refold.serve.identify import Spot, chained, essence, longest
from refold.serve.incoming import ELSEWHERE, Incoming, Unit, units_of
from refold.serve.service import Service
from refold.session.intake import Intake
from refold.session.session import Session, forked
from refold.stores.store import FindsIds, Forks, Key, LocatesIds

K = TypeVar("K")
V = TypeVar("V")
TRIES = 10
"""How often somebody else may be faster."""
KNOWN = 20_000
"""Conversations of which the newest mark is remembered."""
INJECTED = "refold:tools"
"""The tag of a conversation's first message where expand and search are offered."""


class Turn(NamedTuple):
    """A request that has its place in a conversation."""

    incoming: Incoming
    seed: str
    key: Key
    agent: str | None
    mark: str
    """Of its newest message."""
    said: int | None
    """Messages in the conversation when it was made; None where more may be said before the answer."""
    injected: bool
    rounds: tuple[Draft, ...] = ()
    """What was said since."""
    is_complete: bool = False
    """There is an answer for the client; else the model waits for what it looked up."""
    is_elsewhere: bool = False
    """The history is at the provider."""


class Prepared(NamedTuple):
    turn: Turn
    body: bytes
    """What goes upstream."""
    before: int
    """Tokens of all that was said, and of what goes with it."""
    sent: int
    """Tokens that go upstream."""
    edits: int
    """In force in the view."""


class Response(NamedTuple):
    """An answer of OpenAI's that requests may go on from."""

    key: Key
    id: str
    """Of its last round, where the client knows the first one's."""
    mark: str
    """Of the answer."""
    outputs: tuple[dict[str, Any], ...] = ()
    """Of our own tools, which were called beside the client's."""


class _Known(NamedTuple):
    """What need not be read again of a conversation."""

    next: int = -1
    """How many events it had when this was its newest mark."""
    mark: str | None = None
    injected: bool | None = None
    leading: tuple[bytes, ...] | None = None
    """Of the system messages that were sent last."""


class _Twin:
    def __init__(self) -> None:
        self.lock, self.users = Lock(), 0


class Ledger:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._under_way: Counter[Key] = Counter()
        self._known: OrderedDict[Key, _Known] = OrderedDict()
        self._responses: OrderedDict[tuple[str, str], Response] = OrderedDict()
        """Answers of OpenAI's by owner and id, since requests may go on from there."""
        self._forks: OrderedDict[str, Key] = OrderedDict()
        """The newest fork behind a mark."""
        self._lock = Lock()
        self._twins: dict[str, _Twin] = {}

    # Before

    def prepare(
        self, owner: str, incoming: Incoming, conversation: str | None, agent: str | None
    ) -> Prepared:
        """Finds the conversation, stores what is new, and makes what goes upstream.

        Raises:
            RefoldError: it cannot be done; then the request goes as it came.
        """
        seed = _seed(owner, conversation)
        return self._first_tried(owner, incoming, conversation, agent, incoming.marks(seed), seed)

    def _first_tried(
        self,
        owner: str,
        incoming: Incoming,
        conversation: str | None,
        agent: str | None,
        marks: list[str],
        seed: str,
    ) -> Prepared:
        for _ in range(TRIES):
            with suppress(ConflictError):
                with self._alone(marks[-1]):
                    turn = self._placed(owner, incoming, conversation, agent, marks)._replace(seed=seed)
                try:
                    return Prepared(turn, b"", 0, 0, 0) if incoming.elsewhere else self.fitted(turn)
                except BaseException:
                    self.end(turn)
                    raise
        raise ConflictError(f"Others said something in the same conversation {TRIES} times in a row; retry")

    @contextmanager
    def _alone(self, mark: str) -> Iterator[None]:
        """The same request waits until this has a place."""
        with self._lock:
            twin = self._twins.setdefault(mark, _Twin())
            twin.users += 1
        try:
            with twin.lock:
                yield
        finally:
            with self._lock:
                twin.users -= 1
                if not twin.users:
                    del self._twins[mark]

    def _placed(
        self, owner: str, incoming: Incoming, conversation: str | None, agent: str | None, marks: list[str]
    ) -> Turn:
        """`marks` are those of its messages, after that of what is at the provider."""
        key, at, before = Key(owner, conversation or new_id()), 0, len(marks) - len(incoming.units)
        spot = longest(marks, lambda some: self._located(owner, conversation, some))
        goes_on = spot is not None and self._goes_on(spot, marks, incoming.model, agent)
        is_marked, adopted = spot is not None, None
        if spot is None and conversation is not None and not before:
            spot, goes_on, adopted = self._adopted(key, incoming, agent)
        if spot is not None:
            key, at = spot.key, spot.known
        if goes_on:  # as a fork, or under another name where nothing is shared
            shared = marks[at - 1] if spot and at else None
            key = (
                self._forked(spot, shared, incoming.model, agent) if spot and shared else Key(owner, new_id())
            )
        with (
            self.service.session(key, incoming.model, agent) as session,
            session.notifier,  # nobody says anything in between, but in another process
        ):
            newest, said = self._newest_mark(session), session.record.live.state.index
            if (
                (is_marked and newest != marks[at - 1])
                or (spot is None and said and not before)
                or (adopted not in (None, said) and not goes_on)
            ):
                raise ConflictError(
                    f"{key.conversation!r} was gone on with by somebody else this very moment"
                )
            injected = not before and self._injects(session, incoming)
            tags = (INJECTED,) if injected and not said else ()
            drafts = self._system(session, incoming, tags, is_new=not said)
            intake = _intake(session, incoming)
            new = zip(incoming.units[max(0, at - before) :], marks[max(before, at) :], strict=True)
            for unit, mark in new:
                drafts += intake.take(unit.values(), id=mark, tags=tags).drafts
            session.say(drafts, after=said)
            leading = tuple(unit.digest for unit in incoming.leading)
            is_corrected = bool(said and leading) and self._corrected(session, incoming.leading, leading)
            if not is_corrected:  # or else what is the newest is read again
                decided = {} if said else {"injected": injected}
                self._remember(session, mark=marks[-1], leading=leading, **decided)
            with self._lock:
                self._under_way[key] += 1
            now = session.record.live.state.index
        return Turn(incoming, "", key, agent, marks[-1], now, injected, is_elsewhere=bool(before))

    def _located(
        self, owner: str, conversation: str | None, marks: Sequence[str]
    ) -> Mapping[str, tuple[Key, int]]:
        store = self.service.store
        if isinstance(store, LocatesIds):
            return store.locate(owner, marks)
        if conversation is None or not isinstance(store, FindsIds):
            kind = type(store).__name__
            raise SettingError(
                "x-refold-conversation", f"{kind} knows no conversation by what was said: name it"
            )
        key = Key(owner, conversation)
        return {mark: (key, at) for mark, at in store.find(key, marks).items()}

    def _goes_on(self, spot: Spot, marks: Sequence[str], model: str | None, agent: str | None) -> bool:
        """Something else was said after it, or is about to be: this is a twin, a retry or another past."""
        with self._lock:
            under_way = self._under_way[spot.key] > 0
        if spot.known == len(marks) and under_way:
            return True
        with self.service.session(spot.key, model, agent) as session:
            return self._newest_mark(session) != marks[spot.known - 1]

    def _adopted(self, key: Key, incoming: Incoming, agent: str | None) -> tuple[Spot | None, bool, int]:
        """A conversation that the client names, and that others began, or of which it has only the end: how
        much of the history it has, whether it goes on otherwise, and how many messages there were.

        Where nothing is shared, it goes on with all of it: its name says so.
        """
        digests = [unit.digest for unit in incoming.units]
        with self.service.session(key, incoming.model, agent) as session:
            count = session.get_count()
            tail = session.record.place_of(max(0, count - NEAR - 4 * len(digests)))
            ended = units_said(session.record.events(tail))
            if known := overlap([digest for _, digest in ended], digests):
                return Spot(known, key, ended[-1][0]), False, count
            said = units_said(session.record.events()) if tail else ended
            while known < min(len(said), len(digests)) and said[known][1] == digests[known]:
                known += 1
            spot = Spot(known, key, said[known - 1][0] if known else -1) if said else None
            return spot, 0 < known < len(said), count

    def _newest_mark(self, session: Session) -> str | None:
        with session.notifier:
            session.get_count()  # catches up
            stop = session.record.live.state.next
            known = self._known.get(session.key, _Known())
            if known.next != stop:
                known = known._replace(next=stop, mark=newest_mark(session, stop), leading=None)
                self._remember(session, **known._asdict())
            return known.mark

    def _remember(self, session: Session, **facts: Any) -> None:
        known = self._known.get(session.key, _Known())._replace(next=session.record.live.state.next)
        _keep(self._known, session.key, known._replace(**facts), self._lock)

    def _fork(self, key: Key, at: int, model: str | None, agent: str | None) -> Key:
        if not isinstance(self.service.store, Forks):
            raise StoreError(f"{type(self.service.store).__name__} cannot fork")
        with self.service.session(key, model, agent) as session:
            return forked(session, new_id(), at)

    def _forked(self, spot: Spot, mark: str, model: str | None, agent: str | None) -> Key:
        """A fork behind a mark: one in which nothing was said yet, where an earlier try was left without an
        answer, or a new one.
        """
        old = self._forks.get(mark)
        if old is not None and not self._goes_on(Spot(1, old, spot.at), [mark], model, agent):
            return old
        new = self._fork(spot.key, spot.at, model, agent)
        _keep(self._forks, mark, new, self._lock)
        return new

    def _injects(self, session: Session, incoming: Incoming) -> bool:
        """Whether expand and search are offered: decided with the first message, for good."""
        known = self._known.get(session.key, _Known())
        found, alone = known.injected, incoming.fields.get("n") in (None, 1)
        if found is None and (first := session.record.said_from(0)) is not None:
            found = INJECTED in first.tags
            _keep(self._known, session.key, known._replace(injected=found), self._lock)
        if found is None:
            wish = self.service.settings.inject_tools
            found = bool(incoming.tools) if wish == "auto" else wish in ("on", True)
        found = found and alone and not incoming.has_own  # of several answers the client takes one
        session.reducer.handles = found
        return found

    def _system(
        self, session: Session, incoming: Incoming, tags: tuple[str, ...] = (), *, is_new: bool
    ) -> list[Draft]:
        """System text that is not the same as before: what has to be said of it."""
        intake, name, drafts = _intake(session, incoming), APART.get(incoming.dialect), list[Draft]()
        if name is not None and (incoming.system or None) != (apart(session, name) or None):
            drafts += intake.take([{name: incoming.system or ""}], tags=tags).drafts
        for unit in incoming.leading if is_new else ():
            drafts += intake.take(unit.values(), tags=tags).drafts
        return drafts

    def _corrected(self, session: Session, leading: Sequence[Unit], digests: tuple[bytes, ...]) -> bool:
        """Shows system messages at the beginning as they are now; whether anything had to be changed."""
        if self._known.get(session.key, _Known()).leading == digests:
            return False
        found = (
            event for event in session.record.events() if isinstance(event, Said) and not event.line.apart
        )
        changed = list[Said]()
        for said, unit in zip(found, leading, strict=False):
            shown = session.record.live.state.corrected.get(said.at, said.line)
            if essence(session.record.message(shown)) != unit.digest:
                session.correct(said.at, unit.values()[0], why="the client's system text changed")
                changed.append(said)
        return bool(changed)

    def fitted(self, turn: Turn, *, last: bool = False) -> Prepared:
        """The next request of a turn; the `last` has no tools of ours."""
        incoming = turn.incoming
        with self.service.session(turn.key, incoming.model, turn.agent) as session:
            fields = dict(incoming.fields)
            if turn.injected and not last:
                fields["tools"] = [*incoming.tools, *session.tools(incoming.dialect)]
            fitted = session.fit(dialect=incoming.dialect, request=fields)
            request = fitted.request
            name = APART.get(incoming.dialect)
            if name is not None and not request.get(name):  # as it came, if it came at all
                request.pop(name, None)
                request |= {} if incoming.system is None else {name: incoming.system}
            if incoming.dialect == "anthropic":
                request = marked(request, fitted.settled, incoming.raws)
            live, meter = session.record.live, session.fitter.meter
            hidden = meter.counter.tokens(max(0, live.state.total - live.tokens))
            edits = len({item.edit for item in live.items if item.edit is not None})
            tokens = fitted.report.tokens
            return Prepared(turn, codec.dumps(request), tokens.final + hidden, tokens.final, edits)

    # What is at the provider

    def noted(
        self, owner: str, incoming: Incoming, conversation: str | None, agent: str | None, body: bytes
    ) -> Prepared:
        """Keeps what is new in a request whose history is at the provider; it goes upstream as it came."""
        assert incoming.elsewhere is not None
        field, id = incoming.elsewhere
        known = self._responses.get((owner, id))
        mark = known.mark if known else _mark_of(owner, field, id)
        if field == ELSEWHERE[0]:
            marks = [mark, *incoming.marks(mark)]
            prepared = self._first_tried(owner, incoming, conversation, agent, marks, "")
        else:
            prepared = Prepared(self._added(owner, incoming, conversation, agent, mark), b"", 0, 0, 0)
        if known is not None and (known.id != id or known.outputs):
            fields = codec.loads(body)
            given = fields.get("input") or []
            said = [{"role": "user", "content": given}] if isinstance(given, str) else given
            body = codec.dumps(fields | {field: known.id, "input": [*known.outputs, *said]})
        return prepared._replace(body=body)

    def _added(
        self, owner: str, incoming: Incoming, conversation: str | None, agent: str | None, mark: str
    ) -> Turn:
        """To a conversation that is the provider's: what is said there comes one after the other."""
        store = self.service.store
        found = store.locate(owner, [mark]).get(mark) if isinstance(store, LocatesIds) else None
        key = found[0] if found else Key(owner, conversation or new_id())
        with self.service.session(key, incoming.model, agent) as session:
            intake = _intake(session, incoming)
            drafts = self._system(session, incoming, is_new=not session.get_count())
            for n, unit in enumerate(incoming.units):
                beside: dict[str, Any] = {} if found or n else {"id": mark}
                drafts += intake.take(unit.values(), **beside).drafts
            session.say(drafts)
        with self._lock:
            self._under_way[key] += 1
        return Turn(incoming, "", key, agent, mark, None, False, is_elsewhere=True)

    # After

    def end(self, turn: Turn) -> None:
        """No answer to a turn, as it was prepared, is awaited any more: until then, the same request was
        another one's.
        """
        with self._lock:
            self._under_way[turn.key] -= 1
            if not self._under_way[turn.key]:
                del self._under_way[turn.key]

    def answered(self, turn: Turn, reply: dict[str, Any], visible: dict[str, Any]) -> Turn:
        """Keeps the model's answer, of which the client sees the `visible` part, with what its calls of our
        own tools give.
        """
        incoming, calls = turn.incoming, own_calls(turn.incoming, reply) if turn.injected else []
        turn = turn._replace(is_complete=not calls or len(calls) < len(calls_of(incoming, reply)))
        with self.service.session(turn.key, incoming.model, turn.agent) as session:
            found = [
                Message("tool", (ToolResult(call.call_id, session.call(call.tool, call.input), call.tool),))
                for call in calls
            ]
            mark = self._mark(turn, reply, visible, found) if turn.is_complete else None
            intake, beside = session.intake(), dict[str, Any]({"id": mark} if mark else {})
            drafts = intake.take([reply], lambda n: "reply", **beside).drafts + intake.take(found).drafts
        return self._said(turn, drafts, mark)

    def _mark(
        self, turn: Turn, reply: dict[str, Any], visible: dict[str, Any], found: Sequence[Message]
    ) -> str | None:
        """By which an answer is known again when the client sends it back, or goes on from it."""
        answers, owner = units_in(turn.incoming, visible), turn.key.owner
        mark = turn.incoming.marks(turn.seed, *answers)[-1] if answers else None
        id, shown, dialect = reply.get("id"), visible.get("id"), turn.incoming.dialect
        if dialect == "openai-responses" and isinstance(id, str) and isinstance(shown, str):
            mark = _mark_of(owner, ELSEWHERE[0], shown) if turn.is_elsewhere else mark
            outputs = tuple(value for one in found for value in FORMATS[dialect].render(one)[0])
            if mark is not None:
                _keep(self._responses, (owner, shown), Response(turn.key, id, mark, outputs), self._lock)
        return mark

    def _said(self, turn: Turn, drafts: list[Draft], mark: str | None) -> Turn:
        """Stores what is said after a request; where others said something since, in a fork of its own."""
        all = (*turn.rounds, *drafts)
        with suppress(ConflictError):
            return self._stored(turn, drafts, mark)._replace(rounds=all)
        store = self.service.store
        found = store.find(turn.key, [turn.mark]) if isinstance(store, FindsIds) else {}
        if turn.mark not in found:
            raise NotFoundError(f"{turn.key.conversation!r} was erased meanwhile")
        key = self._fork(turn.key, found[turn.mark], turn.incoming.model, turn.agent)
        with self.service.session(key, turn.incoming.model, turn.agent) as session:
            turn = turn._replace(key=key, said=session.get_count(), rounds=all)
        return self._stored(turn, all, mark)

    def _stored(self, turn: Turn, drafts: Sequence[Draft], mark: str | None) -> Turn:
        with self.service.session(turn.key, turn.incoming.model, turn.agent) as session:
            session.reducer.handles = turn.injected
            with session.notifier:
                session.say(drafts, after=turn.said)
                self._remember(session, mark=mark or turn.mark)
                now = session.record.live.state.index
                return turn._replace(said=None if turn.said is None else now)


def _intake(session: Session, incoming: Incoming) -> Intake:
    """Takes in what is said to the provider: its fields are the provider's, whatever they are called."""
    return session.intake(incoming.dialect)._replace(reads_own=False)


def _keep(known: OrderedDict[K, V], key: K, value: V, lock: Lock) -> None:
    with lock:
        known[key] = value
        known.move_to_end(key)
        if len(known) > KNOWN:
            known.popitem(last=False)


def _seed(owner: str, conversation: str | None) -> str:
    """What marks begin with: nobody has those of another owner, nor those of a conversation with a name."""
    return repr((owner, conversation))


def _mark_of(owner: str, *names: str) -> str:
    """Of what has a name at the provider."""
    return chained(repr((owner, *names)).encode("utf-8", "surrogatepass"), [b""])[0]


def own_calls(incoming: Incoming, reply: dict[str, Any]) -> list[ToolCall]:
    """Calls of tools that are the gateway's own."""
    return [call for call in calls_of(incoming, reply) if call.tool in OWN_TOOLS]


def calls_of(incoming: Incoming, reply: dict[str, Any]) -> list[ToolCall]:
    taken = replies.take(reply)
    messages = taken.messages if taken else []
    return [call for one in messages for call in FORMATS[incoming.dialect].parse(one).calls]


def units_in(incoming: Incoming, reply: dict[str, Any]) -> list[Unit]:
    taken = replies.take(reply)
    return units_of(incoming.dialect, [codec.dumps(one) for one in taken.messages]) if taken else []


def new_id() -> str:
    return f"chat-{uuid4().hex[:16]}"
