"""What happened: one stream of facts per conversation, appended to and never changed.

Said      a message entered the conversation
Replaced  a span of it is now shown as something shorter
Undone    an earlier Replaced, Pinned or Undone no longer holds
Pinned    messages that are shown whatever replaces what is around them
Measured  what the provider says a request took
Called    a model was asked for a summary, and what came of it
Named     the conversation was given a title, or a model
Unknown   a fact of a kind that only a newer refold understands

The place of an event in its stream, `at`, never moves: it is the handle that everybody uses.

An event is stored in two parts, its head and its body (the texts). `HEAD` names the fields of the head, in
the order of their array; `BODY` names the fields of the body, with the values that stand for them where only
the head was read. `core/codec.py` encodes both.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from refold.core.message import Kind, Message, Role, Usage


class Span(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The places from `start` up to, not including, `end`."""

    start: int
    end: int

    def __contains__(self, at: int) -> bool:
        return self.start <= at < self.end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __len__(self) -> int:
        return self.end - self.start

    def covers(self, other: "Span") -> bool:
        return self.start <= other.start and other.end <= self.end

    def meets(self, other: "Span") -> bool:
        return self.start < other.end and other.start < self.end


class Expiry(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a message may be reduced, as its sender wished; unset means as configured."""

    after_steps: int | None = None
    """Intact for so many steps after the one that brought it; 0 is a number, unset means never."""
    mode: Literal["none", "remove", "compact"] | None = None
    """What becomes of it then: nothing, only its name is left, or it is shown shorter; unset, shorter."""
    compact_mode: Literal["first-n-chars", "ai-summary", "skeleton"] | None = None
    """Shorter how: its beginning, what a model writes, or keys, values and errors; unset, its beginning."""
    length: int | None = None
    """Characters that stay; unset, 500."""
    prompt: str | None = None
    """What the summarizer is asked: a text, or a file where it ends in `.md` or `.txt`."""
    strategy: Literal["age", "relevance"] | None = None
    """All that is old expires, or of that only what has little to do with the work at hand: with the words,
    identifiers and quotations of the newest messages, or with their meaning where there is an embedder;
    unset, all."""
    threshold: float | None = None
    """With `relevance`: what is less relevant than this expires; unset, 0.3."""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A shown message without its words: all that views, policies and checks need to know of it."""

    at: int
    """The event that has the words: the Said, or the Replaced that shows something new."""
    role: Role
    tokens: int
    turn: int
    """Messages of the user that ask for something, up to and including this one."""
    step: int
    """Assistant messages up to and including this one."""
    calls: tuple[str, ...] = ()
    """Ids of the tool calls it makes."""
    answers: str | None = None
    """Id of the tool call it answers."""
    tools: tuple[str, ...] = ()
    """Names of the tools it calls or answers for, as far as they are known."""
    n: int = 0
    """Which of the event's messages."""
    apart: bool = False
    """It is system text that stands apart from the messages: only the newest is ever shown."""
    whole: int | None = None
    """Place where the message begins that it was a part of, where one was taken apart."""
    expiry: Expiry | None = None
    """When it may be reduced, where its sender said so."""
    summary: bool = False
    """It stands for messages that are not shown: nobody asks for anything with it."""
    corrects: int | None = None
    """Place of the message that somebody put it in the place of."""
    retry: bool = False
    """In the user's place it only tells the model to try again: nobody asks for anything with it."""
    recalled: bool = False
    """It is what a service remembers, shown beside a message: nobody said it."""
    wordless: bool = False
    """A user's message without text or sound, such as a screenshot: nobody asks for anything with it."""

    @property
    def place(self) -> int:
        """Where it was said; of a correction, where that was said which it corrects."""
        return self.at if self.corrects is None else self.corrects

    @property
    def asks(self) -> bool:
        """It is the user's own: the task, or a later request."""
        is_about = self.summary or self.retry or self.recalled or self.wordless
        return self.role == "user" and not is_about


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message that was taken apart, one tool result each: neighbors make up the whole again."""

    n: int
    """Which piece, from 0; the whole begins so many places before."""
    of: int
    """How many there are."""
    blocks: tuple[int, ...]
    """Where its blocks stood in the whole."""


class Said(msgspec.Struct, frozen=True):
    line: Line
    message: Message
    index: int
    """Which message of the conversation this is, counting messages only."""
    total: int
    """Tokens of all messages up to and including this one."""
    time: float
    dialect: str | None = None
    raw: bytes | None = None
    """The provider's own JSON, where the message came as such."""
    tags: tuple[str, ...] = ()
    kind: Kind | None = None
    piece: Piece | None = None

    @property
    def at(self) -> int:
        return self.line.at

    @property
    def expiry(self) -> Expiry | None:
        return self.line.expiry


class Certificate(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a summary rests on, and what was done to it before it counted."""

    digest: str = ""
    """Of the record up to the end of what it stands for: the hash chain's own."""
    model: str | None = None
    """Who wrote it; None where all of it was put together by rule."""
    kept: int = 0
    """Sentences of the model's that stayed."""
    struck: tuple[str, ...] = ()
    """Its sentences with exact values that the messages do not have: they are not in the summary."""
    appended: tuple[str, ...] = ()
    """What it had left out and was added by rule, word for word."""
    score: float = 1.0
    """The share of its sentences that stayed."""
    usage: Usage | None = None
    cost: float | None = None
    """USD, where the model's prices are known."""
    was_cached: bool = False
    """It had been written before, for the same content: then nothing was paid."""
    left_out: int = 0
    """Rules of the user that there was no room for: they are in the originals only."""


class Worth(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an edit was expected to save, where the provider keeps a cache and its prices are known."""

    removed: int
    """Tokens by which every later request is shorter."""
    rewritten: int
    """Tokens after the first change, which the cache must take in anew."""
    after: float
    """Calls after which it has paid for itself."""
    calls: int
    """Calls that were still expected."""
    saved: float
    """USD by then."""
    cost: float = 0.0
    """USD for the summaries in it."""
    was_forced: bool = False
    """It would have been made whatever it costs: the window or a setting asked for it."""
    was_cold: bool = False
    """The cache had forgotten the conversation anyway."""


class Replaced(msgspec.Struct, frozen=True):
    HEAD: ClassVar = ("view", "span", "lines", "kind", "round", "tokens", "keeps_originals")
    BODY: ClassVar = {"shown": (), "why": "", "time": 0.0, "certificate": None, "worth": None}

    at: int
    view: str
    span: Span
    shown: tuple[Message | int, ...]
    """What stands there now: new messages, or places whose messages are shown as they were."""
    lines: tuple[Line, ...]
    """The same without the words."""
    kind: str
    why: str
    tokens: tuple[int, int]
    """Shown before and after."""
    time: float
    round: int = 0
    """Which compaction of this view, from 1; 0 for edits that are none."""
    certificate: Certificate | None = None
    """Of a summary."""
    worth: Worth | None = None
    """Of all edits that were made together, with the first of them."""
    keeps_originals: bool = True
    """False if what it hides cannot be expanded: it was made with `keep_originals: false`."""


class Undone(msgspec.Struct, frozen=True):
    HEAD: ClassVar = ("of",)
    BODY: ClassVar = {"why": "", "time": 0.0}

    at: int
    of: int
    why: str = ""
    time: float = 0.0


class Pinned(msgspec.Struct, frozen=True):
    HEAD: ClassVar = ("lines",)
    BODY: ClassVar = {"why": "", "time": 0.0}

    at: int
    lines: tuple[Line, ...]
    why: str = ""
    time: float = 0.0


class Measured(msgspec.Struct, frozen=True):
    HEAD: ClassVar = ("view", "of", "estimate", "input", "model", "prefix", "made")
    BODY: ClassVar = {"usage": Usage(0), "model": None, "time": 0.0}

    at: int
    view: str
    of: int
    """The answer whose request was measured."""
    usage: Usage
    estimate: int
    """What refold had counted for the same request, not corrected."""
    model: str | None = None
    time: float = 0.0
    prefix: str | None = None
    """What stood before the messages, system text and tools, as a digest."""
    made: int = 0
    """The first place that came after the request was made."""

    @property
    def input(self) -> int:
        """The reported tokens of the request; 0 where they are the sum of several."""
        return self.usage.input if self.usage.calls == 1 else 0


class Called(msgspec.Struct, frozen=True):
    HEAD: ClassVar = ("view", "time", "calls", "cost")
    BODY: ClassVar = {"span": Span(0, 0), "model": "", "problem": None, "usage": None}

    at: int
    view: str
    span: Span
    """What was to be summarized."""
    model: str
    problem: str | None
    """Why there is no summary of it; None where there is."""
    calls: int
    """Requests that were made."""
    usage: Usage | None = None
    cost: float = 0.0
    """USD, as far as prices are known."""
    time: float = 0.0


class Named(msgspec.Struct, frozen=True):
    HEAD: ClassVar = ("title", "model")
    BODY: ClassVar = {"time": 0.0}

    at: int
    title: str | None = None
    """None leaves it as it was, here and below."""
    model: str | None = None
    time: float = 0.0


class Unknown(msgspec.Struct, frozen=True):
    at: int
    kind: str
    head: Any
    body: Any


Event: TypeAlias = Said | Replaced | Undone | Pinned | Measured | Called | Named | Unknown
Head: TypeAlias = Line | Replaced | Undone | Pinned | Measured | Called | Named
"""An event without its texts. That of a Said is its line; an Unknown has none."""
