"""For Strands Agents: `Agent(…, plugins=[RefoldPlugin(store=…, conversation=…)])`.

Without a `conversation`, the agent's session is the conversation; an agent whose messages are cleared begins
another one.
"""

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Hashable, Mapping
from copy import deepcopy
from itertools import groupby, pairwise
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import msgspec
from strands import Agent
from strands.hooks import AfterInvocationEvent, BeforeInvocationEvent
from strands.middleware import InvokeModelContext, InvokeModelStage
from strands.plugins import Plugin
from strands.tools import PythonAgentTool
from strands.types.content import split_system_prompt
from strands.types.session import decode_bytes_values, encode_bytes_values

from refold.adapters.conversation import (
    AdapterConversations,
    AdapterOptions,
    ModelCall,
    RequestMatch,
    declare_function,
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
from refold.session.history_sync import content_id

DIALECT = "strands"
DEFAULT_AGENT_ID = "default"
"""The id that Strands gives to agents without one."""
CACHE_POINT = "cachePoint"
"""A block without content."""
MEDIA_KINDS: dict[str, Any] = {"image": "image", "audio": "audio", "video": "file", "document": "file"}
TEXT_FORMATS = ("txt", "md", "csv", "html")
"""Documents that are plain text."""
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
REMEMBERED_IDS = 10_000
ENCODER = msgspec.msgpack.Encoder(enc_hook=repr)


class RefoldPlugin(Plugin):
    """Fits every call of the model. The agent's own messages stay unchanged."""

    name = "refold"

    def __init__(self, *, conversation: str | None = None, **options: Unpack[AdapterOptions]) -> None:
        super().__init__()
        self._conversations = AdapterConversations(StrandsConverter(), **options)
        self._conversation = conversation
        self._restarts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """How often the messages of each agent were cleared."""
        self._changed: WeakKeyDictionary[Any, list[tuple[Any, Any]]] = WeakKeyDictionary()
        """The contents of an agent's messages that other plugins changed in its last request, as sent."""

    @property
    def tools(self) -> list[Any]:
        return [self._tool(**about) for about in lookup_tools()]

    def init_agent(self, agent: Agent) -> None:
        agent.add_middleware(InvokeModelStage.Input, self._fit)
        agent.add_hook(self._before_invocation, BeforeInvocationEvent)
        agent.add_hook(self._after_invocation, AfterInvocationEvent)

    def _before_invocation(self, event: BeforeInvocationEvent) -> None:
        if not event.agent.messages and event.agent in self._restarts:
            self._restarts[event.agent] += 1

    async def _after_invocation(self, event: AfterInvocationEvent) -> None:
        """Records the last answer, which no call of the model follows."""
        self._restarts.setdefault(event.agent, 0)
        changed = {id(content): message for content, message in self._changed.pop(event.agent, ())}
        messages = list(event.agent.messages)
        sent = [changed.get(id(message["content"]), message) for message in messages]
        conversation = self._conversations.get(self._name(event.agent))
        await asyncio.to_thread(conversation.record, messages, sent=sent)

    async def _fit(self, context: InvokeModelContext) -> InvokeModelContext:
        """What other plugins insert into this one request is sent, and not recorded."""
        added = context.dynamic_trailing_blocks
        request = context.messages
        last = request[-1] if request else None
        match = RequestMatch.of(context.agent.messages, _without_last_blocks(request, added), _key)
        self._changed[context.agent] = [
            (own["content"], sent)
            for own, sent in zip(match.history, match.sent, strict=True)
            if own is not sent
        ]
        conversation = self._conversations.get(self._name(context.agent))
        if context.model.stateful:  # the provider has the history
            await asyncio.to_thread(conversation.record, match.history)
            return context
        messages = await asyncio.to_thread(conversation.fit_request, match, _model_call(context))
        if added and last is not None:
            messages[-1] = {**messages[-1], "content": [*messages[-1]["content"], *last["content"][-added:]]}
        return context.replace(messages=_alternating(messages))

    def _name(self, agent: Any) -> str:
        if self._conversation is not None:
            return self._conversation
        agent_id = "" if agent.agent_id == DEFAULT_AGENT_ID else agent.agent_id
        return "/".join(filter(None, [agent.session_id, agent_id, str(self._restarts.get(agent) or "")]))

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> PythonAgentTool:
        def run(tool_use: Any, *, agent: Any, **rest: Any) -> Any:
            text = self._conversations.get(self._name(agent)).call(name, tool_use["input"])
            return {"toolUseId": tool_use["toolUseId"], "status": "success", "content": [{"text": text}]}

        spec: Any = {"name": name, "description": description, "inputSchema": {"json": parameters}}
        return PythonAgentTool(name, spec, run)


def _key(message: Any) -> Hashable:
    """Strands' id of a message if it has one, or its content."""
    return message.get("tracking_id") or ENCODER.encode([message["role"], message["content"]])


def _without_last_blocks(messages: list[Any], blocks: int) -> list[Any]:
    """Without the blocks at the end that Strands adds anew to each request."""
    if not (blocks and messages):
        return messages
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"][:-blocks]}]


def _model_call(context: InvokeModelContext) -> ModelCall:
    config: Any = context.model.get_config()
    config = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    limits = {**(config.get("params") or {}), **config}
    tools: list[dict[str, Any]] = []
    for spec in context.tool_specs:
        schema = spec["inputSchema"]
        tools.append(declare_function(spec["name"], spec["description"], schema.get("json", schema)))
    return ModelCall(
        split_system_prompt(context.system_prompt)[0],
        tools,
        config.get("model_id"),
        next(filter(None, (limits.get(name) for name in OUTPUT_LIMITS)), None),
    )


def _alternating(messages: list[Any]) -> list[Any]:
    """Joins neighbors of one role: providers require that user and assistant alternate."""
    if all(one["role"] != two["role"] for one, two in pairwise(messages)):
        return messages
    joined: list[Any] = []
    for _, group in groupby(messages, lambda message: message["role"]):
        first, *rest = group
        blocks = [block for message in (first, *rest) for block in message["content"]]
        joined.append({**first, "content": blocks} if rest else first)
    return joined


class StrandsConverter:
    """A message is known by its content, since a restored history may come with other ids.

    While it lives, a message is also known by its id, so that a changed one keeps its identity.
    """

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        """The id of each message's first content, by Strands' own id."""

    def parse(self, message: Any) -> Message:
        parts = tuple(_part(block) for block in message["content"] if CACHE_POINT not in block)
        is_result = parts and all(isinstance(part, ToolResult) for part in parts)
        role: Role = "tool" if is_result else message["role"]
        parsed = Message(role, parts, usage=_usage(message))
        id = content_id([parsed])
        if tracking_id := message.get("tracking_id"):
            if len(self._ids) > REMEMBERED_IDS:
                del self._ids[next(iter(self._ids))]
            id = self._ids.setdefault(tracking_id, id)
        return msgspec.structs.replace(parsed, id=id)

    def render(self, message: Message, original: Any | None) -> Any:
        blocks = original["content"] if original else []
        known = [(_part(block), block) for block in blocks if CACHE_POINT not in block]
        content: list[Any] = []
        for part in message.parts:
            same = next((block for one, block in known if one == part), None)
            block = deepcopy(same) if same else _block(part)
            if block:
                content.append(block)
        content += [dict(block) for block in blocks if CACHE_POINT in block]
        role = "assistant" if message.role == "assistant" else "user"
        rendered = {"role": role, "content": content}
        if original and "tracking_id" in original:
            rendered["tracking_id"] = original["tracking_id"]
        return rendered


def _part(block: Any) -> Any:
    match block:
        case {"text": str(text)} | {"guardContent": {"text": {"text": str(text)}}}:
            return Text(text)
        case {"toolUse": {"toolUseId": id, "name": name, **rest}}:
            return ToolCall(id, name or "unnamed", _json(rest.get("input", {})))
        case {"toolResult": {"toolUseId": id, "content": content, **rest}}:
            output: Any = tuple(map(_part, content))
            match output:
                case ():
                    output = ""
                case (Text(text=text),):
                    output = text
            return ToolResult(id, output, is_error=rest.get("status") == "error")
        case {"json": value}:
            return Text(_json(value))
        case {"reasoningContent": {"reasoningText": {"text": str(text)}}}:
            return Reasoning(text)
        case {"citationsContent": {"content": content}}:
            return Text("".join(one.get("text", "") for one in content))
    family, value = next(iter(block.items()), ("", None))
    media = _media(family, value) if family in MEDIA_KINDS else None
    return media or Opaque({"type": DIALECT, "block": encode_bytes_values(block)}, DIALECT)


def _media(family: str, value: Any) -> Media | None:
    kind = MEDIA_KINDS[family]
    name = value.get("name")
    format = value.get("format")
    if family == "document":
        family = "text" if format in TEXT_FORMATS else "application"
    match value.get("source"):
        case {"bytes": bytes(data)} if data:
            return Media(kind, data=b64encode(data).decode(), mime=f"{family}/{format}", name=name)
        case {"location": {"type": "s3", "uri": str(uri)}}:
            return Media(kind, url=uri, mime=f"{family}/{format}", name=name)
    return None


def _block(part: Part) -> Any:
    """None if the block cannot be made from the part alone, as reasoning without its signature."""
    match part:
        case Text(text=text):
            return {"text": text}
        case ToolCall(call_id=id, tool=tool, input=input):
            return {"toolUse": {"toolUseId": id, "name": tool, "input": json.loads(input or "{}")}}
        case ToolResult(call_id=id, output=output, is_error=is_error):
            inner = [Text(output)] if isinstance(output, str) else output
            status = "error" if is_error else "success"
            return {"toolResult": {"toolUseId": id, "status": status, "content": [*map(_block, inner)]}}
        case Media(url=url, data=data, mime=mime, name=name):
            family, _, format = (mime or "").partition("/")
            source = {"bytes": b64decode(data)} if data else {"location": {"type": "s3", "uri": url}}
            if family in ("image", "audio", "video"):
                return {family: {"format": format, "source": source}}
            return {"document": {"format": format, "name": name or "document", "source": source}}
        case Opaque(value={"block": block}, dialect=dialect) if dialect == DIALECT:
            return decode_bytes_values(block)
    return None


def _usage(message: Any) -> Usage | None:
    used = (message.get("metadata") or {}).get("usage") or {}
    if not used.get("inputTokens"):
        return None
    input = used["inputTokens"]
    output = used.get("outputTokens", 0)
    cache_read = used.get("cacheReadInputTokens", 0)
    cache_write = used.get("cacheWriteInputTokens", 0)
    if input + output != used.get("totalTokens"):  # the provider counts cached tokens separately
        input += cache_read + cache_write
    return Usage(input, output, cache_read, cache_write)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
