"""Runs a demo: an agent reads a folder, and is then asked about something that it read early."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import refold
from refold.agent import Agent, Failed, Replied, Result
from refold.agent.demo.folder import Folder
from refold.agent.demo.model import QUESTION, DemoModel
from refold.agent.events import AgentEvent
from refold.core.errors import RefoldError
from refold.core.event import Replaced, Said
from refold.core.expiry import EXPAND, SEARCH
from refold.core.message import ToolResult, Usage
from refold.session.session import Session
from refold.stores.store import Store

TASK = "Work through this folder: read what is worth reading, and look for who uses what you find."
MAX_ANSWER_STEPS = 20
MIN_WINDOWS = 2
"""A folder with less text than this many windows is too small to show anything."""
EARLY = 0.5
"""The question is about a line from this share of what was read, the oldest."""
LINE_CHARS = range(12, 101)
"""Lengths of a line that can be asked for."""
_VALUE = re.compile(r"""^["']?[A-Za-z_][\w.-]*["']?(?:: \w+)?\s*[:=]\s*.*\d""")
"""A name with a number, which cannot be guessed."""
_PRIVATE = re.compile(r"passw|secret|credential|auth|private|api[_-]?key|\[refold|`", re.IGNORECASE)
"""Text that should not be on a screen, or that would be read as a handle."""
_WORD = re.compile(r"[A-Za-z0-9_]{5,}")


class Question(msgspec.Struct, frozen=True):
    """About an exact line that the agent read early and usually no longer sees."""

    at: int
    """The place of the result that has the line."""
    path: str
    word: str
    line: str
    """The expected answer."""
    is_hidden: bool
    """The view no longer shows it."""


class DemoStep(msgspec.Struct, frozen=True):
    """One call of the model. Sizes are in tokens."""

    step: int
    tool: str
    """The tool that the model called; empty if it answered."""
    argument: str
    """The argument of the call, or the answer."""
    recorded: int
    """Everything recorded before the step, and the tools: the request without refold."""
    sent: int
    """The request, as the provider counts it."""
    output: int
    saved: dict[str, int]
    """By each stage of the compaction right before the step."""


class DemoResult(msgspec.Struct, frozen=True):
    """The outcome of a demo. Sizes are in tokens."""

    folder: str
    conversation: str
    window: int
    steps: tuple[DemoStep, ...]
    ended_without: int | None
    """The first step whose request would not have fit without refold."""
    question: Question | None
    answer: str
    is_right: bool
    found_by: tuple[str, ...]
    """The tools by which the answer was found."""


def choose_folder(root: Path, window: int) -> tuple[Folder, str]:
    """The folder to read, and why it is another one than `root`; empty if it is not."""
    folder = Folder(root)
    if folder.text_bytes // 4 >= MIN_WINDOWS * window:
        return folder, ""
    size = f"only {folder.text_bytes:,} bytes of text" if folder.text_bytes else "no text"
    why = f"{root} has {size}, too little to fill a window of {window:,} tokens"
    return Folder(Path(refold.__file__).parent), why


def run_demo(
    folder: Folder, model: DemoModel, store: Store, conversation: str, on_step: Callable[[DemoStep], None]
) -> DemoResult:
    """Lets the model read, then asks it a question. Calls `on_step` after each step."""
    most_steps = model.steps + MAX_ANSWER_STEPS
    with refold.open(conversation, store=store, config=model.config) as session:
        recorder = StepRecorder(session, on_step)
        agent = Agent(
            "demo",
            model,
            [folder.read_file, folder.grep],
            config=model.config,
            store=store,
            max_steps=most_steps,
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
        conversation=conversation,
        window=model.window,
        steps=tuple(steps),
        ended_without=next((step.step for step in steps if step.recorded > room), None),
        question=question,
        answer=answer,
        is_right=question is not None and question.line in answer,
        found_by=tuple(dict.fromkeys(tools)),
    )


def find_question(session: Session, request: dict[str, Any]) -> Question | None:
    """The best question: hidden before shown, a value before words, early before late.

    None if nothing was read. The word is in no other line of any result, so that there is one answer.
    """
    read: list[tuple[int, ToolResult]] = []
    texts: list[str] = []
    for event in session.events():
        for result in event.message.results if isinstance(event, Said) else ():
            texts += map(str.strip, str(result.output).splitlines())
            if result.tool == "read_file" and not result.is_error:
                read.append((event.at, result))
    shown = "\n".join(str(message.get("content")) for message in request["messages"])
    early = read[: max(1, int(EARLY * len(read)))]
    lines = sorted(_lines(early), key=lambda one: (one[2] in shown, not _VALUE.match(one[2])))
    for at, path, line in lines:
        if word := _own_word(line, texts):
            return Question(at, path, word, line, line not in shown)
    return None


def _lines(read: list[tuple[int, ToolResult]]) -> Iterator[tuple[int, str, str]]:
    for at, result in read:
        head, *lines = str(result.output).splitlines()
        path = head.rpartition(": ")[0]
        for line in map(str.strip, lines):
            if len(line) in LINE_CHARS and not _PRIVATE.search(line):
                yield at, path, line


def _own_word(line: str, texts: Sequence[str]) -> str | None:
    """A word that only this line has: names before numbers, the longest first."""
    words: set[str] = {*_WORD.findall(line)}
    for word in sorted(words, key=lambda word: (word[0].isdigit(), -len(word), word)):
        if all(text.endswith(line) for text in texts if word in text):
            return word
    return None


def _text_of(result: Result) -> str:
    if isinstance(result.end, Failed):
        raise RefoldError(f"The demo stopped, which is a bug. Please report it: {result.text}")
    return result.text


class StepRecorder:
    """Makes a `DemoStep` of each reply, from the events since the reply before it."""

    def __init__(self, session: Session, on_step: Callable[[DemoStep], None]) -> None:
        self.steps: list[DemoStep] = []
        self._session = session
        self._on_step = on_step
        self._next_place = 0
        self._recorded = 0
        """Tokens of all messages, and of the tools."""

    def __call__(self, event: AgentEvent) -> None:
        if not isinstance(event, Replied):
            return
        said: list[Said] = []
        saved: dict[str, int] = {}
        for new in self._session.events(self._next_place):
            self._next_place = new.at + 1
            match new:
                case Said():
                    said.append(new)
                case Replaced(kind=stage, tokens=(before, after)):
                    saved[stage] = saved.get(stage, 0) + before - after
        *others, reply = said
        usage = reply.message.usage or Usage(0)
        self._recorded += sum(one.line.tokens for one in others)
        if not self.steps:  # nothing is hidden yet, so what was not recorded are the tools
            self._recorded = usage.input
        call = next(iter(reply.message.calls), None)
        step = DemoStep(
            step=len(self.steps) + 1,
            tool=call.tool if call else "",
            argument=_argument(call.input) if call else reply.message.text,
            recorded=self._recorded,
            sent=usage.input,
            output=usage.output,
            saved=saved,
        )
        self._recorded += reply.line.tokens
        self.steps.append(step)
        self._on_step(step)


def _argument(written: str) -> str:
    """The arguments of a call in a few words."""
    arguments = msgspec.json.decode(written)
    arguments.pop("lines", None)
    return " ".join(map(str, arguments.values()))
