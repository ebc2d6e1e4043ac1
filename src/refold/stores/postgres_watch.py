"""Who waits for a conversation is told by NOTIFY, a little after the append and beside it.

A NOTIFY inside the append's transaction would make all writers of a database commit one after the other.
So what was appended is told together, some times a second, by a thread of its own; and since a notice may
get lost, whoever waits also looks for himself once in a while.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Condition, Event, Thread

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
                self._teller = Thread(target=self._tell, name="refold-notify", daemon=True)
                self._teller.start()

    def _tell(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                if not self._lock.wait_for(lambda: self._changed or self._ending.is_set(), IDLE_S):
                    self._teller = None
                    return
            self._tell_once()
            self._ending.wait(EVERY_S)

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
                self._listener = Thread(target=self._listen, name="refold-listen", daemon=True)
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

    def _listen(self) -> None:
        idle_since = time.monotonic()
        while not self._ending.is_set():
            with suppress(psycopg.Error), self._ask.alone() as connection:
                connection.execute(f"LISTEN {CHANNEL}")
                while not self._ending.is_set() and not connection.closed:
                    for notice in connection.notifies(timeout=POLL_S, stop_after=1):
                        with self._lock:
                            told = notice.payload
                            self._wake(
                                list(self._waiting) if told == ALL else map(bytes.fromhex, told.split())
                            )
                    with self._lock:
                        idle_since = time.monotonic() if self._waiting else idle_since
                        if time.monotonic() - idle_since > IDLE_S:
                            self._listener = None
                            return
            self._ending.wait(POLL_S)

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
            thread.join()
        self._tell_once()
        self._begin()
