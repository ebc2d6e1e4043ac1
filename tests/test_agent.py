"""The loop: what it does with a reply, what it stores when, and how it goes on whatever happens."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import agent_run
import refold
from refold.agent import (
    Actions,
    Agent,
    AnthropicModel,
    Asked,
    Chat,
    Ended,
    ExpandMessage,
    Failed,
    Heard,
    OpenAIModel,
    Ran,
    Replied,
    Retry,
    SubAgent,
    Success,
    Tool,
    Waited,
)
from refold.agent.loop import AgentRun
from refold.core.errors import ConflictError, SettingError
from refold.core.event import Replaced, Said
from refold.core.message import Message, Usage
from refold.session.aio import aopen
from refold.stores.sqlite import SQLiteStore
from refold.stores.store import Key
from refold.testing.model import ScriptedModel
from refold.testing.stand_in import InvalidRequestError, Reply, StandIn


def add(a: int, b: int = 2) -> int:
    """Adds two numbers.

    Args:
        a: The first one.
        b: The second, which may
            be left out.
    """
    return a + b


def calls(*given):
    return Reply(calls=given)


def agent_of(script, tools=(), *, name="worker", dialect="openai-chat", window=16_000, config=None, **rest):
    model = StandIn(script, dialect=dialect, window=window)
    settings = [model.config, config] if config else model.config
    return Agent(name, model, tools, config=settings, **{"store": "memory://", **rest})


def stored(agent, conversation):
    return refold.open(conversation, store=agent.store).get_all()


def results(agent, conversation):
    return [result for one in stored(agent, conversation) for result in one.message.results]


@pytest.fixture(params=["openai-chat", "anthropic"])
def dialect(request):
    return request.param


# What a reply asks for


# proves: A11b
def test_a_task_is_worked_on_until_the_model_answers_in_words(dialect):
    agent = agent_of([calls(("add", {"a": 1})), "It is 3."], [add], dialect=dialect)
    result = agent.run("What is 1 + 2?")
    assert result.end == Success("It is 3.")
    assert result.steps == 2
    assert [one.output for one in results(agent, result.conversation)] == ["3"]


def test_a_model_may_be_any_callable():
    assert Agent("poet", lambda request: "Roses.", store="memory://").run("Write!").text == "Roses."


def test_a_tool_is_told_to_the_model_as_its_annotations_and_docstring_have_it():
    tool = Tool.of(add)
    assert tool.description == "Adds two numbers."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first one."},
            "b": {"type": "integer", "description": "The second, which may be left out."},
        },
        "required": ["a"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"b": 1}, "missing required field `a`. It takes: a, b"),
        ({"a": [1]}, "Expected `int`, got `array`"),
        ({"a": 1, "c": 2}, "contains unknown field `c`"),
        ('{"a": 1', "The arguments of add are wrong"),
        ("", "missing required field `a`"),
    ],
)
def test_wrong_arguments_come_back_as_a_sentence_and_the_model_tries_again(written, said):
    agent = agent_of([calls(("add", written)), calls(("add", {"a": "1"})), "3"], [add])
    result = agent.run("What is 1 + 2?")
    wrong, right = results(agent, result.conversation)
    assert wrong.is_error
    assert said in wrong.output
    assert (right.output, right.is_error) == ("3", False)
    assert [s.kind for s in stored(agent, result.conversation) if s.message.results] == [
        "retry-context",
        "action-result",
    ]


def test_a_tool_that_is_not_there_and_one_that_fails_are_the_models_to_deal_with():
    def broken() -> None:
        raise OSError("the disk is full")

    agent = agent_of([calls(("nothing", {}), ("broken", {})), "I give up."], [broken])
    result = agent.run("Go")
    said = {one.tool: one.output for one in results(agent, result.conversation)}
    assert said["nothing"] == "There is no tool 'nothing'; there are broken"
    assert said["broken"] == "broken failed: OSError: the disk is full"
    assert result.end == Success("I give up.")


# proves: A11b
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(""), "empty"),
        (Reply("I will n", finish="length"), "cut off"),
        (Reply("No.", finish="refusal"), "refusal"),
    ],
)
def test_a_reply_of_no_use_is_answered_with_why_and_in_the_end_the_run_fails(reply, said, dialect):
    agent = agent_of([reply, "Done."], dialect=dialect)
    result = agent.run("Go")
    assert result.end == Success("Done.")
    (context,) = [one for one in stored(agent, result.conversation) if one.kind == "retry-context"]
    assert said in context.message.text
    failing = agent_of([reply], dialect=dialect, max_retries=2)
    assert isinstance(failing.run("Go").end, Failed)
    assert failing.model.asked == 3


def test_what_tells_the_model_to_try_again_is_no_request_and_the_task_at_hand_stays_in_view():
    seen = []

    def script(request):
        seen.append([str(message["content"]) for message in request["messages"]])
        if len(seen) in (1, 40):
            return "Done."
        return "" if len(seen) == 2 else calls(("read", {"n": len(seen)}))

    def read(n: int) -> str:
        return page(n)

    agent = agent_of(script, [read], window=8_000)
    agent.run("Find the apples", conversation="c")
    task = " ".join(f"Then collect item-{n} and tell its checksum {n * 7919}." for n in range(20))
    assert agent.run(task, conversation="c").end == Success("Done.")
    assert [n for n, said in enumerate(seen[1:]) if task not in said] == []
    assert any("Your answer was empty" in text for text in seen[2])
    assert not any("Your answer was empty" in text for text in seen[-1])
    assert [one.turn for one in stored(agent, "c") if one.message.role == "user"] == [1, 2, 2]


def test_a_reply_of_no_use_does_not_answer_a_request():
    chat = refold.open("c", store="memory://", model="gpt-5")
    asked = [{"role": "user", "content": text} for text in ("Begin", "Count the red boxes")]
    chat.append([asked[0], {"role": "assistant", "content": "Begun."}, asked[1]])
    chat.append({"role": "assistant", "content": "I will n"})
    chat.append(Message("user", "That was cut off."), kind="retry-context")
    for n in range(6):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        chat.append({"role": "assistant", "tool_calls": [call]})
        chat.append({"role": "tool", "tool_call_id": f"c{n}", "content": page(n)})
    chat.append({"role": "user", "content": "And the blue ones?"})
    chat.compact(keep_recent=1)
    text = "\n".join(message.text for message in chat.view().messages)
    assert "(open) Count the red boxes" in text
    assert "cut off" not in text


def test_what_cannot_be_expanded_or_searched_is_the_models_to_deal_with(tmp_path):
    class Damaged(SQLiteStore):
        def search(self, scope, query, limit):
            raise RuntimeError("the index is damaged")

    store = Damaged(tmp_path / "agent.db")
    agent = agent_of([calls(("refold_search", {"query": "boxes"})), "Done."], store=store)
    result = agent.run("Go")
    assert result.end == Success("Done.")
    (answer,) = results(agent, result.conversation)
    assert answer.is_error
    assert answer.output == "refold_search failed: RuntimeError: the index is damaged"


def test_calls_in_a_reply_that_was_cut_off_are_not_run():
    ran = []
    agent = agent_of([Reply(calls=(("run", {"x": 1}),), finish="length"), "Done."], [logged(ran)])
    result = agent.run("Go")
    assert ran == []
    (answer,) = results(agent, result.conversation)
    assert answer.is_error
    assert "cut off" in answer.output


def logged(ran, name="run"):
    def run(x: int) -> str:
        ran.append(x)
        return f"ran {x}"

    return Tool.of(run, name=name)


# proves: A11b
def test_with_chat_every_text_is_for_the_user_who_answers_with_the_next_run():
    agent = agent_of(["Shall I?", "And now?", "Done then."], chat=True)
    first = agent.run("Delete it")
    assert first.end == Chat("Shall I?")
    assert agent.run("yes", conversation=first.conversation).end == Chat("And now?")
    assert agent.run("yes", conversation=first.conversation).end == Chat("Done then.")


# proves: A11, A11b
def test_one_reply_may_ask_for_several_kinds_of_things_at_once():
    helper = agent_of(["42"], name="helper", store=None)
    reply = calls(
        ("add", {"a": 1}), ("helper", {"task": "the answer"}), ("refold_expand", {"at": 0}), ("add", {})
    )
    agent = agent_of([reply, "Done."], [add], sub_agents=[helper])
    events = list(agent.stream("Go"))
    (steps, _) = [event.steps for event in events if isinstance(event, Replied) and event.agent == "worker"]
    assert [type(step) for step in steps] == [ExpandMessage, Actions, SubAgent, Retry]
    assert len(results(agent, events[-1].conversation)) == 4


# At the same time, each by itself


# proves: A11b
def test_calls_of_one_reply_run_at_the_same_time_in_threads_and_in_tasks():
    barrier, met = threading.Barrier(2, timeout=10), []

    def wait() -> str:
        barrier.wait()
        return "met in threads"

    async def pass_by(n: int) -> str:
        met.append(n)
        while len(met) < 2:
            await asyncio.sleep(0)
        return "met in tasks"

    work = calls(("wait", {}), ("pass_by", {"n": 1}), ("wait", {}), ("pass_by", {"n": 2}))
    agent = agent_of([work, "Done."], [wait, pass_by])
    result = agent.run("Go")
    outputs = sorted(one.output for one in results(agent, result.conversation))
    assert outputs == ["met in tasks"] * 2 + ["met in threads"] * 2


def test_a_result_is_stored_the_moment_it_is_there_and_its_tool_never_runs_again(tmp_path):
    ran, release = [], threading.Event()

    def fast(x: int) -> str:
        ran.append(x)
        return "fast"

    def slow(x: int) -> str:
        ran.append(x)
        assert release.wait(10)
        return "slow"

    def agent(script):
        return agent_of(script, [fast, slow], store=f"sqlite:///{tmp_path}/agent.db")

    async def left_alone():
        events = agent([calls(("slow", {"x": 2}), ("fast", {"x": 1}))]).astream("Go", conversation="c")
        async for event in events:
            if isinstance(event, Ran):
                break
        await events.aclose()

    asyncio.run(left_alone())
    assert sorted(ran) == [1, 2]
    release.set()
    again = agent(["Done."])
    assert again.run("Go", conversation="c").end == Success("Done.")
    assert sorted(ran) == [1, 2, 2]
    assert sorted(one.output for one in results(again, "c")) == ["fast", "slow"]


def test_a_task_that_has_its_answer_gets_that_one_and_another_task_goes_on(tmp_path):
    agent = agent_of(["One.", "Two."], store=f"sqlite:///{tmp_path}/agent.db")
    assert agent.run("First", conversation="c").text == "One."
    assert agent.run("First", conversation="c").text == "One."
    assert agent.run("Second", conversation="c").text == "Two."
    assert agent.model.asked == 2


def test_models_that_give_every_call_the_same_id_do_no_harm():
    def script(request):
        number = sum(message["role"] == "assistant" for message in request["messages"])
        if number == 3:
            return {"role": "assistant", "content": "Done."}
        function = {"name": "run", "arguments": json.dumps({"x": number})}
        call = {"id": "call_0", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    ran = []
    agent = Agent("worker", script, [logged(ran)], store="memory://")
    result = agent.run("Go")
    assert ran == [0, 1, 2]
    assert len(results(agent, result.conversation)) == 3


def test_calls_with_the_same_id_in_one_reply_get_no_result_of_each_other():
    def call(x):
        function = {"name": "run", "arguments": json.dumps({"x": x})}
        return {"id": "call_0", "type": "function", "function": function}

    def script(request):
        shown.update({m["tool_call_id"]: m["content"] for m in request["messages"] if m["role"] == "tool"})
        asked.extend(c for m in request["messages"] for c in m.get("tool_calls", ()))
        return "Done." if shown else {"role": "assistant", "tool_calls": [call(1), call(2)]}

    ran, asked, shown = [], [], {}
    Agent("worker", script, [logged(ran)], store="memory://").run("Go")
    said = {one["id"]: f"ran {json.loads(one['function']['arguments'])['x']}" for one in asked}
    assert said == shown
    assert sorted(shown.values()) == [f"ran {x}" for x in sorted(ran)]


# One run at a time


def test_a_second_run_of_a_conversation_is_told_who_runs_it_and_runs_no_tool():
    ran, told = [], []

    def pay() -> str:
        ran.append(1)
        if len(ran) > 1:
            return "paid twice"
        with pytest.raises(ConflictError) as error:
            agent_of(["Done."], [pay], store=agent.store).run("Go", conversation="c")
        told.append(str(error.value))
        return "paid"

    agent = agent_of([calls(("pay", {})), "Done."], [pay])
    assert agent.run("Go", conversation="c").end == Success("Done.")
    assert ran == [1]
    assert told[0].startswith(f"'c' is being run by process {os.getpid()} on ")
    assert "use another conversation" in told[0]
    assert agent.run("Go", conversation="c").end == Success("Done.")


def test_of_two_first_runs_at_the_same_time_one_begins_the_conversation(tmp_path):
    lost, ends = threading.Event(), []

    def script(request):
        assert lost.wait(10)
        return "Done."

    def run():
        try:
            agent = agent_of(script, store=f"sqlite:///{tmp_path}/agent.db", max_retries=0)
            ends.append(agent.run("Go", conversation="c").end)
        except ConflictError:
            lost.set()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [Success("Done.")]
    with refold.open("c", store=f"sqlite:///{tmp_path}/agent.db") as chat:
        assert [one.message.role for one in chat.get_all()] == ["system", "user", "assistant"]


def test_a_run_whose_process_was_killed_keeps_nobody_waiting(tmp_path):
    agent = agent_of(["One.", "Two."], store=f"sqlite:///{tmp_path}/agent.db")
    agent.run("First", conversation="c")
    code = f"""
