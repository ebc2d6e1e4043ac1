"""Anthropic Messages: one message of the `messages` list, or the system text that stands apart.

>>> parse({"role": "user", "content": "Hello"}).text
'Hello'
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from refold.core.codec import dumps
from refold.core.errors import MessageError
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
)
from refold.dialects.dialect import Dialect
from refold.dialects.rules.anthropic import AnthropicRules
from refold.dialects.rules.request import Facts
from refold.dialects.shape import (
    EMPTY,
    expect,
    expect_one_of,
    expressible,
    fitting_id,
    is_blank,
    json_or,
    kind_of,
    lost_name,
    own_facts,
    parse_content,
    render_rest,
    text_field,
    with_results,
)

DIALECT = "anthropic"
ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}
THINKING = ("thinking", "redacted_thinking")
BEGIN = "[refold: the conversation goes on here]"
"""Text of a user message that is put before a conversation that begins otherwise."""
GO_ON = "[refold: go on]"
MAX_MARKS = 4


def parse(value: Any, where: str = "message") -> Message:
    """The message in `value`, or the system text in `{"system": …}`; unknown blocks are kept as they are.

    Raises:
        MessageError: the value is neither; names the message and the field.
    """
    expect(value, dict, where)
    if "system" in value and "role" not in value:
        parts = parse_content(value["system"], f"{where}.system", partial(_block, "system"))
        return Message("system", tuple(parts), **own_facts(value))
    role = expect_one_of(value.get("role"), ROLES, f"{where}.role")
    if "content" not in value:
        raise MessageError(f"{where}.content", "a message has content: a text or a list of blocks")
    parts = parse_content(value["content"], f"{where}.content", partial(_block, role))
    only_results = parts and all(isinstance(part, ToolResult) for part in parts)
    return Message("tool" if only_results else ROLES[role], tuple(parts), **own_facts(value))


def render(message: Message) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages to send for a message of another dialect, and what they cannot express of it."""
    lost = lost_name(message)
    said: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for part in expressible(message, lost):
        match part:
            case ToolCall(call_id=id, tool=tool, input=input):
                calls.append({"type": "tool_use", "id": tool_id(id), "name": tool, "input": as_object(input)})
            case ToolResult():
                results.append(_render_result(part, lost))
            case _:
                said += _render_part(part, lost)
    answer = [{"role": "user", "content": results}] if results else []
    if not (said or calls) and (results or lost):
        return answer, lost
    is_text = not calls and len(said) == 1 and kind_of(said[0]) == "text"
    content = said[0]["text"] if is_text else [*said, *calls]
    role = "user" if message.role == "tool" else message.role
    return with_results(message, [{"role": role, "content": content}], answer), lost


def _block(role: str, value: Any, where: str) -> Part:
    expect(value, dict, where)
    match value:
        case {"type": "thinking", "thinking": str(text)}:
            return Reasoning(text)
        case {"type": "tool_use"}:
            if role != "assistant":
                raise MessageError(where, "only an assistant uses tools")
            for field in ("id", "name"):
                expect(value.get(field), str, f"{where}.{field}")
            return ToolCall(value["id"], value["name"], dumps(value.get("input", {})).decode())
        case {"type": "tool_result"}:
            if role != "user":
                raise MessageError(where, "tool results stand in messages of the user")
            return _result(value, where)
        case {"type": "compaction"}:
            return CompactionMarker(value)
    return _inner(value, where)


def _result(value: dict[str, Any], where: str) -> ToolResult:
    id = value.get("tool_use_id")
    content = value.get("content")
    expect(id, str, f"{where}.tool_use_id")
    is_error = value.get("is_error") is True
    if content is None or isinstance(content, str):
        return ToolResult(str(id), content or "", is_error=is_error)
    expect(content, list, f"{where}.content")
    return ToolResult(str(id), tuple(parse_content(content, f"{where}.content", _inner)), is_error=is_error)


def _inner(value: Any, where: str) -> Text | Media | Opaque:
    expect(value, dict, where)
    match value:
        case {"type": "text", "text": str(text)}:
            return Text(text)
    return _media(value) or Opaque(value, DIALECT)


