"""Is what is stored still what was written? Every conversation is read from its first event and verified.

>>> from refold.stores.memory import MemoryStore
>>> examine(MemoryStore())
[]
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from refold.core import codec
from refold.core.codec import GENESIS, Entry, Link
from refold.core.errors import NewerError
from refold.core.event import Said
from refold.core.live import Live, State
from refold.core.plan import line_of
from refold.session.inspect import parse
from refold.session.results import error_text
from refold.stores import store as protocols
from refold.stores.record import Entries, seal
from refold.stores.shelf import Shelf
from refold.stores.store import ConversationInfo, Key, SelfCheck, Snapshot, Store

MOST_UNREADABLE = 20
"""After so many events in a row that cannot be read, the rest of a conversation is not read."""

BACKUP = "restore it from a backup or an export"
CACHE = "it is only a cache: nothing is lost, and refold writes a new one; until then it opens more slowly"
USED_CACHE = "it is only a cache, but in use: export the conversation and import it under another id"
NEWER = "upgrade refold to read it"
ALTERED = "is not what was written"

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
        "a search reads whole conversations, and embeds them again each time if there is an embedder",
    ),
    protocols.RemoteReads: ("waiting for new entries", "followers of events poll ten times a second"),
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
    """None if it concerns the store as a whole."""
    at: int | None = None
    """The event; None if it concerns the conversation as a whole."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for an event that the store cannot return."""

    at: int
    error: Exception


def examine(
    store: Store, *, owner: str | None = None, only: Key | None = None, tick: Tick | None = None
) -> list[Finding]:
    """Everything that is wrong with a store, or with one conversation in it; nothing is changed.

    Damage of any kind becomes a finding; nothing is raised for it.
    """
    findings = [] if only else list(_check_engine(store))
    rows, error = list_safely(store, only.owner if only else owner)
    for row in rows:
        if only in (None, row.key):
            findings += check(store, row.key, tick)
    if error is not None:
        findings.append(Finding(f"the list of conversations cannot be read: {error_text(error)}", BACKUP))
    return findings


def missing_features(store: Store) -> dict[str, str]:
    """Optional features that a store lacks, each with what follows from that."""
    return dict(LACKS[protocol] for protocol in LACKS if not isinstance(store, protocol))


def check(store: Store, key: Key, tick: Tick | None = None) -> list[Finding]:
    """What is wrong with one conversation: its hash chain, its places, its counts, its snapshots."""
    others = list[Finding]()
    snapshots: Mapping[str, Snapshot] = {}
    if isinstance(store, Shelf):
        try:
            snapshots = store.saved(key)  # before the events, so that all of theirs are read below
        except Exception as error:
            others.append(Finding(f"a snapshot cannot be read: {error_text(error)}", CACHE, *key))
    audit = _Audit(key)
    for link in links(store, key):
        audit.take(link)
        if tick:
            tick(1)
    for view, snapshot in snapshots.items():
        others += _check_snapshot(store, key, view, snapshot, audit)
    return audit.findings + others


def links(store: Store, key: Key, start: int = 0) -> Iterator[Link | Unreadable]:
    """The stored events, with a stand-in for each that cannot be read."""
    at = start
    failed = 0
    while failed < MOST_UNREADABLE:
        try:
            for link in store.read(key, at):
                yield link
                at = link.entry.at + 1
                failed = 0
        except Exception as error:  # a damaged row may raise anything
            yield Unreadable(at, error)
            at += 1
            failed += 1
        else:
            return


def list_safely(store: Store, owner: str | None) -> tuple[list[ConversationInfo], Exception | None]:
    """The conversations up to the first that cannot be listed, and the error of that one."""
    rows: list[ConversationInfo] = []
    try:
        for row in store.conversations(owner):
            rows.append(row)
    except Exception as error:  # a name that is not text, a damaged page
        return rows, error
    return rows, None


def _check_engine(store: Store) -> Iterator[Finding]:
    if isinstance(store, SelfCheck):
        try:
            for where, problem, advice in store.examine():
                yield Finding(f"{where}: {problem}", advice or BACKUP)
        except Exception as error:
            yield Finding(f"the store cannot be examined: {error_text(error)}", BACKUP)


