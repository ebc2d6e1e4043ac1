"""The lease of a view: one process at a time compacts it or writes its summaries."""

import os
import time
from contextlib import suppress

from refold.core.errors import RefoldError
from refold.stores.shelf import Shelf
from refold.stores.store import Key, Lease, Store

POLL_S = 0.05


class CompactionLease:
    """The right to compact a view, which one holder has at a time; a dead holder's expires.

    It refers to nothing but the store, so that a finalizer that ends it keeps no session alive.
    """

    def __init__(self, store: Store, key: Key, view: str, holder: str) -> None:
        self.name = f"compaction:{view}"
        self._shelf = store if isinstance(store, Shelf) else None
        self._key = key
        self._holder = holder
        self._pid: int | None = None
        """The process that acquired it."""

    @property
    def is_needed(self) -> bool:
        """False if the store has no leases."""
        return self._shelf is not None

    @property
    def is_held(self) -> bool:
        """True if the view is being compacted."""
        return bool(self._held())

    @property
    def is_held_elsewhere(self) -> bool:
        return any(lease.holder != self._holder for lease in self._held())

    def wait_for_others(self, seconds: float) -> bool:
        """True if no other holder has it by then."""
        until = time.monotonic() + seconds
        while self.is_held_elsewhere:
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        return True

    def acquire(self, seconds: float) -> Lease | None:
        lease = self._hold(seconds)
        self._pid = os.getpid() if lease else None
        return lease

    def end(self) -> None:
        """Lets others acquire it. Until one does, what was written under it stays valid."""
        if self._pid == os.getpid():  # a forked child holds nothing
            self._pid = None
            self._hold(0.0)

    def release(self, lease: Lease) -> None:
        if self._shelf is not None:
            with suppress(RefoldError):
                self._shelf.release(self._key, lease)

    def _hold(self, seconds: float) -> Lease | None:
        if self._shelf is not None:
            with suppress(RefoldError):
                return self._shelf.acquire(self._key, self.name, self._holder, time.time(), seconds)
        return None

    def _held(self) -> list[Lease]:
        if self._shelf is not None:
            with suppress(RefoldError):
                leases = self._shelf.leases(self._key, time.time())
                return [lease for lease in leases if lease.name == self.name]
        return []
