"""Joins the chunks of a stream to the reply that a request without streaming would have returned.

An interrupted stream becomes a reply that can be sent back, with the finish reason `interrupted`: a call with
incomplete input gets the input `{"_partial": text}`, and what no provider accepts unfinished (thinking
without its signature, a server tool without its result) becomes text.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from refold.core.codec import dumps
from refold.core.errors import MessageError
from refold.dialects.shape import json_or, kind_of

INTERRUPTED = "interrupted"
WHOLE = ("id", "index", "name", "role", "type", "format", "signature")
"""Fields that a delta replaces; other texts are appended to."""
PIECES = {
    "output_text": (
        "content",
        "content_index",
        {"type": "output_text", "text": "", "annotations": []},
        "text",
    ),
    "refusal": ("content", "content_index", {"type": "refusal", "refusal": ""}, "refusal"),
    "reasoning_text": ("content", "content_index", {"type": "reasoning_text", "text": ""}, "text"),
    "reasoning_summary_text": ("summary", "summary_index", {"type": "summary_text", "text": ""}, "text"),
}
"""By kind of a Responses delta: the list, the field with the index in it, an empty part, its text field."""
FIELDS = {
    "function_call_arguments": "arguments",
    "mcp_call_arguments": "arguments",
    "custom_tool_call_input": "input",
    "code_interpreter_call_code": "code",
}


def join(chunks: Sequence[Any], where: str = "chunks") -> dict[str, Any] | None:
    """The reply; None if these are not the chunks of a stream.

    Raises:
        MessageError: a chunk has the wrong shape, or does not belong to the stream; names it.
    """
    first = next((chunk for chunk in chunks if not _says_nothing(chunk)), None)
    if not isinstance(first, dict) or "role" in first:
        return None
    kind = kind_of(first) or ""
    if kind == "chunk":  # from the stream helper of OpenAI's SDK, among its own events
        return join([chunk["chunk"] for chunk in chunks if kind_of(chunk) == "chunk" and "chunk" in chunk])
    join_api: Callable[[Iterable[Any]], dict[str, Any]]
    if kind.startswith("response."):
        join_api = _response
    elif kind.startswith(("message_", "content_block_")):
        join_api = _message
    elif isinstance(first.get("choices"), list) and any(map(_is_delta, chunks)):
        join_api = _completion
    else:
        return None
    place = where

    def read() -> Iterator[Any]:
        nonlocal place
        for n, chunk in enumerate(chunks):
            place = f"{where}[{n}]"
            if not _says_nothing(chunk):
                yield chunk

    try:
        return join_api(read())
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"is not a chunk that can follow here: {fault_of(error)}; pass all chunks in their order"
        raise MessageError(place, problem) from error


def fault_of(error: Exception) -> str:
    """What is wrong with a reply or a chunk, by the error that reading it raised."""
    match error:
        case ValueError():
            return str(error)
        case KeyError(args=(str(field),)):
            return f"the field {field!r} is missing"
        case LookupError():
            return "no chunk before it began the block or item that it continues"
    return "a field has a value of another type than the API documents"


def _says_nothing(chunk: Any) -> bool:
    """True for pings and for errors, which end a stream."""
    is_error = isinstance(chunk, dict) and "error" in chunk and "choices" not in chunk
    return is_error or kind_of(chunk) in ("ping", "error")


def _is_delta(chunk: Any) -> bool:
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and "delta" in first


def _completion(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    finish, usage, model = None, None, None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        model = chunk.get("model") or model
        for choice in chunk["choices"]:
            if choice.get("index", 0) != 0:
                continue
            finish = choice.get("finish_reason") or finish
            delta = {**(choice.get("delta") or {})}
            for call in delta.pop("tool_calls", None) or ():
                which = _which(calls, call)
                calls[which] = _merged(calls[which], call)
            message = _merged(message, delta)
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    choice = {"message": message, "finish_reason": finish or INTERRUPTED}
    return {"object": "chat.completion", "choices": [choice], "usage": usage, "model": model}


def _which(calls: list[dict[str, Any]], delta: dict[str, Any]) -> int:
    """Index of the call that a delta belongs to. Some servers number no call, others all of them 0."""
    index, id = delta.get("index"), delta.get("id")
    for which in reversed(range(len(calls))):
        known = calls[which].get("id")
        if calls[which].get("index") == index and (not id or not known or id == known):
            return which
    calls.append({"index": index})
    return len(calls) - 1


def _call(call: dict[str, Any]) -> dict[str, Any]:
    whole = {key: value for key, value in call.items() if key != "index"}
    if isinstance(function := whole.get("function"), dict):
        whole = {"type": "function", **whole, "function": {"arguments": "", **function}}
    return whole


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """An object with a delta applied."""
    return old | {key: _added(old.get(key), value, key) for key, value in new.items()}


def _added(old: Any, new: Any, key: str) -> Any:
    if not old or not new or key in WHOLE:
        return new or (new if old is None else old)
    match old, new:
        case str(), str():
            return old + new
        case dict(), dict():
            return _merged(old, new)
        case list(), list():
            return _listed(old, new)
        case list(), str():  # content that began with parts continues with text
            if kind_of(old[-1]) == "text":
                return [*old[:-1], _merged(old[-1], {"text": new})]
            return [*old, {"type": "text", "text": new}]
        case str(), list():
            return [{"type": "text", "text": old}, *new]
    return new


def _listed(old: list[Any], new: list[Any]) -> list[Any]:
    """A delta with an index continues the entry of that index; any other is a new entry."""
    whole = list(old)
    for entry in new:
        number = entry.get("index") if isinstance(entry, dict) else None
        places = [n for n, one in enumerate(whole) if isinstance(one, dict) and one.get("index") == number]
        if number is None or not places:
            whole.append(entry)
        else:
            whole[places[-1]] = _merged(whole[places[-1]], entry)
    return whole


def _message(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"type": "message", "role": "assistant", "stop_reason": None}
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    usage: dict[str, Any] = {}
    for event in events:
        match event.get("type"):
            case "message_start":
                message |= event["message"]
                usage |= message.get("usage") or {}
            case "content_block_start":
                blocks[event["index"]] = event["content_block"]
            case "content_block_delta":
                index = event["index"]
                block = blocks[index]
                delta = event["delta"]
                if "partial_json" in delta:
                    inputs[index] = inputs.get(index, "") + delta["partial_json"]
                elif "citation" in delta:
                    citations = [*(block.get("citations") or ()), delta["citation"]]
                    blocks[index] = block | {"citations": citations}
                else:
                    new = {key: value for key, value in delta.items() if key != "type"}
                    blocks[index] = _merged(block, new)
            case "content_block_stop":
                inputs[event["index"]] = inputs.get(event["index"]) or "{}"
            case "message_delta":
                message |= event["delta"]
                counts = event.get("usage") or {}
                usage |= {name: count for name, count in counts.items() if count is not None}
    content = [_with_input(block, inputs.get(n)) for n, block in sorted(blocks.items())]
    if message["stop_reason"] is None:
        message["stop_reason"] = INTERRUPTED
        content = [block for one in content for block in _unfinished(one, content)]
    return message | {"content": content, "usage": usage}


def _with_input(block: dict[str, Any], text: str | None) -> dict[str, Any]:
    """The block with its input; `text` is the JSON of the deltas, None without deltas and an end."""
    if "input" not in block or block["input"]:
        return block
    value = json_or(text or "", None)
    return block | {"input": value if isinstance(value, dict) else {"_partial": text or ""}}


def _unfinished(block: dict[str, Any], content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    match block:
        case {"type": "text", "text": ""}:
            return []
        case {"type": "thinking", "thinking": str(text)} if not block.get("signature"):
            return [{"type": "text", "text": f"[interrupted thinking: {text}]"}] if text else []
        case {"type": "server_tool_use" | "mcp_tool_use" as kind, "id": id, "name": name}:
            if all(other.get("tool_use_id") != id for other in content):
                asked = dumps(block.get("input")).decode()
                return [{"type": "text", "text": f"[interrupted {kind}: {name} {asked}]"}]
    return [block]


def _response(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    response: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    done = set[int]()
    is_over = False
    for event in events:
        match str(event.get("type")).split("."):
            case ["response", "completed" | "incomplete" | "failed" | "cancelled"]:
                response = event["response"]
                is_over = True
            case ["response", "created" | "in_progress" | "queued"]:
                response = event["response"]
            case ["response", "output_item", "added" | "done" as state]:
                items[event["output_index"]] = event["item"]
                if state == "done":
                    done.add(event["output_index"])
            case ["response", kind, "delta"] if kind in PIECES or kind in FIELDS:
                index = event["output_index"]
                item = items[index]
                if index not in done:
                    items[index] = _with_piece(item, kind, event)
    if not is_over:
        response = response | {"status": INTERRUPTED, "output": []}
    whole = [item if n in done else _cut(item) for n, item in sorted(items.items())]
    output = response.get("output") or [item for item in whole if item]
    return response | {"object": "response", "output": output}


def _with_piece(item: dict[str, Any], kind: str, event: dict[str, Any]) -> dict[str, Any]:
    if kind in FIELDS:
        return _merged(item, {FIELDS[kind]: event["delta"]})
    field, number, begin, inner = PIECES[kind]
    parts = [*(item.get(field) or ())]
    n = event[number]
    if n == len(parts):
        parts.append(begin)
    parts[n] = _merged(parts[n], {inner: event["delta"]})
    return item | {field: parts}


def _cut(item: dict[str, Any]) -> dict[str, Any]:
    """The item if it is incomplete. Incomplete reasoning becomes a message: the API refuses it otherwise."""
    if item.get("type") in ("message", "function_call"):
        return item | {"status": "incomplete"}
    if item.get("type") != "reasoning":
        return item
    parts = [*(item.get("summary") or ()), *(item.get("content") or ())]
    text = "".join(part["text"] for part in parts)
    said = {"type": "output_text", "text": f"[interrupted reasoning: {text}]", "annotations": []}
    return {"type": "message", "role": "assistant", "content": [said]} if text else {}
