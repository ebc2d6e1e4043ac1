"""For Pydantic AI: `Agent(model, capabilities=[Refold(store=…, conversation=…)])`.

Without a `conversation`, it is the one that the run belongs to, by its message history.
"""

import asyncio
from base64 import b64decode
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from pydantic_ai import AgentRunResult, FunctionToolset, RunContext, Tool
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import (
    AudioUrl,
    BinaryContent,
    CachePoint,
    DocumentUrl,
    ImageUrl,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextContent,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
    VideoUrl,
    is_multi_modal_content,
)
from pydantic_ai.models import ModelRequestContext

from refold.adapters.align import are_same, match_request
from refold.adapters.conversation import AdapterConversations, ModelCall, declare_function, lookup_tools
from refold.adapters.synced_history import Overridden, Passed
from refold.config.config import Source
from refold.core import codec
from refold.core.message import Media, Message, Opaque, Part, Reasoning, Text, ToolCall, ToolResult, Usage
from refold.stores.store import Store

DIALECT = "pydantic-ai"
IS_LATE = hasattr(AbstractCapability, "prepare_model_request")
"""From 2.66 on, a hook runs after those of other capabilities, when the model is certain."""
RECORDED = frozenset(("user-prompt", "tool-return", "retry-prompt", "retry-feedback", "compaction", "speech"))
"""Kinds of request parts that are recorded. Others, such as system prompts, are sent with every request."""


