"""Summarizers: the official SDKs against a scripted model, callables of every kind, and how they fail."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from refold.core.errors import SettingError
from refold.core.message import Usage
from refold.summaries.call import CallOutcome, call, running_loop
from refold.summaries.providers import ModelSummarizer, output_limit_field, summarizer_by_name
from refold.summaries.summarizer import Answer, Ask
from refold.testing.model import Reply, ScriptedModel

ASK = Ask("conversation", "What happened?", "You summarize.", (), None, 1, 300, "default")
KEY = "a-key-like-no-other"
SOON = {"retry-after-ms": "1"}


@pytest.fixture(autouse=True)
def only_what_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, address or profile of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "ANTHROPIC_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class BusyError(Exception):
    """One that a user's own client might raise."""

    def __init__(self, status_code: int, headers: dict[str, str]) -> None:
        super().__init__("busy")
        self.status_code, self.headers, self.response = status_code, headers, self


@pytest.fixture(params=["openai", "anthropic"])
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


def summarizer(provider: str, model: ScriptedModel, **more: Any) -> Any:
    url = model.openai_url if provider == "openai" else model.anthropic_url
    return ModelSummarizer(f"{provider}/a-model", **{"base_url": url, "api_key": KEY, **more})


def put(to: Any, *, timeout_s: float = 10.0, **more: Any) -> CallOutcome:
    return asyncio.run(call(to, ASK, timeout_s=timeout_s, **more))


def said(provider: str, *script: Any) -> tuple[CallOutcome, list[dict[str, Any]]]:
    with ScriptedModel(script) as model:
        outcome = put(summarizer(provider, model))
        assert model.until(lambda: model.in_flight == 0)
        return outcome, model.requests


