"""For Strands Agents: `Agent(…, plugins=[RefoldPlugin(store=…, conversation=…)])`.

Without a `conversation` it is the agent's session; when its messages are taken away, it begins another.
"""

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Hashable, Iterable, Mapping
from copy import deepcopy
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from strands import Agent
from strands.hooks import AfterInvocationEvent, BeforeInvocationEvent
from strands.middleware import InvokeModelContext, InvokeModelStage
from strands.plugins import Plugin
from strands.tools import PythonAgentTool
from strands.types.content import split_system_prompt
from strands.types.session import decode_bytes_values, encode_bytes_values

from refold.adapters.align import numbered, standing, woven
from refold.adapters.conversation import Ask, Talks, tools
from refold.adapters.synced_history import Otherwise
from refold.config.config import Source
from refold.core import codec
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

DIALECT = "strands"
UNNAMED = "default"
"""The id of an agent that was given none."""
MARK = "cachePoint"
"""A block that says nothing."""
FAMILIES: dict[str, Any] = {"image": "image", "audio": "audio", "video": "file", "document": "file"}
ENCODER = msgspec.msgpack.Encoder(enc_hook=repr)
IDS = 10_000
"""Messages whose first words are remembered."""
TEXTS = ("txt", "md", "csv", "html")
"""Documents that are nothing but text."""


