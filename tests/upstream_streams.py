"""How does a reply look on the wire, whole and as a stream of events, in each dialect?

Shapes, order of fields and oddities (padding, obfuscation, pings) are those of recorded traffic.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

from upstream_model import Reply
from upstream_rules import Body, Dialect, encrypted, prefixes, signature, tokens

PIECE = 24
"""Characters in one delta."""


def pieces(text: str) -> Iterator[str]:
    size = max(PIECE, len(text) // 200)
    return (text[at : at + size] for at in range(0, len(text), size))


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def whole(dialect: Dialect, reply: Reply, body: Body, sent: int) -> Body:
    """The answer as one JSON object."""
    return {"chat": _completion, "responses": _response, "anthropic": _message}[dialect](reply, body, sent)


def events(dialect: Dialect, reply: Reply, body: Body, sent: int) -> Iterator[str]:
    """The answer as server-sent events, each with its empty line."""
    return {"chat": _chunks, "responses": _response_events, "anthropic": _message_events}[dialect](
        reply, body, sent
    )


def failed(dialect: Dialect) -> str:
    """The event of a failure in the middle of a stream."""
    if dialect == "anthropic":
        return _padded(
            "error", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, 0
        )
    words = "The server had an error while processing your request. Sorry about that!"
    if dialect == "chat":
        error = {"message": words, "type": "server_error", "param": None, "code": None}
        return f"data: {compact({'error': error})}\n\n"
    event = {"type": "error", "code": "server_error", "message": words, "param": None, "sequence_number": 99}
    return f"event: error\ndata: {compact(event)}\n\n"


def _output_tokens(reply: Reply) -> int:
    return 1 + tokens([reply.thinking, reply.text, [[call.name, call.arguments] for call in reply.calls]])


# OpenAI chat


def _chat_usage(reply: Reply, sent: int) -> Body:
    made = _output_tokens(reply)
    nothing = {"audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    return {
        "prompt_tokens": sent,
        "completion_tokens": made,
        "total_tokens": sent + made,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, **nothing},
    }


def _completion(reply: Reply, body: Body, sent: int) -> Body:
    message: Body = {"role": "assistant", "content": reply.text, "refusal": None, "annotations": []}
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    finish = "tool_calls" if reply.calls else "stop"
    return {
        "id": f"chatcmpl-{reply.seed[:24]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
        "usage": _chat_usage(reply, sent),
        "service_tier": "default",
        "system_fingerprint": "fp_strict",
    }


def _chunks(reply: Reply, body: Body, sent: int) -> Iterator[str]:
    shared = {
        "id": f"chatcmpl-{reply.seed[:24]}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body["model"],
        "service_tier": "default",
        "system_fingerprint": "fp_strict",
    }
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    empty: Body = {"usage": None} if with_usage else {}

    def chunk(delta: Body, finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return f"data: {compact({**shared, **empty, 'choices': [choice], 'obfuscation': 'jP9abrn9XF3'})}\n\n"

    yield chunk({"role": "assistant", "content": None if reply.text is None else "", "refusal": None})
    for piece in pieces(reply.text or ""):
        yield chunk({"content": piece})
    for index, call in enumerate(reply.calls):
        named = {"name": call.name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": named}]})
        for piece in pieces(call.arguments):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, "tool_calls" if reply.calls else "stop")
    if with_usage:
        last = {**shared, "choices": [], "usage": _chat_usage(reply, sent), "obfuscation": "Ohcj4NkgRRFLL"}
        yield f"data: {compact(last)}\n\n"
    yield "data: [DONE]\n\n"


# OpenAI Responses


def _items(reply: Reply, body: Body) -> list[Body]:
    """The output; the item after reasoning has an id that says so (R4)."""
    items: list[Body] = []
    if reply.text is not None:
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": reply.text}
        items.append({"type": "message", "status": "completed", "content": [part], "role": "assistant"})
    for call in reply.calls:
        named = {"arguments": call.arguments, "call_id": call.id, "name": call.name}
        items.append({"type": "function_call", "status": "completed", **named})
    for index, item in enumerate(items):
        made = f"{reply.seed[:22]}{index:02x}"
        mark = "r" if index == 0 and reply.thinking is not None else "p"
        item["id"] = f"{'msg' if item['type'] == 'message' else 'fc'}_{mark}{made}"
    if reply.thinking is not None:
        reasoning = {"id": f"rs_{reply.seed[:22]}00", "type": "reasoning"}
        reasoning["summary"] = [{"type": "summary_text", "text": reply.thinking}]
        if "reasoning.encrypted_content" in (body.get("include") or []) or body.get("store") is False:
            reasoning["encrypted_content"] = encrypted(reasoning["id"])
        items.insert(0, reasoning)
    return items


def _response(reply: Reply, body: Body, sent: int, output: list[Body] | None = None) -> Body:
    """`output=[]`: as it stands at the beginning."""
    made = _output_tokens(reply)
    is_done = output is None
    details = {"reasoning_tokens": tokens(reply.thinking or "")}
    usage = {
        "input_tokens": sent,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": details,
        "total_tokens": sent + made,
    }
    return {
        "id": f"resp_{reply.seed[:48]}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if is_done else "in_progress",
        "background": False,
        "completed_at": int(time.time()) if is_done else None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "model": body["model"],
        "output": _items(reply, body) if is_done else [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "service_tier": "default",
        "store": body.get("store", True),
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_p": 0.98,
        "truncation": "disabled",
        "usage": usage if is_done else None,
        "user": None,
        "metadata": body.get("metadata") or {},
    }


def _response_events(reply: Reply, body: Body, sent: int) -> Iterator[str]:
    for number, event in enumerate(_response_steps(reply, body, sent)):
        event["sequence_number"] = number
        yield f"event: {event['type']}\ndata: {compact(event)}\n\n"


def _response_steps(reply: Reply, body: Body, sent: int) -> Iterator[Body]:
    begun, done = _response(reply, body, sent, []), _response(reply, body, sent)
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(done["output"]):
        at = {"item_id": item["id"], "output_index": index}
        fresh = dict(item)
        match item["type"]:
            case "message":
                fresh |= {"status": "in_progress", "content": []}
                steps = _text_steps(item["content"][0], at, "content", "output_text")
            case "reasoning":
                fresh |= {"summary": []}
                steps = _text_steps(item["summary"][0], at, "summary", "reasoning_summary_text")
            case _:
                fresh |= {"status": "in_progress", "arguments": ""}
                steps = _argument_steps(item, at)
        yield {"type": "response.output_item.added", "item": fresh, "output_index": index}
        yield from steps
        yield {"type": "response.output_item.done", "item": item, "output_index": index}
    yield {"type": "response.completed", "response": done}


def _text_steps(part: Body, at: Body, kind: str, name: str) -> Iterator[Body]:
    at = {**at, f"{kind}_index": 0}
    around = "content_part" if kind == "content" else "reasoning_summary_part"
    more: Body = {"logprobs": []} if kind == "content" else {}
    yield {"type": f"response.{around}.added", **at, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield {"type": f"response.{name}.delta", **at, "delta": piece, **more, "obfuscation": "Ll9YM13tlUL"}
    yield {"type": f"response.{name}.done", **at, **more, "text": part["text"]}
    yield {"type": f"response.{around}.done", **at, "part": part}


def _argument_steps(item: Body, at: Body) -> Iterator[Body]:
    kind = "response.function_call_arguments"
    for piece in pieces(item["arguments"]):
        yield {"type": f"{kind}.delta", "delta": piece, **at, "obfuscation": "ZeIqFLdgSgptWI"}
    yield {"type": f"{kind}.done", "arguments": item["arguments"], **at}


# Anthropic


def _content(reply: Reply, body: Body) -> list[Body]:
    content: list[Body] = []
    if reply.thinking is not None:
        *_, (_, _, _, prefix) = prefixes(body)
        signed = signature(reply.thinking, prefix)
        content.append({"type": "thinking", "thinking": reply.thinking, "signature": signed})
    if reply.text is not None:
        content.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        content.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        )
    return content


def _message(reply: Reply, body: Body, sent: int) -> Body:
    nothing = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    return {
        "model": body["model"],
        "id": f"msg_01{reply.seed[:22]}",
        "type": "message",
        "role": "assistant",
        "content": _content(reply, body),
        "stop_reason": "tool_use" if reply.calls else "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": sent,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "cache_creation": nothing,
            "output_tokens": _output_tokens(reply),
            "service_tier": "standard",
            "inference_geo": "global",
        },
    }


def _message_events(reply: Reply, body: Body, sent: int) -> Iterator[str]:
    for number, event in enumerate(_message_steps(_message(reply, body, sent))):
        yield _padded(event["type"], event, number)


def _padded(name: str, event: Body, number: int) -> str:
    """The blanks before the last brace are Anthropic's own."""
    padding = " " * (number * 7 % 16)
    return f"event: {name}\ndata: {compact(event)[:-1]}{padding}}}\n\n"


def _message_steps(done: Body) -> Iterator[Body]:
    begun = {**done, "content": [], "stop_reason": None, "usage": {**done["usage"], "output_tokens": 1}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(done["content"]):
        match block["type"]:
            case "thinking":
                fresh = {"type": "thinking", "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])
                ]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            case "text":
                fresh = {"type": "text", "text": ""}
                deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
            case _:
                fresh = {**block, "input": {}}
                given = json.dumps(block["input"], ensure_ascii=False)
                deltas = [
                    {"type": "input_json_delta", "partial_json": piece} for piece in ("", *pieces(given))
                ]
        yield {"type": "content_block_start", "index": index, "content_block": fresh}
        if index == 0:
            yield {"type": "ping"}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stopped = {"stop_reason": done["stop_reason"], "stop_sequence": None, "stop_details": None}
    named = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    usage = {name: done["usage"][name] for name in named}
    yield {"type": "message_delta", "delta": stopped, "usage": usage}
    yield {"type": "message_stop"}
