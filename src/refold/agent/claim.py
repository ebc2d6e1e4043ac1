"""One run of a conversation at a time: two of them would run its tools twice."""

import time
from contextlib import suppress
from threading import Event, Lock, Thread

from refold.core.errors import ConflictError, RefoldError
from refold.stores.holder import holder, is_dead
from refold.stores.store import Key, Lease, Leases, Store

NAME = "run"
LEASE_S = 30.0
"""After so many seconds a run is nobody's whose process died elsewhere; of one that died here, at once."""


class Claim:
    """The right to run a conversation, renewed by a thread of its own: the event loop may be busy for long.

    Where the store has no leases, everybody has it.
    """

    def __init__(self, store: Store, key: Key) -> None:
        self._store, self._key = store if isinstance(store, Leases) else None, key
        self._holder = holder()
        self._lease: Lease | None = None
        self._rival: Lease | None = None
        self._lock, self._ended = Lock(), Event()

    def take(self) -> bool:
        """Whether it is taken: there is nothing to take of a conversation in which nothing was said yet.

        Raises:
            ConflictError: somebody else is running it.
        """
        with self._lock:  # who gives up meanwhile waits for it, and releases it
            return self._take()

    def _take(self) -> bool:
        if self._store is None or self._lease is not None or self._ended.is_set():
            return True
        self._lease = self._acquire()
        if self._lease is not None:
            Thread(target=self._keep_up, name="refold-run", daemon=True).start()
            return True
        held = self._held()
        if held is None:
            return False
        if not is_dead(held.holder):
            raise self._conflict(held)
        self._store.release(self._key, held)  # by its fence: where another one was faster, nothing happens
        return self._take()

    def demand(self) -> None:
        """
        Raises:
            ConflictError: it was not renewed for too long, and somebody else has it now.
        """
        if self._rival is not None:
            raise self._conflict(self._rival)

    def release(self) -> None:
        self._ended.set()
        with self._lock:
            lease, self._lease = self._lease, None
            if lease is not None and self._store is not None:
                with suppress(RefoldError):  # it runs out by itself
                    self._store.release(self._key, lease)

    def renew(self) -> None:
        """Keeps it for longer, or notices that somebody else has it."""
        with self._lock:
            if self._lease is None:
                return
            lease = self._acquire()
            if lease is None and (rival := self._held()):
                self._lease, self._rival = None, rival
            else:
                self._lease = lease or self._lease

    def _keep_up(self) -> None:
        while not self._ended.wait(LEASE_S / 3):
            with suppress(RefoldError):  # another time, then
                self.renew()

    def _acquire(self) -> Lease | None:
        assert self._store is not None
        return self._store.acquire(self._key, NAME, self._holder, time.time(), LEASE_S)

    def _held(self) -> Lease | None:
        assert self._store is not None
        return next((one for one in self._store.leases(self._key, time.time()) if one.name == NAME), None)

    def _conflict(self, held: Lease) -> ConflictError:
        where, pid, *_ = f"{held.holder} ?".split(" ")
        return ConflictError(
            f"{self._key.conversation!r} is being run by process {pid} on {where.partition('/')[0]}. Wait for"
            " its end, or use another conversation. If that process is gone, it is free again in"
            f" {LEASE_S:g} seconds."
        )
