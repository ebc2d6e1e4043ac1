"""What every adapter holds, whatever the framework: subclass `AdapterContract` and give it a `Rig`.

A rig runs the framework's own agent with a scripted model, with and without refold; nothing of the framework
is replaced but the model.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import pytest

from refold import opening
from refold.config import load_config
from refold.core.lease import EXPAND, SEARCH
from refold.formats import openai_chat
from refold.meter import Meter
from refold.rules.judge import Facts
from refold.rules.targets import JUDGES

MODEL = "scripted"
WINDOW = 8_000
CONFIG: dict[str, Any] = {"models": {MODEL: {"window": WINDOW, "max_output": 500}}}
"""What a rig hands to its adapter as `config`, with `model=MODEL`."""
TASK = "Read all the ledgers, one after another, and tell me the seal of ledger 3."
STEPS = 200


class Call(NamedTuple):
    id: str
    tool: str
    arguments: dict[str, Any]


class Reply(NamedTuple):
    """What the model says: a text, calls, or both."""

    text: str = ""
    calls: tuple[Call, ...] = ()


class Request(NamedTuple):
    """What reached the model."""

    messages: list[dict[str, Any]]
    """As OpenAI's chat has them, system text included."""
    tools: Sequence[str] = ()
    """Names of the tools that it was offered."""

    @property
    def text(self) -> str:
        return json.dumps(self.messages, ensure_ascii=False)

    @property
    def results(self) -> list[str]:
        return [str(one["content"]) for one in self.messages if one["role"] == "tool"]

    @property
    def asked(self) -> str:
        """What the user said last."""
        said = [one for one in self.messages if one["role"] == "user"]
        own = [one for one in said if "[refold" not in str(one["content"])[:40]]
        return str(own[-1]["content"]) if own else ""


Script: TypeAlias = Callable[[Request], Reply]


class Rig(Protocol):
    """One framework, ready to run: its agent has the tools `read_ledger(number)` and `fail(number)`,
    which are `ledger` and `failing` of this module, and, with refold, expand and search.
    """

    store: str
    """URL of the store that the adapter is given."""

    def run(
        self,
        thread: str,
        text: str,
        script: Script,
        *,
        with_refold: bool = True,
        config: Mapping[str, Any] = CONFIG,
    ) -> str:
        """The user says something in a thread of the framework's; returns the agent's answer.

        May be called from several threads at once, for threads of their own. What the framework keeps of a
        thread outlives the call, and `again`.
        """

    def again(self) -> "Rig":
        """The same in a new process, as far as that can be told: nothing is shared but what is stored."""

    def stored(self, thread: str) -> list[tuple[str, str]]:
        """What the framework itself has stored of a thread: role and text of each message, in its order.

        Roles are `user`, `assistant` and `tool`; the text of a message with calls is what it says besides.
        """


def ledger(number: int) -> str:
    """What the tool `read_ledger` answers: some four hundred tokens."""
    lines = [f"{number:03d}-{n:02d}  barrels of herring  {(number * 37 + n * 11) % 97:>3}" for n in range(24)]
    return "\n".join([f"Ledger {number}, seal {seal(number)}", *lines])


ABORTS = 13
"""The number of a ledger at which whoever reads it is torn away."""


class Aborted(BaseException):
    """No error that a tool could have: its process is ended."""


def failing(number: int) -> str:
    """What the tool `fail` does: it raises."""
    if number == ABORTS:
        raise Aborted
    raise ValueError(f"ledger {number} is missing")


def seal(number: int) -> str:
    return f"S{(number * 7_919 + 104_729) % 99_991:05d}"


class Full(Exception):
    """What a provider says of a request that is larger than its window."""


