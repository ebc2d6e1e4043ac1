"""Several calls with one id in one reply: every call is shown with its own result."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import refold
from histories import DIALECTS, Call, Step
from refold import Message
from refold.agent import Agent
from refold.core import draft
from refold.core.event import Said
from refold.core.message import Text, ToolCall, ToolResult
from refold.core.pairing import ID_SEPARATOR, NO_RESULT, unique_call_ids
from refold.dialects.rules.targets import check_request
from refold.session.doctor import examine

TARGETS = ("openai-chat", "openai-responses", "anthropic", "ai-sdk")


def steps(ids: list[str], answers: list[str]) -> list[Step]:
    """A task, calls for city 0, 1, 2 … in one reply, and results in the order of `answers`."""
    calls = tuple(Call(id, "price", json.dumps({"city": n})) for n, id in enumerate(ids))
    seen = dict.fromkeys(ids, -1)
    results = []
    for id in answers:
        seen[id] = next((n for n in range(seen[id] + 1, len(ids)) if ids[n] == id), len(ids))
        results.append(Step("tool", f"price of {seen[id]}", answers=(id,)))
    return [Step("user", "What does it cost?"), Step("assistant", "", calls), *results]


def opened(messages: list[Any], dialect: str | None = None) -> refold.Session:
    session = refold.open("c", store="memory://", model="gpt-5")
    session.append(messages, dialect=dialect)
    return session


def pairs(request: dict[str, Any]) -> list[tuple[str, str]]:
    """What each call of a request asked for, and what its result says, whatever the dialect."""
    asked, said = dict[str, str](), dict[str, str]()
    for message in request.get("messages", request.get("input")):
        blocks = message["content"] if isinstance(message.get("content"), list) else []
        for one in (message, *(message.get("tool_calls") or ()), *blocks):
            match one:
                case {"id": id, "function": {"arguments": given}}:
                    asked[id] = json.dumps(given)
                case {"type": "function_call", "call_id": id, "arguments": given}:
                    asked[id] = json.dumps(given)
                case {"type": "tool_use", "id": id, "input": given}:
                    asked[id] = json.dumps(given)
                case {"type": "tool-call", "toolCallId": id, "input": given}:
                    asked[id] = json.dumps(given)
                case {"role": "tool", "tool_call_id": id, "content": text}:
                    said[id] = text
                case {"type": "function_call_output", "call_id": id, "output": text}:
                    said[id] = text
                case {"type": "tool_result", "tool_use_id": id, "content": text}:
                    said[id] = text
                case {"type": "tool-result", "toolCallId": id, "output": {"value": text}, "toolName": tool}:
                    assert tool == "price"
                    said[id] = text
    assert asked.keys() == said.keys()
    return [("".join(filter(str.isdigit, given)), said[id]) for id, given in asked.items()]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dialect", TARGETS)
@pytest.mark.parametrize("id", ["a", "", "x" * 64, "fc|1"])
def test_calls_with_one_id_are_shown_with_their_own_results_in_every_dialect(dialect, target, id):
    history = DIALECTS[dialect](steps([id, id, id], [id, id, id]))
    fitted = opened(history, dialect).fit(dialect=target)
    assert pairs(fitted.request) == [("0", "price of 0"), ("1", "price of 1"), ("2", "price of 2")]
    assert check_request(target, fitted.request) == []


@given(
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5),
    st.data(),
    st.sampled_from(TARGETS),
    st.sampled_from(TARGETS),
)
def test_results_that_came_answer_the_first_calls_and_the_others_were_never_answered(
    ids, data, dialect, target
):
    answers = data.draw(st.permutations(ids))
    answers = answers[: data.draw(st.integers(0, len(answers)))]
    told = steps(ids, answers)
    came = [n for n in range(len(ids)) if any(f"price of {n}" == step.text for step in told)]
    fitted = opened(DIALECTS[dialect](told), dialect).fit(dialect=target)
    shown = dict(pairs(fitted.request))
    assert shown == {str(n): f"price of {n}" if n in came else NO_RESULT for n in range(len(ids))}
    assert check_request(target, fitted.request) == []


def test_a_result_too_many_takes_the_place_of_none():
    history = DIALECTS["openai-chat"](steps(["a", "a"], ["a", "a", "a"]))
    fitted = opened(history).fit()
    assert pairs(fitted.request) == [("0", "price of 0"), ("1", "price of 1")]
    assert any("#4 is left out" in notice for notice in fitted.report.notices)


def test_the_record_keeps_the_ids_that_came():
    calls = Message("assistant", [ToolCall("a", "price", "0"), ToolCall("a", "price", "1")])
    results = [Message("tool", [ToolResult("a", text)]) for text in ("first", "second")]
    history = DIALECTS["openai-chat"](steps(["a", "a"], ["a", "a"]))
    session = opened([*history, calls, *results])
    stored = [one.message for one in session.get_all()]
    assert stored[-3:] == [calls, *results]
    assert {call.call_id for message in stored for call in message.calls} == {"a"}
    assert not any(ID_SEPARATOR.encode() in session.record.entry(at).body for at in range(7))
    raw = session.record.event(1)
    assert isinstance(raw, Said)
    assert json.loads(raw.raw or b"") == history[1]
    assert list(examine(session.store)) == []


def test_what_waits_for_a_result_is_the_call_that_has_none():
    session = opened(DIALECTS["openai-chat"](steps(["a", "b", "a"], ["a"])))
    assert [*session.record.live.state.open] == ["b", f"a{ID_SEPARATOR}1"]
    session.append({"role": "tool", "tool_call_id": "a", "content": "price of 2"})
    assert [*session.record.live.state.open] == ["b"]


def test_an_empty_id_waits_no_longer_once_it_is_answered():
    session = opened(DIALECTS["openai-chat"](steps([""], [""])))
    assert session.record.live.state.open == {}


def test_the_same_id_in_a_later_reply_is_the_newest_call():
    told = [*steps(["a", "a"], ["a", "a"]), *steps(["a"], ["a"])]
    fitted = opened(DIALECTS["openai-chat"](told)).fit()
    results = [one["content"] for one in fitted.messages if one["role"] == "tool"]
    assert results == ["price of 0", "price of 1", "price of 0"]


def test_calls_with_one_id_and_their_results_are_pinned_together_and_hidden_together():
    session = opened(DIALECTS["openai-chat"](steps(["a", "a"], ["a", "a"])))
    session.pin(3)
    session.append([{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Done."}])
    session.compact(strategy="sliding-window", target_tokens=1)
    fitted = session.fit()
    assert pairs(fitted.request) == [("0", "price of 0"), ("1", "price of 1")]


def test_a_result_is_shortened_and_corrected_as_that_of_its_own_call():
    session = opened(DIALECTS["openai-chat"](steps(["a", "a"], ["a", "a"])))
    session.correct(3, "nothing")
    session.correct(2, Message("tool", [ToolResult("a", "a lot")]))
    calls = [ToolCall("a", "price", '{"city": 0}'), ToolCall("a", "price", '{"city": 1}')]
    session.correct(1, Message("assistant", [Text("Let me see."), *calls]))
    for target in TARGETS:
        fitted = session.fit(dialect=target)
        assert pairs(fitted.request) == [("0", "a lot"), ("1", "nothing")]
        assert check_request(target, fitted.request) == []


def test_an_agent_stores_each_result_with_the_call_it_ran_whichever_is_done_first():
    from threading import Event

    done, requests = Event(), []

    def price(city: int) -> str:
        """What it costs."""
        if city == 0:
            assert done.wait(10)
        done.set()
        return f"price of {city}"

    def model(request: dict[str, Any]) -> Any:
        requests.append(request)
        reply = DIALECTS["openai-chat"](steps(["a", "a"], []))[1]
        return reply if len(requests) == 1 else "done"

    assert Agent("a", model, [price], store="memory://").run("t", conversation="c").text == "done"
    assert pairs(requests[1]) == [("0", "price of 0"), ("1", "price of 1")]


def test_a_run_that_goes_on_runs_only_the_call_that_has_no_result():
    ran = []

    def price(city: int) -> str:
        """What it costs."""
        ran.append(city)
        return f"price of {city}"

    with refold.open("c", store="memory://repeated", model="gpt-5") as session:
        session.append(DIALECTS["openai-chat"](steps(["a", "a"], ["a"])))
        Agent("a", lambda request: "done", [price], store="memory://repeated").run(
            "What does it cost?", conversation="c"
        )
        assert ran == [1]


@given(st.lists(st.sampled_from(["a", "b", "", f"a{ID_SEPARATOR}1", f"a{ID_SEPARATOR}2"])))
def test_ids_told_apart_are_unique_and_those_that_were_stay(ids):
    own = unique_call_ids(ids)
    assert len({*own}) == len(own) == len(ids)
    assert [own[ids.index(id)] for id in ids] == ids
    assert unique_call_ids(own) == own


@pytest.mark.parametrize("model", ["gpt-5", "claude-sonnet-5"])
def test_a_log_of_an_earlier_version_whose_calls_share_an_id_is_still_sent(tmp_path, monkeypatch, model):
    with monkeypatch.context() as earlier:  # which kept ids as they came
        earlier.setattr(draft, "unique_call_ids", tuple)
        earlier.setattr(draft, "with_unique_ids", lambda message, line: message)
        with refold.open("c", store=f"sqlite:///{tmp_path}/c.db", model=model) as session:
            call = {"id": "a", "type": "function", "function": {"name": "price", "arguments": "{}"}}
            session.append({"role": "user", "content": "What do they cost?"})
            session.append({"role": "assistant", "content": None, "tool_calls": [call, call]})
            session.append([{"role": "tool", "tool_call_id": "a", "content": text} for text in ("1", "2")])
    with refold.open("c", store=f"sqlite:///{tmp_path}/c.db", model=model) as session:
        fitted = session.fit()
    assert refold.check(fitted.messages, dialect=session.dialect) == []
    assert "What do they cost?" in json.dumps(fitted.messages)


def test_an_anthropic_reply_whose_calls_share_an_id_keeps_its_signed_thinking():
    thinking = {"type": "thinking", "thinking": "Two cities.", "signature": "c2ln"}
    uses = [{"type": "tool_use", "id": "a", "name": "price", "input": {"city": n}} for n in (0, 1)]
    texts = ("price of 0", "price of 1")
    results = [{"type": "tool_result", "tool_use_id": "a", "content": text} for text in texts]
    history = [
        {"role": "user", "content": "What does it cost?"},
        {"role": "assistant", "content": [thinking, {**uses[0], "caller": {"type": "direct"}}, uses[1]]},
        {"role": "user", "content": results},
    ]
    fitted = opened(history, "anthropic").fit(dialect="anthropic")
    kept, use, _ = fitted.messages[1]["content"]
    assert kept == thinking
    assert use["caller"] == {"type": "direct"}
    assert pairs(fitted.request) == [("0", "price of 0"), ("1", "price of 1")]
    assert check_request("anthropic", fitted.request) == []


def test_a_responses_reply_whose_calls_share_an_id_keeps_its_reasoning_and_item_ids():
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "c2Vj"}
    calls = [
        {"type": "function_call", "id": f"fc_{n}", "call_id": "a", "name": "price", "arguments": f"{n}"}
        for n in (0, 1)
    ]
    session = opened([{"role": "user", "content": "What does it cost?"}], "openai-responses")
    session.append({"object": "response", "output": [reasoning, *calls], "status": "completed"})
    texts = ("price of 0", "price of 1")
    session.append([{"type": "function_call_output", "call_id": "a", "output": text} for text in texts])
    fitted = session.fit(dialect="openai-responses")
    items = fitted.request["input"]
    assert items[1] == reasoning
    assert [item.get("id") for item in items[1:4]] == ["rs_1", "fc_0", "fc_1"]
    assert pairs(fitted.request) == [("0", "price of 0"), ("1", "price of 1")]
    assert check_request("openai-responses", fitted.request) == []


def test_a_chat_reply_whose_calls_share_an_id_keeps_the_fields_of_its_provider():
    history = DIALECTS["openai-chat"](steps(["a", "a"], ["a", "a"]))
    history[1]["reasoning_content"] = "Two cities."
    history[1]["tool_calls"][1]["extra_content"] = {"google": {"thought_signature": "c2ln"}}
    fitted = opened(history).fit()
    assert fitted.messages[1]["reasoning_content"] == "Two cities."
    assert fitted.messages[1]["tool_calls"][1]["extra_content"] == {"google": {"thought_signature": "c2ln"}}
    assert pairs(fitted.request) == [("0", "price of 0"), ("1", "price of 1")]