def _media(value: dict[str, Any]) -> Media | None:
    match value:
        case {"type": "image", "source": {"type": "base64", "data": str(data), "media_type": str(mime)}}:
            return Media("image", data=data, mime=mime)
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return Media("image", url=url)
        case {"type": "document", "source": {"type": "base64", "data": str(data), "media_type": str(mime)}}:
            return Media("file", data=data, mime=mime, name=text_field(value, "title"))
        case {"type": "document", "source": {"type": "url", "url": str(url)}}:
            return Media("file", url=url, name=text_field(value, "title"))
    return None


def _render_part(part: Part, lost: list[str]) -> list[dict[str, Any]]:
    match part:
        case Text(text=text):
            return [{"type": "text", "text": text}]
        case Media():
            block = _render_media(part)
            if block is None:
                lost.append(f"a {part.kind} that is no image and no PDF")
            return [block] if block else []
    return render_rest(part, DIALECT, lost)


def _render_media(media: Media) -> dict[str, Any] | None:
    mime, data = media.inline or ("", "")
    kind = "image" if media.kind == "image" or mime.startswith("image/") else "document"
    if media.kind == "audio" or (kind == "document" and data and mime not in ("application/pdf", "")):
        return None
    title = {"title": media.name} if media.name and kind == "document" else {}
    if data:
        mime = mime or ("image/png" if kind == "image" else "application/pdf")
        return {"type": kind, "source": {"type": "base64", "media_type": mime, "data": data}} | title
    return {"type": kind, "source": {"type": "url", "url": media.url}} | title


def _render_result(result: ToolResult, lost: list[str]) -> dict[str, Any]:
    output = result.output
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": tool_id(result.call_id)}
    if isinstance(output, str):
        block["content"] = output
    else:
        block["content"] = [inner for part in output for inner in _render_part(part, lost)]
    return block | ({"is_error": True} if result.is_error else {})


def as_object(text: str) -> dict[str, Any]:
    """The input of a call, which must be an object whatever the model wrote."""
    value = json_or(text, text)
    return value if isinstance(value, dict) else {"input": value}


def tool_id(id: str) -> str:
    return fitting_id(id, 64, "-_")


def system_of(contents: Sequence[Any]) -> Any:
    """The value of the system field for the content of one or several messages."""
    if len(contents) <= 1:
        return contents[0] if contents else None
    return [block for content in contents for block in as_blocks(content)]


def as_blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def as_user(message: dict[str, Any]) -> dict[str, Any]:
    """A system message between others as a user message."""
    blocks = as_blocks(message.get("content") or [])
    return {"role": "user", "content": [{"type": "text", "text": "[system]"}, *blocks]}


def repair(messages: Sequence[dict[str, Any]], notices: list[str], facts: Facts) -> list[dict[str, Any]]:
    repaired = _with_whole_server_calls(_with_system_in_place(messages, notices), notices)
    repaired = [_repaired(message, f"messages[{n}]", notices) for n, message in enumerate(repaired)]
    repaired = _with_few_marks(_with_valid_thinking(repaired, notices), MAX_MARKS - facts.marks, notices)
    if repaired and repaired[0].get("role") == "assistant":
        repaired.insert(0, {"role": "user", "content": BEGIN})
        notices.append("messages[0]: added a user message, since the API requires one at the start")
    if facts.no_prefill and repaired and repaired[-1].get("role") == "assistant":
        repaired.append({"role": "user", "content": GO_ON})
        notices.append("added a user message at the end: this model does not continue an assistant message")
    return repaired


