"""For Pydantic AI: `Agent(model, capabilities=[Refold(store=…, conversation=…)])`.

Without a `conversation`, it is the one that the run belongs to, by its message history.
"""

import asyncio
from base64 import b64decode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, Unpack

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

from refold.adapters.conversation import (
    AdapterConversations,
    AdapterOptions,
    ModelCall,
    RequestMatch,
    declare_function,
    lookup_tools,
)
from refold.core.message import Media, Message, Opaque, Part, Reasoning, Text, ToolCall, ToolResult, Usage
from refold.session.history_sync import are_same

DIALECT = "pydantic-ai"
RECORDED = frozenset(("user-prompt", "tool-return", "retry-prompt", "retry-feedback", "compaction", "speech"))
"""Kinds of request parts that are recorded. Others, such as system prompts, are sent with every request."""


class Refold(AbstractCapability[Any]):
    """Fits every call of the model. The run's own messages stay unchanged."""

    def __init__(self, *, conversation: str | None = None, **options: Unpack[AdapterOptions]) -> None:
        self._conversations = AdapterConversations(PydanticAIConverter(), **options)
        self._conversation = conversation

    async def prepare_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        messages = request_context.messages
        parts: list[HistoryPart] = []
        for part in _split(messages):
            if getattr(part.part, "scope", None) != "request" or part.message is messages[-1]:
                parts.append(part)
        match = RequestMatch.of(_history(ctx.messages), parts, _key, _is_recorded)
        conversation = self._conversations.get(self._name(ctx))
        call = _model_call(request_context)
        fitted = await asyncio.to_thread(conversation.fit_request, match, call)
        request_context.messages = _messages(fitted)
        return request_context

    async def after_run(self, ctx: RunContext[Any], *, result: AgentRunResult[Any]) -> AgentRunResult[Any]:
        """Records the last answer, which no call of the model follows."""
        history = _history(result.all_messages())
        await asyncio.to_thread(self._conversations.get(self._name(ctx)).record, history)
        return result

    def get_toolset(self) -> FunctionToolset[Any]:
        return FunctionToolset([self._tool(**about) for about in lookup_tools()])

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> Tool[Any]:
        async def run(ctx: RunContext[Any], **arguments: Any) -> str:
            return await self._conversations.get(self._name(ctx)).acall(name, arguments)

        return Tool.from_schema(run, name, description, parameters, takes_ctx=True)

    def _name(self, ctx: RunContext[Any]) -> str:
        return str(self._conversation or ctx.conversation_id or ctx.run_id)


def _model_call(request: ModelRequestContext) -> ModelCall:
    parameters = request.model_request_parameters
    system = [part.content for part in parameters.instruction_parts or ()]
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
    """None for a response, or a request without parts."""
    n: int = 0
    """The index of the part in its message."""


def _split(messages: Iterable[ModelMessage]) -> list[HistoryPart]:
    split: list[HistoryPart] = []
    for message in messages:
        if isinstance(message, ModelRequest) and message.parts:
            parts = [HistoryPart(message, part, n) for n, part in enumerate(message.parts)]
            if len(parts) > 1:
                parts.sort(key=lambda one: not _is_result(one.part))  # as in the next run's history
            split += parts
        elif isinstance(message, ModelRequest) or message.parts:
            split.append(HistoryPart(message))
    return split


def _history(messages: Iterable[ModelMessage]) -> list[HistoryPart]:
    return [part for part in _split(messages) if _is_recorded(part)]


def _is_recorded(part: HistoryPart) -> bool:
    if part.part is None:
        return isinstance(part.message, ModelResponse)
    return part.part.part_kind in RECORDED


def _key(part: HistoryPart) -> int:
    return id(part.message if part.part is None else part.part)


def _messages(parts: Iterable[HistoryPart]) -> list[ModelMessage]:
    """Messages from parts: the same objects, if all parts of a message are there."""
    messages: list[ModelMessage] = []
    for _, group in groupby(parts, lambda part: id(part.message)):
        shown = sorted(group, key=lambda part: part.n)
        message = shown[0].message
        shown_parts = [part.part for part in shown]
        if shown_parts != [None] and not are_same(shown_parts, message.parts):
            message = replace(message, parts=shown_parts)
        messages.append(message)
    return messages


class PydanticAIConverter:
    def parse(self, part: HistoryPart) -> Message:
        if part.part is not None:
            return Message("tool" if _is_result(part.part) else "user", _content(part.part))
        content: list[Part] = []
        for one in part.message.parts:
            content += _content(one)
        if isinstance(part.message, ModelRequest):
            return Message("user")
        return Message("assistant", tuple(content), usage=_usage(part.message))

    def render(self, message: Message, original: HistoryPart | None) -> HistoryPart:
        known = original.part if original else None
        if message.role == "assistant":
            return _response(message, None if known else original)
        part = _result(message, known) if message.results else _prompt(message, known)
        return original._replace(part=part) if original and known else HistoryPart(ModelRequest([part]), part)


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
        case "system-prompt":
            return (Text(part.content),)
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
