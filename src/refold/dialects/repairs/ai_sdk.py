"""The AI SDK: messages that it would refuse, mended one by one."""

from collections.abc import Sequence
from typing import Any

from refold.core.message import ToolCall, ToolResult
from refold.dialects.ai_sdk import parse, tool_id
from refold.dialects.repairs.repair import EMPTY, RepairedMessages
from refold.dialects.shape import kind_of


def repair(messages: Sequence[dict[str, Any]], **_: Any) -> RepairedMessages:
    """The same with calls and results that belong together, and a notice for each repair."""
    notices: list[str] = []
    return RepairedMessages(
        [_message(message, f"messages[{n}]", notices) for n, message in enumerate(messages)], notices
    )


def unique_ids(message: dict[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    """The same with these ids for its calls, in their order, or for the call that it answers."""
    own, parts = map(tool_id, ids), zip(message["content"], parse(message).parts, strict=True)
    content = [
        {**value, "toolCallId": next(own)} if isinstance(part, ToolCall | ToolResult) else value
        for value, part in parts
    ]
    return {**message, "content": content}


def _message(message: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = _once([_named(part, where, notices) for part in content], where, notices)
    if message.get("role") == "assistant":
        parts = _run_by_the_provider(parts, where, notices)
    same = len(parts) == len(content) and all(new is old for new, old in zip(parts, content, strict=True))
    return message if same else {**message, "content": parts or EMPTY}


def _named(part: Any, where: str, notices: list[str]) -> Any:
    if kind_of(part) not in ("tool-call", "tool-result") or part.get("toolCallId") != "":
        return part
    notices.append(f"{where}: {tool_id('')!r} stands for an empty call id")
    return {**part, "toolCallId": tool_id("")}


def _once(parts: list[Any], where: str, notices: list[str]) -> list[Any]:
    """Without a second call of the same id."""
    seen: set[str] = set()
    kept: list[Any] = []
    for part in parts:
        id = _id(part, "tool-call")
        if id is not None and id in seen:
            notices.append(f"{where}: a second call with the id {id!r} is left out")
            continue
        seen |= {id} if id is not None else set()
        kept.append(part)
    return kept


def _run_by_the_provider(parts: list[Any], where: str, notices: list[str]) -> list[Any]:
    """A result in the assistant's own message answers a call in it, which says that the provider ran it."""
    calls = {_id(part, "tool-call") for part in parts}
    answered = {_id(part, "tool-result") for part in parts} - {None}
    kept: list[Any] = []
    for part in parts:
        call, result = _id(part, "tool-call"), _id(part, "tool-result")
        if result is not None and result not in calls:
            notices.append(f"{where}: a result without its call {result!r} is left out")
            continue
        if call in answered and part.get("providerExecuted") is not True:
            notices.append(f"{where}: the call {call!r} is marked as run by the provider")
            part = {**part, "providerExecuted": True}
        kept.append(part)
    return kept


def _id(part: Any, kind: str) -> str | None:
    id = part.get("toolCallId") if kind_of(part) == kind else None
    return id if isinstance(id, str) else None
