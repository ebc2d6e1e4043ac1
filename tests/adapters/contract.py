"""What every adapter holds, whatever the framework: subclass `AdapterContract` and give it a `Rig`.

A rig runs the framework's own agent with a scripted model, with and without refold; nothing of the framework
is replaced but the model.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import pytest

from refold.config.config import load_config
from refold.core.expiry import EXPAND, SEARCH
from refold.dialects import openai_chat
from refold.dialects.rules.request import Facts
from refold.dialects.rules.targets import RULES
from refold.session import api as opening
from refold.session.meter import Meter

MODEL = "scripted"
WINDOW = 8_000
ANSWER = 500
"""Tokens of the window that the model's answer may take."""
CONFIG: dict[str, Any] = {"models": {MODEL: {"window": WINDOW, "max_output": ANSWER}}}
"""What a rig hands to its adapter as `config`, with `model=MODEL`."""
NO_RESERVE = {"output_reserve": ANSWER, "system_reserve": 0, "safety_buffer": 0, "threshold_percent": 1.0}
TIGHT: dict[str, Any] = {**CONFIG, "agents": {"default": {"compact": NO_RESERVE}}}
"""The same with nothing in reserve: what is left out of the sum is too much at the door."""
ENDLESS = 10**9
"""A window in which everything fits."""
TASK = "Read all the ledgers, one after another, and tell me the seal of ledger 3."
STEPS = 200


class ScriptedCall(NamedTuple):
    id: str
    tool: str
    arguments: dict[str, Any]


class ScriptedReply(NamedTuple):
    """What the model says: a text, calls, or both."""

    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()


class SentRequest(NamedTuple):
    """What reached the model."""

    messages: list[dict[str, Any]]
    """As OpenAI's chat has them, system text included."""
    declared: Sequence[dict[str, Any]] = ()
    """The tools that it was offered, as OpenAI's chat has them."""

    @property
    def tools(self) -> list[str]:
        """Their names."""
        return [str(one["function"]["name"]) for one in self.declared]

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


Script: TypeAlias = Callable[[SentRequest], ScriptedReply]
Mask: TypeAlias = Callable[[str], str]


