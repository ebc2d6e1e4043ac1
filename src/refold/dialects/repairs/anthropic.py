"""Anthropic Messages: messages that its API would refuse, mended one by one."""

from collections.abc import Sequence
from typing import Any

from refold.dialects.anthropic import THINKING, as_blocks, as_user, tool_id
from refold.dialects.message_list import BEGIN
from refold.dialects.repairs.repair import EMPTY, GO_ON, RepairedMessages, is_blank, repeated
from refold.dialects.shape import kind_of

MAX_MARKS = 4
IDS = {"tool_use": "id", "tool_result": "tool_use_id"}
"""Where blocks say which call they are, or answer."""


def repair(
    messages: Sequence[dict[str, Any]], *, no_prefill: bool = False, marks: int = 0, **_: Any
) -> RepairedMessages:
    """The same with every message as the API takes it, and a notice for each repair.

    `marks` is how many cache marks stand outside the messages.
    """
    notices: list[str] = []
    repaired = _served(_addressed(messages, notices), notices)
    repaired = [_message(message, f"messages[{n}]", notices) for n, message in enumerate(repaired)]
    repaired = _unmarked(_thought(repaired, notices), MAX_MARKS - marks, notices)
    if repaired and repaired[0].get("role") == "assistant":
        repaired.insert(0, {"role": "user", "content": BEGIN})
        notices.append("messages[0]: a note of the user's stands first, as the API wants it")
    if no_prefill and repaired and repaired[-1].get("role") == "assistant":
        repaired.append({"role": "user", "content": GO_ON})
        notices.append("a note of the user's stands last: this model does not go on from words of its own")
    return RepairedMessages(repaired, notices)


