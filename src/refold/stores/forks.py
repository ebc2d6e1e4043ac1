"""What a forked process must not share with its parent: connections, threads and their locks."""

import os
from typing import Any, Protocol
from weakref import WeakSet


class Forked(Protocol):
    def after_fork(self) -> None:
        """Runs in the child, before anything else."""


_forked: WeakSet[Forked] = WeakSet()
_parents: list[Any] = []


def renew_after_fork(one: Forked) -> None:
    _forked.add(one)


def keep_for_parent(one: Any) -> None:
    """Keeps the child from collecting, and thereby closing, what the parent uses."""
    _parents.append(one)


def _renew() -> None:
    for one in list(_forked):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
