"""Whose turn it is to hand over a conversation: one at a time, in this process and among others."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Condition, Lock, Thread
from typing import Literal, TypeAlias

from refold.core.errors import RefoldError
from refold.stores.holder import holder, is_dead
from refold.stores.store import Key, Lease, Leases, Store

LEASE_S = 30.0
"""After so long it is another's turn, where a process died elsewhere; where one died here, at once."""

Turn: TypeAlias = Lease | Literal["none needed"] | None
"""None where it is somebody else's."""


class Turns:
    """Among processes by a lease, where the record has them. `using` is entered to ask the record."""

    def __init__(self, record: Store, name: str, using: Callable[[], AbstractContextManager[object]]) -> None:
        self._record, self._name, self._using = record, name, using
        self._holder = holder()
        self._changed, self._taken = Condition(), set[Key]()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._held: dict[Key, Lease] = {}
        """Those that are renewed."""

    @contextmanager
    def alone(self, key: Key, patience_s: float = 0.0) -> Iterator[bool]:
        """Whether nobody else hands over the conversation, or erases it, meanwhile."""
        until = time.monotonic() + patience_s
        with self._changed:
            is_free = self._changed.wait_for(lambda: key not in self._taken, patience_s)
            self._taken |= {key} if is_free else set()
        if not is_free:
            yield False
            return
        try:
            lease = self.lease(key)
            while lease is None and time.monotonic() < until:
                time.sleep(0.05)
                lease = self.lease(key)
            with self._renewed(key, lease):
                yield lease is not None
        finally:
            with self._changed:
                self._taken.discard(key)
                self._changed.notify_all()

    def lease(self, key: Key) -> Turn:
        """Held again, it lasts longer."""
        if not isinstance(self._record, Leases):
            return "none needed"
        now = time.time()
        with self._using():
            lease = self._record.acquire(key, self._name, self._holder, now, LEASE_S)
            if lease is None:
                held = next((one for one in self._record.leases(key, now) if one.name == self._name), None)
                if held is None:
                    return "none needed"  # there is no such conversation
                if is_dead(held.holder):
                    self._record.release(key, held)
                    return self.lease(key)
        return lease

    @contextmanager
    def _renewed(self, key: Key, lease: Turn) -> Iterator[None]:
        """However long a service is waited for; released at the end."""
        if not isinstance(lease, Lease):
            yield
            return
        with self._lock:
            self._held[key] = lease
            if self._thread is None:
                self._thread = Thread(target=self._renew, name="refold-memory-lease", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                lease = self._held.pop(key)
                with suppress(RefoldError), self._using():  # it runs out by itself
                    if isinstance(self._record, Leases):
                        self._record.release(key, lease)

    def _renew(self) -> None:
        """One thread for all that are held, which ends where none is any more."""
        while True:
            time.sleep(LEASE_S / 3)
            with self._lock:
                keys = list(self._held)
            for key in keys:
                with self._lock, suppress(Exception):  # another time, then
                    lease = self.lease(key) if key in self._held else None
                    if isinstance(lease, Lease):
                        self._held[key] = lease
            with self._lock:
                if not self._held:
                    self._thread = None
                    return