def unique_ids(message: dict[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    """The same with these ids for its calls, in their order, or for the call that it answers."""
    own = map(tool_id, ids)
    blocks = [
        {**block, IDS[kind]: next(own)} if (kind := kind_of(block)) in IDS else block
        for block in message["content"]
    ]
    return {**message, "content": blocks}


def _addressed(messages: Sequence[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """System text stays between messages only where it follows the user and the user does not follow it."""
    said = [n for n, message in enumerate(messages) if message.get("role") != "system"]
    new = list(messages)
    for n, message in enumerate(messages):
        if message.get("role") != "system":
            continue
        before = max((m for m in said if m < n), default=None)
        after = min((m for m in said if m > n), default=None)
        follows = before is not None and messages[before].get("role") == "user"
        if not follows or (after is not None and messages[after].get("role") == "user"):
            new[n] = as_user(message)
            notices.append(f"messages[{n}]: system text between messages is shown as the user's")
    return new


def _served(messages: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """A server tool's use and its result stay together; the newest use may still wait for its result."""
    used = {id for message in messages for kind, id in _server_ids(message) if kind == "use"}
    answered = {id for message in messages for kind, id in _server_ids(message) if kind == "result"}
    last = max((n for n, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    new: list[dict[str, Any]] = []
    for n, message in enumerate(messages):
        alone = {
            id
            for kind, id in _server_ids(message)
            if (kind == "result" and id not in used) or (kind == "use" and id not in answered and n != last)
        }
        if alone:
            blocks = [block for block in message["content"] if _server_id(block)[1] not in alone]
            message = {**message, "content": blocks}
            notices.append(f"messages[{n}]: a server tool's use or result without the other is left out")
        new.append(message)
    return new


def _server_ids(message: dict[str, Any]) -> list[tuple[str, Any]]:
    content = message.get("content")
    found = map(_server_id, content if isinstance(content, list) else ())
    return [(kind, id) for kind, id in found if kind]


def _server_id(block: Any) -> tuple[str, Any]:
    kind = kind_of(block) or ""
    uses, answers = kind in ("server_tool_use", "mcp_tool_use"), kind.endswith("_tool_result")
    id = block.get("id" if uses else "tool_use_id") if uses or answers else None
    return ("use" if uses else "result", id) if isinstance(id, str) else ("", None)


def _thought(messages: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Thinking is signed, and stands first in the newest turn that uses tools."""
    new = [_signed(message, f"messages[{n}]", notices) for n, message in enumerate(messages)]
    last = max((n for n, message in enumerate(new) if message.get("role") == "assistant"), default=-1)
    first = last
    while first > 0 and new[first - 1].get("role") == "assistant":
        first -= 1
    run = [
        (n, kind_of(b))
        for n in range(max(first, 0), last + 1)
        for b in as_blocks(new[n].get("content") or [])
    ]
    kinds = [kind for _, kind in run]
    if "tool_use" in kinds and any(kind in THINKING for kind in kinds):
        thinking = next(m for m, kind in enumerate(kinds) if kind in THINKING)
        if any(kind in ("text", "tool_use") for kind in kinds[:thinking]):
            for n in range(first, last + 1):
                new[n] = without_thinking(new[n]) or {**new[n], "content": EMPTY}
            notices.append(f"messages[{last}]: thinking that does not stand first is left out")
    return new


def _signed(message: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, list):
        return message
    blocks = [
        b
        for b in content
        if kind_of(b) != "thinking" or (isinstance(b.get("signature"), str) and b["signature"])
    ]
    if len(blocks) == len(content):
        return message
    notices.append(f"{where}: thinking without a signature is left out")
    return {**message, "content": blocks or as_blocks(EMPTY)}


def _message(message: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    content = message.get("content")
    if is_blank(content):
        notices.append(f"{where}: {EMPTY} stands where nothing was said")
        return {**message, "content": EMPTY}
    if not isinstance(content, list):
        return message
    blocks = [_block(block, where, notices) for block in content]
    said = [block for block in blocks if not _is_blank_text(block)]
    if len(said) < len(blocks):
        notices.append(f"{where}: a text without a letter in it is left out")
    said = _once(said, where, notices)
    if message.get("role") == "assistant":
        said = _in_order(said, ("tool_use",), False, where, notices)
    elif message.get("role") == "user":
        said = _in_order(said, ("tool_result",), True, where, notices)
    said = said or as_blocks(EMPTY)
    return message if said == content else {**message, "content": said}


def _block(block: Any, where: str, notices: list[str]) -> Any:
    match kind_of(block):
        case "tool_use":
            new = {**block, "id": tool_id(str(block.get("id", "")))}
            if new != block:
                notices.append(f"{where}: {new['id']!r} stands for a call id that the API does not take")
            if not isinstance(block.get("input"), dict):
                new["input"] = {"input": block.get("input")}
                notices.append(f"{where}: the input of {block.get('id')!r} is put into an object")
            return new if new != block else block
        case "tool_result":
            new = {**block, "tool_use_id": tool_id(str(block.get("tool_use_id", "")))}
            content = block.get("content")
            if isinstance(content, list) and any(map(_is_blank_text, content)):
                new["content"] = [inner for inner in content if not _is_blank_text(inner)] or as_blocks(EMPTY)
                notices.append(f"{where}: a text without a letter in it is left out of a result")
            return new if new != block else block
    return block


def _is_blank_text(block: Any) -> bool:
    return kind_of(block) == "text" and is_blank(block.get("text"))


def _once(blocks: list[Any], where: str, notices: list[str]) -> list[Any]:
    """Without a second call, or a second result, of the same id; of results the last one counts."""
    ids = [_id(block) for block in blocks]
    first = repeated(ids)
    last = repeated(ids[::-1])[::-1]
    result = []
    for block, id, before, after in zip(blocks, ids, first, last, strict=True):
        if id[0] and (before if kind_of(block) == "tool_use" else after):
            notices.append(f"{where}: a second {id[0]} with the id {id[1]!r} is left out")
        else:
            result.append(block)
    return result


def _id(block: Any) -> tuple[str, Any]:
    match kind_of(block):
        case "tool_use":
            return ("call", block.get("id"))
        case "tool_result":
            return ("result", block.get("tool_use_id"))
    return ("", id(block))


def _in_order(
    blocks: list[Any], kinds: tuple[str, ...], first: bool, where: str, notices: list[str]
) -> list[Any]:
    """Results stand before what the user says, calls after what the assistant says."""
    ordered = sorted(blocks, key=lambda block: (kind_of(block) in kinds) != first)
    if ordered != blocks:
        notices.append(f"{where}: its blocks are put in the order that the API wants")
    return ordered


def _unmarked(messages: list[dict[str, Any]], most: int, notices: list[str]) -> list[dict[str, Any]]:
    """Without the oldest cache marks beyond the most that a request may have."""
    extra = max(0, sum(_marks(message.get("content")) for message in messages) - max(0, most))
    if not extra:
        return messages
    notices.append(f"{extra} cache marks are left out: a request may have {MAX_MARKS}")
    new: list[dict[str, Any]] = []
    for message in messages:
        content, extra = _without_marks(message.get("content"), extra)
        new.append({**message, "content": content} if content is not message.get("content") else message)
    return new


def _marks(content: Any) -> int:
    """Those on blocks, and on blocks inside them."""
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    return sum((block.get("cache_control") is not None) + _marks(block.get("content")) for block in blocks)


def _without_marks(content: Any, extra: int) -> tuple[Any, int]:
    """The same without the first ones, and how many are still to go."""
    if not extra or not _marks(content):
        return content, extra
    new: list[Any] = []
    for block in content:
        if isinstance(block, dict) and extra:
            inner, extra = _without_marks(block.get("content"), extra)
            block = {**block, "content": inner} if "content" in block else block
            if extra and block.get("cache_control") is not None:
                block = {key: value for key, value in block.items() if key != "cache_control"}
                extra -= 1
        new.append(block)
    return new, extra


def without_thinking(message: dict[str, Any]) -> dict[str, Any] | None:
    """The message without its signed thinking; None if nothing else is in it."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    blocks = [block for block in content if kind_of(block) not in THINKING]
    return message if len(blocks) == len(content) else {**message, "content": blocks} if blocks else None
