"""The fold, the live view, and the invariants that follow from them."""

from collections.abc import Iterable
from itertools import zip_longest

import msgspec
import pytest
from hypothesis import given, settings

import refold
from refold.core import codec
from refold.core.draft import Draft, LastRequest, number
from refold.core.event import Event, Head, Line, Measured, Pinned, Replaced, Said, Span, Undone
from refold.core.live import Live, State
from refold.core.message import Media, Message, Text
from refold.core.plan import Edit, Stamp, settle
from refold.core.view import ActiveEdits, fold
from refold.session.doctor import examine
from refold.stores.memory import MemoryStore
from refold.stores.record import seal
from refold.stores.store import Key, Snapshot
from strategies import streams


class Past:
    """What a live view may ask of the past, answered from a list."""

    def __init__(self, events: list[Event]) -> None:
        self.heads = {event.at: codec.head(codec.encode(event)) for event in events}

    def facts(self, before: int) -> Iterable[Head]:
        return [h for at, h in self.heads.items() if at < before and h and not isinstance(h, Line)]

    def lines(self, span: Span) -> Iterable[Line]:
        return [h for at, h in self.heads.items() if at in span and isinstance(h, Line)]


def words_of(events: list[Event]):
    by_place = {event.at: event for event in events}

    def words(line: Line):
        event = by_place[line.at]
        return event.message if isinstance(event, Said) else event.shown[line.n]

    return words


def live(events: list[Event], view: str = "main") -> Live:
    past, result = Past(events), Live(view, words_of(events))
    for event in events:
        result.apply(past.heads[event.at], event.at, past)
    return result


# proves: I11
@settings(max_examples=20 * settings().max_examples)
@given(streams() | streams(busy=True))
def test_the_incremental_view_equals_the_fold(events):
    past = Past(events)
    for view in ("main", "other"):
        kept_up = Live(view, words_of(events))
        for n, event in enumerate(events):
            kept_up.apply(past.heads[event.at], event.at, past)
            expected = fold(events[: n + 1], view)
            assert kept_up.freeze() == expected
            assert kept_up.tokens == expected.tokens
        assert kept_up.freeze().messages == fold(events, view).messages


def standing(events: list[Event], view: str = "main") -> tuple[set[int], set[int], list[Replaced]]:
    """The edits and pins in force, and the edits that no other covers: told as plainly as it can be."""
    facts: dict[int, Replaced | Pinned] = {}
    in_force: set[int] = set()
    effects: dict[int, tuple[int, bool]] = {}

    def crosses(one: Span, other: Span) -> bool:
        return one.meets(other) and not one.covers(other) and not other.covers(one)

    def edits() -> list[Replaced]:
        return [fact for fact in facts.values() if isinstance(fact, Replaced) and fact.at in in_force]

    def widest() -> list[Replaced]:
        rank = {edit.at: (len(edit.span), edit.at) for edit in edits()}
        return [
            edit
            for edit in edits()
            if not any(o.span.covers(edit.span) and rank[o.at] > rank[edit.at] for o in edits())
        ]

    for event in events:
        match event:
            case Replaced(span=span) if event.view == view and 0 <= span.start < span.end <= event.at:
                if any(edit.span.meets(span) and not span.covers(edit.span) for edit in widest()):
                    continue
            case Pinned():
                pass
            case Undone() if event.of in effects:
                at, on = effects[event.of]
                fact = facts[at]
                blocked = isinstance(fact, Replaced) and any(crosses(fact.span, e.span) for e in edits())
                if (at in in_force) == on and (on or not blocked):
                    in_force ^= {at}
                    effects[event.at] = (at, not on)
                continue
            case _:
                continue
        facts[event.at] = event
        effects[event.at] = (event.at, True)
        in_force.add(event.at)
    pins = {at for at in in_force if isinstance(facts[at], Pinned)}
    return in_force - pins, pins, sorted(widest(), key=lambda edit: edit.span)


# proves: I11
@settings(max_examples=20 * settings().max_examples)
@given(streams() | streams(busy=True))
def test_the_edits_in_force_are_those_of_the_definition(events):
    for view in ("main", "other"):
        active = ActiveEdits(view)
        for n, event in enumerate(events):
            active.apply(event)
            expected = standing(events[: n + 1], view)
            assert (set(active.edits), active.pins, active.outermost) == expected


def test_what_only_tells_the_model_to_try_again_is_neither_task_nor_turn_nor_latest():
    draft = [Draft(Message(role, text), 5) for role, text in (("user", "go"), ("assistant", "hm"))]
    again = Draft(Message("user", "try again"), 5, kind="retry-context")
    events = number([again, *draft, again], State(), LastRequest("main"), 0.0)
    assert [event.line.turn for event in events] == [0, 1, 1, 1]
    for view in (fold(events), live(events).freeze()):
        assert (view.kept, view.latest) == ({1}, 1)
    edit = settle(Edit(Span(3, 4), (Message("user", "again"),), "test", "why"), view, Stamp(4, 0.0), len_of)
    assert [line.place for line in fold([*events, edit]).lines if line.asks] == [1]


def test_a_correction_of_what_tells_the_model_to_try_again_asks_for_nothing_either():
    chat = refold.open("c", store="memory://")
    chat.append({"role": "user", "content": "go"})
    at = chat.append(Message("user", "try again"), kind="retry-context")
    chat.correct(at, "try once more")
    assert [line.place for line in chat.view().lines if line.asks] == [0]


