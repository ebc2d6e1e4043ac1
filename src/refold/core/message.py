"""Messages: a role and typed parts, independent of the provider.

>>> Message("user", (Text("Book a flight to Oslo."),)).text
'Book a flight to Oslo.'
"""

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias

import msgspec
from msgspec.structs import astuple

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Meta = TypeVar("Meta", default=Any)
else:
    from typing import TypeVar

    Meta = TypeVar("Meta")

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ABOVE = "[Summary of the conversation before this]"
"""Heading of a compaction marker that is shown as text."""
Kind: TypeAlias = Literal["action-result", "sub-agent-result", "user-input", "retry-context", "system"]


class _Part(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    pass


class Text(_Part, frozen=True, tag="text"):
    """Text of a message."""

    text: str


class Reasoning(_Part, frozen=True, tag="reasoning"):
    """The reasoning of the model before its answer."""

    text: str


class ToolCall(_Part, frozen=True, tag="tool-call"):
    """A call of a tool."""

    call_id: str
    tool: str
    input: str
    """JSON text exactly as the model wrote it, even if it is invalid."""


class Media(_Part, frozen=True, tag="media"):
    """An image, a file or a sound: a URL or base64 data, as it came."""

    kind: Literal["image", "file", "audio"]
    url: str | None = None
    data: str | None = None
    mime: str | None = None
    name: str | None = None

    @property
    def inline(self) -> tuple[str, str] | None:
        """MIME type and base64 data, also from a `data:` URL; None if the data is elsewhere."""
        for source in (self.data, self.url):
            if source and source.startswith("data:"):
                head, _, data = source[5:].partition(",")
                return (head.partition(";")[0] or self.mime or "", data)
        return (self.mime or "", self.data) if self.data else None


class Opaque(_Part, frozen=True, tag="opaque"):
    """A part that refold does not know, kept verbatim."""

    value: Any
    dialect: str | None = None
    """The only dialect in which it has a meaning; None means all."""


class ToolResult(_Part, frozen=True, tag="tool-result"):
    """The result of a tool call."""

    call_id: str
    output: str | tuple[Text | Media | Opaque, ...]
    tool: str | None = None
    is_error: bool = False


class StepStart(_Part, frozen=True, tag="step-start"):
    pass


class CompactionMarker(_Part, frozen=True, tag="compaction-marker"):
    """A summary that a provider or an application made, in its own format."""

    value: Any = None

    @property
    def text(self) -> str:
        """The text of the summary; empty if it is encrypted.

        >>> CompactionMarker({"type": "compaction", "content": "The flight is booked."}).text
        'The flight is booked.'
        """
        if not isinstance(self.value, dict):
            return self.value if isinstance(self.value, str) else ""
        for field in ("summary", "content", "text", "value"):
            if text := _readable(self.value.get(field)):
                return text
        return ""

    @property
    def is_sealed(self) -> bool:
        """True if the summary is encrypted."""
        sealed = self.value.get("encrypted_content") if isinstance(self.value, dict) else None
        return bool(sealed) and not self.text

    @property
    def spoken(self) -> str:
        """The summary as text, for dialects without such a part."""
        return f"{ABOVE}\n{self.text}" if self.text else ""


Part: TypeAlias = Text | Reasoning | ToolCall | ToolResult | Media | StepStart | CompactionMarker | Opaque


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens as reported by the provider. `input` includes those read from the cache."""

    input: int
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    calls: int = 1
    """Model calls in the sum; several if the provider ran tools of its own in between."""

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))


class Message(msgspec.Struct, Generic[Meta], frozen=True, omit_defaults=True):
    """A role and parts; the rest is optional. `meta` is the application's own and must be JSON."""

    role: Role
    parts: tuple[Part, ...] = ()
    id: str | None = None
    meta: Meta | None = None
    name: str | None = None
    model: str | None = None
    finish: str | None = None
    usage: Usage | None = None
    error: str | None = None
    summary: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.parts, str):  # such as Message("user", "hello")
            msgspec.structs.force_setattr(self, "parts", (Text(self.parts),))
        elif not isinstance(self.parts, tuple):
            msgspec.structs.force_setattr(self, "parts", tuple(self.parts))

    @property
    def text(self) -> str:
        """The text of all parts, tool results included, without reasoning."""
        return "".join(filter(None, map(_text, self.parts)))

    @property
    def has_words(self) -> bool:
        """True if it has text or audio, and not only images and files."""
        is_sound = any(isinstance(part, Media) and part.kind == "audio" for part in self.parts)
        return is_sound or bool(self.text.strip())

    @property
    def markers(self) -> tuple[CompactionMarker, ...]:
        return tuple(part for part in self.parts if isinstance(part, CompactionMarker))

    @property
    def is_summary(self) -> bool:
        """True if it only summarizes the messages before it."""
        others = [part for part in self.parts if not isinstance(part, CompactionMarker | StepStart)]
        return self.summary or (bool(self.markers) and not others)

    @property
    def summaries(self) -> str:
        """The text of the summary that it is, or of the summaries among its parts."""
        return self.text if self.is_summary else "\n".join(marker.text for marker in self.markers)

    @property
    def is_sealed(self) -> bool:
        """True if it has an encrypted summary, which no other summary can replace."""
        return any(marker.is_sealed for marker in self.markers)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    @property
    def results(self) -> tuple[ToolResult, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolResult))


def _readable(value: Any) -> str:
    """A text, or the texts in a list of blocks."""
    if isinstance(value, list):
        texts = [block.get("text") for block in value if isinstance(block, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return value if isinstance(value, str) else ""


def _text(part: Part) -> str:
    match part:
        case Text(text=text) | CompactionMarker(text=text):
            return text
        case ToolResult(output=str(text)):
            return text
        case ToolResult(output=tuple(inner)):
            return "".join(map(_text, inner))
        case _:
            return ""