class RefoldPlugin(Plugin):
    """Fits every call of the model; the agent's own messages stay as they are."""

    name = "refold"

    def __init__(
        self,
        *,
        store: str | Store | None = None,
        conversation: str | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        super().__init__()
        self._talks = Talks(Words(), store=store, model=model, config=config, agent=agent)
        self._conversation = conversation
        self._begun: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._asked: WeakKeyDictionary[Any, list[_Asked]] = WeakKeyDictionary()

    @property
    def tools(self) -> list[Any]:
        return [self._tool(one) for one in tools()]

    def init_agent(self, agent: Agent) -> None:
        agent.add_middleware(InvokeModelStage.Input, self._fitted)
        agent.add_hook(self._begins, BeforeInvocationEvent)
        agent.add_hook(self._ends, AfterInvocationEvent)

    def _begins(self, event: BeforeInvocationEvent) -> None:
        if not event.agent.messages and event.agent in self._begun:
            self._begun[event.agent] += 1

    async def _ends(self, event: AfterInvocationEvent) -> None:
        """Keeps the last answer, which no call of the model comes after."""
        self._begun.setdefault(event.agent, 0)
        others = {id(one.content): one.said for one in self._asked.pop(event.agent, ())}
        said = [others.get(id(one["content"]), one) for one in event.agent.messages]
        await asyncio.to_thread(self._talks.keep, self._name(event.agent), said, is_asked=True)

    async def _fitted(self, context: InvokeModelContext) -> InvokeModelContext:
        """What others add to the messages of this one request stays in it, and out of the record."""
        given, name, added = context.messages, self._name(context.agent), context.dynamic_trailing_blocks
        said, stand = _said(list(context.agent.messages), _without(given, added))
        self._asked[context.agent] = [
            _Asked(one, one.own["content"]) for one in said if isinstance(one, Otherwise)
        ]
        if context.model.stateful:  # the provider has what was said before
            await asyncio.to_thread(self._talks.keep, name, said)
            return context
        passing = {n: one for n, one in enumerate(given) if n not in stand}
        shown = await self._talks.afit(name, said, _ask(context, passing.values()))
        handed = [one.shown if isinstance(one, Otherwise) else one for one in said]
        places = {id(one): n for one, n in zip(handed, stand, strict=True)}
        messages = [given[places[id(one)]] if id(one) in places else one for one in shown]
        if passing:
            messages = woven(messages, [places.get(id(one)) for one in shown], passing)
        if added and messages[-1] is not given[-1]:
            last = messages[-1]
            messages[-1] = {**last, "content": [*last["content"], *given[-1]["content"][-added:]]}
        return context.replace(messages=_joined(messages))

    def _name(self, agent: Any) -> str:
        if self._conversation is not None:
            return self._conversation
        own = "" if agent.agent_id == UNNAMED else agent.agent_id
        return "/".join(filter(None, [agent.session_id, own, str(self._begun.get(agent) or "")]))

    def _tool(self, about: dict[str, Any]) -> PythonAgentTool:
        def run(tool_use: Any, *, agent: Any, **rest: Any) -> Any:
            said = self._talks.call(self._name(agent), about["name"], tool_use["input"])
            return {"toolUseId": tool_use["toolUseId"], "status": "success", "content": [{"text": said}]}

        spec: Any = {"name": about["name"], "description": about["description"]}
        spec["inputSchema"] = {"json": about["parameters"]}
        return PythonAgentTool(about["name"], spec, run)


class _Asked(NamedTuple):
    """What the model was asked last in other words than the agent's."""

    said: Otherwise[Any]
    content: Any
    """The agent's own words, as long as they are not changed."""


def _said(history: list[Any], given: list[Any]) -> tuple[list[Any], dict[int, int]]:
    """What was said of a history, as it stands in a request, and which one each of the request is."""
    if given == history:
        return history, {n: n for n in range(len(given))}
    stand = standing(_keys(history), _keys(given))
    pairs = ((history[at], given[n]) for n, at in stand.items())
    return [one if one == two else Otherwise(one, two) for one, two in pairs], stand


def _keys(messages: list[Any]) -> list[Hashable]:
    """By which copies are known."""
    return numbered([message.get("tracking_id") or Words().mark(message) for message in messages])


def _without(messages: list[Any], blocks: int) -> list[Any]:
    """So many of the newest that are made anew for each request."""
    if not (blocks and messages):
        return messages
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"][:-blocks]}]


def _ask(context: InvokeModelContext, passing: Iterable[Any]) -> Ask:
    """What stands in this request only is counted with the system text."""
    lent = [Words().read(one).text for one in passing]
    config: Any = context.model.get_config()
    config = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    limits = {**(config.get("params") or {}), **config}
    lengths = (limits.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
    return Ask(
        "\n\n".join(filter(None, [split_system_prompt(context.system_prompt)[0], *lent])) or None,
        [_declared(spec) for spec in context.tool_specs],
        config.get("model_id"),
        next(filter(None, lengths), None),
    )


def _declared(spec: Any) -> dict[str, Any]:
    schema = spec["inputSchema"]
    about = {"name": spec["name"], "description": spec["description"]}
    return {"type": "function", "function": {**about, "parameters": schema.get("json", schema)}}


def _joined(messages: list[Any]) -> list[Any]:
    """User and assistant take turns: providers insist on it."""
    if all(one["role"] != two["role"] for one, two in pairwise(messages)):
        return messages
    joined = list[Any]()
    for _, group in groupby(messages, lambda message: message["role"]):
        first, *rest = group
        blocks = [block for one in (first, *rest) for block in one["content"]]
        joined.append({**first, "content": blocks} if rest else first)
    return joined


class Words:
    """How Strands says things.

    Its ids are not those of the record: a history that is restored may come with others. So a message is
    known by what it says, and while it lives also by its id, whatever it says then.
    """

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def mark(self, message: Any) -> Hashable:
        seen = [_seen(block) for block in message["content"] if MARK not in block]
        return (message.get("tracking_id"), message["role"], *seen)

    def read(self, message: Any) -> Message:
        parts = tuple(_part(block) for block in message["content"] if MARK not in block)
        answers = parts and all(isinstance(part, ToolResult) for part in parts)
        role: Role = "tool" if answers else message["role"]
        id = f"said-{blake2b(codec.dumps([role, parts]), digest_size=12).hexdigest()}"
        own = message.get("tracking_id")
        if own and len(self._ids) > IDS:
            del self._ids[next(iter(self._ids))]
        return Message(role, parts, self._ids.setdefault(own, id) if own else id, usage=_usage(message))

    def write(self, message: Message, original: Any | None) -> Any:
        blocks = original["content"] if original else []
        known = [(_part(block), block) for block in blocks if MARK not in block]
        content = list[Any]()
        for part in message.parts:
            block = next((block for one, block in known if one == part), None)
            content.append(deepcopy(block) if block else _block(part))
        marks = [dict(block) for block in blocks if MARK in block]
        own = {"tracking_id": original["tracking_id"]} if original and "tracking_id" in original else {}
        role = "assistant" if message.role == "assistant" else "user"
        return {"role": role, "content": [*filter(None, content), *marks], **own}


def _seen(block: Any) -> Hashable:
    """Texts and bytes as they are: those know their hash."""
    if "text" in block:
        return str(block["text"])
    if "toolResult" in block:
        result = block["toolResult"]
        return (result["toolUseId"], result.get("status"), *map(_seen, result["content"]))
    return ENCODER.encode(block) if "toolUse" in block else _leaves(block)


def _leaves(value: Any) -> Hashable:
    if isinstance(value, dict):
        return (*value, *map(_leaves, value.values()))
    return tuple(map(_leaves, value)) if isinstance(value, list) else value


def _part(block: Any) -> Any:
    match block:
        case {"text": str(text)} | {"guardContent": {"text": {"text": str(text)}}}:
            return Text(text)
        case {"toolUse": {"toolUseId": id, "name": name, **rest}}:
            return ToolCall(id, name or "unnamed", _json(rest.get("input", {})))
        case {"toolResult": {"toolUseId": id, "content": content, **rest}}:
            return ToolResult(
                id, _output([_part(one) for one in content]), is_error=rest.get("status") == "error"
            )
        case {"json": value}:
            return Text(_json(value))
        case {"reasoningContent": {"reasoningText": {"text": str(text)}}}:
            return Reasoning(text)
        case {"citationsContent": {"content": content}}:
            return Text("".join(one.get("text", "") for one in content))
    family, value = next(iter(block.items()), ("", None))
    media = _media(family, value) if family in FAMILIES else None
    return media or Opaque({"type": DIALECT, "block": encode_bytes_values(block)}, DIALECT)


def _output(parts: list[Any]) -> Any:
    match parts:
        case []:
            return ""
        case [Text(text=text)]:
            return text
    return tuple(parts)


def _media(family: str, value: Any) -> Media | None:
    kind, name, form = FAMILIES[family], value.get("name"), value.get("format")
    family = ("text" if form in TEXTS else "application") if family == "document" else family
    match value.get("source"):
        case {"bytes": bytes(data)} if data:
            return Media(kind, data=b64encode(data).decode(), mime=f"{family}/{form}", name=name)
        case {"location": {"type": "s3", "uri": str(uri)}}:
            return Media(kind, url=uri, mime=f"{family}/{form}", name=name)
    return None


def _block(part: Part) -> Any:
    """None for what cannot be said without what is lost, like reasoning without its signature."""
    match part:
        case Text(text=text):
            return {"text": text}
        case ToolCall(call_id=id, tool=tool, input=input):
            return {"toolUse": {"toolUseId": id, "name": tool, "input": json.loads(input or "{}")}}
        case ToolResult(call_id=id, output=output, is_error=failed):
            inner = [Text(output)] if isinstance(output, str) else output
            content, status = [*map(_block, inner)], "error" if failed else "success"
            return {"toolResult": {"toolUseId": id, "status": status, "content": content}}
        case Media(url=url, data=data, mime=mime, name=name):
            family, _, form = (mime or "").partition("/")
            source = {"bytes": b64decode(data)} if data else {"location": {"type": "s3", "uri": url}}
            if family in ("image", "audio", "video"):
                return {family: {"format": form, "source": source}}
            return {"document": {"format": form, "name": name or "document", "source": source}}
        case Opaque(value={"block": block}, dialect=dialect) if dialect == DIALECT:
            return decode_bytes_values(block)
    return None


def _usage(message: Any) -> Usage | None:
    used = (message.get("metadata") or {}).get("usage") or {}
    if not used.get("inputTokens"):
        return None
    asked, answered = used["inputTokens"], used.get("outputTokens", 0)
    cached = (used.get("cacheReadInputTokens", 0), used.get("cacheWriteInputTokens", 0))
    apart = asked + answered != used.get("totalTokens")  # whether the sum has what the cache had, too
    return Usage(asked + sum(cached) if apart else asked, answered, *cached)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
