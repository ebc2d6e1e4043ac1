"""Whole replies of a model, in one piece or as a stream: what to append, and what it took.

>>> message = {"role": "assistant", "content": "Hello"}
>>> take({"object": "chat.completion", "choices": [{"message": message}]}).messages
[{'role': 'assistant', 'content': 'Hello'}]
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from refold.core.errors import MessageError
from refold.core.message import Usage
from refold.dialects import anthropic, openai_chat, openai_responses
from refold.dialects.chunks import INTERRUPTED, events, join
from refold.dialects.shape import expect, kind_of, name_of

__all__ = ["INTERRUPTED", "ParsedReply", "collect", "events", "returnable", "take"]

CHAT = ("prompt_tokens", "completion_tokens", "prompt_tokens_details")
RESPONSES = ("input_tokens", "output_tokens", "input_tokens_details")
ANTHROPIC = ("input_tokens", "output_tokens")
"""Where each keeps its counts: what came in, what went out, and what the cache had to do with it."""


class ParsedReply(msgspec.Struct, frozen=True):
    dialect: str
    messages: list[dict[str, Any]]
    """What to append, as it is sent back to the provider later: one message, or the items of one answer."""
    usage: Usage | None = None
    model: str | None = None
    finish: str | None = None
    """Why the model stopped, in the provider's word; `interrupted` for a stream that was cut off."""


def take(value: Any, where: str = "reply") -> ParsedReply | None:
    """What a whole reply says; None for anything else, such as an ordinary message.

    Raises:
        MessageError: it is a reply, but not a good one; says which field.
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
    """What the chunks of a stream say together; None for anything else, such as a list of messages.

    Raises:
        MessageError: one of them does not belong there; says which.
    """
    whole = join(chunks, where)
    reply = take(whole, where) if whole is not None else None
    if reply is None or reply.finish != INTERRUPTED:
        return reply
    said = [message for message in reply.messages if any(message[key] for key in message if key != "role")]
    return msgspec.structs.replace(reply, messages=said)


def _completion(value: dict[str, Any], where: str) -> ParsedReply:
    choices = value.get("choices")
    expect(choices, list, f"{where}.choices")
    messages, finish = [], None
    if choices:
        choice = _object(choices[0], f"{where}.choices[0]")
        message = _object(choice.get("message"), f"{where}.choices[0].message")
        message = message if "role" in message else {"role": "assistant"} | message
        messages, finish = [returnable(message)], _text(choice, "finish_reason")
    return ParsedReply(
        openai_chat.DIALECT, messages, _usage(value, CHAT, where), _text(value, "model"), finish
    )


def returnable(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what is refused when it is sent back: calls that are none, and sound but its id."""
    empty = [key for key in ("tool_calls", "function_call") if not message.get(key)]
    kept = {key: inner for key, inner in message.items() if key not in empty}
    if isinstance(audio := kept.get("audio"), dict) and "id" in audio:
        kept["audio"] = {"id": audio["id"]}
    return kept


def _response(value: dict[str, Any], where: str) -> ParsedReply:
    expect(value["output"], list, f"{where}.output")
    items = [_object(item, f"{where}.output[{n}]") for n, item in enumerate(value["output"])]
    usage = _usage(value, RESPONSES, where)
    return ParsedReply(openai_responses.DIALECT, items, usage, _text(value, "model"), _text(value, "status"))


def _message(value: dict[str, Any], where: str) -> ParsedReply:
    content = value.get("content")
    expect(content, list, f"{where}.content")
    usage = _usage(value, ANTHROPIC, where)
    message = {"role": "assistant", "content": content}
    return ParsedReply(
        anthropic.DIALECT, [message], usage, _text(value, "model"), _text(value, "stop_reason")
    )


def _usage(reply: dict[str, Any], names: tuple[str, ...], where: str) -> Usage | None:
    usage, place = reply.get("usage"), f"{where}.usage"
    expect(usage, dict | None, place)
    if not usage or usage.get(names[0]) is None:
        return None
    input, output = (_tokens(usage, name, place) for name in names[:2])
    if names is ANTHROPIC:  # which counts apart what it had to do with the cache
        read = _tokens(usage, "cache_read_input_tokens", place)
        written = _tokens(usage, "cache_creation_input_tokens", place)
        return Usage(input + read + written, output, read, written, _calls(reply, usage))
    details, place = usage.get(names[2]) or {}, f"{place}.{names[2]}"
    expect(details, dict, place)
    read, written = (_tokens(details, name, place) for name in ("cached_tokens", "cache_write_tokens"))
    return Usage(input, output, read, written)


def _calls(reply: dict[str, Any], usage: dict[str, Any]) -> int:
    """How often Anthropic called the model: for each tool of its own that it ran, once more."""
    rounds = usage.get("iterations")
    if isinstance(rounds, list) and rounds:
        return len(rounds)
    return 1 + sum(kind_of(block) in ("server_tool_use", "mcp_tool_use") for block in reply["content"])


def _tokens(counts: dict[str, Any], name: str, where: str) -> int:
    value = counts.get(name) or 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MessageError(f"{where}.{name}", f"expected a number of tokens, got {name_of(value)}")
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    expect(value, dict, where)
    found: dict[str, Any] = value
    return found


def _text(value: dict[str, Any], field: str) -> str | None:
    text = value.get(field)
    return text if isinstance(text, str) else None
