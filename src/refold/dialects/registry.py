"""Which dialects there are, and which one a message is in.

>>> recognize({"role": "user", "content": [{"type": "input_text", "text": "Hello"}]})
'openai-responses'
"""

from collections.abc import Iterable, Mapping
from typing import Any

from refold.core.errors import SettingError
from refold.dialects.ai_sdk import AI_SDK
from refold.dialects.anthropic import ANTHROPIC
from refold.dialects.dialect import Dialect
from refold.dialects.flat import FLAT
from refold.dialects.openai_chat import OPENAI_CHAT
from refold.dialects.openai_responses import OPENAI_RESPONSES
from refold.dialects.shape import OWN, json_or, kind_of

DIALECTS = {dialect.name: dialect for dialect in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, AI_SDK, FLAT)}
TARGETS = tuple(name for name, dialect in DIALECTS.items() if dialect.rules is not None)
"""The dialects that requests are made in."""
SYSTEM_FIELDS = {dialect.system_field: name for name, dialect in DIALECTS.items() if dialect.system_field}
"""The dialect whose requests have their system text in this field."""

_SUMMARY = ("isSummary", "is_summary")
_ROW_FIELDS = (
    *("created_at", "createdAt", "timestamp", "session_id", "sessionId", "context_id", "contextId"),
    *("toolCalls", "toolCallId", "toolInvocations", *_SUMMARY),
)
"""Fields of rows of an application's own table: no provider accepts them in a message."""
_ROW_ROLES = ("human", "ai")
_ITEMS = ("message", "reasoning", "compaction", "compaction_summary")
_ITEM_ENDS = ("_call", "_output", "_request", "_response", "_reference", "_tools")
_BY_BLOCK: dict[str, str] = {}
for _dialect in DIALECTS.values():
    _BY_BLOCK |= dict.fromkeys(_dialect.blocks, _dialect.name)


def find_dialect(name: str) -> Dialect:
    """Raises SettingError if there is no such dialect."""
    if name not in DIALECTS:
        raise SettingError("dialect", f"{name!r} is not known; known are {', '.join(DIALECTS)}")
    return DIALECTS[name]


def default_dialect(provider: str | None) -> str:
    """The dialect of requests for the models of a provider."""
    return "anthropic" if provider == "anthropic" else "openai-chat"


def recognize(value: Any) -> str | None:
    """The dialect of a message that could be in no other; None where several would do."""
    if not isinstance(value, Mapping):
        return None
    for field, dialect in SYSTEM_FIELDS.items():
        if value.keys() - {*OWN} == {field}:
            return dialect
    if any(field in value for field in _SUMMARY):
        return "flat"
    kind = kind_of(value)
    if kind in _ITEMS or (kind and kind.endswith(_ITEM_ENDS)) or (kind is None and "phase" in value):
        return "openai-responses"
    if is_row(value):
        return "flat"
    if value.get("tool_calls") is not None or value.get("tool_call_id") is not None:
        return "openai-chat"
    content = value.get("content")
    if isinstance(content, list):
        return _by_blocks(content)
    return None


def is_row(value: Mapping[str, Any]) -> bool:
    """True for a row of an application's own table, and for a message of a user interface."""
    role = value.get("role")
    if not isinstance(role, str):
        return False
    if role in _ROW_ROLES or any(value.get(field) is not None for field in _ROW_FIELDS):
        return True
    content = value.get("content")
    if isinstance(content, str):
        is_stored = isinstance(value.get("id"), str) or (role != "user" and '"toolCallId"' in content)
        return is_stored and content.lstrip().startswith("[") and _are_parts(json_or(content, None))
    return _are_parts(value.get("parts"))


def readable_as(value: Any, default: str) -> str:
    """The dialect to parse a message in that could be in several: the default, unless only OpenAI's chat has
    such messages: those of a `developer`, and those of an assistant without content.
    """
    if default.startswith("openai") or not isinstance(value, Mapping):
        return default
    is_chat = value.get("role") == "developer" or (
        value.get("role") == "assistant" and value.get("content") is None
    )
    return "openai-chat" if is_chat else default


def is_plain(value: Any, dialect: Dialect) -> bool:
    """True for a message that is the same in every dialect, this one included: a role and a text."""
    if not isinstance(value, Mapping) or value.keys() != {"role", "content"}:
        return False
    roles = ("user", "assistant") if dialect.hoists_system else ("user", "assistant", "system")
    return value["role"] in roles and isinstance(value["content"], str)


def spoken(values: Iterable[Any]) -> str | None:
    """The first dialect of requests that is recognized among messages."""
    return next((found for value in values if (found := recognize(value)) in TARGETS), None)


def _are_parts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(map(kind_of, values))


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
