"""Who waits for a conversation is told by NOTIFY, a little after the append and beside it.

A NOTIFY inside the append's transaction would make all writers of a database commit one after the other.
So what was appended is told together, some times a second, by a thread of its own; and since a notice may
get lost, whoever waits also looks for himself once in a while.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Condition, Event, Thread, current_thread

import psycopg

from refold.core.errors import StoreError
from refold.stores.postgres_pool import PostgresPool, renew_after_fork

CHANNEL = "refold"
ALL = "*"
"""Said instead of the keys where there are too many of them."""
MOST_KEYS = 200
"""In one notice, which has less than 8,000 bytes."""
EVERY_S = 0.05
"""Between two notices."""
LOOK_S = 1.0
"""How long somebody waits before he looks for himself."""
IDLE_S = 10.0
"""After so long without work a thread ends; the next append or wait begins another."""
POLL_S = 0.5


class PostgresWatch:
    def __init__(self, ask: PostgresPool) -> None:
        self._ask = ask
        self._begin()
        renew_after_fork(self)

    def _begin(self) -> None:
        self._lock = Condition()
        self._ending = Event()
        self._changed: set[bytes] = set()
        self._waiting: dict[bytes, list[Event]] = {}
        self._teller: Thread | None = None
        self._listener: Thread | None = None
        self._waited = time.monotonic()
        """When somebody waited last."""

    def after_fork(self) -> None:
        self._begin()

    # Telling

    def changed(self, key: bytes) -> None:
        """Something was appended."""
        with self._lock:
            self._changed.add(key)
            self._lock.notify_all()
            self._wake([key])
            if self._teller is None:
                self._teller = Thread(
                    target=self._tell, args=(self._ending,), name="refold-notify", daemon=True
                )
                self._teller.start()

    def _tell(self, ending: Event) -> None:
        while not ending.is_set():
            with self._lock:
                if not self._lock.wait_for(lambda: self._changed or ending.is_set(), IDLE_S):
                    self._teller = None
                    return
            self._tell_once()
            ending.wait(EVERY_S)

    def _tell_once(self) -> None:
        with self._lock:
            keys, self._changed = self._changed, set()
        if keys:
            told = ALL if len(keys) > MOST_KEYS else " ".join(key.hex() for key in keys)
            with suppress(StoreError):  # those who wait look for themselves
                self._ask.ask(lambda run: run("tell", channel=CHANNEL, keys=told), LOOK_S)

    # Waiting

    def wait(self, key: bytes, there: Callable[[], bool], seconds: float) -> bool:
        """Waits until it is there, or for so long; whether it is."""
        until, news = time.monotonic() + seconds, Event()
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
                ending.wait(POLL_S)
        finally:
            self._is_over(at_once=True)

    def _listen_on(self, ending: Event) -> None:
        """On one connection, for as long as there is one."""
        with self._ask.alone() as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            while not ending.is_set() and not connection.closed and self._is_needed():
                for notice in connection.notifies(timeout=POLL_S, stop_after=1):
                    self._hear(notice.payload)

    def _hear(self, told: str) -> None:
        with self._lock, suppress(ValueError):  # anybody may say anything on the channel
            self._wake(list(self._waiting) if told == ALL else map(bytes.fromhex, told.split()))

    def _is_needed(self) -> bool:
        return bool(self._waiting) or time.monotonic() - self._waited <= IDLE_S

    def _is_over(self, *, at_once: bool = False) -> bool:
        """Whether this thread should listen no more: then the next who waits begins another."""
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
            threads = [thread for thread in (self._teller, self._listener) if thread is not None]
        for thread in threads:
            thread.join(LOOK_S)  # one that waits for a server that is away ends by itself
        if not any(thread.is_alive() for thread in threads):
            self._tell_once()
        self._begin()
