"""Which dialects there are, and which one a message is in.

>>> recognize({"role": "user", "content": [{"type": "input_text", "text": "Hello"}]})
'openai-responses'
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from refold.core.errors import SettingError
from refold.core.lazy import Lazy
from refold.core.message import Message
from refold.formats.shape import kind_of


class Format(Protocol):
    """A dialect: a module of this package."""

    DIALECT: str

    def parse(self, value: Any, where: str = "message") -> Message:
        """The message in a value of this dialect."""

    def render(self, message: Message) -> tuple[list[dict[str, Any]], list[str]]:
        """What to send for a message that did not come in this dialect, and what could not be said in it."""

    def unread(self, value: Any) -> list[Any]:
        """What is sent with a value beside what `parse` reads of it; it takes tokens as well."""

    def results(self, value: Any) -> list[int]:
        """Which blocks of its content are tool results."""


FORMATS: Lazy[Format] = Lazy(
    {
        "openai-chat": "refold.formats.openai_chat",
        "openai-responses": "refold.formats.openai_responses",
        "anthropic": "refold.formats.anthropic",
        "ai-sdk": "refold.formats.ai_sdk",
        "flat": "refold.formats.flat",
    }
)
TARGETS = tuple(name for name in FORMATS if name != "flat")
"""Those that requests are made in."""

_BLOCKS = {
    "openai-chat": ("image_url", "input_audio", "refusal"),
    "openai-responses": ("input_text", "input_image", "input_file", "output_text"),
    "ai-sdk": ("tool-call", "tool-result", "tool-approval-request", "tool-approval-response"),
    "anthropic": (
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "document",
        "search_result",
        "compaction",
        "container_upload",
        "server_tool_use",
        "mcp_tool_use",
        "tool_addition",
    ),
    "flat": ("compaction-marker",),
}
_SUMMARY = ("isSummary", "is_summary")
"""Fields that only a row of an application's own has."""
_ITEMS = ("message", "reasoning", "compaction", "compaction_summary")
_ITEM_ENDS = ("_call", "_output", "_request", "_response", "_reference", "_tools")
_BY_BLOCK = {block: dialect for dialect, blocks in _BLOCKS.items() for block in blocks}


def format_of(dialect: str) -> Format:
    """
    Raises:
        SettingError: there is no such dialect.
    """
    if dialect not in FORMATS:
        raise SettingError("dialect", f"{dialect!r} is not known; known are {', '.join(FORMATS)}")
    return FORMATS[dialect]


def recognize(value: Any) -> str | None:
    """The dialect of a message that could be in no other; None where several would do."""
    if not isinstance(value, Mapping):
        return None
    if value.keys() == {"system"}:
        return "anthropic"
    if value.keys() == {"instructions"}:
        return "openai-responses"
    if any(field in value for field in _SUMMARY):
        return "flat"
    kind = kind_of(value)
    if kind in _ITEMS or (kind and kind.endswith(_ITEM_ENDS)) or (kind is None and "phase" in value):
        return "openai-responses"
    if value.get("tool_calls") is not None or value.get("tool_call_id") is not None:
        return "openai-chat"
    content = value.get("content")
    if isinstance(content, list):
        return _by_blocks(content)
    parts = value.get("parts")  # of a UI message
    return "flat" if isinstance(parts, list) and parts and all(map(kind_of, parts)) else None


def is_plain(value: Any, dialect: str) -> bool:
    """A message that is the same in every dialect, this one included: a role and a text."""
    return (
        isinstance(value, Mapping)
        and value.keys() == {"role", "content"}
        and isinstance(value["content"], str)
        and value["role"]
        in (("user", "assistant") if dialect == "anthropic" else ("user", "assistant", "system"))
    )


def spoken(values: Iterable[Any]) -> str | None:
    """The first dialect that is recognized among messages, of those that requests are made in."""
    return next((found for value in values if (found := recognize(value)) in TARGETS), None)


def _by_blocks(content: list[Any]) -> str | None:
    for block in content:
        kind = kind_of(block)
        if kind in _BY_BLOCK:
            return _BY_BLOCK[kind]
        if kind and kind.endswith("_tool_result"):
            return "anthropic"
        if kind in ("image", "file", "reasoning"):
            is_chat, is_anthropic = "file" in block, "source" in block
            return "openai-chat" if is_chat else "anthropic" if is_anthropic else "ai-sdk"
    return None
