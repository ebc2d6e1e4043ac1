"""Generated streams: tool conversations with parallel, interleaved, aborted and orphaned calls, and edits."""

import msgspec
from hypothesis import strategies as st

from histories import DIALECTS, Call, Step
from refold.core.event import (
    Called,
    Event,
    Line,
    Measured,
    Named,
    Pinned,
    Replaced,
    Said,
    Span,
    Undone,
    Unknown,
)
from refold.core.message import Message, Reasoning, Text, ToolCall, ToolResult, Usage


class Stream:
    """Builds a stream whose numbers are right, whatever is asked of it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.said: list[Said] = []
        self.calls: list[str] = []

    def say(self, message: Message, tokens: int | None = None) -> None:
        before = self.said[-1] if self.said else None
        retry = message.role == "user" and message.text.startswith("try again")
        wordless = message.role == "user" and not message.text.strip()
        asks = message.role == "user" and not retry and not wordless
        turn = (before.line.turn if before else 0) + asks
        step = (before.line.step if before else 0) + (message.role == "assistant")
        calls = tuple(call.call_id for call in message.calls)
        tools = tuple(call.tool for call in message.calls)
        answers = message.results[0].call_id if message.results else None
        cost = len(message.text) + 4 if tokens is None else tokens
        apart = message.role == "system" and message.text.startswith("apart")
        facts = (calls, answers, tools, 0, apart)
        line = Line(len(self.events), message.role, cost, turn, step, *facts, retry=retry, wordless=wordless)
        total = (before.total if before else 0) + cost
        self.add(Said(line, message, len(self.said), total, float(len(self.events))))
        self.said.append(self.events[-1])  # type: ignore[arg-type]
        self.calls += calls

    def add(self, event: Event) -> None:
        self.events.append(event)

    @property
    def next(self) -> int:
        return len(self.events)

    def replace(self, span: Span, texts: list[str], refs: list[int], view: str, round: int = 0) -> None:
        at = self.next
        new = [Message("user", [Text(text)]) for text in texts]
        lines = [Line(at, "user", len(text) + 4, 0, 0, n=n) for n, text in enumerate(texts)]
        kept = [s.line for s in self.said if s.at in refs]
        shown = (*new, *(line.at for line in kept))
        why, tokens = "a test", (0, 0)
        self.add(Replaced(at, view, span, shown, (*lines, *kept), "test", why, tokens, 0.0, round))

    def correct(self, of: Said, span: Span, text: str, view: str) -> None:
        """Another text in the place of a message, in an edit of whatever span."""
        at, message = self.next, Message(of.line.role, [Text(text)])
        line = msgspec.structs.replace(of.line, at=at, tokens=len(text) + 4, corrects=of.at)
        self.add(Replaced(at, view, span, (message,), (line,), "correct", "a test", (0, 0), 0.0))


texts = st.text('ab \n"é漢🙂\x00\ud800', max_size=12)
ids = st.sampled_from([f"call_{n}" for n in range(6)])
roles = st.sampled_from(["user", "assistant", "user", "system"])
views = st.sampled_from(["main", "main", "main", "other"])


def _results(id: str, text: str) -> Message:
    return Message("tool", [ToolResult(id, text)])


messages = st.one_of(
    st.builds(lambda text: Message("user", [Text(text)]), texts),
    st.builds(lambda text: Message("user", [Text(f"try again {text}")]), texts),
    st.builds(lambda text: Message("system", [Text(text)]), texts),
    st.builds(lambda text: Message("system", [Text(f"apart {text}")]), texts),
    st.builds(
        lambda text, ids: Message(
            "assistant",
            [Reasoning("hm"), Text(text), *(ToolCall(id, f"tool_{id}", "{}") for id in ids)],
        ),
        texts,
        st.lists(ids, max_size=3, unique=True),
    ),
    st.builds(_results, ids, texts),
    st.builds(_results, ids, texts),
)
mixed = st.one_of(
    messages,
    st.builds(lambda id, text: Message("user", [ToolResult(id, text), Text(text)]), ids, texts),
    st.builds(lambda a, b: Message("tool", [ToolResult(a, "1"), ToolResult(b, "2")]), ids, ids),
    st.builds(lambda a, b: Message("assistant", [ToolCall(a, "f", "{}"), ToolResult(b, "x")]), ids, ids),
)
"""Messages as an application may hand them in: results beside other things, and in any role."""


@st.composite
def streams(
    draw: st.DrawFn, min_size: int = 0, max_size: int = 40, edits: bool = True, busy: bool = False
) -> list[Event]:
    """Any stream at all: edits may be wrong, cross others, or undo what never was.

    A busy one has edits and undoings of the same few messages, and of each other.
    """
    stream = Stream()
    kinds = ["say"] * 5 + (
        ["replace"] * 3 + ["undo"] * 2 + ["correct", "pin", "measure", "call", "name", "unknown"]
        if edits
        else []
    )
    if busy:
        kinds = ["replace", "undo", "correct"]
        for role in ("user", "assistant", "user", "assistant", "user"):
            stream.say(Message(role, role))
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=min_size, max_size=max_size)):
        at = stream.next
        if kind == "say":
            stream.say(draw(messages))
        elif kind == "replace":
            start = draw(st.integers(0, 4 if busy else at))
            end = draw(st.integers(start, min(at + 1, start + 8)))
            refs = draw(st.lists(st.integers(start, max(start, end - 1)), max_size=2, unique=True))
            new = draw(st.lists(texts, max_size=2))
            gone = draw(st.booleans())
            stream.replace(Span(start, end), [] if gone else new, [] if gone else sorted(refs), draw(views))
        elif kind == "correct" and stream.said:
            of = draw(st.sampled_from(stream.said))
            more = draw(st.sampled_from([0, 0, 0, 2]))
            span = Span(max(0, of.at - more), min(at, of.at + 1 + more))
            stream.correct(of, span, draw(texts), draw(views))
        elif kind == "undo" and at:
            facts = [e.at for e in stream.events if not isinstance(e, Said)] or [0]
            stream.add(Undone(at, draw(st.sampled_from(facts) | st.integers(0, at))))
        elif kind == "pin" and stream.said:
            some = st.lists(st.sampled_from(stream.said), min_size=1, max_size=2, unique_by=lambda s: s.at)
            stream.add(Pinned(at, tuple(s.line for s in draw(some))))
        elif kind == "measure":
            stream.add(Measured(at, "main", max(0, at - 1), Usage(10), 9))
        elif kind == "call":
            stream.add(
                Called(at, draw(views), Span(0, at), "a model", draw(texts) or None, 2, Usage(9), 0.25, 7.0)
            )
        elif kind == "name":
            stream.add(Named(at, draw(st.none() | texts), draw(st.none() | texts), 7.0))
        elif kind == "unknown":
            stream.add(Unknown(at, "dreamt", [1], {"of": "sheep"}))
    return stream.events


def _call(id: str) -> dict:
    return {"id": id, "type": "function", "function": {"name": f"tool_{id}", "arguments": '{"a": 1.0}'}}


def _group(call_ids: list[str], results: list[str], text: str | None, extra: dict) -> list[dict]:
    calls = [_call(id) for id in call_ids]
    first = {"role": "assistant", "content": text, "tool_calls": calls, **extra}
    pairs = zip(call_ids, results, strict=False)
    return [first, *({"role": "tool", "tool_call_id": id, "content": text} for id, text in pairs)]


safe = st.text('ab \n"é漢🙂\x00', max_size=12)
fields = st.sampled_from(["refusal", "x_note", "audio"])
extras = st.dictionaries(fields, st.none() | st.integers(), max_size=2)
speakers = st.sampled_from(["user", "system"])
chats = st.lists(
    st.one_of(
        st.builds(lambda role, text: [{"role": role, "content": text}], speakers, safe),
        st.builds(lambda t: [{"role": "user", "content": [{"type": "text", "text": t}]}], safe),
        st.builds(
            _group,
            st.lists(ids, min_size=1, max_size=3, unique=True),
            st.lists(safe, min_size=3, max_size=3),
            safe | st.none(),
            extras,
        ),
    ),
    max_size=8,
).map(lambda groups: [message for group in groups for message in group])
"""Histories in OpenAI chat form, valid as they stand."""

places = st.integers(0, 30)
lengths = st.integers(0, 60)
deeds = st.one_of(
    st.tuples(st.just("say"), messages),
    st.tuples(st.just("say"), mixed),
    st.tuples(st.just("say"), st.builds(lambda role, n: Message(role, "word " * n), roles, lengths)),
    st.tuples(st.just("fit")),
    st.tuples(st.just("compact"), st.integers(0, 4)),
    st.tuples(st.just("undo"), st.none() | places),
    st.tuples(st.sampled_from(["pin", "unpin", "restore"]), places),
)
"""What programs and people do to a session."""
corrections = st.tuples(st.just("correct"), st.integers(0, 12), safe)


@st.composite
def told(draw: st.DrawFn) -> tuple[list[Step], str, tuple[str, ...]]:
    """Any steps in any order, a dialect to write them in, and what the model demands."""
    ids = st.sampled_from(["a", "b", "c", "d" * 70, "e|1"])
    texts = st.sampled_from(["", " ", "Look.", "word " * 30, "word " * 300])
    calls = st.builds(
        Call,
        ids,
        st.sampled_from(["read", "bash", "patch"]),
        st.sampled_from(["{}", "", "[1]", '{"a":1}', "{"]),
    )
    unique = st.lists(calls, max_size=3, unique_by=lambda call: call.id).map(tuple)
    some = st.lists(calls, max_size=3).map(tuple)
    answers = st.lists(ids, min_size=1, max_size=3).map(tuple)
    none, false, bools = st.just(()), st.just(False), st.booleans()
    steps = st.one_of(
        st.builds(Step, st.just("user"), texts, none, none, false, bools),
        st.builds(Step, st.just("system"), texts, none, none, false, false),
        st.builds(Step, st.just("assistant"), texts, unique, none, bools, false),
        st.builds(Step, st.just("assistant"), texts, some, none, bools, false),
        st.builds(Step, st.just("tool"), texts, none, answers, false, false),
    )
    flags = st.sampled_from([(), ("system-inside", "no-prefill", "binds-thinking")])
    return draw(st.lists(steps, max_size=14)), draw(st.sampled_from([*DIALECTS])), draw(flags)


TOOLS = ("read", "bash", "search", "patch")
expiries = st.fixed_dictionaries(
    {"after_steps": st.sampled_from([None, 0, 1, 2, 3])},
    optional={
        "mode": st.sampled_from(["none", "remove", "compact"]),
        "compact_mode": st.sampled_from(["first-n-chars", "skeleton", "ai-summary"]),
        "length": st.integers(0, 300),
        "strategy": st.sampled_from(["age", "relevance"]),
        "threshold": st.sampled_from([0.0, 0.3, 1.0]),
    },
)
prunes = st.fixed_dictionaries(
    {"protect": st.none() | st.integers(0, 200), "keep_turns": st.integers(0, 2)},
    optional={
        "minimum": st.integers(0, 100),
        "keep_steps": st.integers(0, 4),
        "length": st.integers(0, 700),
        "exclude_tools": st.lists(st.sampled_from(TOOLS), max_size=2),
    },
)
ladders = st.fixed_dictionaries(
    {
        "counter": st.just("estimate"),
        "tools": st.dictionaries(
            st.sampled_from(TOOLS), st.builds(lambda rule: {"expire": rule}, expiries), max_size=4
        ),
        "compact": st.fixed_dictionaries(
            {},
            optional={
                "strategy": st.sampled_from(["summarize", "sliding-window", "hierarchical"]),
                "keep_recent": st.integers(0, 12),
                "prune": st.just("off") | prunes,
                "cap": st.just("off") | st.builds(lambda share: {"share": share}, st.floats(0.01, 0.6)),
                "message_threshold": st.integers(2, 12),
                "turn_threshold": st.integers(1, 5),
            },
        ),
    },
    optional={"dedupe": st.just("off") | st.builds(lambda share: {"similarity": share}, st.floats(0.3, 1))},
)
"""Settings of an agent, of all that may reduce something."""

SCRAPS = "HAT078|a|word|error: not found|{|}|[|]|=|x=1|k=v2.5|,| | |漢字|https://a.example.org/b?c=d|2024-05-01|$12"
scraps = st.lists(
    st.sampled_from([*SCRAPS.split("|"), '"k": ', "\n", "\\n", "\ud800", "[refold #57 ", "x" * 90]),
    max_size=60,
).map("".join)
"""Texts of what skeletons look for, in any order."""

windows = st.sampled_from([300, 1_000, 2_000, 4_000])
speech = st.sampled_from(["Look.", "Never use HAT118.", "the flight " * 30, "item_77 costs 12.50, " * 15])
outputs = st.builds(
    lambda name, line, times: f"{name} {line}\n" * times,
    st.sampled_from(["HAT078", "src/app.py:12", "mia_li_3668"]),
    st.sampled_from(["ok", "error: not found", "漢字の記録 [refold #1 read: x]"]),
    st.sampled_from([1, 20, 20, 20, 60, 400]),
)
spoken = st.builds(lambda role, text: [(role, text)], st.sampled_from(["user", "assistant"]), speech)
used = st.tuples(st.sampled_from(TOOLS), outputs)
single, several = (st.lists(used, min_size=1, max_size=most) for most in (1, 3))
runs = st.lists(st.one_of(single, spoken, several, single), max_size=18) | st.lists(
    single | spoken, min_size=8, max_size=16
)
"""What happens after the task, step by step: somebody says something, or tools are called and answer."""


def said(run: list[list[tuple[str, str]]]) -> list[list[dict]]:
    """The same in OpenAI chat form: what is appended at a time, a request before each but for the user's."""
    parts: list[list[dict]] = [[{"role": "user", "content": "Find the cheapest flight; never book it."}]]
    for n, things in enumerate(run):
        if things[0][0] in ("user", "assistant"):
            parts.append([{"role": role, "content": text} for role, text in things])
            continue
        calls = [
            {"id": f"c{n}_{m}", "type": "function", "function": {"name": tool, "arguments": f'{{"n": {n}}}'}}
            for m, (tool, _) in enumerate(things)
        ]
        answers = [
            {"role": "tool", "tool_call_id": f"c{n}_{m}", "content": text}
            for m, (_, text) in enumerate(things)
        ]
        parts.append([{"role": "assistant", "content": None, "tool_calls": calls}, *answers])
    return parts
