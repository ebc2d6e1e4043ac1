"""How large the next request is, when something is done about it, and what a model teaches."""

import json
from pathlib import Path

import msgspec
import pytest

import refold
from refold import Message, ToolCall, ToolResult
from refold.core import codec
from refold.core.budget import Budget
from refold.core.message import Usage
from refold.core.view import fold
from refold.dialects.rules.targets import check_request
from refold.models import count
from refold.models.count import Counter
from refold.session.results import Decision

PI = Path(__file__).parents[2] / "shared" / "data" / "traces" / "pi_coding_agent.jsonl"
SMALL = {"models": {"m": {"window": 10_000, "max_output": 1_000, "provider": "openai"}}}
TOOL = {"type": "function", "function": {"name": "search", "description": "Finds things. " * 200}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def long_answers(count: int) -> list[dict]:
    return [{"role": "assistant", "content": "word " * 300} for _ in range(count)]


def agent(compact: dict, models: dict | None = None) -> dict:
    return {"models": models or SMALL["models"], "agents": {"default": {"compact": compact}}}


# Overflow


# proves: E2
def test_the_threshold_is_the_formula_with_the_documented_defaults():
    chat = refold.open("c", store="memory://")
    overflow = chat.check_overflow()
    assert (overflow.threshold, overflow.limit, overflow.output_reserve) == (93_600, 128_000, 4_000)
    assert overflow.available_tokens == 128_000 - 4_000 - overflow.current_tokens


# proves: E2
def test_reserves_of_a_small_window_take_at_most_a_quarter_of_it():
    assert Budget(window=16_000).threshold == 0.6 * 16_000
    assert Budget(window=8_000, output_reserve=1_000).threshold == 0.6 * 8_000
    assert Budget(window=8_000, output_reserve=6_000).room == 6_000
    assert Budget(window=8_000, output_reserve=6_000, asked=True).room == 2_000
    assert Budget(window=44_000).threshold == 0.8 * (44_000 - 11_000)


# proves: C10
@pytest.mark.parametrize("words", [10, 7_000, 8_200, 9_500])
def test_overflow_says_how_much_there_is_and_how_much_is_left(words):
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    chat.append(user("word " * words))
    overflow = chat.check_overflow()
    room = 10_000 - 1_000
    assert overflow.current_tokens >= words
    assert overflow.available_tokens == max(0, room - overflow.current_tokens)
    assert overflow.is_overflow == (overflow.current_tokens > room)
    assert overflow.is_approaching == (overflow.current_tokens >= 0.9 * room)


def test_tools_and_system_text_are_counted_and_the_last_tools_are_remembered():
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    chat.append(user("go"))
    bare = chat.check_overflow().current_tokens
    with_tools = chat.check_overflow(tools=[TOOL]).current_tokens
    assert with_tools > bare + 500
    fitted = chat.fit(tools=[TOOL])
    assert fitted.report.tokens.final == with_tools == chat.check_overflow().current_tokens
    chat.append({"role": "system", "content": "Rule. " * 100})
    assert chat.check_overflow().current_tokens > with_tools + 150
    assert chat.fit(request={"system": "x " * 500}).report.tokens.final > bare + 500


# proves: C10
def test_the_check_sees_what_a_tool_has_just_returned():
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat.append([user("go"), {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert not chat.should_compact()
    chat.append({"role": "tool", "tool_call_id": "a", "content": "word " * 9_500})
    assert chat.check_overflow().is_overflow
    assert chat.should_compact().fired == ("threshold",)


def test_a_model_with_a_smaller_window_is_seen_at_once():
    models = {**SMALL["models"], "tiny": {"window": 2_000, "max_output": 200, "provider": "openai"}}
    chat = refold.open("c", store="memory://", model="m", config={"models": models})
    chat.append([user("task"), *({"role": "assistant", "content": "word " * 200} for _ in range(9))])
    assert not chat.should_compact()
    chat.model = "tiny"
    assert chat.check_overflow().is_overflow
    assert chat.fit().report.tokens.final <= 1_800
    assert chat.fit().request["model"] == "tiny"


def test_room_is_left_for_the_answer_that_a_request_asks_for():
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    chat.append(user("word " * 5_000))
    assert chat.fit(request={"max_tokens": 100}).report.room > chat.fit().report.room + 800
    assert chat.fit(request={"max_tokens": 100}).request["max_tokens"] == 100
    with pytest.raises(refold.RefoldError, match="max_tokens"):
        chat.fit(request={"max_tokens": 0})


# proves: E1
def test_the_estimate_of_four_characters_a_token_can_be_chosen():
    config = {"agents": {"default": {"counter": "estimate"}}}
    chat = refold.open("c", store="memory://", config=config)
    chat.append([user("12345"), user("")])
    assert [stored.tokens for stored in chat.get_all()] == [2 + 4, 4]


# Triggers


# proves: D1
def test_each_trigger_fires_by_its_own_rule():
    budget = Budget(token_threshold=100, turn_threshold=3, message_threshold=5)
    assert budget.fired(100, 2, 5) == ()
    assert budget.fired(101, 0, 0) == ("token_threshold",)
    assert budget.fired(0, 3, 0) == ("turn_threshold",)
    assert budget.fired(0, 0, 6) == ("message_threshold",)
    assert budget.fired(93_600, 0, 0) == ("threshold", "token_threshold")
    assert Budget().fired(93_599, 99, 99) == ()


# proves: D1
def test_a_decision_is_true_when_anything_fired_and_counts_since_the_last_compaction():
    compact = {"message_threshold": 5, "keep_recent": 1}
    chat = refold.open("c", store="memory://", model="m", config=agent(compact))
    chat.append([user(f"question {n}: how far is it from here to there, by road?") for n in range(6)])
    decision = chat.should_compact()
    assert decision
    assert decision == Decision(("message_threshold",), decision.tokens, 6, 6)
    chat.compact(keep_recent=1)
    after = chat.should_compact()
    assert not after
    assert (after.turns, after.messages) == (0, 1)
    chat.append(user("one more"))
    assert (chat.should_compact().turns, chat.should_compact().messages) == (1, 2)


def turn(n: int) -> list[dict]:
    function = {"name": "look", "arguments": "{}"}
    called = [{"id": f"c{n}", "type": "function", "function": function}]
    result = f"result {n}: " + " ".join(f"word{n}x{i}" for i in range(150))
    return [
        user(f"question {n}"),
        {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "tool_call_id": f"c{n}", "content": result},
        {"role": "assistant", "content": f"answer {n}"},
    ]


def in_window(window: int, compact: dict, **rest) -> refold.Session:
    config = agent(compact, {"m": {"window": window, "max_output": 4_000}})
    return refold.open("c", store="memory://", model="m", config=config, **rest)


WINDOWS = (24_000, 128_000, 400_000, 1_000_000)


# proves: D1, X20
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("compact", "first"),
    [({"turn_threshold": 10}, 10), ({"message_threshold": 30}, 8), ({"token_threshold": 6_000}, 9)],
)
def test_a_trigger_that_the_user_set_acts_in_the_fit_in_which_it_fires_in_any_window(window, compact, first):
    chat = in_window(window, {"max_tokens": 4_000, **compact})
    for n in range(1, first):
        chat.append(turn(n))
        assert not chat.should_compact()
        assert not chat.fit().report.edits
    chat.append(turn(first))
    decision = chat.should_compact()
    assert decision
    report = chat.fit().report
    assert report.fired == decision.fired == tuple(compact)
    assert report.tokens.final <= 4_000 < report.tokens.before
    assert report.notices == ()


# proves: D1, X20
@pytest.mark.parametrize("trigger", [{}, {"turn_threshold": 10}, {"token_threshold": 60_000}])
def test_a_target_above_the_threshold_of_a_small_window_counts_as_that_threshold(trigger):
    chat = in_window(8_000, {"max_tokens": 50_000, **trigger})
    compactions = 0
    for n in range(40):
        chat.append(turn(n))
        report = chat.fit().report
        compactions += bool(report.edits)
        assert report.tokens.final <= chat.check_overflow().threshold
    assert 1 < compactions < 20


# proves: D1, X20
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("trigger", [{"turn_threshold": 5}, {"message_threshold": 19}])
@pytest.mark.parametrize("strategy", ["summarize", "sliding-window", "hierarchical"])
def test_without_max_tokens_all_but_the_newest_messages_is_compacted(window, trigger, strategy):
    chat = in_window(window, {**trigger, "keep_recent": 4, "strategy": strategy})
    for n in range(1, 6):
        chat.append(turn(n))
    report = chat.fit().report
    assert report.fired == tuple(trigger)
    (edit,) = report.edits
    assert edit.why.startswith("a turn or message trigger fired: keep the newest 4")
    texts = [message.text for message in chat.view().messages]
    assert texts[0] == "question 1"
    assert texts[2:] == ["question 5", "", turn(5)[2]["content"], "answer 5"]


# proves: D1, X20
def test_a_trigger_acts_once_until_something_new_came():
    chat = in_window(128_000, {"token_threshold": 2_000, "max_tokens": 1_000})
    chat.append([user("word " * 2_500), *turn(1)])
    first = chat.fit().report
    assert first.edits
    assert first.tokens.final > 2_000
    assert "Compacted to" in first.notices[0]
    assert "cannot be hidden" in first.notices[0]
    decision = chat.should_compact()
    assert (decision.fired, bool(decision)) == (("token_threshold",), False)
    assert decision.obstacle == "nothing was added since the last compaction"
    assert chat.fit().report.edits == ()


# proves: D1, X20
def test_a_trigger_that_can_gain_nothing_says_what_stands_in_the_way():
    chat = in_window(128_000, {"message_threshold": 2, "keep_recent": 10})
    chat.append(turn(1))
    decision = chat.should_compact()
    assert (decision.fired, bool(decision)) == (("message_threshold",), False)
    assert decision.obstacle == "nothing that can be hidden is older than the newest 10 messages"
    report = chat.fit().report
    assert report.edits == ()
    assert report.notices == (f"message_threshold fired, but nothing was compacted: {decision.obstacle}",)
    large = in_window(128_000, {"token_threshold": 500, "max_tokens": 400})
    large.append(user("word " * 600))
    assert not large.should_compact()
    assert "cannot be hidden" in large.fit().report.notices[0]


# proves: D1, X20
def test_what_a_person_took_back_is_not_compacted_again_until_something_new_came():
    chat = in_window(128_000, {"message_threshold": 10, "keep_recent": 4})
    for n in range(3):
        chat.append(turn(n))
    assert chat.fit().report.edits
    chat.undo()
    assert not chat.should_compact()
    assert not chat.fit().report.edits
    chat.append(user("on"))
    assert chat.fit().report.edits


def test_what_stands_in_the_way_is_said_once():
    chat = in_window(128_000, {"turn_threshold": 2, "max_tokens": 4_000})
    notices = list[str]()
    for n in range(5):
        chat.append(user(f"question {n}"))
        notices += chat.fit().report.notices
    assert len(notices) == 1


@pytest.mark.parametrize("images", [1, 4])
@pytest.mark.parametrize("compact", [{}, {"max_tokens": 4_000, "token_threshold": 6_000}])
def test_a_screenshot_that_the_model_has_not_seen_yet_is_shown(images, compact):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400}}
    chat = in_window(16_000, compact)
    chat.append(user("Click through the site."))
    for n in range(12):
        chat.append({"role": "assistant", "content": f"click {n} " + "and so on " * 160})
        chat.append({"role": "user", "content": [picture] * images})
        assert chat.fit().messages[-1]["content"] == [picture] * images
    chat.compact(keep_recent=0)
    assert chat.fit().messages[-1]["content"] == [picture] * images


# proves: D1, D3
def test_a_trigger_acts_only_where_the_view_is_larger_than_it_may_be():
    within = refold.open(
        "c", store="memory://", model="m", config=agent({"turn_threshold": 2, "max_tokens": 500})
    )
    within.append([user("a"), user("b"), user("c")])
    report = within.fit().report
    assert (report.fired, report.edits) == (("turn_threshold",), ())
    assert "turn_threshold fired, but" in report.notices[0]
    beyond = refold.open(
        "c", store="memory://", model="m", config=agent({"token_threshold": 600, "max_tokens": 300})
    )
    beyond.append([user("task"), *({"role": "assistant", "content": "word " * 90} for _ in range(8))])
    report = beyond.fit().report
    assert report.fired == ("token_threshold",)
    assert report.tokens.final <= 300


# Calibration


def answered(chat: refold.Session, text: str, factor: float, extra: int = 0) -> int:
    """One step: a question, a request, an answer whose usage is `factor` times what was counted."""
    chat.append(user(text))
    estimate = chat.fit().report.tokens.final
    taken = int(chat.view().tokens * factor) + extra
    chat.append(refold.Message("assistant", "Fine.", usage=Usage(input=taken)))
    return estimate


# proves: X1
def test_what_a_request_really_took_corrects_the_next_estimate():
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    for n in range(4):
        answered(chat, f"question {n} " * 20, 1.4, extra=500)
    chat.append(user("question again " * 20))
    counted, estimate = chat.view().tokens, chat.fit().report.tokens.final
    assert 0.98 <= estimate / (counted * 1.4 + 500) <= 1.05


# proves: X1
def test_a_second_conversation_starts_calibrated(tmp_path):
    url = f"sqlite:///{tmp_path}/log.db"
    with refold.open("first", store=url, model="m", config=SMALL) as chat:
        for n in range(4):
            answered(chat, f"question {n} " * 40, 1.5)
    with refold.open("second", store=url, model="m", config=SMALL) as chat:
        chat.append(user("word " * 400))
        assert 1.4 <= chat.fit().report.tokens.final / chat.view().tokens <= 1.6
    with refold.open("third", store=url, config=SMALL) as other:
        other.append(user("word " * 400))
        assert other.fit().report.tokens.final / other.view().tokens < 1.1


def test_usage_from_before_an_edit_says_nothing_of_the_view_after_it():
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    for n in range(3):
        answered(chat, f"question {n} " * 50, 1.0, extra=3_000)
    assert chat.fit().report.tokens.final > 3_000
    chat.compact(keep_recent=1)
    assert chat.fit().report.tokens.final < 1_000


def test_usage_that_cannot_be_true_changes_little():
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    for usage in (0, 1, 9_000_000):
        chat.append(user("word " * 100))
        chat.fit()
        chat.append(refold.Message("assistant", "Fine.", usage=Usage(input=usage)))
    assert chat.chat.meter.calibration.ratio == 1.0
    assert chat.fit().report.tokens.final <= chat.view().tokens + 10


def test_an_answer_that_took_several_calls_measures_no_request():
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    chat.append(user("word " * 100))
    before = chat.fit().report.tokens.final
    chat.append(refold.Message("assistant", "Fine.", usage=Usage(input=5_000, calls=3)))
    assert chat.fit().report.tokens.final < before + 20


# proves: C6
def test_a_message_is_never_counted_twice(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/log.db"
    seen: list[str] = []
    real = Counter.text
    monkeypatch.setattr(Counter, "text", lambda self, text: seen.append(text) or real(self, text))
    with refold.open("c", store=url, model="m", config=SMALL) as chat:
        for n in range(30):
            chat.append(user(f"question {n} " + "word " * 300))
            chat.fit()
    with refold.open("c", store=url, model="m", config=SMALL) as chat:
        chat.fit()
        chat.check_overflow()
        chat.view()
    said = [text for text in seen if text.startswith("question")]
    assert len(said) == len({*said}) == 30
    assert count.Counter().text("x") == 1


# Thinking

CLAUDE = {"models": {"c": {"window": 6_000, "max_output": 500, "provider": "anthropic"}}}
BOUND = {"models": {"c": {**CLAUDE["models"]["c"], "flags": ["binds-thinking"]}}}


def think(chat: refold.Session, n: int) -> None:
    thought = {"type": "thinking", "thinking": f"Hm {n}.", "signature": "sig"}
    chat.append([user(f"question {n} " + "word " * 100)])
    chat.append({"role": "assistant", "content": [thought, {"type": "text", "text": f"Answer {n}."}]})


def thoughts(fitted: refold.Fitted) -> list[str]:
    blocks = [block for m in fitted.messages if isinstance(m["content"], list) for block in m["content"]]
    return [block["thinking"] for block in blocks if block["type"] == "thinking"]


@pytest.mark.parametrize(
    ("config", "kept"), [(CLAUDE, [f"Hm {n}." for n in range(2, 5)]), (BOUND, ["Hm 4."])]
)
def test_thinking_between_an_edited_place_and_the_edit_is_dropped_for_good(config, kept):
    chat = refold.open("c", store="memory://", model="c", config=config)
    for n in range(4):
        think(chat, n)
    chat.compact(keep_recent=4)
    think(chat, 4)
    fitted = chat.fit()
    assert thoughts(fitted) == kept
    assert check_request("anthropic", fitted.request) == []
    assert any("signed thinking is left out" in notice for notice in fitted.report.notices) == (
        len(kept) == 1
    )
    again = refold.open("c", store=chat.store, model="c", config=config)
    assert thoughts(again.fit()) == kept
    chat.undo()
    think(chat, 5)
    assert thoughts(chat.fit()) == (["Hm 5."] if len(kept) == 1 else [f"Hm {n}." for n in range(6)])


def test_a_change_of_tools_or_system_text_is_an_edit_at_the_start():
    chat = refold.open("c", store="memory://", model="c", config=BOUND)
    think(chat, 0)
    chat.fit(tools=[TOOL])
    chat.append(refold.Message("assistant", "Fine.", usage=Usage(input=700)))
    assert thoughts(chat.fit(tools=[TOOL])) == ["Hm 0."]
    assert thoughts(chat.fit(tools=[])) == []
    chat.fit(tools=[])
    chat.append(refold.Message("assistant", "Fine.", usage=Usage(input=700)))
    assert thoughts(chat.fit(tools=[])) == []
    think(chat, 1)
    assert thoughts(chat.fit(tools=[])) == ["Hm 1."]


def test_thinking_goes_when_system_text_changes_though_no_usage_was_reported():
    chat = refold.open("c", store="memory://", model="c", config=BOUND)
    chat.append({"system": "one"})
    chat.append(user("task"))
    chat.fit()
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "sig"}
    chat.append({"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]})
    chat.append(user("and?"))
    assert thoughts(chat.fit()) == ["Hm."]
    chat.append({"system": "two"})
    assert thoughts(chat.fit()) == []
    again = refold.open("c", store=chat.store, model="c", config=BOUND)
    assert thoughts(again.fit()) == []
    chat.fit(request={"system": "three"})
    chat.append({"role": "assistant", "content": [thought, {"type": "text", "text": "No."}]})
    assert thoughts(chat.fit(request={"system": "three"})) == ["Hm."]
    assert thoughts(chat.fit(request={"system": "four"})) == []


# What was counted for one model, and asked of another


@pytest.mark.parametrize("other", ["claude-opus-4-8", "claude-sonnet-4-5", "gemini-2.5-pro", "grok-4"])
def test_a_change_of_model_changes_what_is_estimated(other):
    history = [user("Where is gate B12? " * 40), {"role": "assistant", "content": "Über dort, 出口 " * 90}]
    chat = refold.open("c", store="memory://", model="gpt-5")
    chat.append(history)
    chat.fit(tools=[TOOL])
    chat.model = other
    fresh = refold.open("d", store="memory://", model=other)
    fresh.append(history)
    ours, theirs = (one.fit(tools=[TOOL]).report.tokens.final for one in (chat, fresh))
    assert 0.85 <= ours / theirs <= 1.15


def test_a_reply_to_a_request_from_before_an_edit_measures_nothing_of_the_view_after_it():
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    chat.append([user("task"), *long_answers(9), user("on")])
    chat.fit()
    chat.compact(keep_recent=1)
    chat.append(refold.Message("assistant", "Fine.", usage=Usage(input=6_000)))
    assert chat.fit().report.tokens.final < 1_000


@pytest.mark.parametrize(("usage", "model"), [(1, None), (500_000, None), (3_000, "gpt-4o")])
def test_a_measurement_that_cannot_be_of_this_request_is_not_believed(usage, model):
    chat = refold.open("c", store="memory://", model="gpt-5")
    chat.append(user("word " * 500))
    before = chat.fit().report.tokens.final
    chat.append(refold.Message("assistant", "Fine.", model=model, usage=Usage(input=usage)))
    assert chat.fit().report.tokens.final <= before + 20


def test_a_check_between_two_requests_knows_what_stood_beside_the_messages():
    chat = refold.open("c", store="memory://", model="m", config=SMALL)
    chat.append(user("go"))
    beside = {"instructions": "rule " * 3_000, "max_tokens": 900}
    sent = chat.fit(request=beside).report.tokens.final
    assert chat.check_overflow().current_tokens == sent > 3_000
    assert chat.check_overflow(request={"max_tokens": 900}).current_tokens < 100


def test_an_answer_as_long_as_a_request_asks_for_has_its_room():
    config = {"models": {"m": {"window": 8_000, "max_output": 8_000, "provider": "openai"}}}
    chat = refold.open("c", store="memory://", model="m", config=config)
    chat.append([user("task"), *long_answers(12), user("on")])
    fitted = chat.fit(request={"max_tokens": 6_000})
    assert fitted.report.tokens.final <= 2_000


def test_a_switch_turned_off_decides_nothing():
    config = {**SMALL, "agents": {"default": {"compact": False}}}
    chat = refold.open("c", store="memory://", model="m", config=config)
    chat.append(user("word " * 9_900))
    assert not chat.should_compact()
    assert chat.check_overflow().is_overflow


# System text that comes again


@pytest.mark.parametrize("name", ["system", "instructions"])
def test_system_text_that_was_replaced_is_neither_sent_nor_counted(name):
    model = {"system": "claude-sonnet-4-5", "instructions": "gpt-5"}[name]
    config = {"models": {model: {"window": 4_000, "max_output": 400}}}
    chat = refold.open("c", store="memory://", model=model, config=config)
    for n in range(40):
        chat.append({name: f"Rules {n}. " + "rule " * 100})
        chat.append(user(f"question {n}"))
        fitted = chat.fit()
        assert fitted.system.startswith(f"Rules {n}.")
        assert fitted.report.tokens.final < 2_500
        chat.append({"role": "assistant", "content": "Yes."})
    said = chat.fit(dialect="openai-chat").messages
    assert [m["content"][:9] for m in said if m["role"] == "system"] == ["Rules 39."]
    assert sum(stored.message.role == "system" for stored in chat.get_all()) == 40


@pytest.mark.parametrize("words", [5, 300, 500, 1_100])
def test_the_newest_system_text_is_sent_whatever_is_hidden_around_it(words):
    config = {"models": {"my": {"window": 8_000, "max_output": 1_000, "provider": "anthropic"}}}
    chat = refold.open("c", store="memory://", model="my", config=config)
    chat.append({"system": "OLD " + "rule " * words})
    chat.append(user("task"))
    for n in range(30):
        if n % 7 == 2:
            chat.append({"system": f"NEW {n} " + "rule " * words})
        chat.append([{"role": "assistant", "content": f"a{n} " + "word " * 150}, user(f"q{n}")])
        fitted = chat.fit()
        newest = max((m for m in range(n + 1) if m % 7 == 2), default=None)
        assert fitted.system.startswith("OLD" if newest is None else f"NEW {newest} ")
        assert sum(line.role == "system" for line in chat.view().lines) == 1
    again = refold.open("c", store=chat.store, model="my", config=config)
    assert again.fit().request == chat.fit().request
    assert again.view() == fold(list(again.events()))


def test_system_text_that_took_the_place_of_another_is_no_edit():
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5")
    chat.append([{"system": "old " * 500}, {"system": "new"}, user("x")])
    assert chat.fit().report.tokens.final < 50
    assert chat.check_overflow().current_tokens < 50
    assert [type(event).__name__ for event in chat.events()] == ["Said"] * 3
    chat.append({"instructions": "newest"}, dialect="openai-responses")
    assert chat.fit().system == "newest"
    assert chat.fit(dialect="openai-responses").request["instructions"] == "newest"


def test_the_same_system_text_said_again_leaves_thinking_as_it_is():
    chat = refold.open("c", store="memory://", model="c", config=BOUND)
    for n in range(3):
        chat.append({"system": "Be brief."})
        chat.append(user(f"question {n}"))
        assert chat.fit().report.cache_break_at is None
        thought = {"type": "thinking", "thinking": f"Hm {n}.", "signature": "sig"}
        chat.append({"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]})
    assert thoughts(chat.fit()) == ["Hm 0.", "Hm 1.", "Hm 2."]


def test_an_item_with_one_field_is_no_system_text():
    chat = refold.open("c", store="memory://", model="gpt-5")
    chat.append({"instructions": "I"})
    chat.append([user("x"), {"type": "foo_call"}], dialect="openai-responses")
    assert chat.fit(dialect="openai-responses").request["instructions"] == "I"


def test_reminders_in_mid_conversation_go_where_there_is_no_room_for_them():
    config = {"models": {"m": {"window": 4_000, "max_output": 400, "provider": "openai"}}}
    chat = refold.open("c", store="memory://", model="m", config=config)
    chat.append([{"role": "system", "content": "The rules."}, user("task")])
    for _ in range(60):
        chat.append([{"role": "assistant", "content": "Done."}, {"role": "system", "content": "rule " * 100}])
        fitted = chat.fit()
    assert fitted.messages[0] == {"role": "system", "content": "The rules."}
    assert fitted.report.tokens.final < 3_600


def capped(dialect: str) -> list:
    """A question, and nine results so long that each is capped at once."""
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": "t", "arguments": "{}"} for n in range(9)]
    outputs = [
        {"type": "function_call_output", "call_id": f"c{n}", "output": f"line {n} of it\n" * 20_000}
        for n in range(9)
    ]
    return [{"type": "message", "role": "user", "content": "go"}, *calls, *outputs]


def typed(dialect: str) -> list:
    """A message in the dialect, then nine calls and results that are in none."""
    first = {"role": "user", "content": "go"}
    if dialect == "ai-sdk":
        first = {"role": "user", "content": [{"type": "text", "text": "go"}]}
    if dialect == "openai-responses":
        first["type"] = "message"
    said: list = [first]
    for n in range(9):
        said += [
            Message("assistant", [ToolCall(f"c{n}", "t", "{}")]),
            Message("tool", [ToolResult(f"c{n}", "done")]),
        ]
    return said


# proves: A1
@pytest.mark.parametrize(
    ("messages", "model", "dialect"),
    [
        (capped, "gpt-4o", "openai-responses"),
        (capped, None, "openai-responses"),
        (typed, "gpt-4o", "openai-responses"),
        (typed, None, "ai-sdk"),
    ],
)
def test_a_conversation_keeps_its_dialect_while_new_messages_and_edits_have_none(
    messages, model, dialect, tmp_path
):
    said = messages(dialect)
    chat = refold.open("c", store=f"sqlite:///{tmp_path}/a.db", model=model)
    chat.append(said[0], dialect=dialect)
    chat.append(said[1:])
    for _ in range(2):
        assert chat.dialect == dialect
        assert ("input" in chat.fit().request) is (dialect == "openai-responses")
    again = refold.open("c", store=f"sqlite:///{tmp_path}/a.db", model=model)
    assert again.dialect == dialect
    assert ("input" in again.fit().request) is (dialect == "openai-responses")


def test_a_cleared_conversation_has_the_dialect_of_what_is_said_then():
    chat = refold.open("c", store="memory://")
    chat.append([user(str(n)) for n in range(9)], dialect="openai-responses")
    assert chat.dialect == "openai-responses"
    chat.clear()
    chat.append(user("hello"), dialect="anthropic")
    assert chat.dialect == "anthropic"


def test_the_dialect_of_a_long_conversation_without_one_is_looked_for_once(monkeypatch):
    chat = refold.open("c", store="memory://", model="gpt-4o")
    chat.append([Message("user", str(n)) for n in range(50)])
    read: list[int] = []
    monkeypatch.setattr(codec, "dialect_of", lambda entry: read.append(entry.at))
    for n in range(50, 60):
        chat.fit()
        chat.append(Message("user", str(n)))
    assert sorted(read) == list(range(59))


@pytest.mark.skipif(not PI.exists(), reason="the recorded conversations are not beside the project")
def test_a_recorded_conversation_is_estimated_within_five_percent_after_three_calls():
    config = {"agents": {"default": {"compact": False}}}
    chat = refold.open("c", store="memory://", model="claude-sonnet-4-5", config=config)
    errors: list[float] = []
    for message in json.loads(PI.read_text().splitlines()[0])["messages"]:
        usage = message.get("x_usage") or {}
        said = {key: value for key, value in message.items() if not key.startswith("x_")}
        taken = sum(usage.get(name) or 0 for name in ("input", "cacheRead", "cacheWrite"))
        if message.get("x_stop_reason") in ("aborted", "error"):
            continue  # it was not sent back
        if taken:
            errors.append(chat.fit(dialect="openai-chat").report.tokens.final / taken - 1)
            [draft] = chat.intake("openai-chat").take([said]).drafts
            counted = msgspec.structs.replace(draft.message, usage=Usage(input=taken))
            chat.say([msgspec.structs.replace(draft, message=counted)])
        else:
            chat.append(said, dialect="openai-chat")
    assert len(errors) > 400
    assert min(errors[3:]) >= -0.02
    assert max(errors[3:]) <= 0.05
