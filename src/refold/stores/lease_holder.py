"""Who holds a lease: a process that can be told from others, and known to be gone."""

import os
import time
from contextlib import suppress
from pathlib import Path
from platform import node
from threading import Event, RLock, Thread
from uuid import uuid4

from refold.core.errors import RefoldError
from refold.stores.shelf import Shelf
from refold.stores.store import Key, Lease

_PROCESS = uuid4().hex[:12]
"""Tells this process from an earlier one with the same number."""


class RenewedLease:
    """A lease that a thread renews until it is released, since its work may take longer than `seconds`.

    A conversation without entries has no leases.
    """

    def __init__(self, store: Shelf, key: Key, name: str, seconds: float) -> None:
        self.rival: Lease | None = None
        """The lease of another holder, when this one was last acquired or renewed."""
        self._store = store
        self._key = key
        self._name = name
        self._seconds = seconds
        self._holder = new_holder()
        self._lease: Lease | None = None
        self._lock = RLock()
        self._released = Event()

    @property
    def is_held(self) -> bool:
        return self._lease is not None

    def acquire(self) -> None:
        """Acquires or renews it, also from a process that died on this machine; or sets `rival`."""
        with self._lock:
            if self._released.is_set():
                return
            self.rival = None
            was_held = self.is_held
            while True:
                now = time.time()
                self._lease = self._store.acquire(self._key, self._name, self._holder, now, self._seconds)
                if self._lease is not None:
                    break
                leases = self._store.leases(self._key, now)
                current = next((one for one in leases if one.name == self._name), None)
                if current is None or not is_dead(current.holder):
                    self.rival = current
                    return
                self._store.release(self._key, current)  # does nothing if it has another holder by now
            if not was_held:
                Thread(target=self._keep_renewing, name="refold-lease", daemon=True).start()

    def release(self) -> None:
        self._released.set()
        with self._lock:
            if self._lease is not None:
                with suppress(RefoldError):  # it expires by itself
                    self._store.release(self._key, self._lease)
            self._lease = None

    def _keep_renewing(self) -> None:
        while not self._released.wait(self._seconds / 3):
            with self._lock, suppress(Exception):  # the next renewal may succeed
                if not self.is_held:
                    return
                self.acquire()


def new_holder() -> str:
    """A new holder of leases in this process: its machine, its number, and a random part."""
    return f"{_here()} {os.getpid()} {_PROCESS} {uuid4().hex[:12]}"


def is_dead(holder: str) -> bool:
    """True if the holder's process is known to be gone."""
    where, pid, process, *_ = (*holder.split(" "), "", "", "")
    if where != _here() or not pid.isdecimal() or os.name != "posix":
        return False
    return process != _PROCESS if int(pid) == os.getpid() else not _is_running(int(pid))


def _here() -> str:
    """Where process numbers are unique: this machine since it was started, and its PID namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{_host()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    return _host()


def _host() -> str:
    return node().replace(" ", "-").replace("/", "-") or "?"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # sends no signal
    except ProcessLookupError:
        return False
    except OSError:
        return True
    with suppress(OSError):  # it may be a zombie
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in ("Z", "X")
    return True
