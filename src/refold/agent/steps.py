"""What a reply asks for, as a closed union, and the function that reads it."""

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import msgspec

from refold.agent.tools import Tool
from refold.core import codec
from refold.core.event import Said
from refold.core.lease import OWN
from refold.core.message import ToolCall

CUT_OFF = ("length", "max_tokens", "model_context_window_exceeded", "incomplete", "interrupted")
REFUSED = ("content_filter", "refusal")
"""Why models stop, in the words of their providers."""
MOST_TOLD = 20
"""Names of tools that are told to a model that calls one that is not there."""


class Success(msgspec.Struct, frozen=True):
    """The task is done."""

    text: str


class Chat(msgspec.Struct, frozen=True):
    """Something for the user, whose answer is the task of the next run."""

    text: str


class Failed(msgspec.Struct, frozen=True):
    """The run ends without an answer. What was done stays, and a later run goes on from there."""

    why: str

    @property
    def text(self) -> str:
        return self.why


class Retry(msgspec.Struct, frozen=True):
    """The reply is of no use; the model is told why and asked again."""

    why: str
    call: ToolCall | None = None
    """The call that this is the answer to, where there is one."""


class Action(msgspec.Struct, frozen=True):
    call: ToolCall
    arguments: dict[str, Any]


class Actions(msgspec.Struct, frozen=True):
    """Tools to be run, all at once."""

    calls: tuple[Action, ...]


class SubAgent(msgspec.Struct, frozen=True):
    """A task for another agent, in a conversation of its own."""

    call: ToolCall
    task: str


class ExpandMessage(msgspec.Struct, frozen=True):
    """What was hidden is to be shown again, or searched."""

    calls: tuple[ToolCall, ...]


Step: TypeAlias = Success | Failed | Retry | SubAgent | Actions | Chat | ExpandMessage
End: TypeAlias = Success | Failed | Chat


def read(said: Said, tools: Mapping[str, Tool], agents: Collection[str], chat: bool) -> tuple[Step, ...]:
    """The steps that a reply asks for: one, unless it makes calls of several kinds.

    `agents` are the names of those tools that are other agents; with `chat` every text is for the user.
    """
    message, text = said.message, said.message.text
    cut_off = message.finish in CUT_OFF
    if message.calls:
        why = "Not run: your answer was cut off before its end. Write less at a time." if cut_off else ""
        found = [Retry(why, call) if why else _step(call, tools, agents) for call in message.calls]
        return tuple(_joined(found))
    if message.finish in REFUSED or _has_refused(said):
        return (Retry("That was a refusal. Say what you can do of the task, and do it."),)
    if cut_off:
        return (Retry("Your answer was cut off because it was too long. Answer again, in fewer words."),)
    if not text.strip():
        return (Retry("Your answer was empty. Call a tool, or answer in words."),)
    return (Chat(text) if chat else Success(text),)


def _step(call: ToolCall, tools: Mapping[str, Tool], agents: Collection[str]) -> Action | Step:
    if call.tool in OWN:
        return ExpandMessage((call,))
    tool = tools.get(call.tool)
    if tool is None:
        some = ", ".join(list(tools)[:MOST_TOLD]) or "none"
        return Retry(f"There is no tool {call.tool!r}; there are {some}", call)
    try:
        arguments = tool.read(call.input)
    except ValueError as error:
        return Retry(str(error), call)
    return SubAgent(call, arguments["task"]) if call.tool in agents else Action(call, arguments)


def _joined(found: Collection[Action | Step]) -> list[Step]:
    """What can be one step is."""
    actions = tuple(one for one in found if isinstance(one, Action))
    reads = tuple(call for one in found if isinstance(one, ExpandMessage) for call in one.calls)
    rest = [one for one in found if not isinstance(one, Action | ExpandMessage)]
    return [
        *([ExpandMessage(reads)] if reads else []),
        *([Actions(actions)] if actions else []),
        *rest,
    ]


def _has_refused(said: Said) -> bool:
    """OpenAI's models refuse in a field of its own and stop as always."""
    if said.dialect != "openai-chat" or b'"refusal"' not in (said.raw or b""):
        return False
    value = codec.loads(said.raw or b"{}")
    return isinstance(value, dict) and bool(value.get("refusal"))
