"""What a scripted model answers to one request, as OpenAI or Anthropic would write it."""

import json
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import msgspec

from refold.core.message import Usage


class Reply(msgspec.Struct, frozen=True):
    """A plain text is `Reply(text)`."""

    text: str = ""
    """What the model says; where `status` is an error, the message in it."""
    status: int = 200
    headers: Mapping[str, str] = {}
    finish: Literal["stop", "length", "refusal", "tool-calls"] = "stop"
    calls: tuple[tuple[str, Any], ...] = ()
    """Tools that it calls, each with its arguments: an object, or a text for JSON that is none."""
    reasoning: str = ""
    """What it thinks first; without a `text` it is all there is."""
    usage: Usage = Usage(100, 20)
    raw: bytes | None = None
    """The body as it is sent, instead of what `text` and the like would make."""
    hang: Event | None = None
    """Answers when this is set; never, where the server is closed or the client gone before that."""
    cut: bool = False
    """Closes the connection in the middle of the body."""


Request: TypeAlias = dict[str, Any]
"""The JSON that was sent, and under `path` where to."""


def body(reply: Reply, request: Request) -> bytes:
    if reply.raw is not None:
        return reply.raw
    written = (_error if reply.status >= 400 else BODIES[request["path"]])(reply, request)
    return json.dumps(written).encode()


def _error(reply: Reply, request: Request) -> dict[str, Any]:
    """Both APIs have `error.message`; what is beside it in either does not disturb the other."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(reply.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": reply.text, "code": None, "param": None}}


def _completion(reply: Reply, request: Request) -> dict[str, Any]:
    used = reply.usage
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "refusal": None}
    if reply.finish == "refusal":
        message |= {"content": None, "refusal": reply.text or "I cannot help with that."}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls := _calls(reply):
        named = [{"name": name, "arguments": _written(given)} for _, name, given in calls]
        ids = [f"call_{id}" for id, _, _ in calls]
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": function}
            for id, function in zip(ids, named, strict=True)
        ]
    stop = "tool_calls" if calls else "stop"
    reason = {"length": "length", "tool-calls": "tool_calls"}.get(reply.finish, stop)
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": request.get("model"),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": used.input,
            "completion_tokens": used.output,
            "total_tokens": used.input + used.output,
            "prompt_tokens_details": {"cached_tokens": used.cache_read},
        },
    }


def _message(reply: Reply, request: Request) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": "c2lnbmVk"})
    if reply.text:
        content.append({"type": "text", "text": reply.text})
    calls = _calls(reply)
    content += [
        {"type": "tool_use", "id": f"toolu_{id}", "name": name, "input": given} for id, name, given in calls
    ]
    stop = "tool_use" if calls else "end_turn"
    reasons = {"length": "max_tokens", "tool-calls": "tool_use", "refusal": "refusal"}
    used = reply.usage
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": request.get("model"),
        "content": content,
        "stop_reason": reasons.get(reply.finish, stop),
        "stop_sequence": None,
        "usage": {
            "input_tokens": used.input - used.cache_read - used.cache_write,
            "output_tokens": used.output,
            "cache_read_input_tokens": used.cache_read,
            "cache_creation_input_tokens": used.cache_write,
        },
    }


def _calls(reply: Reply) -> list[tuple[str, str, Any]]:
    """With an id for each, which no other call has."""
    given = reply.calls or ((("look", {}),) if reply.finish == "tool-calls" else ())
    return [(uuid4().hex[:12], name, arguments) for name, arguments in given]


def _written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


BODIES: dict[str, Callable[[Reply, Request], dict[str, Any]]] = {
    "/v1/chat/completions": _completion,
    "/v1/messages": _message,
}
"""Where each API listens, and how it writes."""
