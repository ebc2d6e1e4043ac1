"""Whoever watches is told what happens, when it has happened, and can harm nothing."""

import asyncio
import json
import logging
from typing import Any

import pytest

import refold
from refold.core.errors import OverBudgetError, SettingError
from refold.core.event import Replaced, Span
from refold.session.notify import CompactionEvent, MessageEvent
from refold.session.session import Session
from refold.testing.scribe import Scribe
from test_ladder import agent, answers, calls, output, step, user


def watched(window: int = 400_000, store: Any = "memory://", **settings: Any) -> tuple[Session, list[Any]]:
    seen: list[Any] = []
    chat = refold.open("c", store=store, model="m", config=agent(window, **settings), on_event=seen.append)
    return chat, seen


def kinds(seen: list[Any]) -> list[str]:
    return [event.kind for event in seen]


# proves: A5
def test_a_message_that_is_added_is_told_with_its_place_turn_and_step():
    chat, seen = watched()
    chat.append([user("Go."), *step("c1", "found")])
    assert kinds(seen) == ["message-added"] * 3
    assert [(e.conversation, e.at, e.turn, e.step, e.role, e.tools) for e in seen] == [
        ("c", 0, 1, 0, "user", ()),
        ("c", 1, 1, 1, "assistant", ("web_search",)),
        ("c", 2, 1, 1, "tool", ("web_search",)),
    ]
    assert seen[2].message.text == "found"


# proves: A5
@pytest.mark.parametrize(("mode", "then"), [("compact", "message-compacted"), ("remove", "message-removed")])
def test_what_expires_is_told_with_its_reason_and_what_it_saves(mode, then):
    chat, seen = watched(tools={"web_search": {"expire": {"after_steps": 0, "mode": mode, "length": 40}}})
    chat.append([user("Go."), *step("c1", output(500, "x")), *step("c2", "ok", "other")])
    del seen[:]
    chat.fit()
    assert kinds(seen) == ["message-expired", then]
    edit = next(event for event in chat.events() if isinstance(event, Replaced))
    for event in seen:
        assert (event.at, event.edit, event.tools, event.reason) == (2, edit.at, ("web_search",), edit.why)
        assert event.tokens_saved == edit.tokens[0] - edit.tokens[1] > 400


# proves: A3, A5
def test_expanding_is_told_with_its_reason():
    chat, seen = watched()
    chat.append([user("Go."), *step("c1", "found")])
    del seen[:]
    chat.expand(2, reason="to be sure")
    chat.compact(keep_recent=0)
    del seen[1:]
    assert [(e.kind, e.at, e.reason, e.tools) for e in seen] == [
        ("message-expanded", 2, "to be sure", ("web_search",))
    ]


