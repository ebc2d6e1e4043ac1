"""Is what is stored still what was written? Every stream is read from its first event and verified.

>>> from refold.stores.memory import MemoryStore
>>> examine(MemoryStore())
[]
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from refold.core import codec
from refold.core.codec import GENESIS, Entry, Link
from refold.core.errors import CorruptError, RefoldError, StoreError
from refold.core.event import Event, Head, Line, Pinned, Replaced, Said, Span
from refold.core.live import Live, State
from refold.core.message import Message
from refold.core.plan import line_of
from refold.session.inspect import parse
from refold.stores import store as protocols
from refold.stores.record import seal
from refold.stores.shelf import Shelf
from refold.stores.store import ConversationInfo, Key, SelfCheck, Snapshot, Store

MOST_UNREADABLE = 20
"""After so many events in a row that cannot be read, a stream is given up."""

BACKUP = "restore it from a backup or an export"
CACHE = "it is only a cache: nothing is lost, and refold writes a new one; until then it opens more slowly"
USED_CACHE = "it is only a cache, but in use: export the conversation and import it under another id"
NEWER = "upgrade refold to read it"

LACKS: dict[type, tuple[str, str]] = {
    protocols.LocatesIds: ("a global index of ids", "an id is found only within a named conversation"),
    protocols.Forks: ("forks", "a conversation is exported and imported under another id instead"),
    Shelf: (
        "snapshots, leases, cached summaries and settings",
        "opening a conversation folds it from its beginning; two processes that compact the same view may"
        " both pay for a summary; settings of tools come from files only; it cannot be the record of a"
        " hybrid store",
    ),
    protocols.SearchIndex: (
        "a search index",
        "a search reads whole conversations, and is by words, not by meaning",
    ),
    protocols.RemoteReads: ("change notifications", "followers of events poll ten times a second"),
    protocols.Memories: ("memories", "nothing is learned from conversations"),
    SelfCheck: ("a check of the engine", "only the conversations in it are verified"),
}

Tick: TypeAlias = Callable[[int], None]
"""Called with the number of events that were just checked."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong, and what to do about it."""

    problem: str
    advice: str
    owner: str | None = None
    conversation: str | None = None
    """None for what concerns the store as a whole."""
    at: int | None = None
    """The event; None for what concerns the conversation as a whole."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for an event that the store could not hand out."""

    at: int
    error: Exception


def examine(
    store: Store, *, owner: str | None = None, only: Key | None = None, tick: Tick | None = None
) -> list[Finding]:
    """Everything that is wrong with a store, or with one conversation in it; nothing is changed.

    Damage of any kind becomes a finding; nothing is raised for it.
    """
    findings = [] if only else list(_engine(store))
    rows, broken = list_safely(store, only.owner if only else owner)
    for row in rows:
        if only in (None, row.key):
            findings += check(store, row.key, tick)
    if broken is not None:
        findings.append(Finding(f"the list of conversations cannot be read: {told(broken)}", BACKUP))
    return findings


def missing_features(store: Store) -> dict[str, str]:
    """Optional features that a store lacks, each with what follows from that."""
    return dict(LACKS[protocol] for protocol in LACKS if not isinstance(store, protocol))


def check(store: Store, key: Key, tick: Tick | None = None) -> list[Finding]:
    """What is wrong with one conversation: its chain, its places, its numbers, its snapshots."""
    audit = _Audit(key)
    snapshots: Mapping[str, Snapshot] = {}
    if isinstance(store, Shelf):
        try:
            snapshots = store.saved(key)  # before the stream: what they cover is there by then
        except Exception as error:
            audit.others.append(Finding(f"a snapshot cannot be read: {told(error)}", CACHE, *key))
    for link in links(store, key):
        audit.take(link)
        if tick:
            tick(1)
    for view, snapshot in snapshots.items():
        audit.judge_snapshot(view, snapshot)
    return audit.findings()


def links(store: Store, key: Key, start: int = 0) -> Iterator[Link | Unreadable]:
    """The stream, with a stand-in for each event that cannot be read."""
    at = start
    failed = 0
    while failed < MOST_UNREADABLE:
        try:
            for link in store.read(key, at):
                yield link
                at = link.entry.at + 1
                failed = 0
        except Exception as error:  # whatever a damaged row makes of itself
            yield Unreadable(at, error)
            at += 1
            failed += 1
        else:
            return