import os, signal
from refold.stores.lease_holder import RenewedLease
from refold.stores.store import Key, open_store
lease = RenewedLease(open_store("sqlite:///{tmp_path}/agent.db"), Key("default", "c"), "run", 30.0)
lease.acquire()
assert lease.is_held
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert [lease.name for lease in agent.store.leases(Key("default", "c"), time.time())] == ["run"]
    assert agent.run("Second", conversation="c").text == "Two."


def test_a_run_that_was_taken_over_from_elsewhere_ends_before_its_next_step():
    key = Key("default", "c")

    def sleep() -> str:
        (mine,) = agent.store.leases(key, time.time())
        agent.store.release(key, mine)
        assert agent.store.acquire(key, "run", "elsewhere 7 x y", time.time(), 60.0)
        runs[0].lease.acquire()  # what its thread does every few seconds
        return "rested"

    runs = []
    agent = agent_of([calls(("sleep", {})), "Done."], [sleep])
    with pytest.raises(ConflictError, match="by process 7 on elsewhere"):
        asyncio.run(held(agent, runs))
    assert [one.output for one in results(agent, "c")] == ["rested"]
    with pytest.raises(ConflictError, match="by process 7 on elsewhere"):
        agent.run("Go", conversation="c")


async def held(agent, runs):
    async with await aopen("c", store=agent.store, config=agent.config, model="stand-in") as session:
        runs.append(AgentRun(agent, session, (), None))
        return await runs[0].result(Message("user", "Go"))


