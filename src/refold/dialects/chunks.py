"""Joins the chunks of a stream to the reply that a request without streaming would have returned.

An interrupted stream becomes a reply that can be sent back, with the finish reason `interrupted`: a call with
incomplete input gets the input `{"_partial": text}`, and what no provider accepts unfinished (thinking
without its signature, a server tool without its result) becomes text.
"""

import re
from collections.abc import Sequence
from typing import Any

from refold.core.codec import dumps, loads, read_json
from refold.core.errors import MessageError
from refold.dialects.shape import expect, kind_of, optional, required

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


def events(text: str) -> list[Any]:
    """The JSON of server-sent events, without pings, end marks and an incomplete last event.

    Raises:
        MessageError: an event is not JSON.
    """
    found: list[Any] = []
    blocks = re.sub("\r\n?", "\n", text.removeprefix("\ufeff")).split("\n\n")
    for n, block in enumerate(blocks):
        lines = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        data = "\n".join(lines)
        if not data or data == "[DONE]":
            continue
        try:
            found.append(loads(data.encode("utf-8", "surrogatepass")))
        except (ValueError, RecursionError) as error:
            if n < len(blocks) - 1:
                raise MessageError(f"events[{n}]", f"is not JSON: {error}") from error
    return [event for event in found if kind_of(event) != "ping"]


def join(chunks: Sequence[Any], where: str = "chunks") -> dict[str, Any] | None:
    """The reply; None if these are not the chunks of a stream.

    Raises:
        MessageError: a chunk has the wrong shape; names it.
    """
    first = next((chunk for chunk in chunks if not _says_nothing(chunk)), None)
    if not isinstance(first, dict) or "role" in first:
        return None
    kind = kind_of(first) or ""
    if kind.startswith("response."):
        return _response(chunks, where)
    if kind.startswith(("message_", "content_block_")):
        return _message(chunks, where)
    if kind == "chunk":  # from the stream helper of OpenAI's SDK, among its own events
        return join([chunk["chunk"] for chunk in chunks if kind_of(chunk) == "chunk" and "chunk" in chunk])
    if isinstance(first.get("choices"), list) and any(map(_is_delta, chunks)):
        return _completion(chunks, where)
    return None


def _says_nothing(chunk: Any) -> bool:
    """True for pings and for errors, which end a stream."""
    is_error = isinstance(chunk, dict) and "error" in chunk and "choices" not in chunk
    return is_error or kind_of(chunk) in ("ping", "error")


def _is_delta(chunk: Any) -> bool:
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and "delta" in first