def _with_system_in_place(messages: Sequence[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Keep system messages only after a user message that no user message follows."""
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
            notices.append(f"messages[{n}]: system text between messages is sent as a user message")
    return new


def _with_whole_server_calls(messages: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Keep the use and the result of a server tool together; the newest use may still have no result."""
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
            notices.append(f"messages[{n}]: removed a server tool's use or result that lacks its counterpart")
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


def _with_valid_thinking(messages: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Keep thinking if it is signed and, in the newest turn that uses tools, comes first."""
    new = [_with_signed_thinking(message, f"messages[{n}]", notices) for n, message in enumerate(messages)]
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
            notices.append(f"messages[{last}]: removed thinking that does not come first")
    return new


def _with_signed_thinking(message: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
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
    notices.append(f"{where}: removed thinking without a signature")
    return {**message, "content": blocks or as_blocks(EMPTY)}


def _repaired(message: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    content = message.get("content")
    if is_blank(content):
        notices.append(f"{where}: an empty message is sent as {EMPTY}")
        return {**message, "content": EMPTY}
    if not isinstance(content, list):
        return message
    blocks = [_repaired_block(block, where, notices) for block in content]
    said = [block for block in blocks if not _is_blank_text(block)]
    if len(said) < len(blocks):
        notices.append(f"{where}: removed a blank text")
    if message.get("role") == "assistant":
        ordered = sorted(said, key=lambda block: kind_of(block) == "tool_use")
    else:
        ordered = sorted(said, key=lambda block: kind_of(block) != "tool_result")
    if ordered != said:
        notices.append(f"{where}: reordered its blocks as the API requires")
    ordered = ordered or as_blocks(EMPTY)
    return message if ordered == content else {**message, "content": ordered}


def _repaired_block(block: Any, where: str, notices: list[str]) -> Any:
    match kind_of(block):
        case "tool_use":
            new = {**block, "id": tool_id(str(block.get("id", "")))}
            if new != block:
                notices.append(f"{where}: replaced a call id that the API does not accept by {new['id']!r}")
            if not isinstance(block.get("input"), dict):
                new["input"] = {"input": block.get("input")}
                notices.append(f"{where}: wrapped the input of {block.get('id')!r} in an object")
            return new if new != block else block
        case "tool_result":
            new = {**block, "tool_use_id": tool_id(str(block.get("tool_use_id", "")))}
            content = block.get("content")
            if isinstance(content, list) and any(map(_is_blank_text, content)):
                new["content"] = [inner for inner in content if not _is_blank_text(inner)] or as_blocks(EMPTY)
                notices.append(f"{where}: removed a blank text from a result")
            return new if new != block else block
    return block


def _is_blank_text(block: Any) -> bool:
    return kind_of(block) == "text" and is_blank(block.get("text"))


def _with_few_marks(messages: list[dict[str, Any]], most: int, notices: list[str]) -> list[dict[str, Any]]:
    """Leave out the first cache marks beyond the number that a request may have."""
    copies: list[dict[str, Any]] = msgspec.to_builtins(messages)
    marked = [
        block for message in copies for block in _blocks(message) if block.get("cache_control") is not None
    ]
    extra = len(marked) - max(0, most)
    if extra <= 0:
        return messages
    for block in marked[:extra]:
        del block["cache_control"]
    notices.append(f"removed {extra} `cache_control` marks: a request may have {MAX_MARKS}")
    return copies


def _blocks(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The blocks of a message, and those inside them."""
    content = value.get("content")
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict):
            yield from _blocks(block)
            yield block


def without_thinking(message: dict[str, Any]) -> dict[str, Any] | None:
    """The message without its signed thinking; None if nothing else is in it."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    blocks = [block for block in content if kind_of(block) not in THINKING]
    return message if len(blocks) == len(content) else {**message, "content": blocks} if blocks else None


def declare_tool(name: str, about: str, schema: Any) -> dict[str, Any]:
    return {"name": name, "description": about, "input_schema": schema}


ANTHROPIC = Dialect(
    DIALECT,
    parse,
    render,
    rules=AnthropicRules,
    blocks=(
        *("tool_use", "tool_result", "thinking", "redacted_thinking", "document", "search_result"),
        *("compaction", "container_upload", "server_tool_use", "mcp_tool_use", "tool_addition"),
    ),
    result_type="tool_result",
    repair=repair,
    declare_tool=declare_tool,
    system_field="system",
    hoists_system=True,
    signs_thinking=True,
)