# Agents for agents


# proves: A2, A11b
def test_a_sub_agent_has_a_conversation_of_its_own_and_its_answer_enters_as_a_result():
    reader = agent_of([calls(("add", {"a": 40})), "It says 42."], [add], name="reader", store=None)
    agent = agent_of([calls(("reader", {"task": "Read it"})), "42."], sub_agents=[reader])
    result = agent.run("What does it say?", conversation="c")
    assert result.text == "42."
    (answer,) = [one for one in stored(agent, "c") if one.kind == "sub-agent-result"]
    assert answer.message.text == "It says 42."
    (own,) = {row.key.conversation for row in agent.store.conversations()} - {"c"}
    assert own.startswith("c/")
    assert [one.message.text for one in stored(agent, own) if one.message.role == "user"] == ["Read it"]


def test_a_sub_agent_goes_on_where_it_was_when_its_parent_does(tmp_path):
    ran = []

    def agents(script):
        reader = agent_of(script, [logged(ran)], name="reader", store=None)
        boss = [calls(("reader", {"task": "Read"}))] if ran == [] else []
        return agent_of([*boss, "Done."], sub_agents=[reader], store=f"sqlite:///{tmp_path}/a.db")

    async def left_alone():
        events = agents([calls(("run", {"x": 1})), calls(("run", {"x": 2}))]).astream("Go", conversation="c")
        async for event in events:
            if isinstance(event, Ran):
                break
        await events.aclose()

    asyncio.run(left_alone())
    assert ran[0] == 1
    assert agents(["It is read."]).run("Go", conversation="c").text == "Done."
    assert ran.count(1) == 1


