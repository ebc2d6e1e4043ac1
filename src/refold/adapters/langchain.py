"""For LangChain: `create_agent(model, tools, middleware=[RefoldMiddleware(store=…)])`.

The thread is the conversation; without one, each run is its own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Annotated, Any, NotRequired
from uuid import uuid4

import msgspec
from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain.agents.middleware.types import PrivateStateAttr
from langchain.tools import ToolRuntime
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.channels.untracked_value import UntrackedValue
from langgraph.config import get_config
from langgraph.runtime import Runtime

from refold.adapters.align import standing, woven
from refold.adapters.conversation import Ask, Talks, tools
from refold.adapters.synced_history import Otherwise
from refold.config.config import Source
from refold.core.message import (
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    Usage,
)
from refold.stores.store import Store

ROLES: dict[str, Role] = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system"}


UNNAMED = "run"
"""Where nobody has given a name: the hooks were called by hand."""
RUN = "refold_run"
"""Where the state has the name of a run without a thread; it is stored nowhere."""


class State(AgentState[Any]):
    refold_run: NotRequired[Annotated[str, UntrackedValue, PrivateStateAttr]]  # type: ignore[valid-type]


class RefoldMiddleware(AgentMiddleware[Any, Any, Any]):
    """Fits every call of the model; the thread's messages stay as they are. Serves many threads at once."""

    state_schema = State

    def __init__(
        self,
        *,
        store: str | Store | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        super().__init__()
        self._talks = Talks(Words(), store=store, model=model, config=config, agent=agent)
        self._declared: tuple[Sequence[Any], list[dict[str, Any]]] = ((), [])
        self.tools = [self._tool(one) for one in tools()]

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        return handler(self._fitted(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        return await handler(await asyncio.to_thread(self._fitted, request))

    def before_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> dict[str, Any] | None:
        return None if _thread_id() else {RUN: f"run-{uuid4().hex}"}

    async def abefore_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> dict[str, Any] | None:
        return self.before_agent(state, runtime)

    def after_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        """Keeps the last answer, which no call of the model comes after."""
        self._talks.keep(_thread(state), state["messages"])

    async def aafter_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        await asyncio.to_thread(self.after_agent, state, runtime)

    def _fitted(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """What others put into this one request stays in it, and out of the record."""
        messages = [
            one if isinstance(one, BaseMessage) else convert_to_messages([one])[0] for one in request.messages
        ]
        history: Sequence[Any] = request.state["messages"] or messages
        said, stand = _said(history, messages)
        is_all = len(stand) == len(messages)
        passing = {} if is_all else {n: one for n, one in enumerate(messages) if n not in stand}
        lent = "\n\n".join(str(one.text) for one in passing.values())
        ask = Ask(
            "\n\n".join(filter(None, [request.system_message and str(request.system_message.text), lent])),
            self._tools_of(request.tools),
            _named(request.model, "model_name", "model"),
            request.model_settings.get("max_tokens") or _named(request.model, "max_tokens"),
        )
        shown: list[Any] = self._talks.fit(_thread(request.state), said, ask)
        if passing:
            places = {history[at].id: n for n, at in stand.items()}
            shown = woven(shown, [places.get(one.id) for one in shown], passing)
        return request.override(messages=shown)

    def _tools_of(self, given: Sequence[BaseTool | dict[str, Any]]) -> list[dict[str, Any]]:
        """Declared once: they are the same at every call, as a rule."""
        known, declared = self._declared
        if len(known) != len(given) or any(one is not two for one, two in zip(known, given, strict=True)):
            declared = [convert_to_openai_tool(tool) for tool in given]
            self._declared = (list(given), declared)
        return declared

    def _tool(self, about: dict[str, Any]) -> BaseTool:
        name = about["name"]

        def run(runtime: ToolRuntime, **arguments: Any) -> str:
            return self._talks.call(_thread(runtime.state, runtime.config), name, arguments)

        async def arun(runtime: ToolRuntime, **arguments: Any) -> str:
            return await asyncio.to_thread(run, runtime, **arguments)

        return StructuredTool(
            name=name,
            description=about["description"],
            args_schema=about["parameters"],
            func=run,
            coroutine=arun,
        )


def _thread(state: Mapping[str, Any], config: Any = None) -> str:
    """An agent that is another one's tool has a conversation of its own."""
    config = config or get_config()
    inside = str(config.get("configurable", {}).get("checkpoint_ns") or "").rpartition("|")[0]
    name = _thread_id(config) or state.get(RUN) or UNNAMED
    return f"{name}/{inside}" if inside else name


def _thread_id(config: Any = None) -> str:
    return str((config or get_config()).get("configurable", {}).get("thread_id") or "")


def _said(
    history: Sequence[BaseMessage], given: Sequence[BaseMessage]
) -> tuple[Sequence[BaseMessage | Otherwise[BaseMessage]], Mapping[int, int]]:
    """What was said of a thread, as it stands in a request, and which one each of the request is."""
    if len(given) == len(history) and all(map(is_, given, history)):
        return given, dict(zip(range(len(given)), range(len(given)), strict=True))
    stand = standing([one.id or id(one) for one in history], [one.id or id(one) for one in given])
    return [_as(history[at], given[n]) for n, at in stand.items()], stand


def _as(own: BaseMessage, shown: BaseMessage) -> BaseMessage | Otherwise[BaseMessage]:
    """With the id that it has in the thread."""
    if own is shown:
        return own
    return Otherwise(own, shown if shown.id == own.id else shown.model_copy(update={"id": own.id}))


def _named(model: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(model, name, None))), None)


class Words:
    """How LangChain says things."""

    content_of = attrgetter("content")

    def mark(self, message: BaseMessage) -> Hashable:
        calls = [call["id"] for call in message.tool_calls] if isinstance(message, AIMessage) else ()
        return (message.id, *calls, _frozen(message.content))

    def read(self, message: BaseMessage) -> Message:
        role: Role = "assistant" if isinstance(message, AIMessage) else ROLES.get(message.type, "user")
        if isinstance(message, ToolMessage):
            output = (
                message.content if isinstance(message.content, str) else tuple(map(_part, message.content))
            )
            failed = message.status == "error"
            parts: tuple[Part, ...] = (
                ToolResult(message.tool_call_id, output, message.name, is_error=failed),
            )
            return Message("tool", parts, message.id)
        content = [message.content] if isinstance(message.content, str) else message.content
        said = [_part(one) for one in content if one != ""]
        calls, usage = list[Part](), None
        if isinstance(message, AIMessage):
            said = [part for part in said if not (isinstance(part, Opaque) and _is_call(part.value["value"]))]
            calls = [
                ToolCall(call["id"] or "", call["name"], _json(call["args"])) for call in message.tool_calls
            ]
            usage = message.usage_metadata and _usage(message.usage_metadata)
        return Message(role, (*said, *calls), message.id, usage=usage or None, name=message.name)

    def write(self, message: Message, original: BaseMessage | None) -> BaseMessage:
        if message.results:
            result = message.results[0]
            known = original if isinstance(original, ToolMessage) else None
            if known is not None:
                return known.model_copy(update={"content": message.text})
            status: Any = "error" if result.is_error else "success"
            return ToolMessage(message.text, tool_call_id=result.call_id, name=result.tool, status=status)
        match message.role:
            case "assistant":
                calls = [
                    {
                        "id": call.call_id,
                        "name": call.tool,
                        "args": _arguments(call.input),
                        "type": "tool_call",
                    }
                    for call in message.calls
                ]
                return AIMessage(message.text, tool_calls=calls, id=original.id if original else None)
            case "system":
                return SystemMessage(message.text, id=original.id if original else None)
        content: Any = [_block(part) for part in message.parts] if _has_media(message) else message.text
        return HumanMessage(content, id=original.id if original else None)


def _frozen(value: Any) -> Hashable:
    """Texts as they are: those know their hash."""
    if isinstance(value, dict):
        return (*value, *map(_frozen, value.values()))
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _part(block: Any) -> Any:
    """A block of a content."""
    if isinstance(block, str):
        return Text(block)
    match block:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "reasoning", "reasoning": str(text)} | {"type": "thinking", "thinking": str(text)}:
            return Reasoning(text)
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            return Media("image", url=url)
        case {"type": "image" | "audio" | "file" as kind} if block.get("url") or block.get("base64"):
            return Media(kind, block.get("url"), block.get("base64"), block.get("mime_type"))
    return Opaque({"type": "langchain", "value": msgspec.to_builtins(block)}, "langchain")


def _block(part: Part) -> dict[str, Any]:
    match part:
        case Text(text=text):
            return {"type": "text", "text": text}
        case Media(kind=kind, url=url, data=data, mime=mime):
            where = {"url": url} if url else {"base64": data}
            return {"type": kind, **where, **({"mime_type": mime} if mime else {})}
        case Opaque(value={"type": "langchain", "value": dict(value)}):
            return value
    return {"type": "text", "text": ""}


def _has_media(message: Message) -> bool:
    return any(isinstance(part, Media | Opaque) for part in message.parts)


def _is_call(block: Any) -> bool:
    """Providers repeat calls among the blocks."""
    return isinstance(block, dict) and block.get("type") in ("tool_use", "tool_call", "function_call")


def _usage(given: Any) -> Usage:
    details = given.get("input_token_details") or {}
    cached = (details.get("cache_read") or 0, details.get("cache_creation") or 0)
    return Usage(given.get("input_tokens") or 0, given.get("output_tokens") or 0, *cached)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _arguments(text: str) -> dict[str, Any]:
    value = msgspec.json.decode(text or "{}")
    return value if isinstance(value, dict) else {}