class _Audit:
    """Verifies the events of one conversation, in order."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.findings: list[Finding] = []
        self.next = 0
        self.is_complete = True
        """False if the newest events could not be read."""
        self.digests: dict[int, tuple[bytes, ...]] = {0: (GENESIS,)}
        """By place, the digests that the event there may follow from: the one computed from the event before
        it and the stored one, which differ if either was altered. Missing after an event that cannot be read.
        """
        self._counts: tuple[int, int, int, int] | None = (0, 0, 0, 0)
        """Messages, turn, step and tokens so far; None after a damaged event."""

    def take(self, link: Link | Unreadable) -> None:
        at = link.at if isinstance(link, Unreadable) else link.entry.at
        if at > self.next:
            lost = f"#{self.next}" if at == self.next + 1 else f"#{self.next} to #{at - 1}"
            self._report(self.next, f"missing: {lost}, between what came before and #{at}")
        before = self.digests.get(at, ())
        self.next = at + 1
        self.is_complete = not isinstance(link, Unreadable)
        if isinstance(link, Unreadable):
            self._report(at, f"cannot be read: {error_text(link.error)}")
            return
        try:
            self.digests[self.next], is_intact = _next_digests(before, link)
        except Exception as error:  # a column of another type
            self._report(at, f"{ALTERED}: {error_text(error)}")
            return
        try:
            event = codec.decode(link.entry, parse)
            codec.head(link.entry)
        except Exception as error:
            advice = NEWER if isinstance(error, NewerError) else BACKUP
            problem = f"cannot be understood: {error_text(error)}"
            self._report(at, problem if is_intact else f"{ALTERED}; {problem}", advice)
            return
        if not is_intact:
            self._report(at, ALTERED)
        elif isinstance(event, Said):
            self._check_said(event, link.entry)

    def _check_said(self, said: Said, entry: Entry) -> None:
        """Compares what is stored beside a message with its text and with the messages before it."""
        line = said.line
        fresh = line_of(said.message, line.at, line.tokens, line.turn, line.step)
        facts: dict[str, tuple[Any, Any]] = {
            "id": (entry.id, said.message.id),
            "role": (line.role, fresh.role),
            "calls": (line.calls, fresh.calls),
            "answers": (line.answers, fresh.answers),
        }
        if self._counts is not None:
            index, turn, step, total = self._counts
            facts["index"] = (said.index, index)
            facts["turn"] = (line.turn, turn + line.asks)
            facts["step"] = (line.step, step + (line.role == "assistant"))
            facts["total"] = (said.total, total + line.tokens)
        self._counts = (said.index + 1, line.turn, line.step, said.total)
        wrong = [
            f"{name} {one!r} instead of {other!r}" for name, (one, other) in facts.items() if one != other
        ]
        if wrong:
            what = "its stored counts contradict its text or the messages before it"
            self._report(said.at, f"{what}: {', '.join(wrong)}")

    def _report(self, at: int, problem: str, advice: str = BACKUP) -> None:
        self.findings.append(Finding(problem, advice, *self.key, at))
        self._counts = None


def _next_digests(before: tuple[bytes, ...], link: Link) -> tuple[tuple[bytes, ...], bool]:
    """The digests that the next event may follow from, and whether this one follows from one of `before`."""
    entry, stored = link
    computed = [codec.chain(digest, entry) for digest in before]
    if stored in computed or not before:
        return (stored,), True
    either = (computed[0], stored)
    return tuple(digest for digest in either if isinstance(digest, bytes)), False


def _check_snapshot(
    store: Store, key: Key, view: str, snapshot: Snapshot, audit: _Audit
) -> Iterator[Finding]:
    what = f"the snapshot of view {view!r} after #{snapshot.at - 1}"
    if snapshot.at > audit.next:
        if audit.is_complete:
            problem = (
                f"{what} covers {snapshot.at} events, but there are {audit.next}:"
                " the newest events are missing, or the snapshot was altered"
            )
            yield Finding(problem, BACKUP, *key)
        return
    digests = audit.digests.get(snapshot.at, ())
    if digests and snapshot.digest not in [seal(digest, snapshot.body) for digest in digests]:
        yield Finding(f"{what} was altered, or belongs to another conversation", CACHE, *key)
        return
    try:
        state = msgspec.convert(codec.loads(snapshot.body), State, str_keys=True)
    except (ValueError, RecursionError):
        return  # of another version: it is not used
    if any(one.at is not None and one.at < snapshot.at for one in audit.findings):
        return
    entries = Entries(store, key, parse)
    live = Live(view, entries.message)
    try:
        for entry, _ in store.read(key, 0, snapshot.at):
            live.apply(codec.head(entry), entry.at, entries)
        is_same = state == live.snapshot()
    except Exception:  # an intact event that makes no sense
        is_same = False
    if not is_same:
        yield Finding(f"{what} is not what the events add up to", USED_CACHE, *key)
