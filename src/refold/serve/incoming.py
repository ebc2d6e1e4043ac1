"""A request to a provider, taken apart: its history as messages, its cache marks, and all else as it is."""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypeAlias

from refold.core.codec import dumps, loads
from refold.core.errors import MessageError
from refold.core.expiry import OWN_TOOLS
from refold.dialects.anthropic import as_blocks
from refold.dialects.registry import DIALECTS
from refold.dialects.shape import kind_of
from refold.session.history_sync import OMITTABLE, content_digest, prefix_ids

ClientDialect: TypeAlias = Literal["openai-chat", "openai-responses", "anthropic"]
PREVIOUS_RESPONSE = "previous_response_id"
"""Fields that refer to a history at the provider."""
CACHED_DIGESTS = 50_000
"""Clients send the same messages with every request."""
CACHE_CONTROL = "cache_control"
MAX_MARKS = 4
"""That Anthropic allows in a request."""
UNMARKABLE = ("thinking", "redacted_thinking")
DEFAULT_MARK = {"type": "ephemeral"}
_MARK = re.compile(rb'"cache_control":(\{[^{}]*\})')
"""In JSON without spaces: quotes in a text are escaped, so a text never matches."""


class HistoryMessage(NamedTuple):
    """One message of a history; in the Responses API, all items of one answer."""

    raws: tuple[bytes, ...]
    """Its JSON, or that of its items."""
    role: str
    digest: bytes
    """Of its content, or of that of its items; empty for reasoning, which clients may leave out."""

    def values(self) -> list[Any]:
        return [without_cache_control(loads(raw)) for raw in self.raws]


class IncomingRequest(NamedTuple):
    """What a client sends, and what its headers name."""

    dialect: ClientDialect
    fields: dict[str, Any]
    """All but the history and the separate system text."""
    system: Any
    """System text that the API has apart from the messages."""
    leading: tuple[HistoryMessage, ...]
    """System messages at the beginning, which may change from request to request."""
    messages: tuple[HistoryMessage, ...]
    body: bytes
    """As it came."""
    owner: str = ""
    conversation: str | None = None
    agent: str | None = None

    @property
    def model(self) -> str | None:
        model = self.fields.get("model")
        return model if isinstance(model, str) and model else None

    @property
    def provider_history(self) -> tuple[str, str] | None:
        """The field that refers to a history at the provider, and the id in it."""
        for name in DIALECTS[self.dialect].history_fields:
            value = self.fields.get(name)
            id = value.get("id") if isinstance(value, dict) else value
            if isinstance(id, str) and id:
                return name, id
        return None

    @property
    def tools(self) -> list[Any]:
        tools = self.fields.get("tools")
        return tools if isinstance(tools, list) else []

    @property
    def has_refold_tools(self) -> bool:
        """True if the client itself declares tools of the gateway's names: these are the client's."""
        for tool in self.tools:
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            if isinstance(function, dict) and function.get("name") in OWN_TOOLS:
                return True
        return False

    @property
    def raws(self) -> list[bytes]:
        """The JSON of its messages."""
        return [raw for message in (*self.leading, *self.messages) for raw in message.raws]

    def prefix_ids(self, *answers: HistoryMessage, after: str | None = None) -> list[str]:
        """The prefix ids of its messages, and of the answers to them.

        Owners, named conversations and responses at the provider, `after` which they come, have their own.
        """
        seed = repr((self.owner, self.conversation)) if after is None else after
        start = f"{self.dialect} {len(self.leading)} {seed}"
        digests = [message.digest for message in (*self.messages, *answers)]
        return prefix_ids(start.encode("utf-8", "surrogatepass"), digests)


