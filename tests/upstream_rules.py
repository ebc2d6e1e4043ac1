"""What do the providers refuse? From the rules of validity and their own error texts, not from refold.

A rule that is broken becomes a `Refusal`: status, the provider's body, and the rule's name for assertions
(sent as the header `x-broken-rule`, which no provider has). What this server made itself and a client may not
change (signed thinking, encrypted reasoning, compactions) carries a seal that only this server can make.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Dialect = Literal["chat", "responses", "anthropic"]
Body = dict[str, Any]

TEXT_MAX = 10_485_760
MARKS_MAX = 4
IMAGE_TOKENS = 800


@dataclass(eq=False)
class Refusal(Exception):
    """Why a request is not answered."""

    rule: str
    message: str
    status: int = 400
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def body(self, dialect: Dialect, request_id: str) -> Body:
        if dialect == "anthropic":
            error = {"type": self.kind, "message": self.message}
            return {"type": "error", "error": error, "request_id": request_id}
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


# Seals


def seal(*parts: str) -> str:
    """24 hex digits that only this server can make of these words."""
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hmac.new(b"strict upstream", text, hashlib.sha256).hexdigest()[:24]


def signature(thinking: str, prefix: str) -> str:
    """What proves that a model thought this, and behind which conversation."""
    return f"EqQB{seal('thinking', thinking)}{prefix}{seal('bound', thinking, prefix)}=="


def encrypted(item_id: str, kind: str = "reasoning") -> str:
    return f"gAAAAAB{item_id.partition('_')[2]}_{seal(kind, item_id.partition('_')[2])}=="


def compaction_item(name: str) -> Body:
    """A Responses item that stands for what the provider compacted."""
    item_id = f"cmp_{seal('compaction id', name)}"
    return {"type": "compaction", "id": item_id, "encrypted_content": encrypted(item_id, "compaction")}


def compaction_block(summary: str) -> Body:
    """The same for Anthropic Messages."""
    return {"type": "compaction", "content": summary, "signature": seal("compaction", summary)}


def binds_thinking(model: str) -> bool:
    return re.search(r"claude-\w+-5-\d|^bound", model) is not None


def needs_user_last(model: str) -> bool:
    return re.search(r"claude-(opus|sonnet)-4-[6-9]|claude-\w+-5|^bound", model) is not None


def prefixes(body: Body) -> Iterator[tuple[int, int, Body, str]]:
    """Each thinking block with a digest of all that stands before it; last, one for the end of the messages.

    Cache marks, thinking, and whether a text stands alone or in a block make no difference.
    """
    digest = hashlib.sha256(_canonical([body.get("system") or "", body.get("tools") or []]))
    for index, message in enumerate(body["messages"]):
        for place, block in enumerate(blocks(message)):
            if block["type"] in ("thinking", "redacted_thinking"):
                yield index, place, block, digest.hexdigest()[:24]
            else:
                digest.update(_canonical([message["role"], block]))
    yield -1, -1, {}, digest.hexdigest()[:24]


def _canonical(value: Any) -> bytes:
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    match value:
        case {"type": "text", "text": str(text)}:
            return text
        case dict():
            return {key: _plain(one) for key, one in value.items() if key != "cache_control"}
        case [{"type": "text", "text": str(text)}]:
            return text
        case list():
            return [_plain(one) for one in value]
    return value


# Any target


def parse(raw: bytes, dialect: Dialect) -> Body:
    """The body as JSON in valid UTF-8 (G1)."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if re.search(rb"\\u[dD][89a-fA-F]", raw):
            json.dumps(body, ensure_ascii=False).encode("utf-8")
        if not isinstance(body, dict):
            raise ValueError("not an object")
    except ValueError as error:
        if dialect == "anthropic":
            raise Refusal("G1", f"The request body is not valid JSON: {error}") from None
        raise Refusal(
            "G1",
            "We could not parse the JSON body of your request. (HINT: This likely means you aren't using "
            "your HTTP library correctly. The OpenAI API expects a JSON payload, but what was sent was not "
            "valid JSON. If you have trouble figuring out how to fix this, please contact us through our "
            "help center at help.openai.com.)",
        ) from None
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"unexpected {name}")


def blocks(message: Body) -> list[Body]:
    """An Anthropic message's content, a string as one text block."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def tokens(value: Any) -> int:
    """A quarter of the UTF-8 bytes of all strings, and something for each object and each image."""
    return _weight(value) // 4


def _weight(value: Any) -> int:
    match value:
        case str():
            return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
        case {"type": "image" | "image_url" | "input_image" | "document" | "file" | "input_file"}:
            return IMAGE_TOKENS * 4
        case dict():
            return 8 + sum(_weight(one) for one in value.values())
        case list():
            return sum(_weight(one) for one in value)
    return 4


def prompt_tokens(body: Body, dialect: Dialect) -> int:
    names = {"chat": "messages", "responses": "input", "anthropic": "messages"}
    parts = (names[dialect], "system", "instructions", "tools")
    return 4 + sum(tokens(body[part]) for part in parts if body.get(part))


def check_window(body: Body, dialect: Dialect, window: int) -> int:
    """How many tokens the prompt has; they and the output asked for fit into the window (G3)."""
    sent = prompt_tokens(body, dialect)
    asked = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    output = max((number for number in asked if isinstance(number, int)), default=0)
    if sent + output <= window:
        return sent
    if dialect == "anthropic":
        if sent > window:
            raise Refusal("G3", f"prompt is too long: {sent} tokens > {window} maximum")
        limit = f"input length and `max_tokens` exceed context limit: {sent} + {output} > {window}"
        raise Refusal("G3", f"{limit}, decrease input length or `max_tokens` and try again")
    if dialect == "responses":
        words = "Your input exceeds the context window of this model. Please adjust your input and try again."
        raise Refusal("G3", words, param="input", code="context_length_exceeded")
    known = f"This model's maximum context length is {window} tokens."
    if sent > window:
        words = f"{known} However, your messages resulted in {sent} tokens. "
        words += "Please reduce the length of the messages."
    else:
        words = f"{known} However, you requested {sent + output} tokens ({sent} in the messages, {output} in "
        words += "the completion). Please reduce the length of the messages or completion."
    raise Refusal("G3", words, param="messages", code="context_length_exceeded")


def check_model(body: Body, dialect: Dialect) -> str:
    """The model's name, or the provider's words for a missing one."""
    if isinstance(body.get("model"), str):
        return str(body["model"])
    if dialect == "anthropic":
        raise Refusal("G2", "model: Field required")
    raise Refusal("G2", "you must provide a model parameter")
