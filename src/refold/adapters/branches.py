"""The forks in which a conversation continues after its past was changed: NAME~1, NAME~2, …"""

from collections.abc import Callable

from refold.core.errors import ConflictError, StoreError
from refold.session.session import Session
from refold.stores.store import Forks

SEPARATOR = "~"
MOST_GAPS = 5
"""Branch names in a row that other conversations may have taken."""


class Branches:
    """A conversation and its branches, each a fork of the one before."""

    def __init__(self, name: str, open_session: Callable[[str], Session]) -> None:
        self.names = [name]
        self.newest = open_session(name)
        self._open_session = open_session
        self._number = 0
        self.follow()

    def _name(self, number: int) -> str:
        return f"{self.names[0]}{SEPARATOR}{number}"

    def follow(self) -> bool:
        """Continues in branches that others began; True if there are any."""
        before = self._number
        number = before + 1
        while number <= self._number + MOST_GAPS:
            if self._is_branch(number):
                self._continue_in(number, self._open_session(self._name(number)))
            number += 1
        return self._number > before

    def fork(self, at: int | None) -> bool:
        """Begins a branch after a place, or from the beginning. False if another writer began one meanwhile.

        Raises:
            StoreError: the store cannot fork.
        """
        store = self.newest.store
        if not isinstance(store, Forks):
            raise StoreError(
                f"The past of {self.names[0]!r} was changed, and {type(store).__name__} cannot fork: leave"
                " earlier messages unchanged, begin another conversation, or use a store that can fork"
            )
        for number in range(self._number + 1, self._number + 1 + MOST_GAPS):
            name = self._name(number)
            try:
                if at is not None:
                    branch = self.newest.fork(name, at=at)
                else:
                    store.fork(self.newest.key, self.newest.key._replace(conversation=name), 0)
                    branch = self._open_session(name)
                    branch.name(title=self.names[0])  # an empty fork would not be stored
            except ConflictError:
                if self.follow():
                    return False
                continue
            self._continue_in(number, branch)
            return True
        raise ConflictError(
            f"{self.names[0]!r} cannot fork: {self._name(self._number + 1)!r} and the names after it belong"
            " to other conversations"
        )

    def _continue_in(self, number: int, branch: Session) -> None:
        self.newest = branch
        self.names.append(branch.conversation)
        self._number = number

    def _is_branch(self, number: int) -> bool:
        """False for another conversation that has the name of a branch."""
        of = self.newest.key
        key = of._replace(conversation=self._name(number))
        store = self.newest.store
        if next(iter(store.read(key, 0, 1)), None) is None:
            return False
        return any(row.key == key and row.parent == of for row in store.conversations(key.owner))
