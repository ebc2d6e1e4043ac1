"""The steps that a reply can ask for, as a closed union, and the function that parses them."""

from collections.abc import Collection, Mapping, Sequence
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
MOST_NAMES = 20
"""Tools that are listed for a model that calls an unknown one."""


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
End: TypeAlias = Success | Failed | Chat


def parse_steps(
    reply: Said, tools: Mapping[str, Tool], agents: Collection[str], chat: bool
) -> tuple[Step, ...]:
    """The steps that a reply asks for: one, unless it makes calls of several kinds.

    `agents` are the names of those tools that are other agents; with `chat` every text is for the user.
    """
    message = reply.message
    is_cut_off = message.finish in CUT_OFF
    if message.calls and is_cut_off:
        why = "Not run: your answer was cut off before its end. Write less at a time."
        return tuple(Retry(why, call) for call in message.calls)
    if message.calls:
        return tuple(_steps_of_calls(message.calls, tools, agents))
    if message.finish in REFUSED or _has_refused(reply):
        return (Retry("That was a refusal. Say what you can do of the task, and do it."),)
    if is_cut_off:
        return (Retry("Your answer was cut off because it was too long. Answer again, in fewer words."),)
    if not message.text.strip():
        return (Retry("Your answer was empty. Call a tool, or answer in words."),)
    return (Chat(message.text) if chat else Success(message.text),)


def _steps_of_calls(
    calls: Sequence[ToolCall], tools: Mapping[str, Tool], agents: Collection[str]
) -> list[Step]:
    """All look-ups are one step, and so are all actions."""
    lookups: list[ToolCall] = []
    actions: list[Action] = []
    rest: list[Step] = []
    for call in calls:
        if call.tool in OWN_TOOLS:
            lookups.append(call)
            continue
        tool = tools.get(call.tool)
        if tool is None:
            names = ", ".join(list(tools)[:MOST_NAMES]) or "none"
            rest.append(Retry(f"There is no tool {call.tool!r}; there are {names}", call))
            continue
        try:
            arguments = tool.parse_arguments(call.input)
        except ValueError as error:
            rest.append(Retry(str(error), call))
            continue
        if call.tool in agents:
            rest.append(SubAgent(call, arguments["task"]))
        else:
            actions.append(Action(call, arguments))
    if actions:
        rest.insert(0, Actions(tuple(actions)))
    if lookups:
        rest.insert(0, ExpandMessage(tuple(lookups)))
    return rest


def _has_refused(reply: Said) -> bool:
    """OpenAI's models put a refusal into a field of its own; the finish reason is the usual one."""
    if reply.dialect != "openai-chat" or b'"refusal"' not in (reply.raw or b""):
        return False
    value = codec.loads(reply.raw or b"{}")
    return isinstance(value, dict) and bool(value.get("refusal"))
