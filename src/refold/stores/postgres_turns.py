"""Who may use a connection: so many at a time, in the order in which they came."""

from collections import deque
from threading import Lock


class PostgresTurns:
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
        try:
            came = mine.acquire(timeout=max(0.0, seconds))
        except BaseException:  # Ctrl-C, where one waits longest
            if not self._leave(mine):
                self.give()
            raise
        return came or not self._leave(mine)

    def _leave(self, mine: Lock) -> bool:
        """Whether it was still waited for, and not given just now."""
        with self._lock:
            is_waiting = mine in self._waiting
            if is_waiting:
                self._waiting.remove(mine)
            return is_waiting

    def give(self) -> None:
        """To whoever waits longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
