"""Token counts of messages, by the model's vocabulary and its provider's framing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from math import ceil
from typing import Any, Literal

import msgspec

from refold.core.codec import dumps, read_json
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    StepStart,
    Text,
    ToolCall,
    ToolResult,
)
from refold.models import framing
from refold.models.framing import REFERENCE, SERVED, Framing
from refold.models.images import words
from refold.models.limits import provider_of
from refold.models.schemas import Declared, typed

SEALED = 6
"""Characters of encrypted text for one token."""
FILE_TOKENS = 40
FLAT = 4
"""Tokens around tools in OpenAI's Responses, which are declared without `function`."""


class Counter(msgspec.Struct, frozen=True):
    """The token counts of one model, including the margin.

    >>> counter("gpt-5").message(Message("user", "How late is it?"))
    9
    """

    framing: Framing = framing.PLAIN

    @property
    def margin(self) -> float:
        return self.framing.margin

    def text(self, text: str) -> int:
        """The tokens of a text; what looks like a special token is text, too."""
        if not text:
            return 0
        if self.framing.vocabulary is None:
            return (len(text) + 3) // 4
        count = encoder(self.framing.vocabulary)(text)
        return count if self.framing.margin == 1.0 else ceil(count * self.framing.margin)

    def message(self, message: Message) -> int:
        tokens = self.framing.message + (self.text(message.name) if message.name else 0)
        for part in message.parts:
            tokens += self.text(part.text) if type(part) is Text else self._part(part)
        return tokens

    def json(self, value: Any) -> int:
        """The tokens of compact JSON; encrypted text is counted by its length."""
        sealed = list[str]()
        plain = _unsealed(value, sealed) if isinstance(value, dict | list) else value
        return self.text(dumps(plain).decode("utf-8", "surrogatepass")) + sum(map(len, sealed)) // SEALED

    def tools(self, tools: Sequence[Any], choice: Any = None) -> int:
        """The tokens of tools as the model sees them; `choice` is the `tool_choice` of the request."""
        rules = self.framing
        shown = [tool for tool in tools if not (isinstance(tool, Mapping) and tool.get("defer_loading"))]
        declared = [Declared.of(tool) for tool in shown]
        own_tools = [tool for tool in declared if tool is not None]
        tokens = rules.deferred if len(shown) < len(tools) else 0
        tokens += sum(self._served(tool) for tool, own in zip(shown, declared, strict=True) if own is None)
        if rules.schemas == "types":
            nested = any(isinstance(tool, Mapping) and "function" in tool for tool in shown)
            return tokens + (
                self.text(typed(own_tools)) + (rules.prompt[0] if nested else FLAT) if own_tools else 0
            )
        for tool in own_tools:
            schema = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
            tokens += rules.tool + self.json(schema)
        return tokens + (rules.prompt[_is_forced(choice)] if shown else 0)

    def system(self, system: Any) -> int:
        """The tokens of system text that is sent apart, a string or blocks."""
        if not system:
            return 0
        blocks = [system] if isinstance(system, str | Mapping) else system
        return self.framing.message + sum(map(self._block, blocks))

    def shape(self, schema: Any) -> int:
        """The tokens of the JSON schema that a request demands of its reply."""
        return self.framing.shape + self.json(schema) if schema else 0

    def estimate(self, counted: int) -> int:
        """The tokens of a request whose messages, system text and tools have so many counted ones."""
        return counted + self.framing.request

    def _block(self, block: Any) -> int:
        if isinstance(block, str):
            return self.text(block)
        text = block.get("text") if isinstance(block, Mapping) else None
        return self.text(text) if isinstance(text, str) else self.json(block)

    def _part(self, part: Part) -> int:
        match part:  # the usual ones first
            case ToolResult(output=str(text)):
                return self.framing.result + self.text(text)
            case ToolCall(tool=tool, input=input):
                return self.framing.call + self.text(tool) + self._input(input)
            case Text(text=text) | Reasoning(text=text):
                return self.text(text)
            case ToolResult(output=tuple(parts)):
                return self.framing.result + sum(map(self._part, parts))
            case Media():
                return self._media(part)
            case Opaque(value=value):
                return self._opaque(value)
            case CompactionMarker(value=value):
                return self.text(part.spoken) if part.text else self.json(value)
            case StepStart():
                return 0
        raise AssertionError(part)

    def _input(self, input: str) -> int:
        if self.framing.input == "json":
            return self.text(input)
        try:
            value = read_json(input)
        except (ValueError, RecursionError):
            return self.text(input)
        return self.text("\n".join(_values(value)))

    def _media(self, media: Media) -> int:
        text = words(media)
        return self.framing.media.tokens(media) if text is None else self.text(text) + FILE_TOKENS

    def _opaque(self, value: Any) -> int:
        kind = str(value.get("type", "")) if isinstance(value, Mapping) else ""
        match value:
            case {"type": "document", "source": {"type": "text", "data": str(text)}}:
                return self.text(text) + FILE_TOKENS
            case {"type": "tool_reference" | "tool_addition"}:
                return REFERENCE
        if kind in _MEDIA:
            return self.framing.media.tokens(Media(_MEDIA[kind], url=""))
        return self.json(value)

    def _served(self, tool: Any) -> int:
        """The tokens of a provider's own tool, whose description is not in the request."""
        kind = str(tool.get("type", "")) if isinstance(tool, Mapping) else ""
        known = (tokens for name, tokens in self.framing.served if kind.startswith(name))
        return self.json(tool) + next(known, SERVED)


