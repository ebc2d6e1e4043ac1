"""A dictionary that does not grow with the life of a process: what was set longest ago is forgotten.

>>> recent = Recent[str, int](2)
>>> for name in ("a", "b", "a", "c"):
...     recent[name] = len(recent)
>>> list(recent)
['a', 'c']
"""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """At most so many entries. Safe to use from many threads."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)  # so that it is the newest; moving it would fail where another thread drops it
        super().__setitem__(key, value)
        while len(self) > self._most:
            self.popitem(last=False)