class TestModels:
    def test_an_answer_comes_with_its_model_usage_and_finish(self, provider: str) -> None:
        used = Usage(100, 20, cache_read=60)
        outcome, requests = said(provider, Reply("It rained. ☔", usage=used))
        assert outcome == CallOutcome(Answer("It rained. ☔", "a-model", used, "stop"))
        assert len(requests) == 1

    def test_openai_is_sent_a_system_message_and_a_limit_that_other_servers_know(self) -> None:
        _, [request] = said("openai", "fine")
        assert request == {
            "path": "/v1/chat/completions",
            "model": "a-model",
            "messages": [
                {"role": "system", "content": "You summarize."},
                {"role": "user", "content": "What happened?"},
            ],
            "max_tokens": 300,
        }

    @pytest.mark.parametrize("url", ["https://api.openai.com/v1", "https://eu.api.openai.com/v1"])
    def test_openai_itself_is_sent_the_limit_that_all_its_models_take(self, url: str) -> None:
        assert output_limit_field(url) == "max_completion_tokens"

    def test_anthropic_is_sent_the_system_apart(self) -> None:
        _, [request] = said("anthropic", "fine")
        assert request == {
            "path": "/v1/messages",
            "model": "a-model",
            "system": "You summarize.",
            "messages": [{"role": "user", "content": "What happened?"}],
            "max_tokens": 300,
        }

    def test_the_address_may_stand_in_the_environment(
        self, provider: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ScriptedModel("fine") as model:
            monkeypatch.setenv("OPENAI_BASE_URL", model.openai_url)
            monkeypatch.setenv("ANTHROPIC_BASE_URL", model.anthropic_url)
            outcome = put(summarizer(provider, model, base_url=None))
            assert outcome.answer is not None
            assert model.requests[0]["max_tokens"] == 300

    @pytest.mark.parametrize("status", [400, 401])
    def test_what_would_fail_again_is_asked_once(self, provider: str, status: int) -> None:
        outcome, requests = said(provider, Reply("no, not so", status))
        assert (outcome.answer, len(requests)) == (None, 1)
        assert outcome.problem in ("400 Bad Request: no, not so", "401 Unauthorized: no, not so")

    def test_after_a_429_it_is_asked_again(self, provider: str) -> None:
        outcome, requests = said(provider, Reply("slow down", 429, {"retry-after": "0"}), "fine")
        assert outcome.answer is not None
        assert (outcome.answer.text, len(requests)) == ("fine", 2)

    def test_a_server_that_fails_is_asked_three_times(self, provider: str) -> None:
        outcome, requests = said(provider, Reply("oops", 500, SOON))
        assert (outcome.answer, len(requests)) == (None, 3)
        assert outcome.problem == "500 Internal Server Error: oops"

    def test_a_hanging_server_is_given_up_and_its_connection_closed(self, provider: str) -> None:
        with ScriptedModel(["fine", Reply("too late", hang=threading.Event())]) as model:
            put(summarizer(provider, model))  # the first takes longer
            outcome = put(summarizer(provider, model), timeout_s=0.5)
            assert (outcome.answer, outcome.problem) == (None, "timed out after 0.5 s")
            assert model.until(lambda: len(model.requests) == 2 and model.in_flight == 0)

    def test_cancellation_closes_the_connection(self, provider: str) -> None:
        async def cancel(model: ScriptedModel) -> None:
            asked = asyncio.create_task(call(summarizer(provider, model), ASK, timeout_s=60))
            assert await asyncio.to_thread(model.until, lambda: model.in_flight == 1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert await asyncio.to_thread(model.until, lambda: model.in_flight == 0)

        with ScriptedModel(Reply(hang=threading.Event())) as model:
            asyncio.run(cancel(model))

    def test_a_connection_that_breaks_off_is_a_problem(self, provider: str) -> None:
        outcome, requests = said(provider, Reply("half of it" * 100, cut=True))
        assert outcome.answer is None
        assert outcome.problem is not None
        assert outcome.problem.startswith("connection error: ")
        assert len(requests) in (1, 3)

    def test_nobody_there_is_a_problem(self, provider: str) -> None:
        with ScriptedModel("fine") as model:
            gone = summarizer(provider, model)
        outcome = put(gone)
        assert outcome.answer is None
        assert outcome.problem is not None
        assert outcome.problem.startswith("connection error: ")

    @pytest.mark.parametrize(
        ("reply", "text", "finish"),
        [
            (Reply(""), "", "stop"),
            (Reply(reasoning="hmm"), "", "stop"),
            (Reply("so", reasoning="hmm"), "so", "stop"),
            (Reply(finish="tool-calls"), "", "tool-calls"),
            (Reply("cut off in", finish="length"), "cut off in", "length"),
            (Reply(finish="refusal"), "", "refusal"),
            (Reply("x" * 1_000_000), "x" * 1_000_000, "stop"),
        ],
        ids=["empty", "only reasoning", "reasoning", "tool call", "truncated", "refusal", "1 MB"],
    )
    def test_whatever_the_model_says_is_told_as_it_is(
        self, provider: str, reply: Reply, text: str, finish: str
    ) -> None:
        answer = said(provider, reply)[0].answer
        assert answer is not None
        assert (answer.text, answer.finish) == (text, finish)

    @pytest.mark.parametrize(
        "body",
        [
            {},
            [],
            "text",
            {"choices": [], "content": []},
            {"choices": None, "content": None, "usage": None, "model": None},
            {"choices": [{"message": None, "finish_reason": "stop"}], "content": [None, 1, {"type": "text"}]},
            {"choices": [{"message": {"content": 1}, "finish_reason": {}}], "stop_reason": [], "model": 1},
            {"choices": {}, "content": {}, "usage": {"prompt_tokens": "1", "prompt_tokens_details": 1}},
        ],
    )
    def test_json_that_is_no_reply_is_a_problem_or_says_nothing(self, provider: str, body: Any) -> None:
        outcome, requests = said(provider, Reply(raw=json.dumps(body).encode()))
        assert len(requests) == 1
        if outcome.answer is None:
            assert outcome.problem is not None
            assert outcome.problem.startswith(f"{provider}/a-model")
        else:
            assert outcome.answer.text == ""

    @pytest.mark.parametrize("body", [b"", b"<html>log in</html>", b'{"a": "\xff"}', b"[" * 100_000])
    @pytest.mark.parametrize("kind", ["application/json", "text/html"])
    def test_what_is_not_json_is_a_problem(self, provider: str, body: bytes, kind: str) -> None:
        outcome, requests = said(provider, Reply(raw=body, headers={"Content-Type": kind}))
        assert (outcome.answer, len(requests)) == (None, 1)
        assert outcome.problem == f"{provider}/a-model: the reply is not JSON"

    def test_a_torn_text_is_a_problem_in_a_reply_and_mended_in_a_request(self) -> None:
        torn = Reply(raw=b'{"choices": [{"message": {"content": "a\\ud800"}}]}')
        assert said("openai", torn)[0].problem == "the summary: contains a lone surrogate"
        with ScriptedModel("fine") as model:
            asked = Ask("message", "a\ud800", "b\udc00", (), None, 1, 300, "default")
            asyncio.run(summarizer("openai", model)(asked))
            asyncio.run(summarizer("anthropic", model)(asked))
            assert [model.requests[0]["messages"][1]["content"], model.requests[1]["system"]] == ["a?", "b?"]

    def test_a_missing_key_is_a_problem_that_says_what_to_set(self, provider: str) -> None:
        with ScriptedModel("fine") as model:
            outcome = put(summarizer(provider, model, api_key=None))
            assert model.requests == []
        assert outcome.problem is not None
        assert outcome.problem.startswith(
            f"{provider}/a-model: set {provider.upper()}_API_KEY or pass api_key"
        )

    def test_a_missing_sdk_is_a_problem_that_names_the_extra(
        self, provider: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, provider, None)
        with ScriptedModel("fine") as model:
            outcome = put(summarizer(provider, model))
        assert outcome.problem == f"{provider}: its SDK is not installed: pip install refold[{provider}]"

    def test_no_key_is_repeated_in_a_problem(self, provider: str) -> None:
        told = f"wrong key {KEY}, not sk-proj-abcdefghij, Bearer abc or https://me:pw@host/?api_key=abc\n" * 9
        problem = said(provider, Reply(told, 401))[0].problem
        assert problem is not None
        assert problem.startswith(
            "401 Unauthorized: wrong key ***, not ***, Bearer *** or https://***@host/?api_key=***"
        )
        assert len(problem) == 300
        assert "\n" not in problem

    def test_many_can_be_asked_at_once(self, provider: str) -> None:
        async def ask_all(model: ScriptedModel, together: threading.Event) -> list[CallOutcome]:
            to = summarizer(provider, model)
            asked = [asyncio.create_task(call(to, ASK, timeout_s=60)) for _ in range(5)]
            assert await asyncio.to_thread(model.until, lambda: model.in_flight == 5)
            together.set()
            return await asyncio.gather(*asked)

        together = threading.Event()
        with ScriptedModel(Reply("fine", hang=together)) as model:
            assert all(outcome.answer for outcome in asyncio.run(ask_all(model, together)))
            assert model.most_at_once == 5

    def test_only_what_may_have_been_answered_may_cost_something(self, provider: str) -> None:
        with ScriptedModel("fine") as model:
            keyless = summarizer(provider, model, api_key=None)
            gone = summarizer(provider, model)
        refused = [said(provider, Reply("no", status))[0] for status in (400, 401, 404)]
        assert all(outcome.is_free for outcome in (*refused, put(gone), put(keyless)))
        lost = [said(provider, reply)[0] for reply in (Reply("half of it" * 100, cut=True), Reply(raw=b"{"))]
        with ScriptedModel(Reply(hang=threading.Event())) as model:
            lost.append(put(summarizer(provider, model), timeout_s=0.3))
        assert not any(outcome.is_free for outcome in lost)


class TestNames:
    @pytest.mark.parametrize(
        ("model", "name"),
        [
            ("openai/gpt-4o-mini", "openai/gpt-4o-mini"),
            ("openai/org/model", "openai/org/model"),
            ("anthropic/claude-haiku-4-5", "anthropic/claude-haiku-4-5"),
            ("Claude-haiku-4-5", "anthropic/Claude-haiku-4-5"),
            ("gpt-4o-mini", "openai/gpt-4o-mini"),
        ],
    )
    def test_a_name_leads_to_its_provider(self, model: str, name: str) -> None:
        found: Any = summarizer_by_name(model, {})
        assert (found.name, found.window) == (name, None)

    def test_an_address_goes_to_its_provider(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
            monkeypatch.setenv(name, KEY)
        with ScriptedModel("fine") as model:
            urls = {"openai": model.openai_url, "anthropic": model.anthropic_url}
            assert all(put(summarizer_by_name(name, urls)).answer for name in ("openai/a/b", "claude-c"))
            asked = [(request["path"], request["model"]) for request in model.requests]
        assert asked == [("/v1/chat/completions", "a/b"), ("/v1/messages", "claude-c")]

    @pytest.mark.parametrize("model", ["foo/bar", "/bar", "openai/", ""])
    def test_a_name_that_leads_nowhere_is_refused(self, model: str) -> None:
        with pytest.raises(SettingError, match=r"openai/MODEL, anthropic/MODEL|PROVIDER/MODEL"):
            summarizer_by_name(model, {})


class TestCallables:
    def test_a_function_may_give_a_text_or_an_answer(self) -> None:
        assert put(lambda ask: f"{ask.kind} {ask.round}") == CallOutcome(Answer("conversation 1"))
        answer = Answer("short", "mine", Usage(1), "length")
        assert put(lambda ask: answer) == CallOutcome(answer)

    def test_a_function_runs_in_a_thread_and_a_coroutine_does_not(self) -> None:
        async def here(ask: Ask) -> str:
            return threading.current_thread().name

        class Here:
            async def __call__(self, ask: Ask) -> str:
                return await here(ask)

        def name(to: Any) -> str | None:
            answer = put(to).answer
            return answer and answer.text

        assert name(here) == name(Here()) == name(lambda ask: here(ask)) == threading.current_thread().name
        assert name(lambda ask: threading.current_thread().name) == "refold-summarizer"

    @pytest.mark.parametrize("is_sync", [False, True], ids=["coroutine", "function that gives one"])
    def test_a_coroutine_may_run_on_a_loop_of_its_own(self, is_sync: bool) -> None:
        async def there(ask: Ask) -> str:
            return str(id(asyncio.get_running_loop()))

        with loop_elsewhere() as loop:
            outcome = put((lambda ask: there(ask)) if is_sync else there, loop=lambda: loop)
        assert outcome.answer == Answer(str(id(loop)))

    def test_a_coroutine_on_a_loop_of_its_own_is_canceled_there(self) -> None:
        begun, ended = threading.Event(), threading.Event()

        async def hangs(ask: Ask) -> str:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return ""

        async def cancel(loop: asyncio.AbstractEventLoop) -> None:
            asked = asyncio.create_task(call(hangs, ASK, timeout_s=60, loop=lambda: loop))
            assert await asyncio.to_thread(begun.wait, 10)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

        with loop_elsewhere() as loop:
            assert put(hangs, timeout_s=0.05, loop=lambda: loop).problem == "timed out after 0.05 s"
            assert ended.wait(10)
            begun.clear()
            ended.clear()
            asyncio.run(cancel(loop))
            assert ended.wait(10)

    def test_a_coroutine_that_will_not_be_canceled_elsewhere_is_left_alone(self) -> None:
        release, ended = threading.Event(), threading.Event()

        async def stubborn(ask: Ask) -> str:
            while not release.is_set():
                try:
                    await asyncio.to_thread(release.wait)
                except asyncio.CancelledError:
                    continue
            asyncio.get_running_loop().call_soon(ended.set)
            return "too late"

        with loop_elsewhere() as loop:
            outcome = put(stubborn, timeout_s=0.05, loop=lambda: loop)
            assert outcome.problem == "timed out after 0.05 s"
            release.set()
            assert ended.wait(10)

    def test_a_loop_that_ends_meanwhile_is_a_problem(self) -> None:
        def ends(ask: Ask) -> Any:
            return stopped()

        async def stopped() -> str:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.Event().wait()
            return ""

        with loop_elsewhere() as loop:
            assert put(ends, loop=lambda: loop).problem == "RuntimeError: canceled on its own event loop"

    def test_a_loop_that_does_not_run_is_not_waited_for(self) -> None:
        async def anywhere(ask: Ask) -> str:
            return "fine"

        with loop_elsewhere() as loop:
            pass
        assert put(anywhere, loop=lambda: loop).answer == Answer("fine")

    @pytest.mark.parametrize(
        ("error", "problem"),
        [
            (ValueError("no\n  good"), "ValueError: no good"),
            (ValueError(), "ValueError"),
            (SettingError("models", "unknown"), "models: unknown"),
            (ConnectionResetError("by peer"), "connection error: by peer"),
            (TimeoutError("mine"), "TimeoutError: mine"),
            (ValueError("x\ud800" * 500), "ValueError: " + "x?" * 143 + "x…"),
        ],
    )
    def test_whatever_it_raises_is_a_problem(self, error: Exception, problem: str) -> None:
        def fails(ask: Ask) -> str:
            raise error

        async def fails_too(ask: Ask) -> str:
            raise error

        for to in (fails, fails_too):
            assert put(to) == CallOutcome(None, problem, is_free=isinstance(error, SettingError))

    @pytest.mark.parametrize(
        "error", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, asyncio.CancelledError]
    )
    def test_what_would_end_a_program_is_a_problem(self, error: type[BaseException]) -> None:
        def stops(ask: Ask) -> str:
            raise error

        assert put(stops) == CallOutcome(None, f"RuntimeError: it raised {error.__name__}")

    @pytest.mark.parametrize("given", [None, 7, b"text", ["text"], Answer(None)])  # type: ignore[arg-type]
    def test_what_is_no_text_is_a_problem(self, given: Any) -> None:
        outcome = put(lambda ask: given)
        kind = "NoneType" if isinstance(given, Answer) else type(given).__name__
        assert outcome == CallOutcome(None, f"the summary: expected a text, got {kind}")

    @pytest.mark.parametrize(
        ("told", "known"),
        [(10**400, 2**53 - 1), (2**53, 2**53 - 1), (2**53 - 1, 2**53 - 1), (-1, 0), (-(10**400), 0)],
    )
    def test_usage_is_told_within_reason(self, told: int, known: int) -> None:
        outcome = put(lambda ask: Answer("fine", usage=Usage(told, told, told, told)))
        assert outcome.answer == Answer("fine", usage=Usage(known, known, known, known))

    @pytest.mark.parametrize("given", ["a\ud800", Answer("a\ud800")])
    def test_a_text_with_a_lone_surrogate_is_a_problem(self, given: Any) -> None:
        assert put(lambda ask: given).problem == "the summary: contains a lone surrogate"

    def test_a_function_that_hangs_is_given_up(self) -> None:
        release, threads = threading.Event(), []

        def hangs(ask: Ask) -> str:
            threads.append(threading.current_thread())
            release.wait()
            return "too late"

        outcome = put(hangs, timeout_s=0.1)
        assert (outcome.answer, outcome.problem) == (None, "timed out after 0.1 s")
        release.set()
        threads[0].join()

    def test_a_coroutine_that_will_not_be_canceled_is_left_alone(self) -> None:
        async def stubborn(ask: Ask) -> str:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return "too late"

        async def give_up() -> None:
            outcome = await call(stubborn, ASK, timeout_s=0.05)
            assert outcome.problem == "timed out after 0.05 s"
            release.set()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

        release = asyncio.Event()
        asyncio.run(give_up())


class TestHome:
    def test_everybody_in_a_process_has_the_same_one_which_runs(self) -> None:
        with ThreadPoolExecutor(8) as many:
            loops = {*many.map(lambda _: running_loop(), range(8))}
        [loop] = loops
        assert loop.is_running()
        assert running_loop() is loop

    def test_a_loop_of_ones_own_comes_first_while_it_runs(self) -> None:
        with loop_elsewhere() as loop:
            assert running_loop(loop) is loop
        assert running_loop(loop) is running_loop()

    def test_it_outlives_what_would_end_a_program(self) -> None:
        async def quits() -> None:
            raise SystemExit

        async def fine() -> str:
            return "fine"

        with pytest.raises(SystemExit):
            asyncio.run_coroutine_threadsafe(quits(), running_loop()).result(10)
        assert asyncio.run_coroutine_threadsafe(fine(), running_loop()).result(10) == "fine"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
    def test_a_fork_has_its_own_and_leaves_the_old_one_alone(self) -> None:
        script = """
import asyncio, os
from refold.summaries.call import running_loop

async def fine():
    return "fine"

def works():
    return asyncio.run_coroutine_threadsafe(fine(), running_loop()).result(10) == "fine"

before = running_loop()
child = os.fork()
if child == 0:
    os._exit(0 if works() and running_loop() is not before else 1)
assert os.waitpid(child, 0)[1] == 0
assert works() and running_loop() is before
"""
        assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@contextmanager
def loop_elsewhere() -> Any:
    """A running event loop in another thread."""
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        stop = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    loop, stop = ready.result()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