# Limits


def test_limits_end_a_run_with_a_reason_and_a_later_run_goes_on():
    ran = []
    script = [calls(("run", {"x": n})) for n in range(4)]
    agent = agent_of([*script, "Done."], [logged(ran)], max_steps=2)
    first = agent.run("Go", conversation="c")
    assert first.end == Failed("max_steps reached: 2 steps done. Run the task again to continue.")
    agent.run("Go", conversation="c")
    assert agent.run("Go", conversation="c").end == Success("Done.")
    assert ran == [0, 1, 2, 3]


def test_money_is_counted_with_that_of_sub_agents_and_its_limit_needs_prices():
    prices = {"models": {"stand-in": {"input": 10.0, "output": 0.0}}}
    used = Reply(calls=(("add", {"a": 1}),), usage=Usage(1_000, 0))
    agent = agent_of([used], [add], config=prices, max_cost=0.025)
    result = agent.run("Go")
    assert "max_cost reached: $0.0300 of $0.025 spent" in result.text
    assert result.cost == pytest.approx(0.03)
    helper = agent_of([Reply("Done.", usage=Usage(1_000, 0))], name="helper", config=prices, store=None)
    ask = Reply(calls=(("helper", {"task": "Go"}),), usage=Usage(0, 0))
    boss = agent_of([ask, Reply("Done.", usage=Usage(0, 0))], config=prices, sub_agents=[helper])
    assert boss.run("Go").cost == pytest.approx(0.01)
    with pytest.raises(SettingError, match="the prices of 'stand-in' are not known"):
        agent_of(["Done."], max_cost=1.0).run("Go")