class Refold(AbstractCapability[Any]):
    """Fits every call of the model. The run's own messages stay unchanged."""

    def __init__(
        self,
        *,
        store: str | Store | None = None,
        conversation: str | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        converter = PydanticAIConverter()
        self._conversations = AdapterConversations(
            converter, store=store, model=model, config=config, agent=agent
        )
        self._conversation = conversation
        self._last: RequestHistory | None = None
        """Of the last request in this run."""

    async def for_run(self, ctx: RunContext[Any]) -> "Refold":
        return copy(self)

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        return request_context if IS_LATE else await self.prepare_model_request(ctx, request_context)

    async def prepare_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        history = RequestHistory(ctx.messages, request_context.messages, self._last)
        self._last = history
        conversation = self._conversations.get(self._name(ctx))
        shown = await conversation.afit(history.passed, _model_call(request_context, history))
        request_context.messages = history.rebuild(shown)
        return request_context

    async def after_run(self, ctx: RunContext[Any], *, result: AgentRunResult[Any]) -> AgentRunResult[Any]:
        """Records the last answer, which no call of the model follows."""
        history = RequestHistory(result.all_messages(), before=self._last)
        await asyncio.to_thread(self._conversations.get(self._name(ctx)).record, history.passed)
        return result

    def get_toolset(self) -> FunctionToolset[Any]:
        return FunctionToolset([self._tool(**about) for about in lookup_tools()])

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> Tool[Any]:
        async def run(ctx: RunContext[Any], **arguments: Any) -> str:
            return await self._conversations.get(self._name(ctx)).acall(name, arguments)

        return Tool.from_schema(run, name, description, parameters, takes_ctx=True)

    def _name(self, ctx: RunContext[Any]) -> str:
        return str(self._conversation or ctx.conversation_id or ctx.run_id)


def _model_call(request: ModelRequestContext, history: "RequestHistory") -> ModelCall:
    """Parts and messages that are not recorded are counted as system text."""
    parameters = request.model_request_parameters
    transient = RequestHistory([message for messages in history.transient.values() for message in messages])
    system = [part.content for part in parameters.instruction_parts or ()]
    for parts in (*history.unrecorded.values(), *transient.unrecorded.values()):
        system += [part.content for part in parts if isinstance(part, SystemPromptPart)]
    system += [PydanticAIConverter().parse(part).text for part in transient.parts]
    if parameters.output_object:
        system.append(_json(parameters.output_object.json_schema))
    return ModelCall(
        "\n\n".join(system) or None,
        [
            declare_function(tool.name, tool.description, tool.parameters_json_schema)
            for tool in (*parameters.function_tools, *parameters.output_tools)
        ],
        request.model.model_name,
        (request.model_settings or {}).get("max_tokens"),
    )


class HistoryPart(NamedTuple):
    """A response, or one part of a request: parts of one request may be in two requests in the next run."""

    message: Any
    part: Any = None
    """None for a response."""
    message_index: int | None = None
    """Of the message in the history."""
    part_index: int = 0
    content: tuple[Part, ...] = ()
    digest: str = ""
    own: "HistoryPart | None" = None
    """The history's own part, if another capability changed it for one request."""

    @classmethod
    def of(cls, message: Any, part: Any, index: int, part_index: int = 0) -> "HistoryPart":
        content: list[Part] = []
        for one in message.parts if part is None else (part,):
            content += _content(one)
        digest = blake2b(codec.dumps([part is None, content]), digest_size=12).hexdigest()
        return cls(message, part, index, part_index, tuple(content), digest)


class RequestHistory:
    """The history, split into parts, and what other capabilities changed in it for one request."""

    def __init__(
        self,
        history: Sequence[ModelMessage],
        request: Sequence[ModelMessage] | None = None,
        before: "RequestHistory | None" = None,
    ) -> None:
        self._history = list(history)
        self.parts: list[HistoryPart] = []
        self.unrecorded: dict[int, list[Any]] = {}
        """Parts that are sent and not recorded, by the index of their message."""
        self.transient: dict[int, Sequence[ModelMessage]] = {}
        """Messages of this request only, by the index of the history's message that follows them."""
        self._changed: dict[int, ModelMessage] = {}
        """Messages that replace those of the history, by index."""
        self._is_unchanged = request is None or are_same(self._history, request)
        if request is not None and not self._is_unchanged:
            self._compare(request)
        elif request is None and before:  # the last request had these changes
            for n, message in before._changed.items():
                if n < len(self._history) and before._history[n] is self._history[n]:
                    self._changed[n] = message
        known = self._take_over(before) if before else 0
        first = len(self.parts)
        for n in range(known, len(self._history)):
            self._split(n)
        if before:  # keep the same objects, by which an unchanged history is recognized
            for n in range(first, min(len(self.parts), len(before.parts))):
                if self.parts[n] == before.parts[n]:
                    self.parts[n] = before.parts[n]

    def _compare(self, request: Sequence[ModelMessage]) -> None:
        """Finds changed and inserted messages. Removed ones are sent if they fit."""
        places = match_request([*map(id, self._history)], [*map(id, request)])
        following = len(self._history)
        for n in range(len(request) - 1, -1, -1):
            at = places.get(n)
            if at is None or type(request[n]) is not type(self._history[at]):
                self.transient[following] = [request[n], *self.transient.get(following, ())]
                continue
            following = at
            if request[n] is not self._history[at]:
                self._changed[at] = request[n]

    def _take_over(self, before: "RequestHistory") -> int:
        """Copies the parts of unchanged messages, except the newest: others may have added to it since."""
        known = len(before._history) - 1
        if not are_same(before._history[:known], self._history[:known]):
            return 0
        for n in {*before._changed, *self._changed}:
            if before._changed.get(n) is not self._changed.get(n):
                known = min(known, n)
        self.parts = before.parts[: bisect_left(before.parts, known, key=attrgetter("message_index"))]
        self.unrecorded = {n: parts for n, parts in before.unrecorded.items() if n < known}
        return known

    def _split(self, n: int) -> None:
        own = self._history[n]
        message = self._changed.get(n, own)
        if isinstance(message, ModelResponse):
            if message.parts:
                own_part = HistoryPart.of(own, None, n) if message is not own else None
                self.parts.append(HistoryPart.of(message, None, n)._replace(own=own_part))
            return
        parts: list[HistoryPart] = []
        is_alike = len(message.parts) == len(own.parts)
        for k, part in enumerate(message.parts):
            if part.part_kind in RECORDED:
                is_changed = is_alike and own.parts[k] is not part
                own_part = HistoryPart.of(own, own.parts[k], n, k) if is_changed else None
                parts.append(HistoryPart.of(message, part, n, k)._replace(own=own_part))
            elif getattr(part, "scope", None) != "request" or n == len(self._history) - 1:
                self.unrecorded.setdefault(n, []).append(part)
        self.parts += sorted(parts, key=lambda one: not _is_result(one.part))  # as in the next run's history

    @property
    def passed(self) -> list[Passed[HistoryPart]]:
        return [part if part.own is None else Overridden(part.own, part) for part in self.parts]

    def rebuild(self, shown: Sequence[HistoryPart]) -> list[ModelMessage]:
        """Messages from parts: the same objects, if all parts of a message are shown unchanged."""
        if self._is_unchanged and are_same(shown, self.parts):
            return [*self._history]
        messages: list[ModelMessage] = []
        due = 0
        for n, group in groupby(shown, attrgetter("message_index")):
            if n is None:
                messages += [part.message for part in group]
                continue
            messages += self._unrecorded_between(due, n)
            messages.append(self._message(n, list(group)))
            due = max(due, n + 1)
        return [*messages, *self._unrecorded_between(due, len(self._history))]

    def _unrecorded_between(self, start: int, stop: int) -> Iterator[ModelMessage]:
        """What is sent with messages that are not shown, and what was inserted before them or at `stop`."""
        last = len(self._history) - 1
        for n in range(start, stop):
            yield from self.transient.get(n, ())
            if n == last and not (self.parts and self.parts[-1].message_index == last):
                yield self._changed.get(last, self._history[last])  # it has no content, and awaits an answer
            elif n in self.unrecorded:
                yield ModelRequest(self.unrecorded[n])
        if start <= stop:
            yield from self.transient.get(stop, ())

    def _message(self, n: int, shown: Sequence[HistoryPart]) -> Any:
        message: Any = self._changed.get(n, self._history[n])
        if isinstance(message, ModelResponse):
            return shown[0].message
        shown_parts = {part.part_index: part.part for part in shown}
        parts: list[Any] = []
        for k, part in enumerate(message.parts):
            if k in shown_parts:
                parts.append(shown_parts[k])
            elif part.part_kind not in RECORDED:
                parts.append(part)
        return message if are_same(parts, message.parts) else replace(message, parts=parts)


class PydanticAIConverter:
    def fingerprint(self, part: HistoryPart) -> Hashable:
        return part.digest

    def parse(self, part: HistoryPart) -> Message:
        if part.part is not None:
            return Message("tool" if _is_result(part.part) else "user", part.content)
        return Message("assistant", part.content, usage=_usage(part.message))

    def render(self, message: Message, original: HistoryPart | None) -> HistoryPart:
        known = original.part if original else None
        if message.role == "assistant":
            return _response(message, None if known else original)
        part = _result(message, known) if message.results else _prompt(message, known)
        return original._replace(part=part) if original and known else HistoryPart(ModelRequest([part]))


def _content(part: Any) -> tuple[Part, ...]:
    match part.part_kind:
        case "text" | "speech" | "compaction" if part.content:
            return (Text(part.content),)
        case "thinking" if part.content:
            return (Reasoning(part.content),)
        case "text" | "speech" | "thinking":
            return ()
        case "tool-call":
            return (ToolCall(part.tool_call_id, part.tool_name, _arguments(part.args)),)
        case "tool-return":
            items = part.content_items(mode="str", wrap_if_error=False) if part.files else ()
            output = tuple(map(_item, items)) or part.model_response_str(wrap_if_error=False)
            is_error = part.outcome != "success"
            return (ToolResult(part.tool_call_id, output, part.tool_name, is_error=is_error),)
        case "retry-prompt" if part.tool_name:
            return (ToolResult(part.tool_call_id, part.model_response(), part.tool_name, is_error=True),)
        case "retry-prompt" | "retry-feedback":
            return (Text(part.model_response()),)
        case "user-prompt":
            items = [part.content] if isinstance(part.content, str) else part.content
            return tuple(_item(one) for one in items if one and not isinstance(one, CachePoint))
        case "file":
            return (_item(part.content),)
    message = ModelRequest if part.part_kind in RECORDED else ModelResponse
    value = ModelMessagesTypeAdapter.dump_python([message([part])], mode="json")[0]["parts"][0]
    value.pop("timestamp", None)
    return (Opaque({"type": value.pop("part_kind"), **value}, DIALECT),)


def _is_result(part: Any) -> bool:
    return part.part_kind == "tool-return" or (part.part_kind == "retry-prompt" and bool(part.tool_name))


def _item(item: Any) -> Any:
    """A text or a file of a prompt or a result."""
    match item:
        case str():
            return Text(item)
        case TextContent():
            return Text(item.content)
        case BinaryContent(media_type=mime):
            kind: Any = mime.partition("/")[0]
            return Media(kind if kind in ("image", "audio") else "file", data=item.base64, mime=mime)
        case ImageUrl():
            return Media("image", url=item.url)
        case AudioUrl():
            return Media("audio", url=item.url)
        case DocumentUrl():
            return Media("file", url=item.url)
        case VideoUrl():
            return Media("file", url=item.url, mime="video/*")
    return Opaque({"type": item.kind, "id": item.file_id, "provider": item.provider_name}, DIALECT)


def _response(message: Message, original: HistoryPart | None) -> HistoryPart:
    """Without thinking, whose signature holds for the original content only."""
    own: Sequence[Any] = original.message.parts if original else ()
    known = [(_content(part), part) for part in own if part.part_kind != "thinking"]
    calls = {part.tool_call_id: part for part in own if isinstance(part, ToolCallPart)}
    parts: list[Any] = []
    for one in message.parts:
        same = next((part for content, part in known if content == (one,)), None)
        match one:
            case _ if same:
                parts.append(same)
            case Text(text=text):
                parts.append(TextPart(text))
            case ToolCall(call_id=id, tool=tool, input=input):
                parts.append(replace(calls[id], args=input) if id in calls else ToolCallPart(tool, input, id))
    if original is None:
        return HistoryPart(ModelResponse(parts))
    return original._replace(message=replace(original.message, parts=parts))


def _result(message: Message, known: Any) -> Any:
    result = message.results[0]
    output = (Text(result.output),) if isinstance(result.output, str) else result.output
    if known is None:
        outcome: Any = "failed" if result.is_error else "success"
        return ToolReturnPart(result.tool or "unknown", _items(output), result.call_id, outcome=outcome)
    return known if getattr(known, "tool_kind", None) else replace(known, content=_items(output, known))


def _prompt(message: Message, known: Any) -> Any:
    if message.role == "system":
        return SystemPromptPart(message.text)
    if not isinstance(known, UserPromptPart):
        return UserPromptPart(_items(message.parts))
    return replace(known, content=_items(message.parts, known))


def _items(parts: Sequence[Part], known: Any = None) -> Any:
    """The content of a prompt or a result; unchanged files are the same objects."""
    content = getattr(known, "content", ())
    files = [*filter(is_multi_modal_content, content if isinstance(content, list | tuple) else (content,))]
    items: list[Any] = []
    for part in parts:
        item = next((file for file in files if _item(file) == part), None) or _rendered_item(part)
        if item is not None:
            items.append(item)
    return items[0] if len(items) == 1 and isinstance(items[0], str) else items


def _rendered_item(part: Part) -> Any:
    match part:
        case Text(text=text):
            return text
        case Media(kind="image", url=str(url)):
            return ImageUrl(url)
        case Media(kind="audio", url=str(url)):
            return AudioUrl(url)
        case Media(url=str(url), mime=mime):
            return VideoUrl(url) if mime else DocumentUrl(url)
        case Media(data=str(data), mime=mime):
            return BinaryContent(b64decode(data), media_type=mime or "application/octet-stream")
    return None


def _usage(response: Any) -> Usage | None:
    """Only of real providers: test models make their usage up."""
    usage = response.usage
    if response.provider_name is None or not usage.input_tokens:
        return None
    return Usage(usage.input_tokens, usage.output_tokens, usage.cache_read_tokens, usage.cache_write_tokens)


def _arguments(args: Any) -> str:
    """A text or a dict, which may come back as the other."""
    try:
        return _json(msgspec.json.decode(args) if isinstance(args, str) and args else args or {})
    except (ValueError, OverflowError):
        return str(args)  # not JSON, as the model wrote it


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()