class Door:
    """The model's door: every request is judged and counted before the script answers it."""

    def __init__(self, script: Script, *, task: str | None = None, window: int = WINDOW) -> None:
        """The `task` is a text that every request must have in it."""
        self.requests: list[Request] = []
        self.faults: list[str] = []
        self._script, self._task, self._window = script, task, window
        self._counter = Meter(None, load_config(CONFIG), MODEL).counter
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Reply:
        """
        Raises:
            Full: the request is larger than the window.
        """
        with self._lock:
            self.requests.append(request)
        judge = JUDGES["openai-chat"](Facts())
        judge.feed(request.messages)
        self.faults += [f"{fault.rule}: {fault.message}" for fault in judge.violations]
        if self._task is not None and self._task not in request.text:
            self.faults.append("the task is gone")
        if self.tokens(request) > self._window:
            raise Full(f"{self.tokens(request)} tokens; the window has {self._window}")
        return self._script(request)

    def tokens(self, request: Request) -> int:
        said = map(openai_chat.parse, request.messages)
        return self._counter.tokens(sum(map(self._counter.message, said)))


class Reader:
    """A model that reads ledgers one by one, and then tells a seal: what it sees of it, or looks it up."""

    def __init__(self, steps: int = STEPS, wanted: int = 3, at_once: int = 1) -> None:
        self.steps, self.wanted, self.at_once = steps, wanted, at_once
        self.read = self.looked_up = 0

    def __call__(self, request: Request) -> Reply:
        if self.read < self.steps:
            numbers = range(self.read + 1, self.read + 1 + self.at_once)
            self.read += self.at_once
            calls = [Call(f"call_{n}", "read_ledger", {"number": n}) for n in numbers]
            return Reply(f"Now ledger {numbers[0]}.", tuple(calls))
        seen = re.search(rf"Ledger {self.wanted}, seal (S\d{{5}})", request.text)
        if seen:
            return Reply(f"The seal is {seen[1]}.")
        if SEARCH not in request.tools or self.looked_up > 3:
            return Reply("I do not know any more.")
        self.looked_up += 1
        if self.looked_up == 1:
            query = {"query": f'"Ledger {self.wanted}, seal"'}
            return Reply("Let me look it up.", (Call("call_search", SEARCH, query),))
        at = re.findall(r"#(\d+)", request.results[-1])
        return Reply("", (Call(f"call_expand{self.looked_up}", EXPAND, {"at": int(at[0])}),))


def kept(rig: Rig, thread: str) -> list[tuple[str, str]]:
    """What our record has of a thread, as `Rig.stored` has it."""
    with opening.open(thread, store=rig.store) as chat:
        said = [one.message for one in chat.get_all()]
    return [(one.role, one.text) for one in said if one.role != "system"]


