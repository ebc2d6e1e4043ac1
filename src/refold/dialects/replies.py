"""Replies of a model, whole or as a stream: the messages to append, and the usage.

>>> message = {"role": "assistant", "content": "Hello"}
>>> take({"object": "chat.completion", "choices": [{"message": message}]}).messages
[{'role': 'assistant', 'content': 'Hello'}]
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from refold.core.errors import MessageError
from refold.core.message import Usage
from refold.dialects.chunks import INTERRUPTED, events, join
from refold.dialects.shape import expect, kind_of, name_of, optional, required, text_field

__all__ = ["INTERRUPTED", "ParsedReply", "collect", "events", "returnable", "take"]


class ParsedReply(msgspec.Struct, frozen=True):
    dialect: str
    messages: list[dict[str, Any]]
    """The messages to append, as they are sent back to the provider: one, or the items of one reply."""
    usage: Usage | None = None
    model: str | None = None
    finish: str | None = None
    """The provider's finish reason; `interrupted` for an incomplete stream."""


def take(value: Any, where: str = "reply") -> ParsedReply | None:
    """The parsed reply; None for anything else, such as a message.

    Raises:
        MessageError: the reply has the wrong shape; names the field.
    """
    match value:
        case {"object": "response", "output": _}:
            return _response(value, where)
        case {"type": "message", "role": "assistant", "stop_reason": _, "usage": _}:
            return _message(value, where)
        case {"object": "chat.completion"} | {"choices": [{"message": _}, *_]} if "role" not in value:
            return _completion(value, where)
    return None


def collect(chunks: Sequence[Any], where: str = "chunks") -> ParsedReply | None:
    """The parsed reply of a stream; None for anything else, such as a list of messages.

    Raises:
        MessageError: a chunk has the wrong shape; names it.
    """
    whole = join(chunks, where)
    reply = take(whole, where) if whole is not None else None
    if reply is None or reply.finish != INTERRUPTED:
        return reply
    said = [message for message in reply.messages if any(message[key] for key in message if key != "role")]
    return msgspec.structs.replace(reply, messages=said)


def _completion(value: dict[str, Any], where: str) -> ParsedReply:
    choices = required(value, "choices", list, where)
    usage = _openai_usage(value, "prompt", "completion", where)
    model = text_field(value, "model")
    if not choices:
        return ParsedReply("openai-chat", [], usage, model)
    message = required(choices[0], "message", dict, f"{where}.choices[0]")
    message = message if "role" in message else {"role": "assistant"} | message
    finish = text_field(choices[0], "finish_reason")
    return ParsedReply("openai-chat", [returnable(message)], usage, model, finish)


def returnable(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what the API refuses in a request: empty calls, and sound besides its id."""
    empty = [key for key in ("tool_calls", "function_call") if not message.get(key)]
    kept = {key: inner for key, inner in message.items() if key not in empty}
    if isinstance(audio := kept.get("audio"), dict) and "id" in audio:
        kept["audio"] = {"id": audio["id"]}
    return kept


def _response(value: dict[str, Any], where: str) -> ParsedReply:
    items = required(value, "output", list, where)
    for n, item in enumerate(items):
        expect(item, dict, f"{where}.output[{n}]")
    usage = _openai_usage(value, "input", "output", where)
    return ParsedReply(
        "openai-responses", items, usage, text_field(value, "model"), text_field(value, "status")
    )


def _message(value: dict[str, Any], where: str) -> ParsedReply:
    content = required(value, "content", list, where)
    usage = _anthropic_usage(value, where)
    message = {"role": "assistant", "content": content}
    model = text_field(value, "model")
    return ParsedReply("anthropic", [message], usage, model, text_field(value, "stop_reason"))


def _openai_usage(reply: dict[str, Any], input: str, output: str, where: str) -> Usage | None:
    usage = optional(reply, "usage", dict, where)
    place = f"{where}.usage"
    if usage.get(f"{input}_tokens") is None:
        return None
    details = optional(usage, f"{input}_tokens_details", dict, place)
    inside = f"{place}.{input}_tokens_details"
    return Usage(
        _tokens(usage, f"{input}_tokens", place),
        _tokens(usage, f"{output}_tokens", place),
        _tokens(details, "cached_tokens", inside),
        _tokens(details, "cache_write_tokens", inside),
    )


def _anthropic_usage(reply: dict[str, Any], where: str) -> Usage | None:
    """Anthropic counts cached tokens separately."""
    usage = optional(reply, "usage", dict, where)
    place = f"{where}.usage"
    if usage.get("input_tokens") is None:
        return None
    read = _tokens(usage, "cache_read_input_tokens", place)
    written = _tokens(usage, "cache_creation_input_tokens", place)
    input = _tokens(usage, "input_tokens", place) + read + written
    return Usage(input, _tokens(usage, "output_tokens", place), read, written, _calls(reply, usage))


def _calls(reply: dict[str, Any], usage: dict[str, Any]) -> int:
    """How often Anthropic called the model: once, and once more for each of its own tools that it ran."""
    rounds = usage.get("iterations")
    if isinstance(rounds, list) and rounds:
        return len(rounds)
    return 1 + sum(kind_of(block) in ("server_tool_use", "mcp_tool_use") for block in reply["content"])


def _tokens(counts: dict[str, Any], name: str, where: str) -> int:
    value = counts.get(name) or 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MessageError(f"{where}.{name}", f"expected a number of tokens, got {name_of(value)}")
    return value