class Units(msgspec.Struct, frozen=True):
    """Counts without the margin, as they are stored: they mean the same for any model.

    >>> Units(counter("claude-sonnet-4-5")).message(Message("user", "word " * 100))
    106
    """

    counter: Counter = Counter()

    @property
    def margin(self) -> float:
        """The model's tokens for one counted token."""
        return self.counter.margin

    def message(self, message: Message) -> int:
        return self.of(self.counter.message(message))

    def json(self, value: Any) -> int:
        return self.of(self.counter.json(value))

    def tools(self, tools: Sequence[Any], choice: Any = None) -> int:
        return self.of(self.counter.tools(tools, choice))

    def system(self, system: Any) -> int:
        return self.of(self.counter.system(system))

    def shape(self, schema: Any) -> int:
        return self.of(self.counter.shape(schema))

    def of(self, tokens: int) -> int:
        return tokens if self.margin == 1.0 else ceil(tokens / self.margin)

    def tokens(self, units: int) -> int:
        return units if self.margin == 1.0 else ceil(units * self.margin)


@lru_cache(256)
def counter(
    model: str | None, provider: str | None = None, kind: Literal["auto", "estimate"] = "auto"
) -> Counter:
    """The counter of a model: as its provider counts, or four characters a token."""
    if kind == "estimate":
        return Counter(framing.ESTIMATE)
    return Counter(framing.framing(model, provider or provider_of(model)))


_MEDIA: dict[str, Literal["image", "file", "audio"]] = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "file"),
    "input_audio": "audio",
}
_SEALED = ("encrypted_content", "signature", "thought_signature")


def _is_forced(choice: Any) -> bool:
    """True if a `tool_choice` makes the model use a tool."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    return kind in ("any", "tool", "required", "function", "custom")


def _unsealed(value: Any, sealed: list[str]) -> Any:
    """The value without encrypted texts, which are appended to `sealed`."""
    if isinstance(value, list):
        return [_unsealed(inner, sealed) for inner in value]
    if not isinstance(value, dict):
        return value
    hidden = (*_SEALED, "data") if value.get("type") == "redacted_thinking" else _SEALED
    sealed += [inner for key, inner in value.items() if key in hidden and isinstance(inner, str)]
    return {
        key: _unsealed(inner, sealed)
        for key, inner in value.items()
        if key not in hidden or not isinstance(inner, str)
    }


def _values(value: Any) -> Iterator[str]:
    """Names and values, for models that do not see the JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner)
    else:
        yield dumps(value).decode()


@cache
def encoder(vocabulary: str) -> Callable[[str], int]:
    """The function that counts the tokens of a text in a vocabulary."""
    from splintr import Tokenizer  # 43 ms, paid only by those who count

    tokenizer = Tokenizer.from_pretrained(vocabulary)
    plain, flat = tokenizer.encode_ordinary, tokenizer.encode_flat
    marked = vocabulary not in ("o200k_base", "cl100k_base", "llama3")

    def count(text: str) -> int:
        try:
            if marked or "<|" in text:  # how special tokens begin
                return len(plain(text))
            return len(flat(text)) // 4  # four bytes an id
        except UnicodeEncodeError:
            return count(text.encode("utf-8", "replace").decode())

    return count
