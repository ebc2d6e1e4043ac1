"""The steps that a reply can ask for, as a closed union, and the function that parses them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from refold.agent.tools import Tool
from refold.core import codec
from refold.core.event import Said
from refold.core.expiry import OWN_TOOLS
from refold.core.message import ToolCall

CUT_OFF = ("length", "max_tokens", "model_context_window_exceeded", "incomplete", "interrupted")
REFUSED = ("content_filter", "refusal")
"""Finish reasons of all providers."""
MAX_LISTED_TOOLS = 20


class Success(msgspec.Struct, frozen=True):
    """The task is done."""

    text: str


class Chat(msgspec.Struct, frozen=True):
    """A text for the user, whose answer is the task of the next run."""

    text: str


class Failed(msgspec.Struct, frozen=True):
    """The run ends without an answer. What was done stays, and a later run continues from there."""

    why: str

    @property
    def text(self) -> str:
        return self.why


class Retry(msgspec.Struct, frozen=True):
    """The reply is unusable; the model is told why and asked again."""

    why: str
    call: ToolCall | None = None
    """The call whose result this is; None if the whole reply is unusable."""


class Action(msgspec.Struct, frozen=True):
    call: ToolCall
    arguments: dict[str, Any]


class Actions(msgspec.Struct, frozen=True):
    """Tools to run, all at once."""

    calls: tuple[Action, ...]


class SubAgent(msgspec.Struct, frozen=True):
    """A task for another agent, in a conversation of its own."""

    call: ToolCall
    task: str


class ExpandMessage(msgspec.Struct, frozen=True):
    """Calls of refold_expand and refold_search."""

    calls: tuple[ToolCall, ...]


Step: TypeAlias = Success | Failed | Retry | SubAgent | Actions | Chat | ExpandMessage
CallStep: TypeAlias = Retry | SubAgent | Actions | ExpandMessage
End: TypeAlias = Success | Failed | Chat


def parse_steps(
    reply: Said, tools: Mapping[str, Tool], agents: Collection[str], chat: bool
) -> tuple[Step, ...]:
    """The steps that a reply asks for: one, unless it makes calls of several kinds.

    `agents` are the names of those tools that are other agents; with `chat` every text is for the user.
    """
    message = reply.message
    if message.calls:
        return _grouped(parse_call(reply, call, tools, agents) for call in message.calls)
    if message.finish in REFUSED or _has_refused(reply):
        return (Retry("That was a refusal. Say what you can do of the task, and do it."),)
    if message.finish in CUT_OFF:
        return (Retry("Your answer was cut off because it was too long. Answer again, in fewer words."),)
    if not message.text.strip():
        return (Retry("Your answer was empty. Call a tool, or answer in words."),)
    return (Chat(message.text) if chat else Success(message.text),)


def parse_call(reply: Said, call: ToolCall, tools: Mapping[str, Tool], agents: Collection[str]) -> CallStep:
    """The step that one of the reply's calls asks for."""
    if reply.message.finish in CUT_OFF:
        return Retry("Not run: your answer was cut off before its end. Write less at a time.", call)
    if call.tool in OWN_TOOLS:
        return ExpandMessage((call,))
    tool = tools.get(call.tool)
    if tool is None:
        names = ", ".join(list(tools)[:MAX_LISTED_TOOLS]) or "none"
        return Retry(f"There is no tool {call.tool!r}; there are {names}", call)
    try:
        arguments = tool.parse_arguments(call.input)
    except ValueError as error:
        return Retry(str(error), call)
    if call.tool in agents:
        return SubAgent(call, arguments["task"])
    return Actions((Action(call, arguments),))


def _grouped(steps: Iterable[CallStep]) -> tuple[Step, ...]:
    """All look-ups as one step, all actions as one, then the others."""
    lookups: list[ToolCall] = []
    actions: list[Action] = []
    rest: list[Step] = []
    for step in steps:
        match step:
            case ExpandMessage(calls):
                lookups += calls
            case Actions(calls):
                actions += calls
            case _:
                rest.append(step)
    if actions:
        rest.insert(0, Actions(tuple(actions)))
    if lookups:
        rest.insert(0, ExpandMessage(tuple(lookups)))
    return tuple(rest)


def _has_refused(reply: Said) -> bool:
    """OpenAI's models put a refusal into a field of its own; the finish reason is the usual one."""
    if reply.dialect != "openai-chat" or b'"refusal"' not in (reply.raw or b""):
        return False
    value = codec.loads(reply.raw or b"{}")
    return isinstance(value, dict) and bool(value.get("refusal"))
