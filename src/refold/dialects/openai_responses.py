"""OpenAI Responses: one item of `input`, the items of one answer, or the instructions that stand apart.

>>> parse({"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}).calls[0].tool
'look'
"""

from collections.abc import Callable, Sequence
from typing import Any

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
    StepStart,
    Text,
    ToolCall,
    ToolResult,
)
from refold.dialects.dialect import Dialect
from refold.dialects.rules.openai_responses import ResponsesRules
from refold.dialects.rules.request import Facts
from refold.dialects.shape import (
    EMPTY,
    OWN,
    data_url,
    expect,
    expect_one_of,
    expressible,
    fitting_id,
    is_blank,
    kind_of,
    lost_name,
    own_facts,
    parse_content,
    render_rest,
    stands_apart,
)

DIALECT = "openai-responses"
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
HAVE_ERRORS = ("image_generation_call", "mcp_call", "mcp_list_tools")
"""Items with an `error` field of the API."""
INPUT = ("action", "arguments", "input", "operation")
"""Fields with the arguments of the different calls."""
RESULTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "function_call": lambda text: {"type": "function_call_output", "output": text},
    "custom_tool_call": lambda text: {"type": "custom_tool_call_output", "output": text},
    "local_shell_call": lambda text: {"type": "local_shell_call_output", "output": text},
    "apply_patch_call": lambda text: {
        "type": "apply_patch_call_output",
        "status": "failed",
        "output": text,
    },
    "shell_call": lambda text: {
        "type": "shell_call_output",
        "output": [{"stdout": "", "stderr": text, "outcome": {"type": "exit", "exit_code": 1}}],
    },
}
"""The result of a call that has none, by the type of the call, with a text that says so."""
PREFIXES = {"function_call": "fc_", "message": "msg_", "reasoning": "rs_"}


def parse(value: Any, where: str = "message") -> Message:
    """The message in an item, in the list of items of one reply, or in `{"instructions": …}`.

    Raises:
        MessageError: the value is none of these; names the item and the field.
    """
    if isinstance(value, list):
        said = [parse(item, f"{where}[{n}]") for n, item in enumerate(value)]
        if not said or {message.role for message in said} != {"assistant"}:
            raise MessageError(where, "a list of items must be one reply of the model")
        parts = tuple(part for message in said for part in message.parts)
        return Message("assistant", parts, meta=said[0].meta, error=said[0].error)
    expect(value, dict, where)
    if stands_apart(value, "instructions"):
        expect(value["instructions"], str, f"{where}.instructions")
        return Message("system", (Text(value["instructions"]),), **own_facts(value))
    return Message(role_of(value, where), tuple(_parts(value, where)), **own_facts(value, own_fields(value)))


def role_of(item: dict[str, Any], where: str = "item") -> Role:
    if stands_apart(item, "instructions"):
        return "system"
    kind = item.get("type", "message")
    expect(kind, str, f"{where}.type")
    if kind == "message" or "role" in item:
        return ROLES[expect_one_of(item.get("role"), ROLES, f"{where}.role")]
    return "tool" if _is_of_caller(item, "_output") or kind.endswith("_response") else "assistant"


def render(message: Message) -> tuple[list[dict[str, Any]], list[str]]:
    """The items to send for a message of another dialect, and what they cannot express of it."""
    lost = lost_name(message)
    role = "user" if message.role == "tool" else message.role
    items: list[dict[str, Any]] = []
    said: list[Any] = []
    for part in expressible(message, lost):
        match part:
            case ToolCall(call_id=id, tool=tool, input=input):
                call = {"type": "function_call", "call_id": tool_id(id), "name": tool, "arguments": input}
                items += [*_said(role, said), call]
                said = []
            case ToolResult(call_id=id, output=output):
                lost += ["that a result is an error"] if part.is_error else []
                content = output if isinstance(output, str) else _inner(output, lost)
                result = {"type": "function_call_output", "call_id": tool_id(id), "output": content}
                items += [*_said(role, said), result]
                said = []
            case Opaque(value=value, dialect=origin) if origin == DIALECT:
                items += [*_said(role, said), value]
                said = []
            case StepStart():
                pass
            case _:
                said += _render_part(part, lost)
    items += _said(role, said)
    if not items and not lost:
        items.append({"role": role, "content": ""})
    return items, lost


