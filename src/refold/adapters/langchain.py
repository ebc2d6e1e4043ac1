"""For LangChain: `create_agent(model, tools, middleware=[RefoldMiddleware(store=…)])`.

A thread is a conversation; without a thread, each run is one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Annotated, Any, NotRequired, Unpack
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

from refold.adapters.conversation import (
    AdapterConversations,
    AdapterOptions,
    ModelCall,
    RequestMatch,
    lookup_tools,
)
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
from refold.session.history_sync import are_same

ROLES: dict[str, Role] = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system"}
UNNAMED = "run"
"""The conversation of hooks that are called by hand, outside of a run."""
RUN_KEY = "refold_run"
"""The key of the state that names a run without a thread. It is not checkpointed."""


class RefoldState(AgentState[Any]):
    refold_run: NotRequired[Annotated[str, UntrackedValue, PrivateStateAttr]]  # type: ignore[valid-type]


class RefoldMiddleware(AgentMiddleware[Any, Any, Any]):
    """Fits every call of the model. The thread's messages stay unchanged. Serves many threads at once."""

    state_schema = RefoldState

    def __init__(self, **options: Unpack[AdapterOptions]) -> None:
        super().__init__()
        self._conversations = AdapterConversations(LangChainConverter(), **options)
        self._declared: tuple[Sequence[Any], list[dict[str, Any]]] = ((), [])
        self.tools = [self._tool(**about) for about in lookup_tools()]

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        return handler(self._fit(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        return await handler(await asyncio.to_thread(self._fit, request))

    def before_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> dict[str, Any] | None:
        return None if _thread_id(get_config()) else {RUN_KEY: f"run-{uuid4().hex}"}

    async def abefore_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> dict[str, Any] | None:
        return self.before_agent(state, runtime)

    def after_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        """Records the last answer, which no call of the model follows."""
        self._conversations.get(_conversation(state, get_config())).record(state["messages"])

    async def aafter_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        await asyncio.to_thread(self.after_agent, state, runtime)

    def _fit(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """What other middleware inserts into this one request is sent, and not recorded."""
        messages = request.messages
        if not all(isinstance(message, BaseMessage) for message in messages):
            messages = convert_to_messages(messages)
        history: Sequence[Any] = request.state["messages"] or messages
        call = ModelCall(
            str(request.system_message.text) if request.system_message else None,
            self._declarations(request.tools),
            _first_attribute(request.model, "model_name", "model"),
            request.model_settings.get("max_tokens") or _first_attribute(request.model, "max_tokens"),
        )
        conversation = self._conversations.get(_conversation(request.state, get_config()))
        fitted: list[Any] = conversation.fit_request(RequestMatch.of(history, messages, _key), call)
        return request.override(messages=fitted)

    def _declarations(self, tools: Sequence[BaseTool | dict[str, Any]]) -> list[dict[str, Any]]:
        """Cached, since most calls offer the same tools as the one before."""
        known, declarations = self._declared
        if not are_same(known, tools):
            declarations = [convert_to_openai_tool(tool) for tool in tools]
            self._declared = (list(tools), declarations)
        return declarations

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> BaseTool:
        def run(runtime: ToolRuntime, **arguments: Any) -> str:
            conversation = _conversation(runtime.state, runtime.config)
            return self._conversations.get(conversation).call(name, arguments)

        async def arun(runtime: ToolRuntime, **arguments: Any) -> str:
            return await asyncio.to_thread(run, runtime, **arguments)

        return StructuredTool(
            name=name, description=description, args_schema=parameters, func=run, coroutine=arun
        )


def _conversation(state: Mapping[str, Any], config: Any) -> str:
    """An agent that is a tool of another agent has a conversation of its own."""
    name = _thread_id(config) or state.get(RUN_KEY) or UNNAMED
    namespace = str(config.get("configurable", {}).get("checkpoint_ns") or "").rpartition("|")[0]
    return f"{name}/{namespace}" if namespace else name


def _thread_id(config: Any) -> str:
    return str(config.get("configurable", {}).get("thread_id") or "")


def _key(message: BaseMessage) -> Hashable:
    return message.id or id(message)


def _first_attribute(model: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(model, name, None))), None)


class LangChainConverter:
    def parse(self, message: BaseMessage) -> Message:
        content = [message.content] if isinstance(message.content, str) else message.content
        if isinstance(message, ToolMessage):
            output = message.content if isinstance(message.content, str) else tuple(map(_part, content))
            is_error = message.status == "error"
            result = ToolResult(message.tool_call_id, output, message.name, is_error=is_error)
            return Message("tool", (result,), message.id)
        if not isinstance(message, AIMessage):
            parts = [_part(block) for block in content if block != ""]
            return Message(ROLES.get(message.type, "user"), tuple(parts), message.id, name=message.name)
        parts = [_part(block) for block in content if block != "" and not _is_call(block)]
        for call in message.tool_calls:
            parts.append(ToolCall(call["id"] or "", call["name"], msgspec.json.encode(call["args"]).decode()))
        usage = _usage(message.usage_metadata) if message.usage_metadata else None
        return Message("assistant", tuple(parts), message.id, usage=usage, name=message.name)

    def render(self, message: Message, original: BaseMessage | None) -> BaseMessage:
        if message.results:
            if isinstance(original, ToolMessage):
                return original.model_copy(update={"content": message.text})
            result = message.results[0]
            status: Any = "error" if result.is_error else "success"
            return ToolMessage(message.text, tool_call_id=result.call_id, name=result.tool, status=status)
        id = original.id if original else None
        match message.role:
            case "assistant":
                return AIMessage(message.text, tool_calls=[_tool_call(call) for call in message.calls], id=id)
            case "system":
                return SystemMessage(message.text, id=id)
        content: Any = message.text
        if any(isinstance(part, Media | Opaque) for part in message.parts):
            content = [_block(part) for part in message.parts]
        return HumanMessage(content, id=id)


def _part(block: Any) -> Any:
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
            block = {"type": kind, "url": url} if url else {"type": kind, "base64": data}
            return {**block, "mime_type": mime} if mime else block
        case Opaque(value={"type": "langchain", "value": dict(value)}):
            return value
    return {"type": "text", "text": ""}


def _is_call(block: Any) -> bool:
    """Providers repeat calls among the content blocks."""
    return isinstance(block, dict) and block.get("type") in ("tool_use", "tool_call", "function_call")


def _tool_call(call: ToolCall) -> Any:
    arguments = msgspec.json.decode(call.input or "{}")
    if not isinstance(arguments, dict):
        arguments = {}
    return {"id": call.call_id, "name": call.tool, "args": arguments, "type": "tool_call"}


def _usage(metadata: Any) -> Usage:
    details = metadata.get("input_token_details") or {}
    return Usage(
        metadata.get("input_tokens") or 0,
        metadata.get("output_tokens") or 0,
        details.get("cache_read") or 0,
        details.get("cache_creation") or 0,
    )