def _completion(chunks: Sequence[Any], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    finish, usage, model = None, None, None
    for n, chunk in enumerate(chunks):
        if _says_nothing(chunk):
            continue
        choices = required(chunk, "choices", list, f"{where}[{n}]")
        usage, model = chunk.get("usage") or usage, chunk.get("model") or model
        for i, choice in enumerate(choices):
            expect(choice, dict, f"{where}[{n}].choices[{i}]")
            if choice.get("index", 0) != 0:
                continue
            finish = choice.get("finish_reason") or finish
            delta = optional(choice, "delta", dict, f"{where}[{n}].choices[{i}]")
            place = f"{where}[{n}].choices[{i}].delta"
            for j, call in enumerate(optional(delta, "tool_calls", list, place)):
                expect(call, dict, f"{place}.tool_calls[{j}]")
                which = _which(calls, call)
                calls[which] = _merged(calls[which], call)
            message = _merged(message, {key: one for key, one in delta.items() if key != "tool_calls"})
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


def _message(chunks: Sequence[Any], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"type": "message", "role": "assistant", "stop_reason": None}
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    usage: dict[str, Any] = {}
    for n, event in enumerate(chunks):
        place = f"{where}[{n}]"
        expect(event, dict, place)
        match kind_of(event):
            case "message_start":
                message |= required(event, "message", dict, place)
                usage |= optional(message, "usage", dict, f"{place}.message")
            case "content_block_start":
                blocks[required(event, "index", int, place)] = required(event, "content_block", dict, place)
            case "content_block_delta":
                index = required(event, "index", int, place)
                delta = required(event, "delta", dict, place)
                if index not in blocks:
                    raise MessageError(f"{place}.index", f"no block {index} has begun")
                if isinstance(text := delta.get("partial_json"), str):
                    inputs[index] = inputs.get(index, "") + text
                else:
                    blocks[index] = _with_delta(blocks[index], delta, place)
            case "content_block_stop":
                index = required(event, "index", int, place)
                inputs[index] = inputs.get(index) or "{}"
            case "message_delta":
                message |= required(event, "delta", dict, place)
                counts = optional(event, "usage", dict, place)
                usage |= {name: count for name, count in counts.items() if count is not None}
    content = [_with_input(block, inputs.get(n)) for n, block in sorted(blocks.items())]
    if message["stop_reason"] is None:
        message["stop_reason"] = INTERRUPTED
        content = [block for one in content for block in _unfinished(one, content)]
    return message | {"content": content, "usage": usage}


def _with_delta(block: dict[str, Any], delta: dict[str, Any], where: str) -> dict[str, Any]:
    if "citation" in delta:
        return block | {"citations": [*optional(block, "citations", list, where), delta["citation"]]}
    return _merged(block, {key: value for key, value in delta.items() if key != "type"})


def _with_input(block: dict[str, Any], text: str | None) -> dict[str, Any]:
    """The block with its input; `text` is the JSON of the deltas, None without deltas and an end."""
    if "input" not in block or block["input"]:
        return block
    try:
        value = read_json(text or "")
    except (ValueError, RecursionError):
        value = None
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


def _response(chunks: Sequence[Any], where: str) -> dict[str, Any]:
    response: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    done = set[int]()
    is_over = False
    for n, event in enumerate(chunks):
        place = f"{where}[{n}]"
        expect(event, dict, place)
        match (kind_of(event) or "").split("."):
            case ["response", "completed" | "incomplete" | "failed" | "cancelled"]:
                response = required(event, "response", dict, place)
                is_over = True
            case ["response", "created" | "in_progress" | "queued"]:
                response = required(event, "response", dict, place)
            case ["response", "output_item", "added" | "done" as state]:
                index = required(event, "output_index", int, place)
                items[index] = required(event, "item", dict, place)
                done |= {index} if state == "done" else set()
            case ["response", kind, "delta"] if kind in PIECES or kind in FIELDS:
                index = required(event, "output_index", int, place)
                if index not in items:
                    raise MessageError(f"{place}.output_index", f"no item {index} has begun")
                if index not in done:
                    items[index] = _with_piece(items[index], kind, event, place)
    if not is_over:
        response = response | {"status": INTERRUPTED, "output": []}
    whole = [item if n in done else _cut(item, f"{where}.item") for n, item in sorted(items.items())]
    output = optional(response, "output", list, f"{where}.response") or [item for item in whole if item]
    return response | {"object": "response", "output": output}


def _with_piece(item: dict[str, Any], kind: str, event: dict[str, Any], where: str) -> dict[str, Any]:
    delta = required(event, "delta", str, where)
    if kind in FIELDS:
        return _merged(item, {FIELDS[kind]: delta})
    field, number, begin, inner = PIECES[kind]
    parts = [*optional(item, field, list, where)]
    n = required(event, number, int, where)
    if not 0 <= n <= len(parts):
        raise MessageError(f"{where}.{number}", f"no part {n} has begun")
    parts += [begin] if n == len(parts) else []
    expect(parts[n], dict, f"{where}.{number}")
    parts[n] = _merged(parts[n], {inner: delta})
    return item | {field: parts}


def _cut(item: dict[str, Any], where: str) -> dict[str, Any]:
    """The item if it is incomplete. Incomplete reasoning becomes a message: the API refuses it otherwise."""
    if kind_of(item) != "reasoning":
        return item | ({"status": "incomplete"} if kind_of(item) in ("message", "function_call") else {})
    parts = [*optional(item, "summary", list, where), *optional(item, "content", list, where)]
    text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    said = {"type": "output_text", "text": f"[interrupted reasoning: {text}]", "annotations": []}
    return {"type": "message", "role": "assistant", "content": [said]} if text else {}