def _said(role: str, parts: list[Any]) -> list[dict[str, Any]]:
    """The message item of content parts, if there are any."""
    if not parts:
        return []
    if all(kind_of(part) in ("input_text", "output_text") for part in parts):
        return [{"role": role, "content": "\n\n".join(part["text"] for part in parts)}]
    return [{"role": role, "content": parts}]


def unread(value: Any) -> list[Any]:
    """Encrypted reasoning. Other fields (ids, states, annotations) take no tokens."""
    items = value if isinstance(value, list) else [value]
    return [
        {"encrypted_content": item["encrypted_content"]}
        for item in items
        if kind_of(item) == "reasoning" and isinstance(item.get("encrypted_content"), str)
    ]


def own_fields(item: dict[str, Any]) -> Sequence[str]:
    """Items have an `id` of the API, and some have an `error`."""
    if stands_apart(item, "instructions"):
        return OWN
    theirs = ("id", "error") if kind_of(item) in HAVE_ERRORS else ("id",)
    return [name for name in OWN if name not in theirs]


def _is_of_caller(item: dict[str, Any], end: str) -> bool:
    """True for a call that the caller executes (`_call`), or for its output (`_output`)."""
    kind = item.get("type")
    is_kind = isinstance(kind, str) and kind.endswith(end)
    return is_kind and isinstance(item.get("call_id"), str) and item.get("execution") != "server"


def _parts(item: dict[str, Any], where: str) -> Sequence[Part]:
    match item:
        case {"type": "function_call"}:
            for field in ("call_id", "name", "arguments"):
                expect(item.get(field), str, f"{where}.{field}")
            return [ToolCall(item["call_id"], item["name"], item["arguments"])]
        case {"type": "function_call_output"}:
            expect(item.get("call_id"), str, f"{where}.call_id")
            return [_result(item, where)]
        case {"type": "reasoning"}:
            return [Reasoning(_reasoning(item))]
        case {"type": "compaction" | "compaction_summary"}:
            return [CompactionMarker(item)]
        case {"type": str(kind), "role": _} if kind != "message":
            return [Opaque(item, DIALECT)]
        case {"role": str()}:
            content = item.get("content")
            return [] if content is None else parse_content(content, f"{where}.content", _part)
        case {"type": str(kind)} if _is_of_caller(item, "_call"):
            given: Any = next((item[field] for field in INPUT if field in item), {})
            text = given if isinstance(given, str) else dumps(given).decode()
            name = item.get("name")
            return [ToolCall(item["call_id"], name if isinstance(name, str) else kind[: -len("_call")], text)]
        case {"type": str()} if _is_of_caller(item, "_output"):
            return [_result(item, where)]
    return [Opaque(item, DIALECT)]


def _result(item: dict[str, Any], where: str) -> ToolResult:
    output = item.get("output")
    if isinstance(output, str):
        return ToolResult(item["call_id"], output)
    if isinstance(output, list):
        parts = [_part(part, f"{where}.output[{n}]") for n, part in enumerate(output)]
        return ToolResult(item["call_id"], tuple(parts))
    rest = {key: value for key, value in item.items() if key not in ("type", "call_id", "id", "status")}
    return ToolResult(item["call_id"], (Opaque(rest, DIALECT),))


def _reasoning(item: dict[str, Any]) -> str:
    lists = [item[field] for field in ("summary", "content") if isinstance(item.get(field), list)]
    parts = [part for parts in lists for part in parts if isinstance(part, dict)]
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _part(value: Any, where: str) -> Text | Media | Opaque:
    expect(value, dict, where)
    match value:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return Text(text)
        case {"type": "input_image", "image_url": str(url)}:
            return Media("image", url=url)
        case {"type": "input_file", "file_data": str(data)}:
            name = value.get("filename")
            return Media("file", data=data, name=name if isinstance(name, str) else None)
        case {"type": "input_file", "file_url": str(url)}:
            return Media("file", url=url)
        case _:
            return Opaque(value, DIALECT)


def _inner(parts: Sequence[Part], lost: list[str]) -> Any:
    content = [inner for part in parts for inner in _render_part(part, lost)]
    if all(kind_of(inner) == "input_text" for inner in content):
        return "\n".join(inner["text"] for inner in content)
    return content


