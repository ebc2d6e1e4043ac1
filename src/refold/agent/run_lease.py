"""A lease that lets one process at a time run a conversation: two runs would call its tools twice."""

import time
from contextlib import suppress
from threading import Event, Lock, Thread

from refold.core.errors import ConflictError, RefoldError
from refold.stores.lease_holder import is_dead, new_holder
from refold.stores.store import Key, Lease, Leases, Store

NAME = "run"
LEASE_S = 30.0
"""A lease that is not renewed expires after this time; one whose process died on this machine, at once."""


class RunLease:
    """The right to run a conversation. A thread renews it, since the event loop may be busy for long.

    On a store without leases, every run gets it.
    """

    def __init__(self, store: Store, key: Key) -> None:
        self._store = store if isinstance(store, Leases) else None
        self._key = key
        self._holder = new_holder()
        self._lease: Lease | None = None
        self._rival: Lease | None = None
        self._lock = Lock()
        self._is_released = Event()

    def take(self) -> bool:
        """Returns False for a conversation without messages, which cannot be leased.

        Raises:
            ConflictError: another run holds the lease.
        """
        with self._lock:  # a `release` meanwhile waits, and then finds the lease
            while self._store is not None and self._lease is None and not self._is_released.is_set():
                self._lease = self._acquire()
                if self._lease is not None:
                    Thread(target=self._keep_renewing, name="refold-run", daemon=True).start()
                    return True
                current = self._current()
                if current is None:
                    return False
                if not is_dead(current.holder):
                    raise self._conflict(current)
                self._store.release(self._key, current)  # does nothing if another run has taken it since
            return True

    def check(self) -> None:
        """
        Raises:
            ConflictError: it was not renewed in time, and another run holds it now.
        """
        if self._rival is not None:
            raise self._conflict(self._rival)

    def renew(self) -> None:
        with self._lock:
            if self._lease is None:
                return
            lease = self._acquire()
            if lease is not None:
                self._lease = lease
            elif rival := self._current():
                self._lease = None
                self._rival = rival

    def release(self) -> None:
        self._is_released.set()
        with self._lock:
            if self._lease is not None and self._store is not None:
                with suppress(RefoldError):  # it expires by itself
                    self._store.release(self._key, self._lease)
            self._lease = None

    def _keep_renewing(self) -> None:
        while not self._is_released.wait(LEASE_S / 3):
            with suppress(RefoldError):  # the next renewal may succeed
                self.renew()

    def _acquire(self) -> Lease | None:
        assert self._store is not None
        return self._store.acquire(self._key, NAME, self._holder, time.time(), LEASE_S)

    def _current(self) -> Lease | None:
        assert self._store is not None
        return next((one for one in self._store.leases(self._key, time.time()) if one.name == NAME), None)

    def _conflict(self, current: Lease) -> ConflictError:
        where, pid, *_ = f"{current.holder} ?".split(" ")
        return ConflictError(
            f"{self._key.conversation!r} is being run by process {pid} on {where.partition('/')[0]}. Wait"
            f" until that run ends, or use another conversation. If the process is gone, the lease expires"
            f" within {LEASE_S:g} seconds."
        )
