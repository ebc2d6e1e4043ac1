"""One demonstration from its first step to its last: an agent reads, and is asked about the beginning."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import refold
from refold.agent import Agent, Asked, Failed, Replied, Result
from refold.agent.demo.folder import Folder
from refold.agent.demo.model import LIKE, QUESTION, Model, cached
from refold.agent.demo.question import Question, question_about
from refold.agent.events import AgentEvent
from refold.core.errors import RefoldError
from refold.core.event import Replaced, Said
from refold.core.lease import EXPAND, SEARCH
from refold.core.message import ToolCall, Usage
from refold.models.limits import find
from refold.session.session import Session
from refold.stores.store import Store

TASK = "Work through this folder: list it, read what is worth reading, and look for who uses what you find."
ANSWERING = 20
"""Steps that the answer may take."""
FULL = 2
"""A folder with less text than so many windows is too small to show anything."""


class Edits(msgspec.Struct, frozen=True):
    """What one rung did before a step."""

    rung: str
    edits: int
    tokens_saved: int


class Step(msgspec.Struct, frozen=True):
    """One call of the model. All in tokens."""

    step: int
    tool: str
    """What it called; nothing where it answered."""
    argument: str
    """Of the call; or the answer."""
    said: int
    """All that was said before it, tools included: the request without refold."""
    sent: int
    """The request, as the provider counts it."""
    cached: int
    """What of it the provider's cache had."""
    output: int
    edits: tuple[Edits, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """What came of it."""

    folder: str
    files: int
    conversation: str
    window: int
    room: int
    """Of the window, besides the answer."""
    steps: tuple[Step, ...]
    said: int
    most_sent: int
    ended_without: int | None
    """The step at which the request would not have fit any more without refold."""
    sent: int
    """By all steps together."""
    sent_without: int
    """The same in a window without end."""
    cost: float
    """USD at the prices of `prices`, cached tokens at theirs."""
    cost_without: float
    prices: str
    question: Question | None
    answer: str
    is_right: bool
    found_by: tuple[str, ...] = ()
    """The tools by which the answer was found."""


def chosen(root: Path, window: int) -> tuple[Folder, str]:
    """The folder to read, and why it is another one; '' where it is not."""
    folder = Folder(root)
    if folder.text_bytes // 4 >= FULL * window:
        return folder, ""
    own = Folder(Path(refold.__file__).parent)
    files = "no text" if not folder.text_bytes else f"only {folder.text_bytes:,} bytes of text"
    return own, f"{root} has {files}, too little to fill a window of {window:,} tokens"


def run(
    folder: Folder, model: Model, store: Store, conversation: str, tell: Callable[[Step], None]
) -> Outcome:
    """Reads for as long as the model does, and then asks it a question; `tell` is given each step."""
    with refold.open(conversation, store=store, config=model.config) as record:
        watch, most = Watch(record, tell), model.steps + ANSWERING
        agent = Agent(
            "demo", model, folder.tools, config=model.config, store=store, max_steps=most, on_event=watch
        )
        _demand_done(agent.run(TASK, conversation=conversation))
        asked = question_about(record, model.requests[-1])
        read, answer = len(watch.steps), ""
        if asked is not None:
            question = QUESTION.format(path=asked.path, word=asked.word)
            answer = _demand_done(agent.run(question, conversation=conversation))
        record.name(title=f"Reading {folder.root.resolve().name}")
    return _outcome(folder, model, conversation, watch, asked, answer, watch.steps[read:])


def _demand_done(result: Result) -> str:
    if isinstance(result.end, Failed):
        raise RefoldError(f"The demo stopped, which is a bug. Please report it: {result.text}")
    return result.text


class Watch:
    """Makes steps of what an agent tells, at the moment it happens: the record is as it was then."""

    def __init__(self, record: Session, tell: Callable[[Step], None]) -> None:
        self.record, self.tell = record, tell
        self.steps: list[Step] = []
        self._seen = self._said = 0
        self._beside: int | None = None
        """What a request takes besides what was said: tools."""
        self._edits: tuple[Edits, ...] = ()

    def __call__(self, event: AgentEvent) -> None:
        match event:
            case Asked():
                self._edits = self._read()
            case Replied():
                before = self._said
                self._read()
                self.steps.append(self._step(before))
                self.tell(self.steps[-1])

    def _read(self) -> tuple[Edits, ...]:
        """Takes in what is new, and says which edits are among it."""
        found: dict[str, Edits] = {}
        for event in self.record.events(self._seen):
            self._seen = event.at + 1
            match event:
                case Said(line=line):
                    self._said, self._newest = self._said + line.tokens, event
                case Replaced(kind=rung, tokens=(before, after)):
                    so_far = found.get(rung, Edits(rung, 0, 0))
                    found[rung] = Edits(rung, so_far.edits + 1, so_far.tokens_saved + before - after)
        return tuple(found.values())

    def _step(self, before: int) -> Step:
        message = self._newest.message
        usage = message.usage or Usage(0)
        if self._beside is None:  # nothing is hidden yet
            self._beside = usage.input - before
        before += self._beside
        call: ToolCall | None = next(iter(message.calls), None)
        tool, argument = (call.tool, _argument(call)) if call else ("", message.text)
        number = len(self.steps) + 1
        return Step(number, tool, argument, before, usage.input, usage.cache_read, usage.output, self._edits)


def _argument(call: ToolCall) -> str:
    """What of a call is worth a look."""
    given = msgspec.json.decode(call.input)
    lines = f":{given['first']}" if "first" in given else ""
    values = [value for key, value in given.items() if key not in ("first", "lines")]
    return " ".join(f"#{value}" if isinstance(value, int) else str(value) for value in values) + lines


def _outcome(
    folder: Folder,
    model: Model,
    conversation: str,
    watch: Watch,
    asked: Question | None,
    answer: str,
    answering: Sequence[Step],
) -> Outcome:
    steps, window = watch.steps, model.window
    room = window - model.max_output
    prices = find(LIKE, {}).limits
    appended = [0, *(step.said for step in steps)]
    without = [
        Usage(step.said, step.output, cache_read=cached(before))
        for before, step in zip(appended, steps, strict=False)
    ]
    withal = [Usage(step.sent, step.output, cache_read=step.cached) for step in steps]
    return Outcome(
        folder=str(folder.root),
        files=len(folder.files),
        conversation=conversation,
        window=window,
        room=room,
        steps=tuple(steps),
        said=steps[-1].said + steps[-1].output,
        most_sent=max(step.sent for step in steps),
        ended_without=next((step.step for step in steps if step.said > room), None),
        sent=sum(step.sent for step in steps),
        sent_without=sum(step.said for step in steps),
        cost=sum(map(prices.price, withal)),
        cost_without=sum(map(prices.price, without)),
        prices=LIKE,
        question=asked,
        answer=answer,
        is_right=asked is not None and asked.line in answer,
        found_by=tuple(dict.fromkeys(step.tool for step in answering if step.tool in (SEARCH, EXPAND))),
    )