def _render_part(part: Part, lost: list[str]) -> list[Any]:
    match part:
        case Text(text=text):
            return [{"type": "input_text", "text": text}]
        case Media(kind="image"):
            return [{"type": "input_image", "image_url": data_url(part, "image/png")}]
        case Media(kind="file", name=name) if part.inline:
            source = data_url(part, "application/pdf")
            return [{"type": "input_file", "filename": name or "file", "file_data": source}]
        case Media(kind="file", url=url):
            return [{"type": "input_file", "file_url": url}]
        case Media():
            lost.append("audio")
            return []
    return render_rest(part, DIALECT, lost)


def tool_id(id: str) -> str:
    return fitting_id(id, 64)


def repair(messages: Sequence[dict[str, Any]], notices: list[str], facts: Facts) -> list[dict[str, Any]]:
    items = [_repaired(item, f"input[{n}]", notices) for n, item in enumerate(messages)]
    return _with_reasoning(_answered_in_kind(items, notices), facts.store, notices)


def _repaired(item: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    new = dict(item)
    id, call = item.get("id"), item.get("call_id")
    prefix = PREFIXES.get(kind_of(item) or "message")
    if prefix and id is not None and not (isinstance(id, str) and id.startswith(prefix)):
        del new["id"]
        notices.append(f"{where}: removed the id {id!r}, which does not begin with {prefix}")
    if isinstance(call, str) and tool_id(call) != call:
        new["call_id"] = tool_id(call)
        notices.append(f"{where}: replaced a call id of {len(call)} characters by {new['call_id']!r}")
    if kind_of(item) in (None, "message") and is_blank(item.get("content")):
        new["content"] = EMPTY
        notices.append(f"{where}: an empty message is sent as {EMPTY}")
    return item if new == item else new


def _answered_in_kind(items: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Replace outputs of the wrong type, or leave out the call if no output can be made up (a screenshot)."""
    made: dict[str | None, int] = {}
    new: list[dict[str, Any] | None] = list(items)
    for n, item in enumerate(items):
        kind, id = kind_of(item) or "", _call_id(item)
        if kind.endswith("_call"):
            made[id] = n
        if not kind.endswith("_output") or id is None or id not in made:
            continue
        call_kind = kind_of(items[made[id]]) or ""
        if kind == f"{call_kind}_output" or call_kind == "tool_search_call":
            continue
        notices.append(f"input[{n}]: replaced a {kind}, which cannot answer a {call_kind}")
        text = item.get("output")
        new[n] = None
        if call_kind in RESULTS:
            new[n] = {**RESULTS[call_kind](text if isinstance(text, str) else str(text)), "call_id": id}
        else:
            new[made[id]] = None
    return [item for item in new if item is not None]


def _call_id(item: dict[str, Any]) -> str | None:
    id = item.get("call_id")
    return id if isinstance(id, str) else None


def _with_reasoning(
    items: list[dict[str, Any]], store: bool | None, notices: list[str]
) -> list[dict[str, Any]]:
    """Leave out reasoning that the API would refuse; what followed it loses its `id`."""
    kept: list[dict[str, Any]] = []
    follows: dict[str, Any] | None = None
    for item in reversed(items):
        if kind_of(item) == "reasoning":
            alone = follows is None or role_of(follows) != "assistant"
            if alone or (store is False and not item.get("encrypted_content")):
                notices.append(f"removed reasoning {item.get('id')!r}: the API would refuse it")
                if not alone and follows is not None and "id" in follows:
                    kept[-1] = follows = {key: value for key, value in follows.items() if key != "id"}
                continue
        kept.append(item)
        follows = item
    return kept[::-1]


def declare_tool(name: str, about: str, schema: Any) -> dict[str, Any]:
    """Not strict: that would make all arguments required."""
    return {"type": "function", "name": name, "description": about, "parameters": schema, "strict": False}


OPENAI_RESPONSES = Dialect(
    DIALECT,
    parse,
    render,
    rules=ResponsesRules,
    blocks=("input_text", "input_image", "input_file", "output_text"),
    unread=unread,
    own_fields=own_fields,
    repair=repair,
    declare_tool=declare_tool,
    list_field="input",
    system_field="instructions",
    has_items=True,
    history_fields=("previous_response_id", "conversation"),
)