def list_safely(store: Store, owner: str | None) -> tuple[list[ConversationInfo], Exception | None]:
    """The conversations as far as their list can be read, and why no further."""
    rows: list[ConversationInfo] = []
    try:
        for row in store.conversations(owner):
            rows.append(row)
    except Exception as error:  # a name that is no text, a damaged page
        return rows, error
    return rows, None


def told(error: Exception) -> str:
    """An error in words; those that are not ours say of what kind they are."""
    return str(error) if isinstance(error, RefoldError) else f"{type(error).__name__}: {error}"


def _engine(store: Store) -> Iterator[Finding]:
    if isinstance(store, SelfCheck):
        try:
            for where, problem, advice in store.examine():
                yield Finding(f"{where}: {problem}", advice or BACKUP)
        except Exception as error:
            yield Finding(f"the store cannot be examined: {told(error)}", BACKUP)


class _Audit:
    """Reads one stream in order and remembers what it needs to judge the next event, and snapshots."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.others: list[Finding] = []
        """What concerns no single event."""
        self._problems: dict[int, list[tuple[str, str]]] = {}
        self._next = 0
        self._recorded: bytes | None = GENESIS
        """Digest of the event before, as stored; None where it cannot be known."""
        self._computed: bytes | None = GENESIS
        self._counts: tuple[int, int, int, int] | None = (0, 0, 0, 0)
        """Index, turn, step and total before the next message; None after a gap."""
        self._digests: dict[int, tuple[bytes, bytes]] = {}
        """Of the record up to and including each place, as stored and as computed."""
        self._heads = _Heads()
        self._whole = 0
        """Nothing is wrong with so many of the first events, so that views can be built from them."""
        self._is_ended = True
        """The stream was read to its end, not given up."""

    def take(self, link: Link | Unreadable) -> None:
        at = link.at if isinstance(link, Unreadable) else link.entry.at
        if at > self._next:
            lost = f"#{self._next}" if at == self._next + 1 else f"#{self._next} to #{at - 1}"
            self._note(self._next, f"missing: {lost}, between what came before and #{at}")
            self._lose()
        self._next = at + 1
        self._is_ended = not isinstance(link, Unreadable)
        if isinstance(link, Unreadable):
            self._note(at, f"cannot be read: {told(link.error)}")
            self._lose()
            return
        try:
            self._chain(link)
        except Exception as error:  # a column of another type
            self._note(at, f"is not what was written: {told(error)}")
            self._lose()
        self._read(link.entry)
        if at in self._problems:
            self._counts = None
        elif self._whole == at:
            self._whole += 1

    def findings(self) -> list[Finding]:
        found = []
        for at, problems in sorted(self._problems.items()):
            _, advice = problems[0]
            found.append(Finding("; ".join(problem for problem, _ in problems), advice, *self.key, at))
        return found + self.others

    def _note(self, at: int, problem: str, advice: str = BACKUP) -> None:
        self._problems.setdefault(at, []).append((problem, advice))

    def _lose(self) -> None:
        """What follows cannot be judged by what came before."""
        self._recorded = None
        self._computed = None
        self._counts = None

    def _chain(self, link: Link) -> None:
        """A broken link is told once, where it is: what follows is judged by either digest before it."""
        entry, digest = link
        at = entry.at
        before = {prior for prior in (self._recorded, self._computed) if prior is not None}
        follows = {prior for prior in before if codec.chain(prior, entry) == digest}
        if before and not follows:
            again = at - 1 in self._problems
            self._note(at, "does not follow from the event before it" if again else "is not what was written")
        elif follows == {self._computed} and self._recorded != self._computed:
            self._problems.pop(at - 1, None)
            self._note(at - 1, "its digest was altered; the event itself is whole")
        prior = self._computed if self._computed in follows else self._recorded
        self._computed = codec.chain(prior, entry) if prior is not None else digest
        self._recorded = digest if isinstance(digest, bytes) else self._computed
        self._digests[at] = (self._recorded, self._computed)

    def _read(self, entry: Entry) -> None:
        """The words and the numbers beside them, each judged by the other."""
        at = entry.at
        try:
            event = codec.decode(entry, parse)
        except Exception as error:
            newer = isinstance(error, StoreError) and not isinstance(error, CorruptError)
            self._note(at, f"cannot be understood: {told(error)}", NEWER if newer else BACKUP)
        else:
            for problem in self._judge(event, entry):
                self._note(at, problem)
        try:
            self._heads.append(at, codec.head(entry))
        except Exception as error:
            if at not in self._problems:
                self._note(at, f"cannot be applied: {told(error)}")

    def _judge(self, event: Event, entry: Entry) -> Iterator[str]:
        match event:
            case Said():
                yield from self._judge_said(event, entry)
            case Replaced(at=at, shown=shown, lines=lines):
                rests = event.certificate.digest if event.certificate else ""
                _, known = self._digests.get(event.span.end - 1, (b"", b""))
                if rests and known and self._whole == at and known.hex() != rests:
                    yield "it was written about another record: its certificate does not match"
                new = {n: one for n, one in enumerate(shown) if isinstance(one, Message)}
                told = [line for line in lines if line.at == at]
                if len(lines) != len(shown) or [line.n for line in told] != list(new):
                    yield "its head and its body differ in what they show"
                elif any(new[line.n].role != line.role for line in told):
                    yield "its head and its body differ in the role of what they show"
                elif {line.at for line in lines} - {at} != {one for one in shown if isinstance(one, int)}:
                    yield "its head and its body differ in which messages stay"
            case Pinned(at=at, lines=lines) if any(line.at >= at for line in lines):
                yield "it pins what was not said yet"

    def _judge_said(self, said: Said, entry: Entry) -> Iterator[str]:
        line, message = said.line, said.message
        if message.id != entry.id:
            yield f"its id is {entry.id!r}, but its words have {message.id!r}"
        fresh = line_of(message, line.at, line.tokens, line.turn, line.step)
        for name in ("role", "calls", "answers"):
            if getattr(line, name) != getattr(fresh, name):
                yield f"its head has {name} {getattr(line, name)!r}, its body {getattr(fresh, name)!r}"
        counts = (said.index + 1, line.turn, line.step, said.total)
        if self._counts is not None:
            index, turn, step, total = self._counts
            expected = (index + 1, turn + line.asks, step + (line.role == "assistant"), total + line.tokens)
            for name, is_, be in zip(("index", "turn", "step", "total"), counts, expected, strict=True):
                if is_ != be:
                    less = name == "index"
                    yield f"its {name} is {is_ - less:,}, but {be - less:,} by what came before"
        self._counts = counts

    def judge_snapshot(self, view: str, snapshot: Snapshot) -> None:
        """Once the stream was read."""
        what = f"the snapshot of view {view!r}"
        if snapshot.at > self._next:
            if self._is_ended:
                problem = (
                    f"{what} covers {snapshot.at} events, but there are {self._next}:"
                    " the newest events are missing, or the snapshot was altered"
                )
                self.others.append(Finding(problem, BACKUP, *self.key))
            return
        what = f"{what} after #{snapshot.at - 1}"
        known = self._digests.get(snapshot.at - 1)
        if known and snapshot.digest not in {seal(digest, snapshot.body) for digest in known}:
            altered = f"{what} was altered, or belongs to another record"
            self.others.append(Finding(altered, CACHE, *self.key))
            return
        try:
            state = msgspec.convert(codec.loads(snapshot.body), State, str_keys=True)
        except (ValueError, RecursionError):
            return  # sealed and of another version: it is passed over
        if self._whole < snapshot.at:
            return
        try:
            is_same = state == self._heads.fold(view, snapshot.at)
        except Exception:  # an event that is chained and still makes no sense
            is_same = False
        if not is_same:
            self.others.append(Finding(f"{what} is not what the stream adds up to", USED_CACHE, *self.key))


class _Heads:
    """The heads of a stream, for folding it into views without a store."""

    def __init__(self) -> None:
        self._heads: dict[int, Head | None] = {}
        self._facts: list[Head] = []

    def append(self, at: int, head: Head | None) -> None:
        self._heads[at] = head
        if head is not None and not isinstance(head, Line):
            self._facts.append(head)

    def facts(self, before: int, /) -> Iterable[Head]:
        return [fact for fact in self._facts if fact.at < before]

    def lines(self, span: Span, /) -> Iterable[Line]:
        heads = (self._heads.get(at) for at in span)
        return [head for head in heads if isinstance(head, Line)]

    def fold(self, view: str, stop: int) -> State:
        """The state of a view after so many events."""
        live = Live(view, _no_words)
        for at in range(stop):
            live.apply(self._heads[at], at, self)
        return live.snapshot()


def _no_words(line: Line) -> Message:
    raise AssertionError("a check of numbers never asks for words")