def read_request(
    dialect: ClientDialect,
    body: bytes,
    owner: str = "",
    conversation: str | None = None,
    agent: str | None = None,
) -> IncomingRequest:
    """Raises MessageError if it is not a request of that dialect, or only the provider can judge it."""
    name = DIALECTS[dialect].list_field
    try:
        fields = loads(body)
        if not isinstance(fields, dict):
            raise MessageError("request", "expected a JSON object")
        history = fields.pop(name, None)
        if name == "input" and isinstance(history, str):
            history = [{"role": "user", "content": history}]
        if not isinstance(history, list) or not history:
            raise MessageError(name, "expected a list of messages")
        messages = read_messages(dialect, list(map(dumps, history)))
    except (ValueError, RecursionError) as error:
        raise MessageError("request", f"cannot be read: {error}") from error
    first = next((n for n, message in enumerate(messages) if message.role != "system"), 0)
    field = DIALECTS[dialect].system_field
    system = fields.pop(field, None) if field is not None else None
    leading = tuple(messages[:first])
    return IncomingRequest(
        dialect, fields, system, leading, tuple(messages[first:]), body, owner, conversation, agent
    )


def read_messages(dialect: ClientDialect, raws: Sequence[bytes]) -> list[HistoryMessage]:
    """Raises MessageError, which says which, if one of them is not a message."""
    has_items = DIALECTS[dialect].has_items
    messages: list[HistoryMessage] = []
    for n, raw in enumerate(raws):
        role, digest = _role_and_digest(dialect, raw, n)
        last = messages[-1] if messages else None
        if has_items and last and role == last.role == "assistant":
            messages[-1] = HistoryMessage((*last.raws, raw), "assistant", last.digest + digest)
        else:
            messages.append(HistoryMessage((raw,), role, digest))
    return messages


_cached: dict[bytes, tuple[str, bytes]] = {}


def _role_and_digest(dialect: ClientDialect, raw: bytes, n: int) -> tuple[str, bytes]:
    key = blake2b(raw, digest_size=16, key=dialect.encode()).digest()
    known = _cached.get(key)
    if known is None:
        value = loads(raw)
        message = DIALECTS[dialect].parse(value, f"messages[{n}]")
        digest = b"" if kind_of(value) in OMITTABLE else content_digest(message)
        known = (message.role, digest)
        if len(_cached) > CACHED_DIGESTS:
            _cached.clear()
        _cached[key] = known
    return known


# Cache marks of Anthropic requests: the client's own, and one behind what stays until the next edit


def without_cache_control(value: Any) -> Any:
    """A message without cache marks, which clients set elsewhere in every request."""
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        return value
    blocks = []
    for block in content:
        if isinstance(block, dict):
            inner = without_cache_control(block) if kind_of(block) == "tool_result" else block
            block = {key: one for key, one in inner.items() if key != CACHE_CONTROL}
        blocks.append(block)
    return {**value, "content": blocks}


def with_cache_control(request: dict[str, Any], settled: int, raws: Sequence[bytes]) -> dict[str, Any]:
    """The request with the client's marks on messages that are sent as they came, whose JSON is `raws`, and
    one more mark behind its first `settled` messages, if another is allowed.
    """
    messages = list(request["messages"])
    for n in range(1, min(len(messages), len(raws)) + 1):
        if b'"cache_control"' in raws[-n]:
            original = loads(raws[-n])
            if without_cache_control(original) == messages[-n]:
                messages[-n] = original
    marks = _MARK.findall(dumps([request.get("tools"), request.get("system"), messages]))
    if settled and CACHE_CONTROL not in request and len(marks) < MAX_MARKS:
        later = _MARK.findall(dumps(messages[settled:]))
        mark = loads(later[0]) if later else DEFAULT_MARK  # marks with a longer lifetime must come first
        messages[settled - 1] = _marked(messages[settled - 1], mark)
    return {**request, "messages": messages}


def _marked(message: dict[str, Any], mark: dict[str, Any]) -> dict[str, Any]:
    """The message with the mark on its last block that can have one."""
    blocks = as_blocks(message["content"])
    for n in reversed(range(len(blocks))):
        block = blocks[n]
        is_empty = kind_of(block) == "text" and not block.get("text")
        if isinstance(block, dict) and kind_of(block) not in UNMARKABLE and not is_empty:
            blocks[n] = {CACHE_CONTROL: mark, **block}
            return {**message, "content": blocks}
    return message
