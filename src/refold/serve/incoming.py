"""A request to a provider as it came: its history taken apart, all else as it is."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from refold.core.codec import dumps, loads
from refold.core.errors import MessageError
from refold.core.expiry import OWN_TOOLS
from refold.dialects.message_list import LIST
from refold.dialects.registry import FORMATS
from refold.dialects.shape import APART, kind_of
from refold.serve.identify import UNSAID, chained, essence

Dialect: TypeAlias = Literal["openai-chat", "openai-responses", "anthropic"]
ELSEWHERE = ("previous_response_id", "conversation")
"""Fields that say that the history is at the provider."""
MEMO = 50_000
"""Messages whose digests are remembered: clients send them again with every request."""


class Unit(NamedTuple):
    """What becomes one message: one of the list, or the items of one answer."""

    raws: tuple[bytes, ...]
    role: str
    digest: bytes
    """Of what it says, or those of what its items say; empty where that is nothing."""

    def values(self) -> list[Any]:
        return [unmarked(loads(raw)) for raw in self.raws]


class Incoming(NamedTuple):
    dialect: Dialect
    fields: dict[str, Any]
    """All but the history and the system text that stands apart."""
    system: Any
    """Which stands apart from the messages."""
    leading: tuple[Unit, ...]
    """System messages at the beginning, which may be others every time."""
    units: tuple[Unit, ...]

    @property
    def model(self) -> str | None:
        model = self.fields.get("model")
        return model if isinstance(model, str) and model else None

    @property
    def is_stream(self) -> bool:
        return self.fields.get("stream") is True

    @property
    def elsewhere(self) -> tuple[str, str] | None:
        """What says that the history is at the provider: the field, and the id in it."""
        for name in ELSEWHERE if self.dialect == "openai-responses" else ():
            value = self.fields.get(name)
            id = value.get("id") if isinstance(value, dict) else value
            if isinstance(id, str) and id:
                return name, id
        return None

    @property
    def has_own(self) -> bool:
        """It has tools that are called like the gateway's: these are the client's."""
        functions = [one.get("function", one) for one in self.tools if isinstance(one, dict)]
        return any(isinstance(one, dict) and one.get("name") in OWN_TOOLS for one in functions)

    @property
    def raws(self) -> list[bytes]:
        """Its messages as they are written."""
        return [raw for unit in (*self.leading, *self.units) for raw in unit.raws]

    @property
    def tools(self) -> list[Any]:
        tools = self.fields.get("tools")
        return tools if isinstance(tools, list) else []

    def marks(self, seed: str, *answers: Unit) -> list[str]:
        """The marks of its messages, and of what is answered."""
        start = f"{self.dialect} {len(self.leading)} {seed}"
        return chained(
            start.encode("utf-8", "surrogatepass"), [one.digest for one in (*self.units, *answers)]
        )


def read_request(dialect: Dialect, body: bytes) -> Incoming:
    """
    Raises:
        MessageError: it is no request of that dialect, or one that only the provider can judge.
    """
    name = LIST.get(dialect, "messages")
    try:
        fields, raws = _taken_apart(body, name)
        units = units_of(dialect, raws)
    except (ValueError, RecursionError) as error:
        raise MessageError("request", f"cannot be read: {error}") from error
    if not units:
        raise MessageError(name, "says nothing")
    spoken = next((n for n, unit in enumerate(units) if unit.role != "system"), 0)
    system = fields.pop(APART[dialect], None) if dialect in APART else None
    return Incoming(dialect, fields, system, tuple(units[:spoken]), tuple(units[spoken:]))


def units_of(dialect: Dialect, raws: Sequence[bytes]) -> list[Unit]:
    """
    Raises:
        MessageError: one of them is no message; says which.
    """
    units: list[Unit] = []
    for n, raw in enumerate(raws):
        unit = _unit(dialect, raw, n)
        last = units[-1] if units else None
        if dialect == "openai-responses" and last and unit.role == last.role == "assistant":
            units[-1] = Unit(last.raws + unit.raws, "assistant", last.digest + unit.digest)
        else:
            units.append(unit)
    return units


_memo: dict[bytes, tuple[str, bytes]] = {}


def _unit(dialect: Dialect, raw: bytes, n: int) -> Unit:
    key = blake2b(raw, digest_size=16, key=dialect.encode()).digest()
    known = _memo.get(key)
    if known is None:
        value = loads(raw)
        message = FORMATS[dialect].parse(value, f"messages[{n}]")
        known = message.role, b"" if kind_of(value) in UNSAID else essence(message)
        if len(_memo) > MEMO:
            _memo.clear()
        _memo[key] = known
    return Unit((raw,), *known)


def _taken_apart(body: bytes, name: str) -> tuple[dict[str, Any], list[bytes]]:
    """The fields of a request, and its messages as they are written."""
    try:
        written = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        raws = [bytes(raw) for raw in msgspec.json.decode(written.pop(name), type=list[msgspec.Raw])]
        return {key: msgspec.json.decode(raw) for key, raw in written.items()}, raws
    except (msgspec.DecodeError, KeyError):
        pass  # there is no such list; or a lone surrogate, or a number out of range
    fields = loads(body)
    if not isinstance(fields, dict):
        raise MessageError("request", "is no JSON object")
    history = fields.pop(name, None)
    if name == "input" and isinstance(history, str):
        history = [{"role": "user", "content": history}]
    if not isinstance(history, list):
        raise MessageError(name, "is no list of messages")
    return fields, list(map(dumps, history))


def unmarked(value: Any) -> Any:
    """A message without marks for caches, which clients set elsewhere in every request."""
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        return value
    return {**value, "content": [_unmarked(block) for block in content]}


def _unmarked(block: Any) -> Any:
    if not isinstance(block, dict):
        return block
    kept = unmarked(block) if kind_of(block) == "tool_result" else block
    return {key: one for key, one in kept.items() if key != "cache_control"}