class AdapterContract:
    """Subclass it, with your own `rig` fixture."""

    @pytest.fixture
    def rig(self) -> Rig:
        pytest.fail("give me a fixture `rig`")

    def test_a_long_loop_in_a_small_window_ends_with_the_right_answer(self, rig: Rig) -> None:
        door = Door(Reader(), task=TASK)
        assert rig.run("long", TASK, door) == f"The seal is {seal(3)}."
        assert len(door.requests) > STEPS
        assert door.faults == []
        assert max(map(door.tokens, door.requests)) > WINDOW / 4  # it is not simply cut to nothing

    def test_without_refold_the_same_program_overflows(self, rig: Rig) -> None:
        door = Door(Reader())
        with pytest.raises(Exception):  # noqa: B017 each framework has errors of its own
            rig.run("bare", TASK, door, with_refold=False)
        assert door.tokens(door.requests[-1]) > WINDOW

    def test_what_the_framework_stores_is_left_as_it_is_and_stands_once_in_the_record(self, rig: Rig) -> None:
        steps = 40
        assert rig.run("whole", TASK, Door(Reader(steps))) == f"The seal is {seal(3)}."
        stored = rig.stored("whole")
        read = [(role, text) for role, text in stored if role == "tool" and text.startswith("Ledger")]
        assert read[:steps] == [("tool", ledger(n)) for n in range(1, steps + 1)]
        assert stored[0] == ("user", TASK)
        assert stored[-1] == ("assistant", f"The seal is {seal(3)}.")
        assert not any("[refold" in text for role, text in stored if role != "tool")
        assert kept(rig, "whole") == stored

    def test_the_latest_question_is_always_there(self, rig: Rig) -> None:
        rig.run("asks", TASK, Door(Reader(30), task=TASK))
        door = Door(Reader(30, wanted=5), task="Thank you. And the seal of ledger 5?")
        assert rig.run("asks", "Thank you. And the seal of ledger 5?", door) == f"The seal is {seal(5)}."
        assert door.faults == []
        assert all(TASK in request.text for request in door.requests)

    def test_calls_in_parallel_keep_their_results(self, rig: Rig) -> None:
        door = Door(Reader(30, at_once=3), task=TASK)
        assert rig.run("parallel", TASK, door) == f"The seal is {seal(3)}."
        assert door.faults == []
        newest = [request.results[-3:] for request in door.requests[1:10]]
        assert newest == [[ledger(n + k) for k in (1, 2, 3)] for n in range(0, 27, 3)]

    def test_errors_of_tools_reach_the_model(self, rig: Rig) -> None:
        replies = iter([Reply("", (Call("call_1", "fail", {"number": 9}),)), Reply("It is missing.")])
        door = Door(lambda request: next(replies))
        assert rig.run("errors", TASK, door) == "It is missing."
        assert "ledger 9 is missing" in door.requests[1].results[0]

    def test_a_run_that_broke_off_can_be_gone_on_with(self, rig: Rig) -> None:
        """The model fails while its calls are under way; what the framework stored of it is mended."""

        def breaks(request: Request) -> Reply:
            raise ConnectionError("the model is gone")

        reader = Reader(3)
        script = iter(cast(list[Script], [reader, reader, breaks]))
        with pytest.raises(Exception):  # noqa: B017
            rig.run("broken", TASK, Door(lambda request: next(script)(request)))
        door = Door(Reader(20), task="Go on.")
        assert rig.run("broken", "Go on.", door) == f"The seal is {seal(3)}."
        assert door.faults == []

    def test_a_call_that_was_aborted_can_be_gone_on_from(self, rig: Rig) -> None:
        """The framework has stored a call, maybe, and will never have its result."""
        replies = iter([Reply("", (Call("call_0", "fail", {"number": ABORTS}),)), Reply("It came back.")])
        with suppress(BaseException):
            rig.run("aborted", TASK, Door(lambda request: next(replies)))
        door = Door(Reader(20), task="Go on.")
        assert rig.again().run("aborted", "Go on.", door) == f"The seal is {seal(3)}."
        assert door.faults == []

    def test_a_new_process_goes_on_where_the_old_one_was(self, rig: Rig) -> None:
        rig.run("resumed", TASK, Door(Reader(30)))
        door, question = (
            Door(Reader(0), task="Once more: the seal of ledger 3?"),
            "Once more: the seal of ledger 3?",
        )
        assert rig.again().run("resumed", question, door) == f"The seal is {seal(3)}."
        assert door.faults == []
        assert kept(rig, "resumed") == rig.again().stored("resumed")

    def test_two_threads_at_once_do_not_mix(self, rig: Rig) -> None:
        doors = {name: Door(Reader(25, wanted=n), task=f"{TASK} ({name})") for n, name in enumerate("ab", 2)}
        with ThreadPoolExecutor(2) as pool:
            runs = {
                name: pool.submit(rig.run, name, f"{TASK} ({name})", door) for name, door in doors.items()
            }
        assert {name: run.result() for name, run in runs.items()} == {
            "a": f"The seal is {seal(2)}.",
            "b": f"The seal is {seal(3)}.",
        }
        assert [door.faults for door in doors.values()] == [[], []]
        for name, other in ("ab", "ba"):
            assert not any(f"({other})" in request.text for request in doors[name].requests)

    def test_the_model_can_expand_what_is_hidden(self, rig: Rig) -> None:
        door = Door(Reader(60, wanted=1))
        assert rig.run("expands", TASK, door) == f"The seal is {seal(1)}."
        assert {EXPAND, SEARCH} <= set(door.requests[0].tools)

    def test_with_compaction_off_everything_is_sent(self, rig: Rig) -> None:
        off = {**CONFIG, "agents": {"default": {"compact": "off"}}}
        door = Door(Reader(30), window=100_000)
        assert rig.run("off", TASK, door, config=off) == f"The seal is {seal(3)}."
        assert door.requests[-1].results == [ledger(n) for n in range(1, 31)]
