"""What this process has read of a memory's conversations, kept up to date by reading what is new."""

from collections import OrderedDict
from threading import Lock, RLock

from refold.stores.agentcore_events import Seen, seen
from refold.stores.agentcore_known import Known
from refold.stores.agentcore_service import Place, Service
from refold.stores.store import Key

MOST_KNOWN = 256
"""Conversations that are kept; more are forgotten whole."""
MOST_KNOWN_BYTES = 64_000_000
LOCKS = 64


class Reading:
    """Safe to use from many threads: those who look at the same conversation wait for each other."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: OrderedDict[Place, Known] = OrderedDict()
        self._keeping = Lock()
        self._locks = [RLock() for _ in range(LOCKS)]

    def locked(self, place: Place) -> RLock:
        return self._locks[hash(place) % LOCKS]

    def known(self, place: Place) -> Known | None:
        """The conversation of a session as it was when it was last looked at."""
        return self._known.get(place)

    def forget(self, place: Place) -> None:
        with self._keeping:
            self._known.pop(place, None)

    def fresh(self, place: Place, key: Key | None = None) -> Known | None:
        """The conversation of a session as it is now; None where there is none, or one of another key."""
        with self.locked(place):
            known = self._known.get(place)
            if known is None or key not in (None, known.key) or not self._extend(place, known):
                known = self._load(place, key)
            self._keep(place, known)
            return known

    def _keep(self, place: Place, known: Known | None) -> None:
        with self._keeping:
            self._known.pop(place, None)
            if known is not None:
                self._known[place] = known
            size = sum(one.size for one in self._known.values())
            while len(self._known) > MOST_KNOWN or (size > MOST_KNOWN_BYTES and len(self._known) > 1):
                size -= self._known.popitem(last=False)[1].size

    def _extend(self, place: Place, known: Known) -> bool:
        """Takes in what is new; False where the conversation is no longer the one that was known."""
        is_elsewhere = known.home != place
        if is_elsewhere and self._service.event(place, known.begun.id) is None:
            return False
        events, is_there = self._service.since(known.home, known.tip, known.branch and known.branch.name)
        new = [one for event in reversed(events) if (one := seen(event)) is not None]
        if not is_there or any(one.kind == "grave" and one.stream == known.stream for one in new):
            return False
        known.take(new)
        return True

    def _load(self, place: Place, key: Key | None) -> Known | None:
        ours = self.ours(place)
        buried = {one.stream for one in ours if one.kind == "grave"}
        firsts = [one for one in ours if _begins(one) and one.stream not in buried]
        mine = [one for one in firsts if self._service.place(one.key) == place and key in (None, one.key)]
        if not mine:
            return None
        known = Known.begin(min(mine), place)
        known.take(ours if known.branch is None else self.ours(known.home, known.branch.name))
        return known if known.links or known.begun.kind == "fork" else None

    def ours(self, place: Place, branch: str | None = None) -> list[Seen]:
        """The events that are ours, the oldest first."""
        events = list(self._service.events(place, branch))
        return [one for event in reversed(events) if (one := seen(event)) is not None]


def _begins(event: Seen) -> bool:
    head = event.head
    return event.kind == "fork" or (event.kind == "batch" and head["root"] and head["at"] == 0)