def test_a_tool_that_takes_too_long_ends_the_run_and_runs_again_in_a_later_one():
    release, ran = threading.Event(), []

    def hang() -> str:
        ran.append(1)
        release.wait(10)
        return "at last"

    agent = agent_of([calls(("hang", {})), "Done."], [hang], max_seconds=0.2)
    result = agent.run("Go", conversation="c")
    assert result.end == Failed("max_seconds reached. Run the task again to continue.")
    assert results(agent, "c") == []
    release.set()
    agent.max_seconds = None
    assert agent.run("Go", conversation="c").end == Success("Done.")
    assert [one.output for one in results(agent, "c")] == ["at last"]


def test_what_cannot_fit_ends_the_run_with_the_numbers_before_the_model_is_asked():
    agent = agent_of(["Done."], window=2_000)
    result = agent.run("word " * 5_000)
    assert isinstance(result.end, Failed)
    assert "there is room for" in result.text
    assert agent.model.asked == 0


# Models


def test_both_sdks_work_with_tools_over_http(dialect):
    with ScriptedModel([calls(("add", {"a": 1})), "It is 3."]) as server:
        model = (
            OpenAIModel("gpt-5", base_url=server.openai_url, api_key="none")
            if dialect == "openai-chat"
            else AnthropicModel("claude-sonnet-5", base_url=server.anthropic_url, api_key="none")
        )
        agent = Agent("worker", model, [add], store="memory://", system="You add.")
        result = agent.run("What is 1 + 2?")
    assert result.end == Success("It is 3.")
    assert result.usage == Usage(200, 40, calls=2)
    assert result.cost > 0
    first, second = server.requests
    assert [tool.get("name") or tool["function"]["name"] for tool in first["tools"]] == [
        "add",
        "refold_expand",
        "refold_search",
    ]
    assert "You add." in json.dumps(first)
    assert "refold_expand shows again" in json.dumps(first)
    assert len(second["messages"]) == len(first["messages"]) + 2


def test_a_model_out_of_reach_is_asked_again_where_that_may_help():
    busy = Reply("slow down", 429, {"retry-after": "0"})
    with ScriptedModel([busy, busy, "Done."]) as server:
        model = OpenAIModel("gpt-5", base_url=server.openai_url, api_key="none")
        events = list(Agent("worker", model, store="memory://").stream("Go"))
    waited = [event.why for event in events if isinstance(event, Waited)]
    assert waited == ["429 Too Many Requests: slow down"] * 2
    assert events[-1].result.end == Success("Done.")
    with ScriptedModel([Reply("no such model", 404)]) as server:
        model = OpenAIModel("gpt-5", base_url=server.openai_url, api_key="none")
        result = Agent("worker", model, store="memory://").run("Go")
        assert len(server.requests) == 1
    assert result.end == Failed("The request to the model failed. 404 Not Found: no such model")


