"""Who may use a connection: so many at a time, in the order in which they came."""

from collections import deque
from threading import Lock


class Turns:
    def __init__(self, many: int) -> None:
        self._free, self._lock = many, Lock()
        self._waiting: deque[Lock] = deque()

    def take(self, seconds: float) -> bool:
        """Whether it came in that time."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            mine = Lock()
            mine.acquire()
            self._waiting.append(mine)
        if mine.acquire(timeout=max(0.0, seconds)):
            return True
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
                return False
            return True  # given just now

    def give(self) -> None:
        """To whoever waits longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
