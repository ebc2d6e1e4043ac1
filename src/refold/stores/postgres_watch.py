"""Wakes those who wait for new entries, by LISTEN and NOTIFY.

A NOTIFY inside the append's transaction would serialize all commits of the database, so a thread sends the
notifications a few times a second. Since one may get lost, waiters also poll once in a while.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Condition, Event, Thread, current_thread

import psycopg

from refold.core.errors import StoreError
from refold.stores.forks import renew_after_fork
from refold.stores.postgres_pool import PostgresPool

CHANNEL = "refold"
ALL_KEYS = "*"
"""Sent if there are too many keys for one notification, which has at most 8,000 bytes."""
MAX_KEYS = 200
NOTIFY_EVERY_S = 0.05
LOOK_S = 1.0
"""How often a waiter polls."""
IDLE_S = 10.0
"""A thread ends after so long without work; the next append or wait starts another."""
LISTEN_S = 0.5


class PostgresWatch:
    def __init__(self, pool: PostgresPool) -> None:
        self._pool = pool
        self._begin()
        renew_after_fork(self)

    def _begin(self) -> None:
        self._lock = Condition()
        self._ending = Event()
        self._changed: set[bytes] = set()
        self._waiting: dict[bytes, list[Event]] = {}
        self._notifier: Thread | None = None
        self._listener: Thread | None = None
        self._waited = time.monotonic()
        """When the last wait ended."""

    def after_fork(self) -> None:
        self._begin()

    # Notifying

    def changed(self, key: bytes) -> None:
        """Announces an append."""
        with self._lock:
            self._changed.add(key)
            self._lock.notify_all()
            self._wake([key])
            if self._notifier is None:
                self._notifier = Thread(
                    target=self._notify, args=(self._ending,), name="refold-notify", daemon=True
                )
                self._notifier.start()

    def _notify(self, ending: Event) -> None:
        while not ending.is_set():
            with self._lock:
                if not self._lock.wait_for(lambda: self._changed or ending.is_set(), IDLE_S):
                    self._notifier = None
                    return
            self._notify_once()
            ending.wait(NOTIFY_EVERY_S)

    def _notify_once(self) -> None:
        with self._lock:
            keys = self._changed
            self._changed = set()
        if keys:
            payload = ALL_KEYS if len(keys) > MAX_KEYS else " ".join(key.hex() for key in keys)
            with suppress(StoreError):  # waiters also poll
                self._pool.run(lambda run: run("tell", channel=CHANNEL, keys=payload), LOOK_S)

    # Waiting

    def wait(self, key: bytes, there: Callable[[], bool], seconds: float) -> bool:
        """Waits until `there()` is true, at most so long; returns what it is."""
        until = time.monotonic() + seconds
        news = Event()
        if seconds <= 0 or there():
            return seconds > 0 or there()
        with self._lock:
            self._waiting.setdefault(key, []).append(news)
            if self._listener is None:
                self._listener = Thread(
                    target=self._listen, args=(self._ending,), name="refold-listen", daemon=True
                )
                self._listener.start()
        try:
            while not there():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                news.wait(min(left, LOOK_S))
                news.clear()
            return True
        finally:
            with self._lock:
                self._waiting[key].remove(news)
                if not self._waiting[key]:
                    del self._waiting[key]
                self._waited = time.monotonic()

    def _listen(self, ending: Event) -> None:
        try:
            while not ending.is_set() and not self._is_over():
                with suppress(psycopg.Error, StoreError):
                    self._listen_on(ending)
                ending.wait(LISTEN_S)
        finally:
            self._is_over(at_once=True)

    def _listen_on(self, ending: Event) -> None:
        with self._pool.connect() as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            while not ending.is_set() and not connection.closed and self._is_needed():
                for notice in connection.notifies(timeout=LISTEN_S, stop_after=1):
                    self._received(notice.payload)

    def _received(self, payload: str) -> None:
        with self._lock, suppress(ValueError):  # anybody may use the channel
            self._wake(list(self._waiting) if payload == ALL_KEYS else map(bytes.fromhex, payload.split()))

    def _is_needed(self) -> bool:
        return bool(self._waiting) or time.monotonic() - self._waited <= IDLE_S

    def _is_over(self, *, at_once: bool = False) -> bool:
        """True if this thread should end; the next waiter starts another."""
        with self._lock:
            is_over = at_once or not self._is_needed()
            if is_over and self._listener is current_thread():
                self._listener = None
            return is_over

    def _wake(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for news in self._waiting.get(key, []):
                news.set()

    def close(self) -> None:
        self._ending.set()
        with self._lock:
            self._lock.notify_all()
            threads = [thread for thread in (self._notifier, self._listener) if thread is not None]
        for thread in threads:
            thread.join(LOOK_S)  # one that waits for an unreachable server ends by itself
        if not any(thread.is_alive() for thread in threads):
            self._notify_once()
        self._begin()
