"""Whatever was said, in whatever dialect: the request is valid for its target, and fits."""

from typing import Any

import pytest
from hypothesis import given, settings

import refold
import views
from histories import DIALECTS
from refold.core.errors import OverBudgetError
from refold.core.pairing import OrphanResult
from refold.dialects.rules.targets import check_request
from refold.session import render as page
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.stores.store import Key
from strategies import told

TARGETS = ("openai-chat", "openai-responses", "anthropic", "ai-sdk")
WINDOWS = (600, 2_000, 200_000)
FLAGS = ("system-inside", "no-prefill", "binds-thinking")


def sessions(flags: tuple[str, ...] = ()) -> tuple[MemoryStore, refold.Config]:
    limits = {
        f"w{window}": {"window": window, "max_output": window // 8, "flags": list(flags)}
        for window in WINDOWS
    }
    return MemoryStore(), refold.config.load_config({"models": limits})


def judged(history: list[Any], dialect: str, flags: tuple[str, ...]) -> list[Any]:
    """The violations in all requests that can be made of a history, asked for step by step and at once."""
    store, config = sessions(flags)
    key, found = Key("default", "h"), list[Any]()
    writer = Session(store, key, config=config)
    for part in (history[: len(history) // 2], history[len(history) // 2 :]):
        if part:
            writer.append(part, dialect=dialect)
        for window in WINDOWS:
            for target in TARGETS:
                session = Session(store, key, model=f"w{window}", config=config, view=f"{target}-{window}")
                try:
                    fitted = session.fit(dialect=target)
                except OverBudgetError:
                    continue
                assert fitted.report.tokens.final <= window
                known = {"no_prefill": "no-prefill" in flags, "system_inside": "system-inside" in flags}
                found += check_request(target, fitted.request, **known) if fitted.messages else []
    return found


# proves: C15, I5
@settings(max_examples=2 * settings().max_examples)
@given(told())
def test_every_history_is_a_valid_request_in_every_target(history):
    steps, dialect, flags = history
    assert judged(DIALECTS[dialect](steps), dialect, flags) == []


# proves: C15
def test_a_share_of_the_million_views_is_valid():
    seen = views.many(range(2_000_000, 2_000_100))
    assert [what for what in seen if what.startswith("seed")] == []
    assert seen["valid"] > 1_500


def test_the_views_are_not_valid_when_pairing_is_by_adjacency(monkeypatch):
    monkeypatch.setattr(page, "repair_pairs", _pairs_with_the_line_before)
    seen = views.many(range(40))
    assert any("A4" in what or "C1" in what or "R1" in what or "A3" in what for what in seen)


def _pairs_with_the_line_before(lines):
    """A result belongs to the message right before it, whatever its id."""
    slots: list[Any] = []
    before: Any = None
    for line in lines:
        follows = before is not None and (before.calls or before.answers is not None)
        slots.append(line if line.answers is None or follows else OrphanResult(line))
        before = line
    return slots, []


@pytest.mark.parametrize("flags", [(), FLAGS])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_empty_conversation_is_no_request_and_no_fault(dialect, flags):
    store, config = sessions(flags)
    session = Session(store, Key("default", "h"), model="w2000", config=config)
    assert session.fit(dialect=dialect).messages == []


def test_a_repaired_request_of_anthropic_begins_with_a_user_message():
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    said = {
        "role": "assistant",
        "content": [{"type": "text", "text": " "}, {"type": "text", "text": "Hello."}],
    }
    chat.append([said, {"role": "user", "content": "Hello?"}], dialect="anthropic")
    fitted = chat.fit()
    assert [message["role"] for message in fitted.messages] == ["user", "assistant", "user"]
    assert any("messages[0]: added a user message" in notice for notice in fitted.report.notices)
