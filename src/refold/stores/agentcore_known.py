"""A conversation at AgentCore as this process knows it: the streams it is made of, and what was read of them.

A conversation begins with an event in its own session: its first batch, or the pointer of a fork. The
batches of a fork are on a branch of the session where its past is, its home.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from refold.core.codec import GENESIS, Link
from refold.stores.agentcore_events import Seen, links
from refold.stores.agentcore_service import Branch, Place
from refold.stores.store import Key

ENDLESS = 1 << 62


class Segment(NamedTuple):
    """A past that is shared: entries of a stream, up to a place."""

    stream: str
    stop: int


class Ancestor(NamedTuple):
    key: Key
    stream: str
    fork_at: int
    """The first place that is not shared with it."""
    home: Place


class Mark(NamedTuple):
    """An event that counts, and the places before `stop` are known with it."""

    stop: int
    id: str
    nonce: str
    parts: tuple[str, ...]


@dataclass(slots=True)
class Known:
    key: Key
    begun: Seen
    """The event that it began with."""
    home: Place
    branch: Branch | None = None
    line: tuple[Segment, ...] = ()
    of: tuple[Ancestor, ...] = ()
    """What it is a fork of, the nearest first."""
    links: list[Link] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    size: int = 0
    _batches: dict[tuple[str, int, str], list[Seen]] = field(default_factory=dict)
    _parts: dict[str, dict[int, Seen]] = field(default_factory=dict)

    @classmethod
    def begin(cls, begun: Seen, place: Place) -> Self:
        """Of the event that stands at the beginning of a session."""
        head = begun.head
        if begun.kind != "fork":
            return cls(begun.key, begun, place)
        branch = Branch(*head["branch"]) if head["branch"] else None
        line = tuple(Segment(*one) for one in head["line"])
        return cls(begun.key, begun, Place(*head["home"]), branch, line, ancestors(begun))

    @property
    def stream(self) -> str:
        return self.begun.stream

    @property
    def nonce(self) -> str:
        """Of whoever began it."""
        return str(self.begun.head["nonce"])

    @property
    def tip(self) -> str:
        """The newest event that counts."""
        return self.marks[-1].id if self.marks else self.begun.id

    @property
    def digest(self) -> bytes:
        return self.links[-1].digest if self.links else GENESIS

    def mark(self, at: int) -> Mark | None:
        """The event that holds a place."""
        low, high = 0, len(self.marks)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.marks[middle].stop > at else (middle + 1, high)
        return self.marks[low] if low < len(self.marks) else None

    def line_until(self, at: int) -> tuple[Segment, ...]:
        """The past that a fork at a place shares."""
        all = (*self.line, Segment(self.stream, at))
        starts = (0, *(segment.stop for segment in all))
        cut = (Segment(one.stream, min(one.stop, at)) for one in all)
        return tuple(one for one, start in zip(cut, starts, strict=False) if start < one.stop)

    def take(self, events: Iterable[Seen]) -> None:
        """Goes on with what continues what is known. Of two that claim a place, the first by id counts."""
        stops = dict(self.line) | {self.stream: ENDLESS}
        for one in events:
            if one.kind == "part" and one.stream in stops:
                self._parts.setdefault(one.head["nonce"], {})[one.head["n"]] = one
            elif one.kind == "batch" and len(self.links) <= one.head["at"] < stops.get(one.stream, 0):
                claim = (one.stream, one.head["at"], one.head["previous"])
                self._batches.setdefault(claim, []).append(one)
        while (batch := self._next()) is not None:
            stop, parts = self._segment.stop, self._whole(batch) or ()
            new = [link for link in links(batch, parts) if link.entry.at < stop]
            del self._batches[batch.stream, batch.head["at"], batch.head["previous"]]
            self._parts.pop(batch.head["nonce"], None)
            self.links += new
            self.places |= {link.entry.id: link.entry.at for link in new if link.entry.id is not None}
            self.size += sum(len(link.entry.head) + len(link.entry.body) for link in new)
            ids = tuple(part.id for part in parts)
            self.marks.append(Mark(len(self.links), batch.id, batch.head["nonce"], ids))

    @property
    def _segment(self) -> Segment:
        at = len(self.links)
        return next((one for one in self.line if at < one.stop), Segment(self.stream, ENDLESS))

    def _next(self) -> Seen | None:
        claims = self._batches.get((self._segment.stream, len(self.links), self.digest.hex()), [])
        return min((one for one in claims if self._whole(one) is not None), default=None)

    def _whole(self, batch: Seen) -> Sequence[Seen] | None:
        """The parts of a batch; None where some are missing."""
        parts = self._parts.get(batch.head["nonce"], {})
        count = batch.head["parts"]
        return [parts[n] for n in range(count)] if len(parts) >= count else None


def ancestors(event: Seen) -> tuple[Ancestor, ...]:
    """What the fork that an event tells of is a fork of."""
    rows = event.head["of"]
    return tuple(Ancestor(Key(*key), stream, at, Place(*home)) for key, stream, at, home in rows)
