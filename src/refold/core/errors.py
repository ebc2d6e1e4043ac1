"""Everything that can go wrong.

RefoldError
├── MessageError       a message that cannot be understood; nothing was stored
├── SettingError       a setting that is unknown or not allowed
├── NotFoundError      no such conversation, place or message
│   └── CannotExpandError  there is nothing to show again at that place
├── OverBudgetError    what must be shown does not fit the window
├── ConflictError      that place or name is taken: somebody else wrote first
└── StoreError         the store cannot be used now; nothing acknowledged is lost
    ├── CorruptError   what is stored is not what was written
    └── NewerError     written by a newer refold than this one
"""


class RefoldError(Exception):
    """The root: `except RefoldError` catches whatever refold raises on purpose."""


class MessageError(RefoldError):
    """A message that cannot be understood. Nothing was stored."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where, self.problem = where, problem


class SettingError(RefoldError):
    """A setting that is unknown or not allowed; says where it stands and what is allowed."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where, self.problem = where, problem


class NotFoundError(RefoldError):
    """No such conversation, place or message."""


class CannotExpandError(NotFoundError):
    """There is nothing to show again at that place; says why, in a sentence for whoever asked."""


class OverBudgetError(RefoldError):
    """What must be shown does not fit the window."""

    def __init__(self, tokens: int, room: int, window: int) -> None:
        super().__init__(
            f"What must be shown needs {tokens:,} tokens; there is room for {room:,} in a window of"
            f" {window:,}. Use a model with a larger window, lower compact.output_reserve, offer fewer"
            " tools, or unpin something."
        )
        self.tokens, self.room, self.window = tokens, room, window


class ConflictError(RefoldError):
    """That place or name is taken: somebody else wrote first. Read again and retry."""


class StoreError(RefoldError):
    """The store cannot be used now. Nothing acknowledged is lost; retry when the cause is gone."""


class CorruptError(StoreError):
    """What is stored is not what was written."""


class NewerError(StoreError):
    """Written by a newer refold than this one; upgrade to read it."""
