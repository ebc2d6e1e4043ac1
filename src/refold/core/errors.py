"""The exceptions of refold.

RefoldError
├── MessageError       a message that cannot be understood; nothing was stored
├── SettingError       a setting that is unknown or not allowed
├── NotFoundError      no such conversation, place or message
│   └── CannotExpandError  there is nothing to show again at that place
├── OverBudgetError    what must be shown does not fit the window
├── ConflictError      another writer took that place or name first
└── StoreError         the store cannot be used now; nothing acknowledged is lost
    ├── CorruptError   what is stored is not what was written
    └── NewerError     written by a newer version of refold
"""

from collections.abc import Sequence
from typing import NamedTuple


class RefoldError(Exception):
    """The base of all errors that refold raises on purpose.

    The text says what is wrong, where, and what to do.
    """

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the error without calling `__init__`, which may take other arguments than the text."""
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[RefoldError], args: tuple[object, ...]) -> RefoldError:
    error = kind.__new__(kind)
    error.args = args
    return error


class MessageError(RefoldError):
    """A message that cannot be understood. Nothing was stored.

    Correct the message at `where` and append all of them again.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where, self.problem = where, problem


class SettingError(RefoldError):
    """A setting, or an argument, that is unknown or not allowed.

    Correct it at `where`: a file and its line, or an argument. The text has what is allowed.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where, self.problem = where, problem


class NotFoundError(RefoldError):
    """No such conversation, place or message.

    `refold list` and `refold show ID` print those that exist; `refold list --all-owners` lists every owner's.
    """


class CannotExpandError(NotFoundError):
    """There is nothing to expand at this place, or no such part.

    Ask for another place or part. The text is a sentence that a model can act on, too.
    """


class LargePart(NamedTuple):
    """One of the largest parts of a request that does not fit."""

    what: str
    """What it is: the task, the latest user message, pinned, the system text, tools …"""
    role: str
    tokens: int
    advice: str
    """How to make it smaller."""
    at: int | None = None
    """Its place; None for tools and for system text that the caller gives beside the messages."""

    def __str__(self) -> str:
        place = "" if self.at is None else f"#{self.at} "
        return f"{place}{self.role}, {self.tokens:,} tokens ({self.what}): {self.advice}"


class OverBudgetError(RefoldError):
    """What must be shown does not fit the window.

    The text names the largest parts and what to do about each. A model with a larger window or a lower
    `compact.output_reserve` helps in any case.
    """

    def __init__(self, tokens: int, room: int, window: int, largest: Sequence[LargePart] = ()) -> None:
        needs = f"What must be shown needs {tokens:,} tokens; there is room for {room:,} in a window of"
        parts = [str(part) for part in largest]
        smaller = tokens - sum(part.tokens for part in largest)
        if largest and smaller > room:
            parts.append(f"all smaller parts together, {smaller:,} tokens")
        named = f" Largest: {'; '.join(parts)}." if parts else ""
        rest = "A model with a larger window or a lower compact.output_reserve helps as well."
        super().__init__(f"{needs} {window:,}.{named} {rest}")
        self.tokens, self.room, self.window = tokens, room, window
        self.largest = tuple(largest)


class ConflictError(RefoldError):
    """Another writer took that place or name first.

    Read again and retry, or choose another name.
    """


class StoreError(RefoldError):
    """The store cannot be used now. Nothing acknowledged is lost.

    Retry when the cause, which the text names, is gone.
    """


class CorruptError(StoreError):
    """What is stored is not what was written.

    Run `refold doctor`, which says what is damaged, and restore that from a backup or an export.
    """


class NewerError(StoreError):
    """Written by a newer refold than this one.

    Upgrade to read it; nothing was changed.
    """
