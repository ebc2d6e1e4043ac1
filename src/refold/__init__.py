"""refold keeps everything an agent said, and shows the model a view that always fits.

>>> chat = open("task-42", store="memory://")
>>> chat.append({"role": "user", "content": "Which of these flights is cheaper?"})
0
>>> chat.fit().messages
[{'role': 'user', 'content': 'Which of these flights is cheaper?'}]
"""

from typing import TYPE_CHECKING, Any

from refold.config.config import Config
from refold.core import moved
from refold.core.errors import (
    CannotExpandError,
    ConflictError,
    NotFoundError,
    OverBudgetError,
    RefoldError,
    SettingError,
)
from refold.core.event import Expiry
from refold.core.message import Message, Text, ToolCall, ToolResult
from refold.core.view import View
from refold.session.api import fit, load, open
from refold.session.oneoff import check, count, limits
from refold.session.results import CompactionResult, Fitted, Report, StoredMessage
from refold.session.session import Session

if TYPE_CHECKING:
    from refold.session.aio import AsyncSession, aopen

__version__ = "0.1.0"

moved.install()

__all__ = [
    "AsyncSession",
    "CannotExpandError",
    "CompactionResult",
    "Config",
    "ConflictError",
    "Expiry",
    "Fitted",
    "Message",
    "NotFoundError",
    "OverBudgetError",
    "RefoldError",
    "Report",
    "Session",
    "SettingError",
    "StoredMessage",
    "Text",
    "ToolCall",
    "ToolResult",
    "View",
    "aopen",
    "check",
    "count",
    "fit",
    "limits",
    "load",
    "open",
]


def __getattr__(name: str) -> Any:
    if name in ("AsyncSession", "aopen"):  # asyncio is half of the time to import; not all need it
        from refold.session import aio

        return getattr(aio, name)
    raise AttributeError(f"module 'refold' has no attribute {name!r}")
