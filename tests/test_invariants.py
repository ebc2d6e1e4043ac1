"""What must always hold, each a sentence of ARCHITECTURE.md."""

import asyncio
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import msgspec
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import refold
from pairing import check, faults
from refold.core import view as view_module
from refold.core.budget import Budget
from refold.core.event import Line, Pinned, Replaced, Said, Span, Undone
from refold.core.message import Message
from refold.core.pairing import MissingResult, OrphanResult, Slot, repair_pairs
from refold.core.plan import Stamp, settle
from refold.core.view import ActiveEdits, fold
from refold.dialects.registry import DIALECTS, TARGETS
from refold.dialects.rules.targets import check_request
from refold.policies.summarize import Window
from refold.session.aio import AsyncSession
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.stores.store import Key
from strategies import chats, deeds, messages, streams
from test_view import live, standing

NUMBERS = count()


def new_session(window: int = 400, store: MemoryStore | None = None, **options) -> Session:
    config = refold.config.load_config({"models": {"m": {"window": window, "max_output": window // 4}}})
    key = Key("default", f"c{next(NUMBERS)}")
    return Session(store or MemoryStore(), key, model="m", config=config, **options)


def do(session: Session, deed: tuple) -> None:
    """One thing that a program or a person does; what is refused is refused."""
    match deed:
        case ("say", message):
            session.append(message)
        case ("fit",):
            session.fit()
        case ("compact", keep):
            session.compact(keep_recent=keep)
        case ("undo", None):
            session.undo()
        case (verb, at):
            getattr(session, verb)(at)


def try_to(session: Session, deed: tuple) -> bool:
    with suppress(refold.RefoldError):
        do(session, deed)
        return True
    return False


# proves: A8, I1
@given(st.lists(deeds, max_size=30))
def test_what_was_said_is_never_changed_and_never_deleted(things):
    session, before = new_session(), []
    for thing in things:
        try_to(session, thing)
        now = list(session.store.read(session.key))
        assert now[: len(before)] == before
        before = now


# proves: I2
@given(streams() | streams(busy=True))
def test_every_message_is_covered_by_exactly_one_item(events):
    view = fold(events)
    for event in events:
        if isinstance(event, Said):
            assert sum(event.at in item.span for item in view.items) == 1
    assert [item.span for item in view.items] == sorted(item.span for item in view.items)


# proves: B9, I3
@given(streams() | streams(busy=True))
def test_undoing_the_newest_edit_gives_back_the_view_before_it(events):
    if events and isinstance(newest := events[-1], Replaced | Pinned | Undone):
        undone = Undone(newest.at + 1, newest.at)
        assert fold([*events, undone]).messages == fold(events[:-1]).messages


# proves: B9, I3
@given(streams() | streams(busy=True))
def test_undoing_all_gives_back_what_was_said(events):
    said = [event for event in events if isinstance(event, Said)]
    newest = max((event.at for event in said if event.line.apart), default=None)
    stream = list(events)
    while edited := [item.edit for item in fold(stream).items if item.edit is not None]:
        stream.append(Undone(len(stream), max(edited)))
    shown = [event.message for event in said if not event.line.apart or event.at == newest]
    assert fold(stream).messages == shown


# proves: I4
@given(streams(), st.lists(messages, max_size=5))
def test_saying_more_never_changes_what_is_already_shown(events, more):
    from strategies import Stream

    stream = Stream()
    stream.events = list(events)
    stream.said = [event for event in events if isinstance(event, Said)]
    before = _among_the_messages(events)
    for message in more:
        stream.say(message)
    assert _among_the_messages(stream.events)[: len(before)] == before


def _among_the_messages(events: list) -> list[tuple[int, int]]:
    """What is shown, but for system text that stands apart, of which only the newest counts."""
    return [(line.at, line.n) for line in fold(events).lines if not line.apart]


# proves: I5
@given(streams())
def test_no_view_has_a_tool_call_without_its_result_or_a_result_without_its_call(events):
    lines = fold(events).lines
    slots, notices = repair_pairs(lines)
    mended = [_as_line(slot) for slot in slots]
    assert check(mended) == []
    if not check(lines):
        assert sorted(mended, key=repr) == sorted(lines, key=repr)
        assert not notices
    users = [line for line in lines if line.role != "tool" and line.answers is None]
    assert [line for line in mended if line in users] == users


# proves: C15, I5
@given(st.lists(deeds, max_size=30))
def test_no_request_has_a_tool_call_without_its_result(things):
    session = new_session()
    for thing in things:
        try_to(session, thing)
        with suppress(refold.OverBudgetError):
            request = session.fit().request
            assert check(map(_line, request["messages"])) == []
            assert [v for v in check_request("openai-chat", request) if v.rule != "G2"] == []


def _as_line(slot: Slot) -> Line:
    match slot:
        case MissingResult(call=call):
            return Line(-1, "tool", 0, 0, 0, answers=call)
        case OrphanResult(line=line):
            return Line(line.at, "user", line.tokens, line.turn, line.step)
        case line:
            return line


def _line(message: dict) -> Line:
    calls = tuple(call["id"] for call in message.get("tool_calls") or ())
    return Line(0, message["role"], 0, 0, 0, calls, message.get("tool_call_id"))


# proves: D3, I6
@given(st.lists(deeds, max_size=30), st.integers(60, 2_000))
def test_fit_returns_a_view_within_the_room_or_raises_with_the_numbers(things, window):
    session = new_session(window)
    for thing in things:
        try_to(session, thing)
        try:
            fits = session.fit().report.tokens.final <= window - window // 4
        except refold.OverBudgetError as error:
            fits = error.tokens > error.room == window - window // 4
        assert fits


# proves: C11, I8
@given(chats)
def test_what_nobody_edited_renders_as_it_came(history):
    session = new_session(1_000_000)
    session.append(history)
    session.append(Message("user", "an end, so that no call is left open"))
    assert json.dumps(session.fit().messages[: len(history)]) == json.dumps(history)


# proves: C11, I8
@given(messages)
def test_rendering_what_was_parsed_gives_the_same_message(message):
    for dialect in TARGETS:
        format = DIALECTS[dialect]
        for rendered in format.render(message)[0]:
            assert format.render(format.parse(rendered)) == ([rendered], [])


# proves: I9
@given(streams(), st.integers(20, 400))
def test_policies_are_functions_of_their_arguments(events, window):
    view, budget = fold(events), Budget(window=window, max_tokens=window // 3)

    def cost(message: Message) -> int:
        return len(message.text)

    assert Window()(view, budget, cost) == Window()(fold(list(events)), budget, cost)


# proves: E4
@given(streams(), st.integers(20, 400), st.none() | st.integers(0, 10))
def test_the_window_never_parts_a_result_from_its_call(events, window, keep):
    view, budget = fold(events), Budget(window=window, max_tokens=window // 3)
    stamp = Stamp(len(events), 0.0)
    for edit in Window(keep)(view, budget, lambda message: 1):
        event = settle(edit, view, stamp, lambda message: 1)
        after = fold([*events, event])
        assert after != view
        assert {*faults(after.lines)} <= {*faults(view.lines)}


# proves: I13
@given(st.lists(deeds, max_size=30), st.integers(100, 1_000))
def test_pinned_messages_the_task_and_the_latest_user_message_are_in_every_view(things, window):
    session = new_session(window)
    for thing in things:
        try_to(session, thing)
        said = [event for event in session.events() if isinstance(event, Said)]
        users = [event for event in said if event.line.role == "user" and event.message.text.strip()]
        pinned = {
            line.at for pin in session.record.live.state.pins.values() if pin.holds for line in pin.lines
        }
        must = {*(event.at for event in (*users[:1], *users[-1:])), *pinned}
        shown = {line.at: message for item in session.view().items for line, message in _both(item)}
        for event in said:
            if event.at in must:
                assert shown[event.at] == event.message


def _both(item):
    return zip(item.lines, item.shown, strict=True)


# proves: I10
@given(st.lists(deeds, max_size=25))
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=settings().max_examples // 2)
def test_sync_and_async_give_the_same_events_for_the_same_input(things):
    one, other = new_session(), new_session()

    async def play() -> None:
        twin = AsyncSession(other)
        for thing in things:
            with suppress(refold.RefoldError):
                await _ado(twin, thing)

    for thing in things:
        try_to(one, thing)
    asyncio.run(play())
    assert [_timeless(e) for e in one.events()] == [_timeless(e) for e in other.events()]


async def _ado(session: AsyncSession, deed: tuple) -> None:
    match deed:
        case ("say", message):
            await session.append(message)
        case ("fit",):
            await session.fit()
        case ("compact", keep):
            await session.compact(keep_recent=keep)
        case ("undo", None):
            await session.undo()
        case (verb, at):
            await getattr(session, verb)(at)


def _timeless(event):
    """Without its time, and without the digests that times go into."""
    known = {name: getattr(event, name) for name in event.__struct_fields__ if name != "time"}
    if known.get("certificate"):
        known["certificate"] = msgspec.structs.replace(known["certificate"], digest="")
    return known


# proves: I10
def test_the_two_sessions_have_the_same_names_attributes_and_properties_too():
    session = new_session()
    twin = AsyncSession(session)
    public = {name for name in dir(session) if not name.startswith("_")}
    assert {"store", "config", "conversation", "model", "append"} <= public
    assert public == {name for name in dir(twin) if not name.startswith("_")} - {"sync"}
    for name in public:
        one = getattr(session, name)
        if not callable(one):
            assert getattr(twin, name) == one, name
            continue
        parameters = inspect.signature(one).parameters
        assert list(inspect.signature(getattr(twin, name)).parameters) == list(parameters), name


def fold_differs(events) -> bool:
    return fold(events) != live(events).freeze()


def standing_edits_differ(events) -> bool:
    active = ActiveEdits("main", events)
    return (set(active.edits), active.pins, active.outermost) != standing(events)


BREAKS: dict[str, tuple[str, Callable, Callable]] = {
    "pinned messages are forgotten": ("display", lambda lines, span, kept: tuple(lines), fold_differs),
    "gaps are not merged": ("merge", list, fold_differs),
    "no edit stands": ("is_valid_edit", lambda edit: False, standing_edits_differ),
    "inner edits decide as well": ("_outermost", list, standing_edits_differ),
    "what was redone may cross": ("crosses", lambda one, other: False, standing_edits_differ),
}


# proves: I11
@pytest.mark.parametrize("name", BREAKS)
def test_a_deliberate_break_of_the_fold_is_caught(monkeypatch, name):
    function, broken, differs = BREAKS[name]

    def is_noticed(events) -> bool:
        try:
            return differs(events)
        except Exception:
            return True

    monkeypatch.setattr(view_module, function, broken)
    try:
        find(
            streams() | streams(busy=True), is_noticed, settings=settings(max_examples=20_000, database=None)
        )
    except NoSuchExample:
        pytest.fail(f"nobody noticed: {name}")


def test_a_span_knows_what_it_holds():
    assert 3 in Span(3, 5)
    assert 5 not in Span(3, 5)
    assert list(Span(3, 5)) == [3, 4]
