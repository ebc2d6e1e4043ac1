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
from refold.dialects.chunks import INTERRUPTED, fault_of, join
from refold.dialects.shape import kind_of, text_field


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
        MessageError: the reply has the wrong shape.
    """
    try:
        match value:
            case {"object": "response", "output": _}:
                return _response(value)
            case {"type": "message", "role": "assistant", "stop_reason": _, "usage": _}:
                return _message(value)
            case {"object": "chat.completion"} | {"choices": [{"message": _}, *_]} if "role" not in value:
                return _completion(value)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"is not a reply of its API: {fault_of(error)}; pass the reply as the API returned it"
        raise MessageError(where, problem) from error
    return None


def collect(chunks: Sequence[Any], where: str = "chunks") -> ParsedReply | None:
    """The parsed reply of a stream; None for anything else, such as a list of messages.

    Raises:
        MessageError: a chunk has the wrong shape; names it.
    """
    whole = join(chunks, where)
    reply = take(whole, f"{where}[0:{len(chunks)}]") if whole is not None else None
    if reply is None or reply.finish != INTERRUPTED:
        return reply
    said = [message for message in reply.messages if any(message[key] for key in message if key != "role")]
    return msgspec.structs.replace(reply, messages=said)


def _completion(value: dict[str, Any]) -> ParsedReply:
    usage = _openai_usage(value, "prompt_tokens", "completion_tokens")
    model = text_field(value, "model")
    if not value["choices"]:
        return ParsedReply("openai-chat", [], usage, model)
    choice = value["choices"][0]
    message = choice["message"]
    message = message if "role" in message else {"role": "assistant"} | message
    finish = text_field(choice, "finish_reason")
    return ParsedReply("openai-chat", [returnable(message)], usage, model, finish)


def returnable(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what the API refuses in a request: empty calls, and sound besides its id."""
    empty = [key for key in ("tool_calls", "function_call") if not message.get(key)]
    kept = {key: inner for key, inner in message.items() if key not in empty}
    if isinstance(audio := kept.get("audio"), dict) and "id" in audio:
        kept["audio"] = {"id": audio["id"]}
    return kept


def _response(value: dict[str, Any]) -> ParsedReply:
    items = [{**item} for item in value["output"]]
    usage = _openai_usage(value, "input_tokens", "output_tokens")
    finish = text_field(value, "status")
    return ParsedReply("openai-responses", items, usage, text_field(value, "model"), finish)


def _message(value: dict[str, Any]) -> ParsedReply:
    message = {"role": "assistant", "content": [*value["content"]]}
    finish = text_field(value, "stop_reason")
    return ParsedReply("anthropic", [message], _anthropic_usage(value), text_field(value, "model"), finish)


def _openai_usage(reply: dict[str, Any], input: str, output: str) -> Usage | None:
    usage = reply.get("usage") or {}
    if usage.get(input) is None:
        return None
    details = usage.get(f"{input}_details") or {}
    cached = _tokens(details, "cached_tokens")
    return Usage(
        _tokens(usage, input), _tokens(usage, output), cached, _tokens(details, "cache_write_tokens")
    )


def _anthropic_usage(reply: dict[str, Any]) -> Usage | None:
    """Anthropic counts cached tokens separately."""
    usage = reply.get("usage") or {}
    if usage.get("input_tokens") is None:
        return None
    read = _tokens(usage, "cache_read_input_tokens")
    written = _tokens(usage, "cache_creation_input_tokens")
    input = _tokens(usage, "input_tokens") + read + written
    return Usage(input, _tokens(usage, "output_tokens"), read, written, _calls(reply, usage))


def _calls(reply: dict[str, Any], usage: dict[str, Any]) -> int:
    """How often Anthropic called the model: once, and once more for each of its own tools that it ran."""
    rounds = usage.get("iterations")
    if isinstance(rounds, list) and rounds:
        return len(rounds)
    return 1 + sum(kind_of(block) in ("server_tool_use", "mcp_tool_use") for block in reply["content"])


def _tokens(counts: dict[str, Any], name: str) -> int:
    value = counts.get(name) or 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a number of tokens")
    return value
