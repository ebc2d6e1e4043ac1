"""A lease that lets one process at a time run a conversation: two runs would call its tools twice."""

from refold.core.errors import ConflictError
from refold.stores.lease_holder import RenewedLease
from refold.stores.shelf import Shelf
from refold.stores.store import Key, Store

LEASE_S = 30.0
"""A lease that is not renewed expires after this time; one whose process died on this machine, at once."""


class RunLease:
    """The right to run a conversation. On a store without leases, every run gets it."""

    def __init__(self, store: Store, key: Key) -> None:
        self._key = key
        self._lease = RenewedLease(store, key, "run", LEASE_S) if isinstance(store, Shelf) else None

    def take(self) -> bool:
        """Returns False for a conversation without messages, which cannot be leased.

        Raises:
            ConflictError: another run holds the lease.
        """
        if self._lease is None:
            return True
        if not self._lease.is_held:
            self._lease.acquire()
        self.check()
        return self._lease.is_held

    def check(self) -> None:
        """
        Raises:
            ConflictError: it was not renewed in time, and another run holds it now.
        """
        rival = self._lease.rival if self._lease else None
        if rival is not None:
            where, pid, *_ = f"{rival.holder} ?".split(" ")
            raise ConflictError(
                f"{self._key.conversation!r} is being run by process {pid} on {where.partition('/')[0]}. Wait"
                " until that run ends, or use another conversation. If the process is gone, the lease expires"
                f" within {LEASE_S:g} seconds."
            )

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()