@pytest.mark.parametrize("missing", [b",false]", b",false,false]"], ids=["wordless", "retry"])
def test_an_entry_from_before_there_was_a_field_is_read_as_it_was(missing):
    entry = codec.encode(number([Draft(Message("user", "go"), 5)], State(), LastRequest("main"), 0.0)[0])
    older = entry._replace(head=entry.head.removesuffix(missing) + b"]")
    assert older.head != entry.head
    assert codec.head(older) == codec.head(entry)


def test_a_message_without_text_is_neither_task_nor_turn_nor_latest():
    shot = Draft(Message("user", [Media("image", data="AA")]), 5)
    said = [Draft(Message(role, text), 5) for role, text in (("user", "go"), ("assistant", "hm"))]
    blank = Draft(Message("user", [Text(" \n"), Media("file", url="https://example.org/a.pdf")]), 5)
    events = number([shot, *said, shot, blank], State(), LastRequest("main"), 0.0)
    assert [event.line.turn for event in events] == [0, 1, 1, 1, 1]
    assert [event.line.asks for event in events] == [False, True, False, False, False]
    assert [codec.head(codec.encode(event)) for event in events] == [event.line for event in events]
    for view in (fold(events), live(events).freeze()):
        assert (view.kept, view.latest) == ({1}, 1)
    edit = settle(Edit(Span(3, 4), (Message("user", "[image]"),), "test", "why"), view, Stamp(5, 0.0), len_of)
    assert [line.place for line in fold([*events, edit]).lines if line.asks] == [1]


def test_a_screenshot_does_not_push_the_task_or_the_latest_request_out_of_the_view():
    config = {"models": {"small": {"window": 2_000, "max_output": 200}}}
    chat = refold.open("c", store="memory://", model="small", config=config)
    shot = {"type": "image", "source": {"type": "base64", "data": "AAAA", "media_type": "image/png"}}
    chat.append({"role": "user", "content": [shot]})
    chat.append({"role": "user", "content": "Book the flight to Oslo."})
    for n in range(12):
        use = {"type": "tool_use", "id": f"c{n}", "name": "click", "input": {"x": n}}
        result = {"type": "tool_result", "tool_use_id": f"c{n}", "content": "word " * 100}
        chat.append({"role": "assistant", "content": [use]})
        chat.append({"role": "user", "content": [result, shot]})
        fitted = chat.fit(dialect="anthropic")
    view = chat.view()
    assert (view.kept, view.latest) == ({1}, 1)
    assert "Book the flight to Oslo." in str(fitted.messages)
    assert chat.get_all()[-1].turn == 1
    assert any(edit.kind in ("summarize", "prune") for edit in chat.events() if hasattr(edit, "round"))


def test_a_record_from_before_keeps_its_task_and_a_snapshot_from_before_is_not_trusted():
    store, key = MemoryStore(), Key("default", "c")
    chat = refold.open("c", store=store)
    chat.append([Message("user", [Media("image", data="AA")]), Message("user", "go")])
    assert chat.view().kept == {1}
    older, digest = MemoryStore(), b""
    for entry, _ in store.read(key):  # as it was written when a screenshot still was a request
        head = [*msgspec.json.decode(entry.head)[:-1]]
        head[3] = entry.at + 1
        digest = older.append(key, [entry._replace(head=msgspec.json.encode(head))])
    again = refold.open("c", store=older)
    assert (again.view().kept, again.view().latest) == ({0}, 1)
    assert not [finding for finding in examine(older) if finding.problem]
    live = again.record.live
    state = msgspec.structs.replace(live.snapshot(), version=8, latest=0)
    body = codec.dumps(state)
    older.save(key, "main", Snapshot(2, body, seal(digest, body)))
    assert refold.open("c", store=older).view().latest == 1


def test_what_was_spoken_is_a_request():
    events = number(
        [Draft(Message("user", [Media("audio", data="AA")]), 5)], State(), LastRequest("main"), 0.0
    )
    assert fold(events).latest == 0
    assert events[0].line.turn == 1


def len_of(message: Message) -> int:
    return len(message.text)


def _shown(events: list[Event]) -> list[tuple[int, int, int]]:
    return [(line.at, line.n, item.span.start) for item in fold(events).items for line in item.lines]


@given(streams() | streams(busy=True))
def test_what_was_said_between_a_change_and_what_changed_it_is_stale(events):
    expected: set[int] = set()
    for n, event in enumerate(events):
        before, after = _shown(events[:n]), _shown(events[: n + 1])
        if isinstance(event, Said | Measured):
            continue
        for old, new in zip_longest(before, after):
            if old is None or new is None or old[:2] != new[:2]:
                start = min(place[2] for place in (old, new) if place is not None)
                expected |= set(range(start, event.at))
                break
    said = {event.at for event in events if isinstance(event, Said)}
    stale = {at for span in live(events).state.stale for at in span}
    assert stale & said == expected & said


def _words(events: list[Event]) -> list[tuple[int, int]]:
    return [(at, n) for at, n, _ in _shown(events)]


@given(streams() | streams(busy=True))
def test_a_measurement_holds_until_something_shown_changes(events):
    newest: int | None = None
    changed = 0
    for n, event in enumerate(events):
        if isinstance(event, Measured) and event.view == "main":
            newest = event.at if changed <= event.made else newest
        elif not isinstance(event, Said) and _words(events[:n]) != _words(events[: n + 1]):
            newest, changed = None, event.at + 1
    gauge = live(events).state.measured
    assert (gauge and gauge.at) == newest