def tool_declaration(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool, as a request has it."""
    about = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": about}


class Rig(Protocol):
    """One framework, ready to run: its agent has the tools `read_ledger(number)` and `fail(number)`,
    which are `ledger` and `failing` of this module, and, with refold, expand and search.
    """

    store: str
    """URL of the store that the adapter is given."""
    hooks: Sequence[type[Any]]
    """The adapter's classes: through their methods the framework calls it."""

    def run(
        self,
        thread: str,
        text: str,
        script: Script,
        *,
        with_refold: bool = True,
        config: Mapping[str, Any] = CONFIG,
        mask: Mask | None = None,
    ) -> str:
        """The user says something in a thread of the framework's; returns the agent's answer.

        Where there is a `mask`, another layer of the framework's, before refold, puts every text of a request
        through it: what the user, the model and the tools say. Where no such layer can be, it skips the test.

        May be called from several threads at once, for threads of their own. What the framework keeps of a
        thread outlives the call, and `again`.
        """

    def again(self) -> "Rig":
        """The same in a new process, as far as that can be told: nothing is shared but what is stored."""

    def stored(self, thread: str) -> list[tuple[str, str]]:
        """What the framework itself has stored of a thread: role and text of each message, in its order.

        Roles are `user`, `assistant` and `tool`; the text of a message with calls is what it says besides.
        """

    def raw(self, thread: str) -> list[bytes]:
        """The same in the framework's own serialization, all of each message."""


SHORT_LEDGERS, LONG_LEDGERS = 1_000, 2_000
"""From these numbers on, ledgers have one line only, and are longer than the window."""


def ledger(number: int) -> str:
    """What the tool `read_ledger` answers: some four hundred tokens, as a rule."""
    many = 1 if SHORT_LEDGERS <= number < LONG_LEDGERS else 24 if number < LONG_LEDGERS else 1_000
    lines = [
        f"{number:03d}-{n:02d}  barrels of herring  {(number * 37 + n * 11) % 97:>3}" for n in range(many)
    ]
    lines[12:13] = [f"{number:03d}-12  ledger {number} was signed by the {clerk(number)} clerk"] * (many > 12)
    return "\n".join([f"Ledger {number}, seal {seal(number)}", *lines])


ABORTING_LEDGER = 13
"""The number of a ledger at which whoever reads it is torn away."""


ABORTED = threading.Event()
"""It was."""


class ProcessAborted(BaseException):
    """No error that a tool could have: its process is ended."""


def failing(number: int) -> str:
    """What the tool `fail` does: it raises."""
    if number == ABORTING_LEDGER:
        ABORTED.set()
        raise ProcessAborted
    raise ValueError(f"ledger {number} is missing")


HAIR = ("bald", "blond", "dark", "gray", "red")
MOODS = ("calm", "cheerful", "gloomy", "grumpy", "merry", "sleepy")


def seal(number: int) -> str:
    return f"S{(number * 7_919 + 104_729) % 99_991:05d}"


def clerk(number: int) -> str:
    """Who signed a ledger, in the middle of it: words, which no summary keeps as it keeps numbers."""
    return " ".join(one[number * 7 % len(one)] for one in (HAIR, MOODS))


class WindowExceeded(Exception):
    """What a provider says of a request that is larger than its window."""


class CheckedModel:
    """The model's door: every request is judged and counted before the script answers it."""

    def __init__(
        self, script: Script, *, task: str | None = None, window: int = WINDOW, answer: int = ANSWER
    ) -> None:
        """The `task` is a text that every request must have in it; the `answer` must have room, too."""
        self.requests: list[SentRequest] = []
        self.faults: list[str] = []
        self._script, self._task, self._room = script, task, window - answer
        self._meter = Meter(None, load_config(CONFIG), MODEL)
        self._lock = threading.Lock()

    def __call__(self, request: SentRequest) -> ScriptedReply:
        """
        Raises:
            Full: the request, with room for its answer, is larger than the window.
        """
        with self._lock:
            self.requests.append(request)
        judge = RULES["openai-chat"](Facts())
        judge.feed(request.messages)
        self.faults += [f"{fault.rule}: {fault.message}" for fault in judge.violations]
        if self._task is not None and self._task not in request.text:
            self.faults.append("the task is gone")
        if self.tokens(request) > self._room:
            raise WindowExceeded(f"{self.tokens(request)} tokens; the window has room for {self._room}")
        return self._script(request)

    def tokens(self, request: SentRequest) -> int:
        """Of all that is sent: system text, messages and tools."""
        count, said = self._meter.counter, (openai_chat.parse(_sent(one)) for one in request.messages)
        return self._meter.estimate(sum(map(count.message, said)) + count.tools(request.declared), None)


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """However a rig spells it: arguments without spaces, and of a result nothing but what it says."""
    if message["role"] == "tool":
        return {key: message[key] for key in ("role", "tool_call_id", "content")}
    calls = [_compact(call) for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message


def _compact(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(json.loads(function["arguments"]), separators=(",", ":"))
    return {**call, "function": {**function, "arguments": arguments}}


class LedgerReader:
    """A model that reads ledgers one by one, and then tells the seal of one: what it sees of it, or looks up.

    With `deep`, it tells who signed it, of which the beginning of a ledger says nothing.
    """

    def __init__(
        self,
        steps: int = STEPS,
        wanted: int | None = 3,
        at_once: int = 1,
        *,
        first: int = 1,
        deep: bool = False,
    ) -> None:
        self.steps, self.wanted, self.at_once, self.first, self.deep = steps, wanted, at_once, first, deep
        self.read = self.looked_up = 0
        self.called: list[str] = []
        """Tools of refold's, in order."""

    def __call__(self, request: SentRequest) -> ScriptedReply:
        if self.read < self.steps:
            begun = self.first + self.read
            self.read += self.at_once
            calls = [
                ScriptedCall(f"call_{n}", "read_ledger", {"number": n})
                for n in range(begun, begun + self.at_once)
            ]
            return ScriptedReply(f"Now ledger {begun}.", tuple(calls))
        if self.wanted is None:
            return ScriptedReply("I have read them.")
        signed, sealed = "ledger {} was signed by the (\\w+ \\w+) clerk", "Ledger {}, seal (S\\d{{5}})"
        if seen := re.search((signed if self.deep else sealed).format(self.wanted), request.text):
            return ScriptedReply(f"It was the {seen[1]} clerk." if self.deep else f"The seal is {seen[1]}.")
        if SEARCH not in request.tools or self.looked_up > 3:
            return ScriptedReply("I do not know any more.")
        self.looked_up += 1
        return self._look_up(request)

    def _look_up(self, request: SentRequest) -> ScriptedReply:
        if not self.called:
            self.called.append(SEARCH)
            query = {"query": f'"Ledger {self.wanted}, seal"'}
            return ScriptedReply("Let me look it up.", (ScriptedCall("call_search", SEARCH, query),))
        self.called.append(EXPAND)
        at = re.findall(r"#(\d+)", request.results[-1])
        return ScriptedReply("", (ScriptedCall(f"call_expand{self.looked_up}", EXPAND, {"at": int(at[0])}),))


def recorded_messages(rig: Rig, thread: str) -> list[tuple[str, str]]:
    """What our record has of a thread, as `Rig.stored` has it."""
    with opening.open(thread, store=rig.store) as chat:
        said = [one.message for one in chat.get_all()]
    return [(one.role, one.text) for one in said if one.role != "system"]


ID = re.compile(rb"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}")
TIME = re.compile(rb"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+]00:00)?|\b\d{10}\.\d+")


def without_ids_and_times(stored: Sequence[bytes]) -> list[bytes]:
    """Without times; ids, which are made up anew in each run, are told by the order in which they come."""
    known = dict[bytes, bytes]()

    def name(found: re.Match[bytes]) -> bytes:
        return known.setdefault(found[0], b"id-%d" % len(known))

    return [ID.sub(name, TIME.sub(b"then", one)) for one in stored]


def tool_results(request: SentRequest) -> list[tuple[str, str]]:
    """The tool of each call, and what it said."""
    said = {one["tool_call_id"]: str(one["content"]) for one in request.messages if one["role"] == "tool"}
    calls = [call for one in request.messages for call in one.get("tool_calls", ())]
    return [(call["function"]["name"], said[call["id"]]) for call in calls]


def run_to_answer(
    rig: Rig, thread: str, reader: LedgerReader, text: str = TASK, *, config: Mapping[str, Any] = CONFIG
) -> CheckedModel:
    """Runs a turn that ends with the seal that the reader wants, without an invalid request."""
    door = CheckedModel(reader, task=text)
    assert reader.wanted is not None
    assert rig.run(thread, text, door, config=config) == f"The seal is {seal(reader.wanted)}."
    assert door.faults == []
    return door


class AdapterContract:
    """Subclass it, with your own `rig` fixture."""

    @pytest.fixture
    def rig(self) -> Rig:
        pytest.fail("give me a fixture `rig`")

    def test_a_long_loop_in_a_small_window_ends_with_the_right_answer(self, rig: Rig) -> None:
        door = run_to_answer(rig, "long", LedgerReader())
        assert len(door.requests) > STEPS
        assert max(map(door.tokens, door.requests)) > WINDOW / 4  # it is not simply cut to nothing

    def test_without_refold_the_same_program_overflows(self, rig: Rig) -> None:
        door = CheckedModel(LedgerReader())
        with pytest.raises(Exception):  # noqa: B017 each framework has errors of its own
            rig.run("bare", TASK, door, with_refold=False)
        assert door.tokens(door.requests[-1]) > WINDOW - ANSWER

    def test_tools_and_the_answer_have_their_room(self, rig: Rig) -> None:
        """Where nothing is in reserve, a sum without either of them would be refused at the door."""
        reader = LedgerReader(150, wanted=SHORT_LEDGERS, first=SHORT_LEDGERS)
        door = run_to_answer(rig, "tight", reader, config=TIGHT)
        newest = door.requests[-1]
        tools = door.tokens(newest) - door.tokens(SentRequest(newest.messages))
        assert WINDOW - ANSWER - max(map(door.tokens, door.requests)) < min(tools, ANSWER)

    def test_what_the_framework_stores_is_left_as_it_is_and_stands_once_in_the_record(self, rig: Rig) -> None:
        steps = 40
        run_to_answer(rig, "whole", LedgerReader(steps))
        stored = rig.stored("whole")
        read = [(role, text) for role, text in stored if role == "tool" and text.startswith("Ledger")]
        assert read[:steps] == [("tool", ledger(n)) for n in range(1, steps + 1)]
        assert stored[0] == ("user", TASK)
        assert stored[-1] == ("assistant", f"The seal is {seal(3)}.")
        assert not any("[refold" in text for role, text in stored if role != "tool")
        assert recorded_messages(rig, "whole") == stored

    def test_to_the_byte_it_is_what_the_framework_stores_without_refold(self, rig: Rig) -> None:
        steps = 40
        bare = CheckedModel(LedgerReader(steps, wanted=None), window=ENDLESS)
        rig.run("bare", TASK, bare, with_refold=False)
        door = CheckedModel(LedgerReader(steps, wanted=None))
        rig.run("fitted", TASK, door)
        assert ledger(1) not in door.requests[-1].results  # it was shortened there
        before = rig.raw("fitted")
        assert without_ids_and_times(before) == without_ids_and_times(rig.raw("bare"))
        assert ledger(1) == next(text for role, text in rig.stored("fitted") if role == "tool")
        rig.again().run("fitted", "Go on.", CheckedModel(LedgerReader(steps, wanted=None, first=steps)))
        assert rig.raw("fitted")[: len(before)] == before

    def test_what_another_layer_masks_stays_masked(self, rig: Rig) -> None:
        """Whether it is shown as it is, in part, or not at all; and in the next turn as well."""

        def mask(text: str) -> str:
            return text.replace("herring", "[fish]")

        bare = CheckedModel(LedgerReader(2, wanted=None), window=ENDLESS)
        rig.run("bare", f"{TASK} I like herring.", bare, with_refold=False, mask=mask)
        assert ledger(2) not in bare.requests[-1].text
        assert mask(ledger(2)) == bare.requests[-1].results[-1]  # the layer is there
        for script in (
            LedgerReader(3, wanted=None, first=LONG_LEDGERS),
            LedgerReader(40),
            LedgerReader(20, wanted=1, deep=True),
        ):
            door = CheckedModel(script, task=TASK)
            rig.run("masked", f"{TASK} I like herring.", door, mask=mask)
            assert door.faults == []
            assert [n for n, request in enumerate(door.requests) if "herring" in request.text] == []
            assert "[fish]" in door.requests[-1].text

    def test_the_latest_question_is_always_there(self, rig: Rig) -> None:
        run_to_answer(rig, "asks", LedgerReader(30))
        question = "Thank you. And the seal of ledger 5?"
        door = run_to_answer(rig, "asks", LedgerReader(30, wanted=5), question)
        assert all(TASK in request.text for request in door.requests)

    def test_calls_in_parallel_keep_their_results(self, rig: Rig) -> None:
        door = run_to_answer(rig, "parallel", LedgerReader(30, at_once=3))
        newest = [request.results[-3:] for request in door.requests[1:10]]
        assert newest == [[ledger(n + k) for k in (1, 2, 3)] for n in range(0, 27, 3)]

    def test_errors_of_tools_reach_the_model(self, rig: Rig) -> None:
        call = ScriptedCall("call_1", "fail", {"number": 9})
        replies = iter([ScriptedReply("", (call,)), ScriptedReply("It is missing.")])
        door = CheckedModel(lambda request: next(replies))
        assert rig.run("errors", TASK, door) == "It is missing."
        assert "ledger 9 is missing" in door.requests[1].results[0]

    def test_a_run_that_broke_off_can_be_gone_on_with(self, rig: Rig) -> None:
        """The model fails while its calls are under way; what the framework stored of it is mended."""

        def breaks(request: SentRequest) -> ScriptedReply:
            raise ConnectionError("the model is gone")

        reader = LedgerReader(3)
        script = iter(cast(list[Script], [reader, reader, breaks]))
        with pytest.raises(Exception):  # noqa: B017
            rig.run("broken", TASK, CheckedModel(lambda request: next(script)(request)))
        run_to_answer(rig, "broken", LedgerReader(20), "Go on.")

    def test_a_call_that_was_aborted_can_be_gone_on_from(self, rig: Rig) -> None:
        """The framework has stored a call, maybe, and will never have its result."""

        def aborts(request: SentRequest) -> ScriptedReply:
            if ABORTED.is_set():  # there are frameworks that go on
                raise ProcessAborted
            return ScriptedReply("", (ScriptedCall("call_0", "fail", {"number": ABORTING_LEDGER}),))

        ABORTED.clear()
        with pytest.raises(BaseException):  # noqa: B017
            rig.run("aborted", TASK, CheckedModel(aborts))
        assert ABORTED.is_set()
        door = run_to_answer(rig.again(), "aborted", LedgerReader(20), "Go on.")
        for call, said in tool_results(door.requests[0]):
            assert call == "fail"
            assert "ledger" not in said  # nobody makes up what the tool would have said

    def test_a_new_process_goes_on_where_the_old_one_was(self, rig: Rig) -> None:
        run_to_answer(rig, "resumed", LedgerReader(30))
        run_to_answer(rig.again(), "resumed", LedgerReader(0), "Once more: the seal of ledger 3?")
        assert recorded_messages(rig, "resumed") == rig.again().stored("resumed")

    def test_two_threads_at_once_do_not_mix(self, rig: Rig) -> None:
        readers = [LedgerReader(25, wanted=2), LedgerReader(25, wanted=3)]
        with ThreadPoolExecutor(2) as pool:
            doors = list(pool.map(run_to_answer, [rig] * 2, "ab", readers, [f"{TASK} (a)", f"{TASK} (b)"]))
        for door, other in zip(doors, "ba", strict=True):
            assert not any(f"({other})" in request.text for request in door.requests)

    def test_the_model_can_expand_what_is_hidden(self, rig: Rig) -> None:
        reader = LedgerReader(60, wanted=1, deep=True)
        door = CheckedModel(reader)
        assert rig.run("expands", TASK, door) == f"It was the {clerk(1)} clerk."
        assert {EXPAND, SEARCH} <= set(door.requests[0].tools)
        assert reader.called == [SEARCH, EXPAND]
        asked, told = door.requests[-2:]
        assert clerk(1) not in asked.text  # what was found does not show it
        assert clerk(1) in told.results[-1]

    def test_with_compaction_off_everything_is_sent(self, rig: Rig) -> None:
        off = {**CONFIG, "agents": {"default": {"compact": "off"}}}
        door = CheckedModel(LedgerReader(30), window=100_000)
        assert rig.run("off", TASK, door, config=off) == f"The seal is {seal(3)}."
        assert door.requests[-1].results == [ledger(n) for n in range(1, 31)]