def test_a_reply_may_come_in_pieces():
    def piece(**delta):
        return {
            "id": "1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        }

    async def model(request):
        yield piece(role="assistant", content="Ros")
        yield piece(content="es.")
        end = piece()
        end["choices"][0]["finish_reason"] = "stop"
        yield end

    events = list(Agent("poet", model, store="memory://").stream("Write!"))
    assert len([event for event in events if isinstance(event, Heard)]) == 3
    assert events[-1].result.end == Success("Roses.")


@pytest.mark.parametrize("reply", [{"role": "user", "content": "Hi"}, Message("system", "Hi"), []])
def test_what_is_no_message_of_the_assistant_is_no_reply_and_is_not_stored(reply):
    agent = Agent("worker", lambda request: reply, store="memory://", max_retries=0)
    result = agent.run("Go")
    assert isinstance(result.end, Failed)
    assert "reply: expected a message of the role assistant, got" in result.text
    assert [one.message.role for one in stored(agent, result.conversation)] == ["system", "user"]


def test_a_model_without_a_key_is_a_setting_to_be_made(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SettingError, match="OPENAI_API_KEY"):
        Agent("worker", "openai/gpt-5", store="memory://").run("Go")
    with pytest.raises(SettingError, match="openai/MODEL"):
        Agent("worker", "nobody/gpt-5")


def test_the_model_that_stands_in_refuses_what_a_provider_would_refuse():
    model = StandIn(["Done."], window=1_200)
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    unanswered = [{"role": "user", "content": "Go"}, {"role": "assistant", "tool_calls": [call]}]
    for messages in (unanswered, [], [{"role": "user", "content": "word " * 900}]):
        with pytest.raises(InvalidRequestError):
            model({"model": "stand-in", "messages": messages})
    assert model.asked == 0


# The view


def page(n):
    lines = [f"{n}.{k}: {k * n} of {k + n} things are in box {k}-{n}" for k in range(120)]
    return "\n".join(lines)


# proves: A11, B6
def test_a_long_run_stays_within_the_window_and_hidden_results_are_expanded():
    pages, expanded = [page(n) for n in range(30)], []

    def read(n: int) -> str:
        return pages[n]

    def script(request):
        hidden = re.search(r"\[refold #(\d+) read", json.dumps(request["messages"]))
        if hidden and not expanded:
            expanded.append(int(hidden[1]))
            return calls(("refold_expand", {"at": expanded[0], "lines": "7"}))
        number = len(model.numbers)
        model.numbers.append(number)
        return calls(("read", {"n": number})) if number < 30 else "Done."

    model = StandIn(script, window=16_000)
    model.numbers = []
    agent = Agent("reader", model, [read], config=model.config, store="memory://")
    result = agent.run("Read all", conversation="c")
    assert result.end == Success("Done.")
    assert model.most_tokens < 16_000
    (again,) = [one for one in results(agent, "c") if one.tool == "refold_expand"]
    original = refold.open("c", store=agent.store).expand(expanded[0])
    assert original in pages
    assert original.splitlines()[6] in again.output


# proves: C7
def test_the_view_is_pruned_when_a_run_ends_also_after_an_error():
    def read(n: int) -> str:
        return page(n)

    def script(request):
        number = sum(message["role"] == "assistant" for message in request["messages"])
        if number == 9:
            raise SettingError("the model", "is gone")
        return calls(("read", {"n": number}))

    model = StandIn(script, window=128_000)
    settings = {"compact": {"prune": {"protect": 2_000, "minimum": 1_000}}}
    config = [model.config, {"agents": {"default": settings}}]
    agent = Agent("reader", model, [read], config=config, store="memory://")
    with pytest.raises(SettingError):
        agent.run("Read all", conversation="c")
    events = list(refold.open("c", store=agent.store).events())
    assert {event.kind for event in events if isinstance(event, Replaced)} == {"prune"}


# proves: C13
def test_tools_of_the_library_are_offered_while_something_in_view_has_to_do_with_them():
    def weather(city: str) -> str:
        """What the weather is like."""
        return "rain " * 400

    def stock(name: str) -> str:
        """The price of a share."""
        return "12"

    def offered(request):
        return {tool["function"]["name"] for tool in request["tools"]} - {"refold_expand", "refold_search"}

    seen = []

    def script(request):
        seen.append(offered(request))
        if len(seen) == 1:
            return calls(("find_tools", {"query": "weather in Oslo"}))
        return calls(("weather", {"city": "Oslo"})) if len(seen) == 2 else "Done."

    agent = agent_of(script, [add], library=[weather, stock])
    agent.run("Go", conversation="c")
    assert seen == [{"add", "find_tools"}, *[{"add", "find_tools", "weather"}] * 2]
    chat = refold.open("c", store=agent.store)
    chat.append([{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Welcome."}] * 3)
    chat.compact(keep_recent=2)
    agent.run("Again", conversation="c")
    assert seen[-1] == {"add", "find_tools"}


# proves: C13
def test_a_tool_that_is_pinned_stays_on_offer():
    def weather(city: str) -> str:
        """What the weather is like."""
        return "rain"

    seen = []

    def script(request):
        seen.append({tool["function"]["name"] for tool in request["tools"]})
        return calls(("find_tools", {"query": "weather"})) if len(seen) == 1 else "Done."

    agent = agent_of(script, library=[weather])
    agent.run("Go", conversation="c")
    chat = refold.open("c", store=agent.store)
    found = next(one.at for one in chat.get_all() if one.message.results)
    chat.pin(found)
    chat.append([{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Welcome."}] * 3)
    chat.compact(keep_recent=2)
    agent.run("Again", conversation="c")
    assert "weather" in seen[-1]


# proves: B6
def test_loops_have_settings_of_their_own_which_a_configuration_overrides():
    compact = agent_of(["Done."]).config.agent("default").compaction
    assert (compact.message_threshold, compact.keep_recent, compact.max_tokens) == (100, 20, 4_800)
    given = {"agents": {"worker": {"compact": {"keep_recent": 5}}}}
    agent = agent_of(["Done."], config=given)
    assert agent.settings == "worker"
    assert agent.config.agent("worker").compaction.message_threshold is None
    assert agent.config.agent("worker").compaction.keep_recent == 5


@pytest.mark.parametrize("verb", ["run", "stream"])
def test_an_override_of_a_run_holds_for_its_sub_agents_too_and_ends_with_it(verb):
    page = "A page of many words. " * 200

    def read() -> str:
        return page

    inner = agent_of([calls(("read", {})), "It is a page."], [read], name="reader")
    script = [
        calls(("read", {})),
        calls(("reader", {"task": "Read."})),
        "Done.",
        calls(("read", {})),
        "Again.",
    ]
    outer = agent_of(script, [read], sub_agents=[inner])
    override = {"after_steps": 0, "mode": "remove"}
    if verb == "run":
        outer.run("Read twice.", conversation="c", override=override)
    else:
        list(outer.stream("Read twice.", conversation="c", override=override))
    outer.run("Once more.", conversation="c")
    for agent, shown in ((outer, [False, True]), (inner, [False])):
        (conversation,) = {one.key.conversation for one in agent.store.conversations()}
        view = refold.open(conversation, store=agent.store).view()
        texts = [message.text for message in view.messages if message.role == "tool"]
        assert [text == page for text in texts if text != "It is a page."] == shown


FORGE = """
agents:
  myAgent:
    id: myAgent
    model: gpt-4-turbo
    system_prompt: "You are a helpful assistant."
    compact:
      max_tokens: 4000
      token_threshold: 6000
      turn_threshold: 10
      message_threshold: 30
"""


def test_an_agent_is_made_of_a_file_with_its_id_its_system_prompt_and_its_compact(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("forge.yaml").write_text(FORGE.replace("id: myAgent", "id: other"))
    Path("refold.yaml").write_text(FORGE)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert Agent.from_config("myAgent").model.name == "gpt-4-turbo"

    def model(request):
        return request["messages"][0]["content"]

    for name in ("myAgent", "other"):
        agent = Agent.from_config(name, "forge.yaml", model=model, prompt="", store="memory://")
        assert agent.run("Who are you?").text == "You are a helpful assistant."
        assert agent.config.agent(agent.settings).compaction.turn_threshold == 10
    with pytest.raises(SettingError, match="is not configured; configured: myAgent"):
        Agent.from_config("nobody", "forge.yaml")
    with pytest.raises(SettingError, match="model: is not set"):
        Agent.from_config("a", {"agents": {"a": {}}})


def test_what_an_agent_is_told_is_said_once_and_again_when_it_changes():
    agent = agent_of(["One.", "Two.", "Three."], system="You count.")
    agent.run("a", conversation="c")
    agent.run("b", conversation="c")
    agent.system, agent.prompt = "You count well.", ""
    agent.run("c", conversation="c")
    told = [one.message.text for one in stored(agent, "c") if one.message.role == "system"]
    assert len(told) == 2
    assert told[0].startswith("You count.\n\nYou work in steps")
    assert told[1] == "You count well."


def test_an_agent_without_handles_is_told_nothing_of_expanding():
    agent = agent_of(["Done."], config={"agents": {"default": {"handles": False}}})
    told = stored(agent, agent.run("Go").conversation)[0].message.text
    assert "refold_search" in told
    assert "refold_expand" not in told
    assert "#N" not in told


# Those who watch


def test_a_stream_tells_each_step_and_ends_with_the_result():
    agent = agent_of([calls(("add", {"a": 1})), "3"], [add])
    events = list(agent.stream("What is 1 + 2?"))
    own = [event for event in events if isinstance(event, Asked | Replied | Ran | Ended)]
    assert [event.kind for event in own] == [
        *("step:asked", "step:replied", "step:ran", "step:asked", "step:replied", "run:ended")
    ]
    assert "message-added" in {event.kind for event in events}
    assert events[-1].result.end == Success("3")


def test_a_callback_that_raises_harms_nothing():
    heard = []

    async def listen(event):
        heard.append(event.kind)

    def fail(event):
        raise RuntimeError("no")

    agent = agent_of(["Done."], on_event=[fail, listen])
    assert agent.run("Go").end == Success("Done.")
    assert heard[-1] == "run:ended"


def test_what_is_wrong_with_an_agent_is_said_when_it_is_made():
    def odd(*args: int) -> None: ...

    def opaque(lock: threading.Event) -> None: ...

    with pytest.raises(SettingError, match=r"a model cannot pass \*args: int"):
        Agent("a", print_nothing, [odd])
    with pytest.raises(SettingError, match="types that JSON has"):
        Agent("a", print_nothing, [opaque])
    with pytest.raises(SettingError, match="two tools are named 'add'"):
        Agent("a", print_nothing, [add, add])
    with pytest.raises(SettingError, match="task: expected a text"):
        Agent("a", print_nothing, store="memory://").run("")


def print_nothing(request):
    return "Done."


# What must hold


def test_killed_at_random_moments_it_comes_to_the_same_end_and_repeats_no_tool(tmp_path):
    done = agent_run.run(steps=30, kills=5, seed=3, root=tmp_path)
    assert done["kills"] == 5
    assert done["most_tokens"] < agent_run.WINDOW


def test_the_loop_is_short():
    loop = Path(refold.__file__).parent / "agent" / "loop.py"
    assert len(loop.read_text().splitlines()) < 400


def test_who_does_not_use_it_does_not_import_it():
    code = "import sys, refold; assert not [name for name in sys.modules if name.startswith('refold.agent')]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_result_in_the_record_has_an_id_of_its_own():
    agent = agent_of([calls(("add", {"a": 1}), ("add", {"a": 2})), "Done."], [add])
    agent.run("Go", conversation="c")
    said = [e for e in refold.open("c", store=agent.store).events() if isinstance(e, Said)]
    ids = [event.message.id for event in said if event.message.results]
    assert len(set(ids)) == 2
    assert all(isinstance(event.message, Message) for event in said)


def test_usages_of_all_replies_are_added_up():
    usage = Usage(100, 10, 90)
    model = StandIn([Reply(calls=(("double", {"n": 1}),), usage=usage), Reply("Two.", usage=usage)])

    def double(n: int) -> int:
        """Twice as much."""
        return 2 * n

    result = Agent("adder", model, [double], config=model.config, store="memory://").run("Double one.")
    assert result.usage == Usage(200, 20, 180, calls=2)


def test_an_answer_that_was_corrected_is_the_answer(tmp_path):
    model, store = StandIn(["It is three."]), f"sqlite:///{tmp_path}/c.db"
    agent = Agent("adder", model, config=model.config, store=store)
    agent.run("What is 1 + 1?", conversation="c")
    with refold.open("c", store=store) as chat:
        chat.correct(max(one.at for one in chat.get_all()), "It is two.")
    assert agent.run("What is 1 + 1?", conversation="c").text == "It is two."


@pytest.mark.parametrize(
    "given_",
    [{"max_steps": "5"}, {"max_steps": -1}, {"max_retries": -1}, {"max_cost": "x"}, {"max_seconds": -2.0},
     {"tools": None}, {"tools": "grep"}, {"library": 7}, {"sub_agents": {"a": 1}}, {"sub_agents": 3}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_when_an_agent_is_made(given_):
    with pytest.raises(SettingError, match=next(iter(given_))):
        Agent("a", StandIn(["x"]), store="memory://", **given_)


def test_a_tool_that_yields_gives_all_that_it_yields():
    def count(n: int):
        """Numbers."""
        yield from range(n)

    model = StandIn([Reply(calls=(("count", {"n": 3}),)), "Done."])
    Agent("counter", model, [count], config=model.config, store="memory://").run("Count.")
    assert model.requests[-1]["messages"][-1]["content"] == "[0,1,2]"