def test_a_compaction_is_told_from_its_start_to_its_end():
    chat, seen = watched(8_000)
    chat.append(user("The task."))
    for n in range(30):
        chat.append(step(f"c{n}", output(400, f"value_{n}")))
        chat.fit()
    course = [event for event in seen if isinstance(event, CompactionEvent)]
    assert len(course) > 4
    assert kinds(course) == ["compaction:start", "compaction:complete"] * (len(course) // 2)
    for start, end in zip(course[::2], course[1::2], strict=True):
        assert start.reason == "threshold"
        assert start.limit == 8_000
        assert end.tokens_before == start.tokens_before > end.tokens_after
        assert end.reason == start.reason
        assert end.tokens_saved > 0
        assert end.messages > 0
    assert any(event.was_summarized for event in course)
    assert any(isinstance(e, MessageEvent) and isinstance(e.span, Span) for e in seen)
    folded = [e for e in seen if e.kind == "message-compacted" and e.span]
    assert all(e.edit in {event.at for event in chat.events()} for e in folded)


def test_a_compaction_on_demand_and_the_prune_at_the_end_are_told():
    chat, seen = watched(40_000)
    chat.append(user("The task."))
    for n in range(24):
        chat.append(step(f"c{n}", output(1_000, f"value_{n}")))
    del seen[:]
    chat.close()
    assert kinds(seen)[-1] == "prune:complete"
    assert seen[-1].was_pruned
    assert seen[-1].tokens_saved > 0
    del seen[:]
    chat.compact(keep_recent=2)
    assert [k for k in kinds(seen) if k[:4] != "mess"] == ["compaction:start", "compaction:complete"]
    assert seen[0].reason == "on demand"


@pytest.mark.parametrize("asks", ["fit", "compact"])
def test_events_of_one_compaction_agree_and_count_messages(asks):
    chat, seen = watched(32_000, compact={"message_threshold": 20, "keep_recent": 4})
    chat.append(user("The task."))
    for n in range(10):
        chat.append(step(f"c{n}", output(100, f"value_{n}")))
    before = chat.check_overflow().current_tokens
    if asks == "fit":
        chat.fit()
    else:
        chat.compact(keep_recent=4)
    start, end = (event for event in seen if isinstance(event, CompactionEvent))
    assert start.reason == end.reason == ("message_threshold" if asks == "fit" else "on demand")
    assert start.tokens_before == end.tokens_before == before
    assert end.tokens_after == chat.check_overflow().current_tokens
    assert end.messages == 20 - 4  # all but the task and the newest


# proves: E7
def test_a_summary_that_fails_is_told():
    def broken(ask: Any) -> str:
        raise RuntimeError("no")

    seen: list[Any] = []
    chat = refold.open(
        "c", store="memory://", model="m", config=agent(8_000), summarizer=broken, on_event=seen.append
    )
    chat.append(user("The task."))
    for n in range(30):
        chat.append(step(f"c{n}", output(400, f"value_{n}")))
        chat.fit()
    failed = [event for event in seen if event.kind == "compaction:failed"]
    assert failed
    assert "RuntimeError" in failed[0].reason


def test_a_compaction_is_told_before_its_summary_is_waited_for():
    seen: list[Any] = []
    when: list[list[str]] = []
    scribe = Scribe()

    def slow(ask: Any) -> str:
        when.append(kinds(seen))
        return scribe(ask)

    chat = refold.open(
        "c", store="memory://", model="m", config=agent(16_000), summarizer=slow, on_event=seen.append
    )
    chat.append([user("The task."), *(m for n in range(9) for m in step(f"c{n}", output(300, f"v_{n}")))])
    chat.compact(keep_recent=2)
    assert "compaction:start" in when[0]
    assert kinds(seen).count("compaction:start") == 1


def test_a_compaction_that_somebody_else_made_meanwhile_ends_as_well(tmp_path):
    store, seen = f"sqlite:///{tmp_path}/c.db", list[Any]()

    def slow(ask: Any) -> str:
        with refold.open("c", store=store, model="m", config=agent(8_000)) as other:
            other.compact(keep_recent=2)
        return "nothing of use"

    config = agent(8_000)
    chat = refold.open("c", store=store, model="m", config=config, summarizer=slow, on_event=seen.append)
    chat.append(user("The task."))
    for n in range(40):
        chat.append(step(f"c{n}", output(400, f"value_{n}")))
        chat.fit()
    course = [kind for kind in kinds(seen) if kind in ("compaction:start", "compaction:complete")]
    assert len(course) > 2
    assert course == ["compaction:start", "compaction:complete"] * (len(course) // 2)
    chat.close()


def test_what_cannot_fit_is_told_as_overflow():
    chat, seen = watched(2_000)
    chat.append(user(output(3_000, "big")))
    with pytest.raises(OverBudgetError):
        chat.fit()
    assert kinds(seen)[-1] == "overflow"
    assert seen[-1].tokens_before > seen[-1].limit == 2_000
    chat, seen = watched(2_000, compact="off")
    chat.append(user(output(3_000, "big")))
    chat.fit()
    assert kinds(seen)[-1] == "overflow"


def test_a_callback_that_raises_is_reported_and_harms_nothing(caplog):
    seen: list[str] = []

    def broken(event: Any) -> None:
        raise ValueError("mine")

    chat = refold.open("c", store="memory://", on_event=[broken, lambda event: seen.append(event.kind)])
    with caplog.at_level(logging.WARNING, "refold"):
        assert chat.append(user("Go.")) == 0
    assert seen == ["message-added"]
    assert "on_event failed at message-added: ValueError('mine')" in caplog.text
    assert chat.fit().report.notices == ("on_event failed at message-added: ValueError('mine')",)
    assert chat.fit().report.notices == ()


def test_a_callback_may_use_the_session():
    chat: Session
    places: list[int] = []

    def note(event: Any) -> None:
        if event.kind == "message-added" and event.role == "user":
            places.append(chat.append({"role": "assistant", "content": "noted"}))

    chat = refold.open("c", store="memory://", on_event=note)
    assert chat.append(user("Go.")) == 0
    assert places == [1]
    assert chat.get_count() == 2


def test_a_callback_may_be_a_coroutine_in_a_program_that_awaits_nothing():
    seen: list[str] = []

    async def note(event: Any) -> None:
        await asyncio.sleep(0)
        seen.append(event.kind)

    async def broken(event: Any) -> None:
        raise ValueError("mine")

    chat = refold.open("c", store="memory://", on_event=[note, broken])
    chat.append(user("Go."))
    assert seen == ["message-added"]
    assert "ValueError" in chat.fit().report.notices[0]


def test_a_callback_of_an_async_session_runs_in_its_loop():
    async def main() -> list[Any]:
        seen: list[Any] = []
        told = asyncio.Event()

        async def note(event: Any) -> None:
            await told.wait()
            seen.append((event.kind, asyncio.get_running_loop()))

        async with await refold.aopen("c", store="memory://", on_event=note) as chat:
            await chat.append(user("Go."))
            assert not seen
            told.set()
        return [(kind, loop is asyncio.get_running_loop()) for kind, loop in seen]

    assert asyncio.run(main()) == [("message-added", True)]


def test_what_is_no_callback_is_refused():
    with pytest.raises(SettingError, match="on_event"):
        refold.open("c", store="memory://", on_event="print")  # type: ignore[arg-type]


def test_a_fork_is_watched_by_the_same():
    chat, seen = watched()
    chat.append(user("Go."))
    twin = chat.fork("twin")
    twin.append(calls(("c1", "web_search")))
    twin.append(answers("c1", json.dumps({"a": 1})))
    assert [event.conversation for event in seen] == ["c", "twin", "twin"]
