"""refold keeps everything an agent said, and shows the model a view that always fits.

>>> chat = open("task-42", store="memory://")
>>> chat.append({"role": "user", "content": "Which of these flights is cheaper?"})
0
>>> chat.fit().messages
[{'role': 'user', 'content': 'Which of these flights is cheaper?'}]
"""

from refold.answers import CompactionResult, Fitted, Report, StoredMessage
from refold.config import Config
from refold.core.errors import ConflictError, NotFoundError, OverBudgetError, RefoldError
from refold.core.message import Message, Text, ToolCall, ToolResult
from refold.core.view import View
from refold.session import Session
from refold.session import fit_messages as fit
from refold.session import load_session as load
from refold.session import open_session as open

__version__ = "0.1.0"

__all__ = [
    "CompactionResult",
    "Config",
    "ConflictError",
    "Fitted",
    "Message",
    "NotFoundError",
    "OverBudgetError",
    "RefoldError",
    "Report",
    "Session",
    "StoredMessage",
    "Text",
    "ToolCall",
    "ToolResult",
    "View",
    "fit",
    "load",
    "open",
]
