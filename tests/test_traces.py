"""Real agent runs, aborted and orphaned calls included: they fit, they are valid, nothing is lost."""

import json
from pathlib import Path

import pytest

import refold
from pairing import check
from refold.core.errors import OverBudgetError
from refold.core.event import Line
from refold.core.view import fold

DATA = Path(__file__).parents[2] / "shared" / "data" / "traces"
FILES = sorted(DATA.glob("*.jsonl")) if DATA.exists() else []
CHAT = [file for file in FILES if not file.name.startswith("anthropic_")]

pytestmark = pytest.mark.skipif(not CHAT, reason="the recorded conversations are not beside the project")


def histories(file: Path) -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in file.read_text().splitlines()]


def lines_of(messages: list[dict]) -> list[Line]:
    return [
        Line(0, m["role"], 0, 0, 0, tuple(c["id"] for c in m.get("tool_calls") or ()), m.get("tool_call_id"))
        for m in messages
    ]


@pytest.mark.parametrize("file", CHAT, ids=lambda file: file.stem)
def test_a_recorded_run_renders_as_it_came(file):
    for history in histories(file):
        chat = refold.open("run", store="memory://")
        chat.append(history)
        assert [s.message.role for s in chat.get_all()][:1] == [_role(history[0])]
        fitted = chat.fit(override={"off": True})
        if not fitted.report.notices:
            assert json.dumps(fitted.messages) == json.dumps(history)
        assert [e.raw for e in chat.events()] == [_compact(message) for message in history]


@pytest.mark.parametrize("window", [2_000, 8_000, 32_000])
@pytest.mark.parametrize("file", CHAT, ids=lambda file: file.stem)
def test_a_recorded_run_fits_step_by_step_and_is_valid(file, window):
    config = {"models": {"m": {"window": window, "max_output": window // 8}}}
    for history in histories(file)[:12]:
        chat = refold.open("run", store="memory://", model="m", config=config)
        task = next((m for m in history if m["role"] == "user"), None)
        for message in history:
            chat.append(message)
            if message["role"] == "assistant":
                continue
            try:
                fitted = chat.fit()
            except OverBudgetError:
                continue
            assert check(lines_of(fitted.messages)) == []
            assert fitted.report.tokens.final <= window - window // 8
            if task in history[: chat.get_count()]:
                assert task in fitted.messages
        assert chat.view() == fold(list(chat.events()))


def _role(message: dict) -> str:
    return {"developer": "system"}.get(message["role"], message["role"])


def _compact(message: dict) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
