"""Runs a demo: an agent reads a folder, and is then asked about something that it read early."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import refold
from refold.agent import Agent, Asked, Failed, Replied, Result
from refold.agent.demo.folder import Folder
from refold.agent.demo.model import LIKE, QUESTION, DemoModel, cached_tokens
from refold.agent.demo.question import Question, find_question
from refold.agent.events import AgentEvent
from refold.core.errors import RefoldError
from refold.core.event import Replaced, Said
from refold.core.expiry import EXPAND, SEARCH
from refold.core.message import ToolCall, Usage
from refold.models.limits import find
from refold.session.session import Session
from refold.stores.store import Store

TASK = "Work through this folder: list it, read what is worth reading, and look for who uses what you find."
ANSWER_STEPS = 20
"""Steps that the answer may take."""
LEAST_WINDOWS = 2
"""A folder with less text than this many windows is too small to show anything."""


class StageEdits(msgspec.Struct, frozen=True):
    """What one stage of the compaction did before a step."""

    rung: str
    edits: int
    tokens_saved: int


class DemoStep(msgspec.Struct, frozen=True):
    """One call of the model. Sizes are in tokens."""

    step: int
    tool: str
    """The tool that the model called; empty if it answered."""
    argument: str
    """The argument of the call, or the answer."""
    said: int
    """Everything recorded before the step, and the tools: the request without refold."""
    sent: int
    """The request, as the provider counts it."""
    cached: int
    """Tokens of the request that the provider's cache had."""
    output: int
    edits: tuple[StageEdits, ...] = ()


class DemoResult(msgspec.Struct, frozen=True):
    """The outcome of a demo. Sizes are in tokens."""

    folder: str
    files: int
    conversation: str
    window: int
    room: int
    """The window without the room for the output."""
    steps: tuple[DemoStep, ...]
    said: int
    most_sent: int
    ended_without: int | None
    """The first step whose request would not have fit without refold."""
    sent: int
    """By all steps together."""
    sent_without: int
    """By all steps together without refold, in an unlimited window."""
    cost: float
    """USD at the prices of the model `prices`, including its prices for cached tokens."""
    cost_without: float
    prices: str
    question: Question | None
    answer: str
    is_right: bool
    found_by: tuple[str, ...] = ()
    """The tools by which the answer was found."""


def choose_folder(root: Path, window: int) -> tuple[Folder, str]:
    """The folder to read, and why it is another one than `root`; empty if it is not."""
    folder = Folder(root)
    if folder.text_bytes // 4 >= LEAST_WINDOWS * window:
        return folder, ""
    size = f"only {folder.text_bytes:,} bytes of text" if folder.text_bytes else "no text"
    why = f"{root} has {size}, too little to fill a window of {window:,} tokens"
    return Folder(Path(refold.__file__).parent), why


def run_demo(
    folder: Folder, model: DemoModel, store: Store, conversation: str, on_step: Callable[[DemoStep], None]
) -> DemoResult:
    """Lets the model read, then asks it a question. Calls `on_step` after each step."""
    with refold.open(conversation, store=store, config=model.config) as session:
        recorder = StepRecorder(session, on_step)
        agent = Agent(
            "demo",
            model,
            folder.tools,
            config=model.config,
            store=store,
            max_steps=model.steps + ANSWER_STEPS,
            on_event=recorder,
        )
        _text_of(agent.run(TASK, conversation=conversation))
        question = find_question(session, model.requests[-1])
        reading_steps = len(recorder.steps)
        answer = ""
        if question is not None:
            text = QUESTION.format(path=question.path, word=question.word)
            answer = _text_of(agent.run(text, conversation=conversation))
        session.name(title=f"Reading {folder.root.resolve().name}")
    steps = recorder.steps
    room = model.window - model.max_output
    tools = [step.tool for step in steps[reading_steps:] if step.tool in (SEARCH, EXPAND)]
    return DemoResult(
        folder=str(folder.root),
        files=len(folder.files),
        conversation=conversation,
        window=model.window,
        room=room,
        steps=tuple(steps),
        said=steps[-1].said + steps[-1].output,
        most_sent=max(step.sent for step in steps),
        ended_without=next((step.step for step in steps if step.said > room), None),
        sent=sum(step.sent for step in steps),
        sent_without=sum(step.said for step in steps),
        cost=_cost([Usage(step.sent, step.output, cache_read=step.cached) for step in steps]),
        cost_without=_cost(_usage_without(steps)),
        prices=LIKE,
        question=question,
        answer=answer,
        is_right=question is not None and question.line in answer,
        found_by=tuple(dict.fromkeys(tools)),
    )


def _text_of(result: Result) -> str:
    if isinstance(result.end, Failed):
        raise RefoldError(f"The demo stopped, which is a bug. Please report it: {result.text}")
    return result.text


def _usage_without(steps: Sequence[DemoStep]) -> list[Usage]:
    """The usage of each step without refold: every request begins with all of the one before it."""
    usages: list[Usage] = []
    before = 0
    for step in steps:
        usages.append(Usage(step.said, step.output, cache_read=cached_tokens(before)))
        before = step.said
    return usages


def _cost(usages: Sequence[Usage]) -> float:
    return sum(map(find(LIKE, {}).limits.price, usages))


class StepRecorder:
    """Makes a `DemoStep` of each call of the model, while the record is as it was at that moment."""

    def __init__(self, session: Session, on_step: Callable[[DemoStep], None]) -> None:
        self.steps: list[DemoStep] = []
        self._session = session
        self._on_step = on_step
        self._next_place = 0
        self._recorded_tokens = 0
        self._tool_tokens: int | None = None
        """Tokens of a request besides its messages."""
        self._edits: tuple[StageEdits, ...] = ()

    def __call__(self, event: AgentEvent) -> None:
        match event:
            case Asked():
                self._edits = self._read_events()
            case Replied():
                before = self._recorded_tokens
                self._read_events()
                self.steps.append(self._step(before))
                self._on_step(self.steps[-1])

    def _read_events(self) -> tuple[StageEdits, ...]:
        """Reads the new events, and returns the edits among them."""
        found: dict[str, StageEdits] = {}
        for event in self._session.events(self._next_place):
            self._next_place = event.at + 1
            match event:
                case Said(line=line):
                    self._recorded_tokens += line.tokens
                    self._newest = event
                case Replaced(kind=rung, tokens=(before, after)):
                    so_far = found.get(rung, StageEdits(rung, 0, 0))
                    found[rung] = StageEdits(rung, so_far.edits + 1, so_far.tokens_saved + before - after)
        return tuple(found.values())

    def _step(self, recorded: int) -> DemoStep:
        message = self._newest.message
        usage = message.usage or Usage(0)
        if self._tool_tokens is None:  # nothing is hidden yet
            self._tool_tokens = usage.input - recorded
        call = next(iter(message.calls), None)
        return DemoStep(
            step=len(self.steps) + 1,
            tool=call.tool if call else "",
            argument=_argument(call) if call else message.text,
            said=recorded + self._tool_tokens,
            sent=usage.input,
            cached=usage.cache_read,
            output=usage.output,
            edits=self._edits,
        )


def _argument(call: ToolCall) -> str:
    """The arguments of a call in a few words."""
    arguments = msgspec.json.decode(call.input)
    lines = f":{arguments['first']}" if "first" in arguments else ""
    words: list[str] = []
    for name, value in arguments.items():
        if name not in ("first", "lines"):
            words.append(f"#{value}" if isinstance(value, int) else str(value))
    return " ".join(words) + lines
