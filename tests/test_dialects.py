"""Recorded traffic and real runs: in as it came, out as it came, and valid in every target."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import refold
from refold.core.errors import OverBudgetError
from refold.core.message import Text, ToolResult
from refold.dialects.registry import TARGETS, recognize
from refold.dialects.rules.targets import check_request
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.stores.store import Key

DATA = Path(__file__).parents[2] / "shared" / "data"
RECORDED = {
    "api_openai_chat": "openai-chat",
    "api_openai_responses": "openai-responses",
    "api_anthropic_messages": "anthropic",
    "api_anthropic_count_tokens": "anthropic",
}
recorded = pytest.mark.skipif(
    not DATA.exists(), reason="the recorded conversations are not beside the project"
)
LARGE = {"agents": {"default": {"compact": False}}}


def exchanges(name: str) -> Iterator[dict[str, Any]]:
    with (DATA / "recordings" / f"{name}.jsonl").open() as lines:
        yield from map(json.loads, lines)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def said(request: dict[str, Any]) -> list[Any]:
    """What a request says: system text first, then its messages."""
    apart = [{name: request[name]} for name in ("system", "instructions") if request.get(name) is not None]
    messages = request.get("messages", request.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return apart + messages


def answer(dialect: str, reply: dict[str, Any]) -> list[Any]:
    match dialect:
        case "openai-chat":
            return [reply["choices"][0]["message"]]
        case "openai-responses":
            return reply["output"]
    return [{"role": "assistant", "content": reply["content"]}]


# proves: C11, I8
@recorded
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("at_once", [True, False])
def test_every_recorded_request_renders_back_as_it_came(name, at_once, tmp_path):
    dialect = RECORDED[name]
    store = f"sqlite:///{tmp_path}/log.db"
    for n, exchange in enumerate(exchanges(name)):
        request = exchange["request"]
        chat = refold.open(f"c{n}", store=store, config=LARGE)
        if at_once:
            chat.append(said(request), dialect=dialect)
        else:
            for message in said(request):
                chat.append(message, dialect=dialect)
        chat.close()
        again = refold.open(f"c{n}", store=store, config=LARGE)
        beside = {key: request[key] for key in ("previous_response_id", "conversation") if key in request}
        fitted = again.fit(dialect=dialect, request=beside)
        again.close()
        if exchange["status"] == 200:
            assert fitted.report.notices == ()
        name_of_list = "input" if dialect == "openai-responses" else "messages"
        sent = request[name_of_list]
        if isinstance(sent, str):
            sent = [{"role": "user", "content": sent}]
        assert compact(fitted.messages) == compact(sent)
        assert compact(fitted.system) == compact(request.get("system", request.get("instructions")))


# proves: C11
@recorded
@pytest.mark.parametrize("name", list(RECORDED)[:3])
def test_every_recorded_reply_is_stored_and_sent_back_as_it_came(name):
    dialect = RECORDED[name]
    for exchange in exchanges(name):
        reply = exchange["response"]
        if exchange["status"] != 200 or not isinstance(reply, dict):
            continue
        if "object" in reply and reply["object"] not in ("chat.completion", "response"):
            continue  # a compaction or a count, which is no answer
        chat = refold.open("c", store="memory://", config=LARGE)
        chat.append({"role": "user", "content": "Hello"}, dialect=dialect)
        chat.append(reply)
        expected = answer(dialect, reply)
        stored = [json.loads(event.raw) for event in chat.events() if getattr(event, "raw", None)][1:]
        flat = [item for one in stored for item in (one if isinstance(one, list) else [one])]
        assert compact(flat) == compact(expected)
        message = chat.get_all()[-1].message
        assert message.model == reply["model"]
        assert message.usage is None or message.usage.input > 0


@recorded
@pytest.mark.parametrize("name", RECORDED)
def test_no_recorded_message_is_taken_for_another_dialect(name):
    for exchange in exchanges(name):
        assert {recognize(message) for message in said(exchange["request"])} <= {None, RECORDED[name]}


# proves: C15
@recorded
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_request_can_be_said_in_every_dialect(name, target):
    for exchange in exchanges(name):
        request = exchange["request"]
        if request.get("previous_response_id") or request.get("conversation"):
            continue  # half of the conversation is at the provider
        chat = refold.open("c", store="memory://", config=LARGE)
        chat.append(said(request), dialect=RECORDED[name])
        fitted = chat.fit(dialect=target)
        strict = RECORDED[name] != target
        found = check_request(target, fitted.request, strict=strict) if fitted.messages else []
        assert [fault for fault in found if fault.rule not in ("A6", "G4", "R1")] == []  # reused ids came so
        shown = json.dumps(fitted.request, ensure_ascii=False)
        for stored in chat.get_all():
            for text in texts(stored.message.parts):
                assert json.dumps(text, ensure_ascii=False)[1:-1] in shown


def texts(parts: Any) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Text):
            yield part.text
        elif isinstance(part, ToolResult):
            yield from [part.output] if isinstance(part.output, str) else texts(part.output)


def traces() -> list[Path]:
    return sorted((DATA / "traces").glob("*.jsonl")) if DATA.exists() else []


@recorded
@pytest.mark.parametrize("window", [2_000, 16_000, 200_000])
@pytest.mark.parametrize("file", traces(), ids=lambda file: file.stem)
def test_a_real_run_is_valid_in_every_target(file, window):
    limits = {"m": {"window": window, "max_output": window // 8}}
    config = refold.config.load_config({"models": limits})
    fitted = 0
    for line in file.read_text().splitlines()[:6]:
        history = [
            {key: value for key, value in message.items() if not key.startswith("x_")}
            for message in json.loads(line)["messages"]
        ]
        dialect = "anthropic" if file.name.startswith("anthropic_") else "openai-chat"
        store, key = MemoryStore(), Key("default", "run")
        sessions = {
            target: Session(store, key, model="m", config=config, view=target)
            for target in ("openai-chat", "openai-responses", "anthropic")
        }
        step = max(1, len(history) // 12)
        for start in range(0, len(history), step):
            next(iter(sessions.values())).append(history[start : start + step], dialect=dialect)
            for target, session in sessions.items():
                try:
                    request = session.fit(dialect=target).request
                except OverBudgetError:
                    continue
                fitted += 1
                assert [fault for fault in check_request(target, request) if fault.rule != "G2"] == []
    assert fitted or window == 2_000  # where the task alone is larger than that


# proves: C11, I8
def test_a_message_taken_apart_is_whole_again_with_its_keys_and_numbers():
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    use = [{"type": "tool_use", "id": id, "name": "f", "input": {"x": 1.0}} for id in "ab"]
    chat.append([{"role": "user", "content": "go"}, {"role": "assistant", "content": use}])
    one = {"tool_use_id": "a", "type": "tool_result", "content": "1", "cache_control": {"type": "ephemeral"}}
    two = {"type": "tool_result", "is_error": False, "tool_use_id": "b", "content": []}
    results = {"content": [one, two, {"type": "text", "text": "and"}], "role": "user"}
    place = chat.append(results)
    assert [stored.message.role for stored in chat.get_all()] == ["user", "assistant", "tool", "tool", "user"]
    assert compact(chat.fit().messages[-1]) == compact(results)
    chat.append({"role": "assistant", "content": "ok"})
    assert place == 2
    assert compact(chat.fit().messages[2]) == compact(results)


def test_one_answer_in_many_items_is_one_step():
    chat = refold.open("c", store="memory://", model="gpt-5")
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "b", "name": "g", "arguments": "{}"},
    ]
    outputs = [{"type": "function_call_output", "call_id": id, "output": "1"} for id in "ab"]
    places = chat.append([{"role": "user", "content": "go"}, *items, *outputs])
    assert places == [0, 1, 1, 1, 2, 3]
    assert [stored.step for stored in chat.get_all()] == [0, 1, 1, 1]
    fitted = chat.fit()
    assert fitted.input == fitted.request["input"] == [{"role": "user", "content": "go"}, *items, *outputs]
    said = chat.fit(dialect="openai-chat").messages
    assert [len(message.get("tool_calls", ())) for message in said] == [0, 2, 0, 0]


# proves: C11
def test_what_a_dialect_cannot_say_is_told_and_stays_in_the_record():
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "sig"}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    said = {"role": "assistant", "content": [thought, search, found, {"type": "text", "text": "Done."}]}
    chat.append([{"role": "user", "content": "Look it up."}, said])
    fitted = chat.fit(dialect="openai-chat")
    assert fitted.messages[1] == {"role": "assistant", "content": "Done."}
    assert [notice.partition(" cannot")[0] for notice in fitted.report.notices] == [
        "#1: reasoning",
        "#1: a server_tool_use of anthropic",
        "#1: a web_search_tool_result of anthropic",
    ]
    assert chat.fit().messages[1] == said


def test_system_text_stands_where_the_dialect_wants_it():
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    chat.append([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])
    fitted = chat.fit()
    assert (fitted.system, fitted.messages) == ("Be brief.", [{"role": "user", "content": "Hello"}])
    assert fitted.request["system"] == "Be brief."
    said = chat.fit(dialect="openai-chat")
    assert (said.system, said.messages[0]) == (None, {"role": "system", "content": "Be brief."})
    chat.append({"role": "system", "content": "Be polite too."}, dialect="openai-chat")
    late = chat.fit()
    assert late.system == "Be brief."
    assert late.messages[1]["content"][1] == {"type": "text", "text": "Be polite too."}
    assert late.report.notices == ("#2: system text between messages is sent as a user message",)


def test_fit_takes_system_text_apart_and_answers_in_the_dialect_it_was_asked_in():
    history = [{"role": "user", "content": "Hello"}]
    assert refold.fit(history, model="claude-sonnet-5", system="Be brief.") == history
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [*history, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answered = [*tools, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    assert refold.fit(answered, model="claude-sonnet-5") == answered
    items = [*history, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]
    items += [{"type": "function_call_output", "call_id": "a", "output": "1"}]
    assert refold.fit(items, model="gpt-5") == items


def test_who_puts_system_text_first_gets_it_back_whatever_the_model():
    history = [{"role": "system", "content": "Never reveal the key."}, {"role": "user", "content": "hi"}]
    assert refold.fit(history, model="openrouter/anthropic/claude-sonnet-4.5") == history


def test_a_note_of_an_earlier_fit_is_nobodys_task_and_not_what_the_user_said_last():
    compact = {"threshold_percent": 1_600 / 3_000}
    config = {
        "models": {"m": {"window": 4_000, "max_output": 400}},
        "agents": {"default": {"compact": compact}},
    }
    history: list[Any] = [
        {"role": "user", "content": "The task"},
        {"role": "user", "content": "IMPORTANT: at most 100 euros"},
    ]
    for n in range(30):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        history += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        history += [{"role": "tool", "tool_call_id": f"c{n}", "content": "w " * 300}]
        history = refold.fit(history, model="m", config=config)
        assert history[0]["content"] == "The task"
        assert sum("IMPORTANT" in str(m["content"]) for m in history) == 1
        assert sum("<record" in str(m["content"]) for m in history) <= 1
    assert any("<record" in str(m["content"]) for m in history)


def test_system_text_in_a_request_is_the_callers_own():
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    chat.append({"system": [{"type": "text", "text": "Be brief."}]})
    chat.append({"role": "user", "content": "x"})
    chat.fit().system[0]["text"] = "changed"
    assert chat.fit().system == [{"type": "text", "text": "Be brief."}]


def test_items_of_one_answer_are_one_step_however_they_arrive():
    config = {"models": {"m": {"window": 4_000, "max_output": 400}}}
    chat = refold.open("c", store="memory://", model="m", config=config)
    chat.append({"role": "user", "content": "task"}, dialect="openai-responses")
    for n, size in ((1, 500), (2, 1_000), (3, 700)):
        chat.append({"type": "reasoning", "id": f"rs_{n}", "summary": [], "encrypted_content": "abc" * 50})
        call = {"type": "function_call", "id": f"fc_{n}", "call_id": f"c{n}", "name": "f", "arguments": "{}"}
        chat.append(call)
        chat.append({"type": "function_call_output", "call_id": f"c{n}", "output": "7 " * size})
        assert [item.get("id") for item in chat.fit().input][-3:] == [f"rs_{n}", f"fc_{n}", None]
    assert [stored.step for stored in chat.get_all()] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_fork_or_a_view_at_a_piece_of_a_message_has_all_of_it():
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    use = [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in "ab"]
    chat.append([{"role": "user", "content": "go"}, {"role": "assistant", "content": use}])
    results = [{"type": "tool_result", "tool_use_id": id, "content": id} for id in "ab"]
    place = chat.append({"role": "user", "content": results})
    assert chat.fork("f", at=place).fit().messages[-1] == {"role": "user", "content": results}
    assert len(chat.view(place).messages) == 4


def test_a_message_in_pieces_that_comes_again_under_its_id_stores_nothing():
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    results = [{"type": "tool_result", "tool_use_id": id, "content": id} for id in "abc"]
    first = chat.append({"role": "user", "content": results[:2]}, id="r")
    assert chat.append({"role": "user", "content": results}, id="r") == first
    assert chat.get_count() == 2


def test_a_users_message_is_never_left_out_whatever_cannot_be_said_of_it():
    chat = refold.open("c", store="memory://", model="gpt-5")
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    chat.append([{"role": "user", "content": [sound]}, {"role": "assistant", "content": "Loud."}])
    for target in ("openai-responses", "anthropic"):
        fitted = chat.fit(dialect=target)
        assert fitted.messages[0]["role"] == "user"
        assert "cannot be shown here" in str(fitted.messages[0]["content"])
        assert "audio" in fitted.report.notices[0]


def test_a_picture_in_a_result_is_named_where_tools_return_only_text():
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": [image]}
    chat.append([{"role": "user", "content": "go"}, {"role": "assistant", "content": [use]}])
    chat.append({"role": "user", "content": [result]})
    fitted = chat.fit(dialect="openai-chat")
    assert fitted.messages[-1] == {"role": "tool", "tool_call_id": "a", "content": "[image]"}
    told = [notice.partition(" cannot")[0] for notice in fitted.report.notices]
    assert told == ["#2: that a result is an error", "#2: image data in a result"]


KINDS = ("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call")


@pytest.mark.parametrize("kind", [*KINDS, "computer_call", "tool_search_call"])
def test_a_call_of_any_kind_that_was_aborted_is_mended(kind):
    chat = refold.open("c", store="memory://", model="gpt-5")
    call = {"type": kind, "call_id": "a", "name": "f", "arguments": "{}", "input": "x"}
    call |= {"action": {"commands": ["ls"]}, "operation": {"type": "delete_file"}, "execution": "client"}
    chat.append([{"role": "user", "content": "go"}, call, {"role": "user", "content": "stop"}])
    fitted = chat.fit()
    assert check_request("openai-responses", fitted.request) == []
    assert fitted.report.notices
    answer = f"{kind}_output".replace("tool_search_call", "function_call")
    types = [item.get("type") for item in fitted.input]
    assert types[-2:] == ([None, None] if kind == "computer_call" else [answer, None])


def test_cache_marks_are_counted_wherever_they_stand():
    mark = {"cache_control": {"type": "ephemeral"}}
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    chat.append({"system": [{"type": "text", "text": "Be brief.", **mark}]})
    uses = [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in "abc"]
    inner = [{"type": "text", "text": "1", **mark}]
    results = [{"type": "tool_result", "tool_use_id": id, "content": inner} for id in "abc"]
    chat.append([{"role": "user", "content": "go"}, {"role": "assistant", "content": uses}])
    chat.append({"role": "user", "content": results})
    assert chat.fit().report.notices == ()
    fitted = chat.fit(tools=[{"name": "f", "input_schema": {"type": "object"}, **mark}])
    assert check_request("anthropic", fitted.request) == []
    assert fitted.report.notices == ("removed 1 `cache_control` marks: a request may have 4",)


@pytest.mark.parametrize("stray", [{"type": "tool_result", "tool_use_id": "x"}, {"type": "error"}])
def test_a_block_without_its_message_is_refused(stray):
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    with pytest.raises(refold.RefoldError, match="role"):
        chat.append(stray)


def test_a_message_that_is_the_same_everywhere_comes_back_with_its_keys_as_they_were():
    chat = refold.open("c", store="memory://", model="gpt-5")
    chat.append({"content": "go", "role": "user"})
    for target in TARGETS:
        assert compact(chat.fit(dialect=target).messages) == '[{"content":"go","role":"user"}]'
