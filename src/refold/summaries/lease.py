"""One compaction at a time per view, whoever asks for it and in whatever process."""

import os
import time
from contextlib import suppress

from refold.core.errors import RefoldError
from refold.stores.store import Key, Lease, Leases, Store

POLL_S = 0.05
"""Between two looks at whether another holder is done."""


class CompactionLease:
    """The right to write summaries of a view, which one holder has at a time; a dead holder's runs out.

    It knows its store and nothing else: whoever ends it at exit keeps nothing alive until then.
    """

    def __init__(self, store: Store, key: Key, view: str, holder: str) -> None:
        self.name = f"compaction:{view}"
        self._store, self._key, self._holder = store, key, holder
        self._writer: int | None = None
        """The process that writes."""

    @property
    def is_needed(self) -> bool:
        return isinstance(self._store, Leases)

    @property
    def is_held(self) -> bool:
        """Somebody compacts the view now."""
        return bool(self._held())

    @property
    def is_held_elsewhere(self) -> bool:
        return any(lease.holder != self._holder for lease in self._held())

    def wait_for_others(self, seconds: float) -> bool:
        """True if nobody else holds it by then."""
        until = time.monotonic() + seconds
        while self.is_held_elsewhere:
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        return True

    def acquire(self, seconds: float) -> Lease | None:
        lease = self._hold(seconds)
        self._writer = os.getpid() if lease else None
        return lease

    def end(self) -> None:
        """Others may go on; until one does, what was written under the lease is the newest there is."""
        if self._writer == os.getpid():  # a fork of the process that writes holds nothing
            self._writer = None
            self._hold(0.0)

    def release(self, lease: Lease) -> None:
        if isinstance(self._store, Leases):
            with suppress(RefoldError):
                self._store.release(self._key, lease)

    def _hold(self, seconds: float) -> Lease | None:
        if isinstance(self._store, Leases):
            with suppress(RefoldError):
                return self._store.acquire(self._key, self.name, self._holder, time.time(), seconds)
        return None

    def _held(self) -> list[Lease]:
        if isinstance(self._store, Leases):
            with suppress(RefoldError):
                leases = self._store.leases(self._key, time.time())
                return [lease for lease in leases if lease.name == self.name]
        return []
