"""For LangChain: `create_agent(model, tools, middleware=[RefoldMiddleware(store=…)])`.

The thread is the conversation; without one, each run is its own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

import msgspec
from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain.tools import ToolRuntime
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.config import get_config
from langgraph.runtime import Runtime

from refold.adapters.talk import Ask, Talks, tools
from refold.config import Source
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


class RefoldMiddleware(AgentMiddleware[Any, Any, Any]):
    """Fits every call of the model; the thread's messages stay as they are. Serves many threads at once."""

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

    def after_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        """Keeps the last answer, which no call of the model comes after."""
        self._talks.keep(_thread(state["messages"]), state["messages"])

    async def aafter_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        await asyncio.to_thread(self.after_agent, state, runtime)

    def _fitted(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        messages = request.messages
        ask = Ask(
            None if request.system_message is None else str(request.system_message.text),
            self._tools_of(request.tools),
            _named(request.model, "model_name", "model"),
            request.model_settings.get("max_tokens") or _named(request.model, "max_tokens"),
        )
        fitted: list[Any] = [*self._talks.fit(_thread(messages), messages, ask)]
        return request.override(messages=fitted)

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
            thread = _thread(runtime.state["messages"], runtime.config)
            return self._talks.call(thread, name, arguments)

        async def arun(runtime: ToolRuntime, **arguments: Any) -> str:
            return await asyncio.to_thread(run, runtime, **arguments)

        return StructuredTool(
            name=name,
            description=about["description"],
            args_schema=about["parameters"],
            func=run,
            coroutine=arun,
        )


def _thread(messages: Sequence[AnyMessage], config: Any = None) -> str:
    """An agent that is another one's tool has a conversation of its own."""
    about = (config or get_config()).get("configurable", {})
    thread, inside = about.get("thread_id"), str(about.get("checkpoint_ns") or "").rpartition("|")[0]
    name = str(thread) if thread else f"run-{messages[0].id if messages else 'empty'}"
    return f"{name}/{inside}" if inside else name


def _named(model: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(model, name, None))), None)


class Words:
    """How LangChain says things."""

    def mark(self, message: BaseMessage) -> Hashable:
        content = message.content
        calls = [call["id"] for call in message.tool_calls] if isinstance(message, AIMessage) else ()
        return (message.id, *calls, content if isinstance(content, str) else hash(repr(content)))

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
                return SystemMessage(message.text)
        return HumanMessage([_block(part) for part in message.parts] if _has_media(message) else message.text)


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
