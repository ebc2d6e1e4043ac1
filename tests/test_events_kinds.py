"""Every kind of event that a session tells reaches those who watch over HTTP, with its numbers."""

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from apis import Running, running
from refold.core.errors import OverBudgetError
from refold.serve import service
from refold.session.notify import CompactionEvent, MessageEvent
from refold.session.session import Session
from refold.stores.store import Key
from served import until
from test_ladder import agent, output, step, user
from watchers import Told, watching

TOOLS = {name: {"expire": {"after_steps": 0, "mode": name}} for name in ("compact", "remove")}
KINDS = {kind for one in (MessageEvent, CompactionEvent) for kind in get_args(get_type_hints(one)["kind"])}


def fails(ask: Any) -> str:
    raise RuntimeError("the model is out")


@pytest.fixture
def run(tmp_path) -> Iterator[Running]:
    settings = agent(40_000, tools=TOOLS)
    settings["models"]["small"] = {**settings["models"]["m"], "window": 2_000, "max_output": 200}
    with running(f"sqlite:///{tmp_path}/log.db", summarizer=fails, settings=settings) as one:
        yield one


def expires(chat: Session) -> None:
    chat.append(
        [user("Go."), *step("c1", output(500, "x"), "compact"), *step("c2", output(500, "y"), "remove")]
    )
    chat.append(step("c3", "ok", "other"))
    chat.fit()
    chat.expand(2, reason="to be sure")
    chat.restore(2)


def overflows(chat: Session) -> None:
    chat.append(user(output(3_000, "big")))
    with pytest.raises(OverBudgetError):
        chat.fit()


def goes_on(chat: Session) -> None:
    """It ends with a prune, when it is no longer kept."""
    chat.append(user("Go."))
    for n in range(24):
        chat.append(step(f"c{n}", output(1_000, f"value_{n}")))


def compacts(chat: Session) -> None:
    goes_on(chat)
    chat.compact("summarize", keep_recent=2)


def test_every_kind_of_event_is_told(run, monkeypatch):
    monkeypatch.setattr(service, "MAX_OPEN_SESSIONS", 0)
    with watching(run, "/api/events") as watcher:
        for do, model in ((expires, "m"), (overflows, "small"), (compacts, "m"), (goes_on, "m")):
            with run.service.session(Key("default", do.__name__), model) as chat:
                do(chat)
        until(lambda: {one.event for one in watcher.told} >= KINDS | {"restored"})

    def told(kind: str, by: Any) -> Told:
        return next(one for one in watcher.named(kind) if one.data["conversation"] == by.__name__)

    for kind in ("message-expired", "message-compacted", "message-removed"):
        assert told(kind, expires).data["tokens_saved"] > 100
    assert (
        told("overflow", overflows).data["tokens_before"] > told("overflow", overflows).data["limit"] == 2_000
    )
    for kind, by in (("compaction:complete", compacts), ("prune:complete", goes_on)):
        facts = told(kind, by).data
        assert facts["tokens_before"] > facts["tokens_after"] > 0
        assert facts["messages"] > 0
    assert told("prune:complete", goes_on).data["was_pruned"] is True
    assert "out" in told("compaction:failed", compacts).data["reason"]
