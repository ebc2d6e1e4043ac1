"""OpenAI Chat Completions: messages that its API would refuse, mended one by one."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from refold.core.codec import dumps
from refold.dialects.openai_chat import tool_id
from refold.dialects.repairs.repair import EMPTY, RepairedMessages, repeated

MAX_CALLS = 128
MAX_CHARS = 10_485_760


def repair(messages: Sequence[dict[str, Any]], **_: Any) -> RepairedMessages:
    """The same with every message as the API takes it, and a notice for each repair."""
    notices: list[str] = []
    repaired = [_message(message, f"messages[{n}]", notices) for n, message in enumerate(messages)]
    return RepairedMessages(_in_batches(repaired, notices), notices)


def unique_ids(message: dict[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    """The same with these ids for its calls, in their order, or for the call that it answers."""
    if message.get("role") == "tool":
        return {**message, "tool_call_id": tool_id(ids[0])}
    calls = zip(message["tool_calls"], ids, strict=True)
    return {**message, "tool_calls": [{**call, "id": tool_id(id)} for call, id in calls]}


def _message(message: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    new = dict(message)
    if "tool_calls" in message:
        new["tool_calls"] = _calls(message["tool_calls"] or (), where, notices)
        if not new["tool_calls"]:
            del new["tool_calls"]
            notices.append(f"{where}: an empty list of calls is left out")
    if isinstance(message.get("tool_call_id"), str):
        new["tool_call_id"] = tool_id(message["tool_call_id"])
    content = message.get("content")
    says = any(new.get(field) for field in ("tool_calls", "function_call", "audio", "refusal"))
    if not says and content in (None, []):
        new["content"] = EMPTY
        notices.append(f"{where}: {EMPTY} stands where nothing was said")
    if isinstance(content, str) and len(content) > MAX_CHARS:
        new["content"] = _shortened(content)
        notices.append(f"{where}: the middle of a text of more than {MAX_CHARS:,} characters is left out")
    return message if new == message else new


def _calls(calls: Sequence[dict[str, Any]], where: str, notices: list[str]) -> list[dict[str, Any]]:
    new: list[dict[str, Any]] = []
    for call, is_there in zip(calls, repeated([call.get("id") for call in calls]), strict=True):
        if is_there:
            notices.append(f"{where}: a second call with the id {call.get('id')!r} is left out")
            continue
        id, function = call.get("id"), call.get("function")
        if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
            call = {
                **call,
                "function": {**function, "arguments": dumps(function.get("arguments") or {}).decode()},
            }
            notices.append(f"{where}: the arguments of {id!r} are written as a string")
        if isinstance(id, str) and tool_id(id) != id:
            call = {**call, "id": tool_id(id)}
            notices.append(f"{where}: {call['id']!r} stands for a call id of {len(id)} characters")
        new.append(call)
    return new


def _shortened(text: str) -> str:
    half = MAX_CHARS // 2 - 100
    return f"{text[:half]}\n[refold: {len(text) - 2 * half:,} characters left out]\n{text[-half:]}"


def _in_batches(messages: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Calls beyond the most that a message may have go into messages of their own, with their results."""
    result: list[dict[str, Any]] = []
    n = 0
    while n < len(messages):
        message, calls = messages[n], messages[n].get("tool_calls") or ()
        n += 1
        if len(calls) <= MAX_CALLS:
            result.append(message)
            continue
        notices.append(f"messages[{n - 1}]: {len(calls)} calls are sent in messages of at most {MAX_CALLS}")
        answers = list(takewhile(lambda other: other.get("role") == "tool", messages[n:]))
        n += len(answers)
        for start in range(0, len(calls), MAX_CALLS):
            batch = calls[start : start + MAX_CALLS]
            ids = {call.get("id") for call in batch}
            result.append({**({"role": "assistant"} if start else message), "tool_calls": batch})
            result += [answer for answer in answers if answer.get("tool_call_id") in ids]
    return result
