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
from refold.core.pairing import ID_SEPARATOR
from refold.dialects.dialect import Dialect, RepairedMessages
from refold.dialects.shape import (
    EMPTY,
    OWN,
    expect,
    expect_parts,
    id_within,
    is_blank,
    kind_of,
    named,
    own_facts,
    rest_of,
    sayable,
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
"""Items that have an `error` of the API's."""
INPUT = ("action", "arguments", "input", "operation")
"""Where the different calls keep what they ask for."""
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
"""What a result says of a call that never returned one."""
PREFIXES = {"function_call": "fc_", "message": "msg_", "reasoning": "rs_"}


def parse(value: Any, where: str = "message") -> Message:
    """The message in an item, in a list of items that the model said together, or in `{"instructions": …}`.

    Raises:
        MessageError: it is no item; says which field of which one.
    """
    if isinstance(value, list):
        said = [parse(item, f"{where}[{n}]") for n, item in enumerate(value)]
        if not said or {message.role for message in said} != {"assistant"}:
            raise MessageError(where, "only what the model said in one answer stands together")
        first = said[0]
        parts = tuple(part for message in said for part in message.parts)
        return Message("assistant", parts, meta=first.meta, error=first.error)
    expect(value, dict, where)
    if stands_apart(value, "instructions"):
        expect(value["instructions"], str, f"{where}.instructions")
        return Message("system", (Text(value["instructions"]),), **own_facts(value))
    return Message(role_of(value, where), tuple(_parts(value, where)), **own_facts(value, own_fields(value)))


def role_of(item: dict[str, Any], where: str = "item") -> Role:
    """Who says an item."""
    if stands_apart(item, "instructions"):
        return "system"
    kind = item.get("type", "message")
    expect(kind, str, f"{where}.type")
    if kind == "message" or "role" in item:
        return ROLES[named(item.get("role"), ROLES, f"{where}.role")]
    return "tool" if _answers(item) or kind.endswith("_response") else "assistant"


def render(message: Message) -> tuple[list[dict[str, Any]], list[str]]:
    """What to send for a message that did not come in this dialect, and what could not be said in it."""
    lost = ["the author's name"] if message.name and message.role != "tool" else []
    items: list[dict[str, Any]] = []
    said: list[Any] = []
    role = "user" if message.role == "tool" else message.role

    def close() -> None:
        if said:
            plain = all(kind_of(inner) in ("input_text", "output_text") for inner in said)
            content = "\n\n".join(inner["text"] for inner in said) if plain else list(said)
            items.append({"role": role, "content": content})
            said.clear()

    for part in sayable(message, lost):
        match part:
            case ToolCall(call_id=id, tool=tool, input=input):
                close()
                call = {"type": "function_call", "call_id": tool_id(id), "name": tool, "arguments": input}
                items.append(call)
            case ToolResult(call_id=id, output=output):
                close()
                lost += ["that a result is an error"] if part.is_error else []
                content = output if isinstance(output, str) else _inner(output, lost)
                items.append({"type": "function_call_output", "call_id": tool_id(id), "output": content})
            case Opaque(value=value, dialect=origin) if origin == DIALECT:
                close()
                items.append(value)
            case StepStart():
                pass
            case _:
                said += _render_part(part, lost)
    close()
    if not items and not lost:
        items.append({"role": role, "content": ""})
    return items, lost


def unread(value: Any) -> list[Any]:
    """Reasoning that only its provider can read: other fields (ids, states, annotations) take no tokens."""
    items = value if isinstance(value, list) else [value]
    return [
        {"encrypted_content": item["encrypted_content"]}
        for item in items
        if kind_of(item) == "reasoning" and isinstance(item.get("encrypted_content"), str)
    ]


def own_fields(item: dict[str, Any]) -> Sequence[str]:
    """The fields that are for refold: items have an `id` of the API's, and some an `error`."""
    if stands_apart(item, "instructions"):
        return OWN
    theirs = ("id", "error") if kind_of(item) in HAVE_ERRORS else ("id",)
    return [name for name in OWN if name not in theirs]


def _answers(item: dict[str, Any]) -> bool:
    """It is the application's answer to a call, not something that the provider ran by itself."""
    kind, server = item.get("type"), item.get("execution") == "server"
    return (
        isinstance(kind, str)
        and kind.endswith("_output")
        and isinstance(item.get("call_id"), str)
        and not server
    )


def _asks(item: dict[str, Any]) -> bool:
    kind, server = item.get("type"), item.get("execution") == "server"
    return (
        isinstance(kind, str)
        and kind.endswith("_call")
        and isinstance(item.get("call_id"), str)
        and not server
    )


def _parts(item: dict[str, Any], where: str) -> list[Part]:
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
        case {"role": str(role)}:
            return _content(item.get("content"), f"{where}.content", role)
        case {"type": str(kind)} if _asks(item):
            asked: Any = next((item[field] for field in INPUT if field in item), {})
            text = asked if isinstance(asked, str) else dumps(asked).decode()
            name = item.get("name")
            return [ToolCall(item["call_id"], name if isinstance(name, str) else kind[: -len("_call")], text)]
        case {"type": str()} if _answers(item):
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


def _content(value: Any, where: str, role: str) -> list[Part]:
    if value is None or isinstance(value, str):
        return [Text(value)] if value is not None else []
    expect_parts(value, where)
    return [_part(part, f"{where}[{n}]") for n, part in enumerate(value)]


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
        case Media(kind="image", url=url):
            mime, data = part.inline or ("", "")
            source = f"data:{mime or 'image/png'};base64,{data}" if data else url
            return [{"type": "input_image", "image_url": source}]
        case Media(kind="file", name=name, url=url):
            mime, data = part.inline or ("", "")
            if data:
                source = f"data:{mime or 'application/pdf'};base64,{data}"
                return [{"type": "input_file", "filename": name or "file", "file_data": source}]
            return [{"type": "input_file", "file_url": url}]
        case Media():
            lost.append("audio")
            return []
    return rest_of(part, DIALECT, lost)


def tool_id(id: str) -> str:
    """The same id, or one that stands for it where it is too long, empty, or told apart from another."""
    return id if 0 < len(id) <= 64 and ID_SEPARATOR not in id else id_within(id, 64, "")


def repair(messages: Sequence[dict[str, Any]], *, store: bool | None = None, **_: Any) -> RepairedMessages:
    """Items that the API accepts one by one."""
    notices: list[str] = []
    items = [_repaired(item, f"input[{n}]", notices) for n, item in enumerate(messages)]
    items = _answered_in_kind(_once(items, notices), notices)
    return RepairedMessages(_with_reasoning(items, store, notices), notices)


def with_call_ids(value: Any, ids: Sequence[str]) -> Any:
    own = map(tool_id, ids)
    items = [
        {**item, "call_id": next(own)} if (said := parse(item)).calls or said.results else item
        for item in (value if isinstance(value, list) else [value])
    ]
    return items if isinstance(value, list) else items[0]


def _repaired(item: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    new = dict(item)
    id, call = item.get("id"), item.get("call_id")
    prefix = PREFIXES.get(kind_of(item) or "message")
    if prefix and id is not None and not (isinstance(id, str) and id.startswith(prefix)):
        del new["id"]
        notices.append(f"{where}: the id {id!r} is left out, since it would begin with {prefix}")
    if isinstance(call, str) and tool_id(call) != call:
        new["call_id"] = tool_id(call)
        notices.append(f"{where}: {new['call_id']!r} stands for a call id of {len(call)} characters")
    if kind_of(item) in (None, "message") and is_blank(item.get("content")):
        new["content"] = EMPTY
        notices.append(f"{where}: {EMPTY} stands where nothing was said")
    return item if new == item else new


def _once(items: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Without a second call under the id of one that is not answered yet."""
    open: set[Any] = set()
    kept: list[dict[str, Any]] = []
    for item in items:
        kind, call = kind_of(item) or "", _call_id(item)
        if kind.endswith("_call") and call is not None and call in open:
            notices.append(f"a second call with the id {call!r} is left out")
            continue
        (open.add if kind.endswith("_call") else open.discard)(call)
        kept.append(item)
    return kept


def _answered_in_kind(items: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Each kind of call has its own kind of result. A picture of a screen cannot be made up: both go."""
    made: dict[str | None, int] = {}
    new: list[dict[str, Any] | None] = list(items)
    for n, item in enumerate(items):
        kind, id = kind_of(item) or "", _call_id(item)
        if kind.endswith("_call"):
            made[id] = n
        if not kind.endswith("_output") or id is None or id not in made:
            continue
        asked = kind_of(items[made[id]]) or ""
        if kind == f"{asked}_output" or asked == "tool_search_call":
            continue
        notices.append(f"input[{n}]: a {kind} is no result of a {asked}")
        text = item.get("output")
        new[n] = None
        if asked in RESULTS:
            new[n] = {**RESULTS[asked](text if isinstance(text, str) else str(text)), "call_id": id}
        else:
            new[made[id]] = None
    return [item for item in new if item is not None]


def _call_id(item: dict[str, Any]) -> str | None:
    id = item.get("call_id")
    return id if isinstance(id, str) else None


def _with_reasoning(
    items: list[dict[str, Any]], store: bool | None, notices: list[str]
) -> list[dict[str, Any]]:
    """Reasoning stays with what follows from it, or both lose each other."""
    kept: list[dict[str, Any]] = []
    follows: dict[str, Any] | None = None
    for item in reversed(items):
        if kind_of(item) == "reasoning":
            alone = follows is None or role_of(follows) != "assistant"
            if alone or (store is False and not item.get("encrypted_content")):
                notices.append(f"reasoning {item.get('id')!r} is left out: the API would refuse it")
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
    unread=unread,
    own_fields=own_fields,
    repair=repair,
    with_call_ids=with_call_ids,
    declare_tool=declare_tool,
    list_field="input",
    system_field="instructions",
    has_items=True,
)
