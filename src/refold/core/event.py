"""Events: the facts that make up a conversation. They are appended and never changed.

Said      a message was recorded
Replaced  a span of it is now shown as something shorter
Undone    an earlier Replaced, Pinned or Undone no longer holds
Pinned    messages stay in every view
Measured  the tokens of a request, as the provider reported them
Called    a summarizer was called: what it cost, and whether it failed
Named     the conversation was given a title, or a model
Unknown   an event of a kind that only a newer version understands

The place of an event in its log, `at`, never changes; handles name it.

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
    """When and how a message is reduced; unset fields keep the configured value."""

    after_steps: int | None = None
    """Steps after its own for which a message is shown whole; unset, always."""
    mode: Literal["none", "remove", "compact"] | None = None
    """What happens then: nothing, only the name stays, or a shorter text is shown; unset, `compact`."""
    compact_mode: Literal["first-n-chars", "ai-summary", "skeleton"] | None = None
    """The text that `compact` shows: its beginning, a model's summary, or keys, values and errors; unset, its
    beginning."""
    length: int | None = None
    """Characters to keep; unset, 500."""
    prompt: str | None = None
    """The prompt for the summarizer: a text, or a file if it ends in `.md` or `.txt`."""
    strategy: Literal["age", "relevance"] | None = None
    """`age`: every old message expires. `relevance`: only those that have little in common with the newest
    messages, by words, identifiers and quotations, or by meaning if there is an embedder. Unset, `age`."""
    threshold: float | None = None
    """With `relevance`: messages below this score expire; unset, 0.3."""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A shown message without its text: the facts that views and policies need."""

    at: int
    """The event with the text: the `Said`, or the `Replaced` that shows something new."""
    role: Role
    tokens: int
    turn: int
    """Number of requests of the user up to and including this message."""
    step: int
    """Number of assistant messages up to and including this one."""
    calls: tuple[str, ...] = ()
    """Ids of the tool calls it makes."""
    answers: str | None = None
    """Id of the tool call it answers."""
    tools: tuple[str, ...] = ()
    """Names of the tools it calls or answers for, as far as they are known."""
    n: int = 0
    """Its index among the event's messages."""
    apart: bool = False
    """System text that its API keeps apart from the messages; only the newest is shown."""
    whole: int | None = None
    """The first place of the message that it was split from."""
    expiry: Expiry | None = None
    """When it may be reduced, if its sender set that."""
    summary: bool = False
    """It stands for messages that are not shown; it is no request."""
    corrects: int | None = None
    """Place of the message that it corrects."""
    retry: bool = False
    """A user message that only has the model try again; it is no request."""
    recalled: bool = False
    """A memory of the store, shown with a message; it was not recorded."""
    wordless: bool = False
    """A user message without text or sound, such as a screenshot; it is no request."""

    @property
    def place(self) -> int:
        """The place of the recorded message; for a correction, of the message that it corrects."""
        return self.at if self.corrects is None else self.corrects

    @property
    def asks(self) -> bool:
        """True for requests of the user: the task, or a later one."""
        is_about = self.summary or self.retry or self.recalled or self.wordless
        return self.role == "user" and not is_about


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message that was split into one event for each tool result."""

    n: int
    """Its number, from 0; the message begins so many places before."""
    of: int
    """The number of pieces."""
    blocks: tuple[int, ...]
    """The positions of its blocks in the message."""


class Said(msgspec.Struct, frozen=True):
    HEAD: ClassVar = (
        *("role", "tokens", "index", "turn", "step", "total", "calls", "answers", "tools"),
        *("apart", "whole", "expiry", "summary", "retry", "wordless"),
    )
    """`index`, `total`, and fields of the line."""

    line: Line
    message: Message
    index: int
    """Its number among the messages of the conversation, from 0."""
    total: int
    """Tokens of all messages up to and including this one."""
    time: float
    dialect: str | None = None
    raw: bytes | None = None
    """The provider's own JSON, if the message came as such."""
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
    """How a summary was made and checked."""

    digest: str = ""
    """The hash chain's digest at the end of the messages that it stands for."""
    model: str | None = None
    """The model that wrote it; None for a summary by rule."""
    kept: int = 0
    """Number of the model's sentences that stayed."""
    struck: tuple[str, ...] = ()
    """Sentences that were removed: they have exact values that the messages do not have."""
    appended: tuple[str, ...] = ()
    """What the model left out and the rules added."""
    score: float = 1.0
    """The share of its sentences that stayed."""
    usage: Usage | None = None
    cost: float | None = None
    """USD, if the model's prices are known."""
    was_cached: bool = False
    """The reply came from the cache of summaries, at no cost."""
    left_out: int = 0
    """Rules of the user for which there was no room; they are in the originals only."""


class Worth(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an edit was expected to save, if the provider has a cache and its prices are known."""

    removed: int
    """Tokens by which every later request is shorter."""
    rewritten: int
    """Tokens after the first change, which are written to the cache again."""
    after: float
    """Calls after which it has paid for itself."""
    calls: int
    """Calls that were still expected."""
    saved: float
    """USD by then."""
    cost: float = 0.0
    """USD for the summaries in it."""
    was_forced: bool = False
    """The window or a setting required it, at any cost."""
    was_cold: bool = False
    """The cache had expired."""


class Replaced(msgspec.Struct, frozen=True):
    HEAD: ClassVar = ("view", "span", "lines", "kind", "round", "tokens", "keeps_originals")
    BODY: ClassVar = {"shown": (), "why": "", "time": 0.0, "certificate": None, "worth": None}

    at: int
    view: str
    span: Span
    shown: tuple[Message | int, ...]
    """What is shown instead: new messages, and places whose messages stay shown."""
    lines: tuple[Line, ...]
    """The same without the text."""
    kind: str
    why: str
    tokens: tuple[int, int]
    """Tokens shown before and after."""
    time: float
    round: int = 0
    """The number of the compaction in this view, from 1; 0 for other edits."""
    certificate: Certificate | None = None
    """Of a summary."""
    worth: Worth | None = None
    """The savings of all edits of a compaction; only its first edit has them."""
    keeps_originals: bool = True
    """False if what it hides cannot be expanded (`keep_originals: false`)."""


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
    """The place of the reply to the request that was measured."""
    usage: Usage
    estimate: int
    """refold's own count of the same request, without calibration."""
    model: str | None = None
    time: float = 0.0
    prefix: str | None = None
    """A digest of system text and tools."""
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
    """The messages to summarize."""
    model: str
    problem: str | None
    """Why the call failed; None if it succeeded."""
    calls: int
    """Number of requests to the provider."""
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
