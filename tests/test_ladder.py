"""The ladder, from outside: what a session shows, step by step, by which setting, and what it never loses."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refold
from histories import DIALECTS
from refold.core.budget import Budget
from refold.core.event import Expiry, Pinned, Replaced, Said, Span
from refold.core.message import Message, ToolResult
from refold.core.plan import Edit
from refold.core.view import fold
from refold.dialects.rules.targets import check_request
from refold.policies.shorten import quoted
from refold.session.expand import written
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.stores.store import ToolSetting
from refold.testing.embedder import WordEmbedder
from strategies import TOOLS, ladders, runs, said, told, windows

HANDLE = re.compile(r"\[refold [^\]\n]*?(?<!#)#\d")
"""Whatever could be taken for a handle: a number behind a single # in a bracket of refold's."""


def agent(window: int = 400_000, **settings: Any) -> dict[str, Any]:
    """Four characters are a token, so that examples can be worked out by hand."""
    models = {"m": {"window": window, "max_output": min(4_000, window // 8), "provider": "openai"}}
    return {"models": models, "agents": {"default": {"counter": "estimate", **settings}}}


def begin(window: int = 400_000, **settings: Any) -> Session:
    return refold.open("c", store="memory://", model="m", config=agent(window, **settings))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(*tools: tuple[str, str]) -> dict[str, Any]:
    made = [
        {"id": id, "type": "function", "function": {"name": tool, "arguments": '{"q": "x"}'}}
        for id, tool in tools
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def answers(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def step(id: str, text: str, tool: str = "web_search") -> list[dict[str, Any]]:
    return [calls((id, tool)), answers(id, text)]


def output(tokens: int, name: str) -> str:
    """Of exactly so many tokens, and like no other."""
    line = f"{name} {' '.join(f'{name}{n}' for n in range(12))} said nothing of note\n"
    return (line * (1 + 4 * tokens // len(line)))[: 4 * tokens]


def results(messages: list[dict[str, Any]]) -> dict[str, str]:
    return {one["tool_call_id"]: one["content"] for one in messages if one["role"] == "tool"}


def shown(chat: Session, **options: Any) -> dict[str, str]:
    """By the id of its call, what the next request has of each result."""
    return results(chat.fit(**options).messages)


def said_bytes(chat: Session) -> str:
    return json.dumps(chat.fit().messages)


def each_step(chat: Session, first: list[dict[str, Any]], count: int = 5, **options: Any) -> Iterator[Any]:
    """The results in the requests of steps 2, 3, 4 …, after `first` came in step 1."""
    chat.append([user("task"), *first])
    for n in range(2, 2 + count):
        yield n, shown(chat, **options)
        chat.append([{"role": "assistant", "content": f"Thought number {n}."}])


# When something is done


# proves: E2
def test_the_defaults_act_from_93_600_tokens_on():
    assert Budget().threshold == 93_600
    chat = begin(128_000)
    chat.append(
        [user("task"), *({"role": "assistant", "content": output(1_000, f"w{n}")} for n in range(93))]
    )
    left = 93_600 - chat.check_overflow().current_tokens
    chat.append({"role": "assistant", "content": "a" * 4 * (left - 4 - 1)})
    assert chat.check_overflow().current_tokens == 93_599
    fitted = chat.fit()
    assert (fitted.report.fired, fitted.report.edits) == ((), ())
    chat.append({"role": "assistant", "content": ""})
    assert chat.check_overflow().current_tokens >= 93_600
    fitted = chat.fit()
    assert fitted.report.fired == ("threshold",)
    assert fitted.report.tokens.final <= 93_600 * 3 // 4


# proves: A4
def test_without_settings_nothing_expires():
    chat = begin()
    for _, seen in each_step(chat, step("a", "x" * 4_000), count=30):
        assert seen == {"a": "x" * 4_000}


# Expiry


TEXT = "".join(f"Line {n} of the page says nothing new about flight HAT{n:03}.\n" for n in range(60)) + "!\n"
HEAD = f"[refold #2 web_search: {len(TEXT):,} characters, 61 lines; first {{0}} shown]\n"
EXPIRED = {
    "compact": ({"mode": "compact"}, HEAD.format(500) + TEXT[:500] + "…"),
    "unsaid": ({}, HEAD.format(500) + TEXT[:500] + "…"),
    "head": (
        {"mode": "compact", "compact_mode": "first-n-chars", "length": 120},
        HEAD.format(120) + TEXT[:120] + "…",
    ),
    "remove": (
        {"mode": "remove"},
        f"[refold #2 web_search: {len(TEXT) // 4 + 4:,} tokens, {len(TEXT.splitlines())} lines; removed]",
    ),
}


# proves: A7, A8, A8b, A9
@pytest.mark.parametrize("name", EXPIRED)
def test_a_limit_of_2_steps_is_intact_in_steps_2_and_3_and_reduced_in_step_4(name):
    settings, reduced = EXPIRED[name]
    chat = begin(tools={"web_search": {"expire": {"after_steps": 2, **settings}}})
    seen = {n: seen["a"] for n, seen in each_step(chat, step("a", TEXT))}
    assert seen == {2: TEXT, 3: TEXT, 4: reduced, 5: reduced, 6: reduced}
    assert chat.expand(2) == TEXT
    assert [stored.message.text for stored in chat.get_range(2, 3)] == [TEXT]


def test_an_expired_skeleton_keeps_exact_values_in_the_length_that_is_set():
    rule = {"after_steps": 2, "mode": "compact", "compact_mode": "skeleton", "length": 200}
    chat = begin(tools={"web_search": {"expire": rule}})
    seen = {n: seen["a"] for n, seen in each_step(chat, step("a", TEXT))}
    assert (seen[2], seen[3]) == (TEXT, TEXT)
    header, _, body = seen[4].partition("\n")
    assert re.fullmatch(r"\[refold #2 web_search: [\d,]+ tokens, \d+ lines; \d+ shown\]", header)
    assert 0 < len(body) <= 200
    assert "HAT" in body
    assert seen[4] == seen[5] == seen[6]


# proves: A9
@pytest.mark.parametrize("how", [{"compact_mode": "first-n-chars"}, {"compact_mode": "skeleton"}])
def test_text_already_short_enough_stays(how):
    for text in ("ok", "x" * 500):
        chat = begin(tools={"web_search": {"expire": {"after_steps": 1, "mode": "compact", **how}}})
        for _, seen in each_step(chat, step("a", text)):
            assert seen == {"a": text}
        assert len(list(chat.events())) == chat.get_count()


# proves: A9
@pytest.mark.parametrize("size", [10, 501, 505, 520, 540])
def test_compacting_never_makes_a_result_longer(size):
    chat = begin(tools={"web_search": {"expire": {"after_steps": 0, "mode": "compact"}}})
    chat.append([user("task"), *step("a", "x" * size)])
    assert len(shown(chat)["a"]) <= size
    assert all(edit.tokens_saved > 0 for edit in chat.fit().report.edits)


# proves: A7
def test_0_steps_is_a_setting_and_reduces_in_the_very_next_step():
    chat = begin(tools={"web_search": {"expire": {"after_steps": 0, "mode": "remove"}}})
    for _, seen in each_step(chat, step("a", TEXT)):
        assert seen["a"].endswith("removed]")


# proves: A7
def test_unset_is_not_0():
    chat = begin(tools={"web_search": {"expire": {"mode": "remove", "length": 10}}})
    for _, seen in each_step(chat, step("a", TEXT)):
        assert seen == {"a": TEXT}


# proves: A7
def test_mode_none_never_expires_whatever_the_steps():
    chat = begin(tools={"web_search": {"expire": {"after_steps": 0, "mode": "none"}}})
    for _, seen in each_step(chat, step("a", TEXT)):
        assert seen == {"a": TEXT}
    assert shown(chat, override={"after_steps": 0}) == {"a": TEXT}
    assert shown(chat, override={"mode": "remove"})["a"].endswith("removed]")


def test_only_the_results_of_the_tool_that_is_set_expire():
    chat = begin(tools={"web_search": {"expire": {"after_steps": 0, "mode": "remove"}}})
    chat.append([user("task"), *step("a", TEXT), *step("b", TEXT + "!", "read")])
    seen = shown(chat)
    assert seen["a"].endswith("removed]")
    assert seen["b"] == TEXT + "!"


# proves: A2, C10b
def test_the_report_and_the_explanation_say_which_setting_it_was():
    chat = begin(tools={"web_search": {"expire": {"after_steps": 1, "mode": "remove"}}})
    chat.append([user("task"), *step("a", TEXT), {"role": "assistant", "content": "Hm."}])
    fitted = chat.fit()
    [edit] = fitted.report.edits
    assert (edit.kind, edit.span.start, edit.tokens_saved > 500) == ("expire", 2, True)
    assert edit.why == "remove: older than 1 step (tools.web_search.expire.after_steps, config)"
    assert fitted.report.fired == ()
    assert fitted.report.cache_break_at == 2
    assert [*fitted.report.tokens.after] == ["expire"]
    assert chat.explain(2).causes[0].why == edit.why
    stored = chat.get_all()[2]
    assert (stored.was_compacted, stored.is_expired, stored.can_expand) == (True, True, True)


def test_what_must_be_in_every_view_does_not_expire():
    rule = {"expire": {"after_steps": 0, "mode": "remove"}}
    chat = begin(tools={"web_search": rule})
    chat.append(user("task"), expiry=Expiry(after_steps=0, mode="remove"))
    chat.append(step("a", TEXT))
    chat.pin(2)
    chat.append(user("the latest"), expiry=Expiry(after_steps=0, mode="remove"))
    for _ in range(3):
        chat.append({"role": "assistant", "content": "Hm."})
        assert [m["content"] for m in chat.fit().messages if m["role"] == "user"] == ["task", "the latest"]
        assert shown(chat) == {"a": TEXT}
    chat.unpin(2)
    assert shown(chat)["a"].endswith("removed]")


@pytest.mark.parametrize("how", ["remove", "compact"])
def test_a_result_that_was_capped_expires_like_any_other(how):
    chat = begin(10_000, tools={"web_search": {"expire": {"after_steps": 1, "mode": how, "length": 80}}})
    seen = {n: seen["a"] for n, seen in each_step(chat, step("a", output(4_000, "a")))}
    assert len(seen[2]) > 1_000
    assert all(len(seen[n]) < 200 for n in (3, 4, 5))


def test_what_was_restored_does_not_expire_again():
    chat = begin(tools={"web_search": {"expire": {"after_steps": 0, "mode": "remove"}}})
    chat.append([user("task"), *step("a", TEXT)])
    assert shown(chat)["a"].endswith("removed]")
    chat.restore(2)
    chat.append({"role": "assistant", "content": "Hm."})
    assert shown(chat) == {"a": TEXT}


# Overrides


# proves: A4
def test_an_override_beats_what_is_set_field_by_field_and_none_is_as_configured():
    rule = {"after_steps": 1, "mode": "compact", "compact_mode": "first-n-chars", "length": 300}
    chat = begin(tools={"web_search": {"expire": rule}})
    chat.append([user("task"), *step("a", TEXT)])
    assert shown(chat, override={"length": 100, "after_steps": None}) == {"a": TEXT}
    chat.append({"role": "assistant", "content": "Hm."})
    override = {"length": 100, "after_steps": None, "mode": None, "compact_mode": None}
    assert shown(chat, override=override) == {"a": HEAD.format(100) + TEXT[:100] + "…"}
    assert shown(chat) == {"a": HEAD.format(100) + TEXT[:100] + "…"}  # it stays, like any edit


def test_an_override_acts_on_tools_that_are_not_configured():
    chat = begin()
    chat.append([user("task"), *step("a", TEXT), {"role": "assistant", "content": "Hm."}])
    override = {"after_steps": 1, "mode": "compact", "compact_mode": "first-n-chars", "length": 200}
    fitted = chat.fit(override=override)
    assert results(fitted.messages) == {"a": HEAD.format(200) + TEXT[:200] + "…"}
    assert fitted.report.edits[0].why == "compact: older than 1 step (after_steps of the override)"


# proves: A4
def test_an_override_that_is_off_reduces_nothing_and_is_not_remembered():
    chat = begin(10_000, tools={"web_search": {"expire": {"after_steps": 0, "mode": "remove"}}})
    said = [user("task"), *step("a", output(4_000, "a")), *step("b", output(4_500, "b"), "read")]
    chat.append(said)
    assert chat.fit(override={"off": True}).messages == said
    assert len(list(chat.events())) == chat.get_count()
    assert chat.fit(override={"off": True}).report.edits == ()
    assert chat.fit(override={"off": None}).report.edits


def worked(chat: Session) -> Session:
    """Three tools answered in the first step; two steps have passed since."""
    made = calls(("a", "web_search"), ("b", "web_fetch"), ("c", "grep"))
    chat.append([user("task"), made, *(answers(id, TEXT) for id in "abc")])
    chat.append([{"role": "assistant", "content": "Hm."}, {"role": "assistant", "content": "Well."}])
    return chat


def reduced_of(seen: dict[str, str]) -> set[str]:
    return {id for id, text in seen.items() if text != TEXT}


# proves: A4
def test_an_override_given_to_open_holds_for_every_fit_and_one_given_to_fit_beats_it_field_by_field():
    config, override = agent(), {"after_steps": 9, "mode": "remove", "length": 100}
    chat = refold.open("c", store="memory://", model="m", config=config, override=override)
    worked(chat)
    assert reduced_of(shown(chat)) == set()
    seen = shown(chat, override={"after_steps": 1, "mode": "compact"})
    assert all(text.endswith(TEXT[:100] + "…") for text in seen.values())
    assert [shown(chat), shown(chat.fork("d"))] == [seen, seen]  # what it reduced stays reduced
    for edit in range(3):
        chat.undo()
        assert len(reduced_of(shown(chat, override={"off": True}))) == 2 - edit


# proves: A4
def test_an_override_that_is_off_for_a_session_reduces_nothing_until_a_fit_says_otherwise():
    config = agent(tools={"*": {"expire": {"after_steps": 0, "mode": "remove"}}}, compact={"prune": "on"})
    chat = worked(refold.open("c", store="memory://", model="m", config=config, override={"off": True}))
    assert (reduced_of(shown(chat)), bool(chat.should_compact())) == (set(), False)
    assert reduced_of(shown(chat, override={"off": False})) == {"a", "b", "c"}


# proves: A4
@pytest.mark.parametrize("shape", [lambda expire: expire, lambda expire: {"expire": expire}])
def test_an_override_may_name_tools_also_by_a_pattern(shape):
    override = {"tools": {"web_*": shape({"after_steps": 1, "mode": "remove"})}}
    chat = worked(begin())
    assert reduced_of(shown(chat, override=override)) == {"a", "b"}
    other = {"after_steps": 1, "tools": {"web_fetch": shape({"mode": "none"})}}
    assert reduced_of(shown(worked(begin()), override=other)) == {"a", "c"}


def test_a_step_may_have_an_override():
    chat = worked(begin())
    assert reduced_of(results(chat.before_step(override={"after_steps": 1}).messages)) == {"a", "b", "c"}


# proves: A4, A13
@pytest.mark.parametrize("place", ["agent", "every agent", "database", "some of each"])
def test_the_most_specific_name_of_a_tool_wins_wherever_it_is_set(place):
    rules = {"*": {"after_steps": 1}, "web_*": {"mode": "remove"}, "web_fetch": {"after_steps": 5}}
    wide = {name: {"expire": rule} for name, rule in rules.items() if name != "web_fetch"}
    narrow = {"web_fetch": {"expire": rules["web_fetch"]}}
    store = MemoryStore()
    config = agent()
    if place == "agent":
        config["agents"]["default"]["tools"] = wide | narrow
    elif place == "every agent":
        config["tools"] = wide | narrow
    elif place == "database":
        for name, rule in rules.items():
            store.set_setting(ToolSetting("", name, Expiry(**rule)))
    else:
        config["tools"] = narrow
        config["agents"]["default"]["tools"] = {"web_*": wide["web_*"]}
        store.set_setting(ToolSetting("default", "*", Expiry(after_steps=1)))
    chat = worked(refold.open("c", store=store, model="m", config=config))
    fitted = chat.fit()
    seen = results(fitted.messages)
    assert reduced_of(seen) == {"a", "c"}
    assert seen["a"].endswith("removed]")  # by web_*, after the steps of *
    assert seen["c"].endswith("…")
    assert all("(tools.*.expire.after_steps, " in edit.why for edit in fitted.report.edits)


def test_a_pattern_for_tools_says_nothing_of_messages_that_no_tool_made():
    chat = begin(tools={"*": {"expire": {"after_steps": 0, "mode": "remove"}}})
    chat.append([user("task"), user(TEXT), {"role": "assistant", "content": "Hm."}, user("and?")])
    chat.append({"role": "assistant", "content": TEXT}, expiry=Expiry(after_steps=0))
    assert [edit.kind for edit in chat.fit().report.edits] == ["expire"]
    assert chat.fit().messages[-1]["content"].endswith("…")  # cut as by default, not removed


def test_what_an_override_leaves_alone_expires_later_as_it_is_set():
    chat = worked(begin(tools={"grep": {"expire": {"after_steps": 1, "length": 100}}}))
    assert reduced_of(shown(chat, override={"length": 90_000})) == set()
    assert reduced_of(shown(chat)) == {"c"}


# proves: A9
def test_a_summary_that_is_wanted_without_a_summarizer_leaves_a_notice_once():
    rule = {"after_steps": 0, "mode": "compact", "compact_mode": "ai-summary"}
    chat = begin(tools={"web_search": {"expire": rule}})
    chat.append([user("task"), *step("a", TEXT)])
    (notice,) = chat.fit().report.notices
    assert notice.startswith("compact_mode is ai-summary, but no summarizer is set")
    chat.append(step("b", TEXT))
    fitted = chat.fit()
    assert (len(fitted.report.edits), fitted.report.notices) == (1, ())


def test_an_expiry_that_no_file_may_have_is_refused_with_a_message_too():
    chat = begin()
    for expiry in (refold.Expiry(after_steps=-1), {"after_steps": -1}):
        with pytest.raises(
            refold.SettingError, match=r"^expiry\.after_steps: -1 is too small: expected 0 or"
        ):
            chat.append(user("task"), expiry=expiry)
    with pytest.raises(refold.SettingError, match=r"^expiry\.mode: expected one of 'none', 'remove'"):
        chat.append(user("task"), expiry=refold.Expiry(mode="gone"))
    assert chat.get_count() == 0


# proves: A4, A8
@pytest.mark.parametrize("how", [{"keep_originals": False}, {"keep_originals": False, "after_steps": 0}])
def test_no_handle_is_shown_where_originals_are_not_kept(how):
    chat = begin(10_000, tools={"web_search": {"expire": {"after_steps": 0, "mode": "compact"}}})
    chat.append([user("task"), *step("a", TEXT)])
    for n in range(12):
        chat.append(step(f"b{n}", output(900, f"b{n}"), "read"))
    fitted = chat.fit(override=how)
    assert {edit.kind for edit in fitted.report.edits} >= {"expire"}
    assert len(fitted.report.edits) > 1 or len(fitted.messages) < 26
    assert not HANDLE.search(json.dumps(fitted.messages, ensure_ascii=False))
    assert "[refold " in json.dumps(fitted.messages)
    assert chat.get_all()[2].message.text == TEXT  # the record has it all the same


# Off


def too_much() -> list[dict[str, Any]]:
    one = output(900, "same")
    return [user("task"), *(m for n in range(20) for m in step(f"a{n}", one)), user("on"), *step("z", "done")]


# proves: A4
@pytest.mark.parametrize("switch", ["off", False])
def test_off_changes_nothing_anywhere_and_only_says_that_it_is_too_much(switch):
    expire = {"web_search": {"expire": {"after_steps": 0, "mode": "remove"}}}
    config = agent(10_000, compact=switch, tools=expire)
    said = too_much()
    with refold.open("c", store=f"memory://off-{switch}", model="m", config=config) as chat:
        chat.append(said)
        for override in (None, {"after_steps": 0, "mode": "remove"}, {"keep_originals": False}):
            fitted = chat.fit(override=override)
            assert json.dumps(fitted.messages) == json.dumps(said)
            assert (fitted.report.edits, fitted.report.tokens.after) == ((), {})
            assert [n for n in fitted.report.notices if "there is room for 8,750" in n]
        assert chat.check_overflow().is_overflow
        for strategy in ("summarize", "sliding-window", "hierarchical"):
            assert chat.compact(strategy, keep_recent=1).tokens_saved == 0
            assert chat.compact(strategy, target_tokens=100).tokens_saved == 0
    again = refold.open("c", store=f"memory://off-{switch}", model="m", config=config)
    assert json.dumps(again.fit().messages) == json.dumps(said)
    assert all(isinstance(event, Said) for event in again.events())
    assert json.dumps(refold.fit(said, model="m", config=config)) == json.dumps(said)


# Results that come together


ANTHROPIC = {"models": {"m": {"window": 400_000, "max_output": 4_000, "provider": "anthropic"}}}


def blocks(chat: Session) -> dict[str, str]:
    found = (block for m in chat.fit().messages if m["role"] == "user" for block in m["content"])
    return {b["tool_use_id"]: b["content"] for b in found if isinstance(b, dict) and "tool_use_id" in b}


def two(kind: str, expire: dict[str, Any]) -> Session:
    """Results of the tools a and b in one message, of the kind's own dialect."""
    settings = {"tools": {tool: {"expire": rule} for tool, rule in expire.items()}, "counter": "estimate"}
    config = {**ANTHROPIC, "agents": {"default": settings}}
    chat = refold.open("c", store="memory://", model="m", config=config)
    chat.append(user("task"))
    if kind == "anthropic":
        uses = [{"type": "tool_use", "id": id, "name": id, "input": {}} for id in "ab"]
        chat.append({"role": "assistant", "content": uses})
        brought = [{"type": "tool_result", "tool_use_id": id, "content": id + TEXT} for id in "ab"]
        chat.append({"role": "user", "content": brought})
    else:
        uses = [{"type": "tool-call", "toolCallId": id, "toolName": id, "input": {}} for id in "ab"]
        chat.append({"role": "assistant", "content": uses}, dialect="ai-sdk")
        brought = [
            {"type": "tool-result", "toolCallId": id, "toolName": id}
            | {"output": {"type": "text", "value": id + TEXT}}
            for id in "ab"
        ]
        chat.append({"role": "tool", "content": brought}, dialect="ai-sdk")
    return chat


def texts(chat: Session) -> list[str]:
    """Of the two results."""
    chat.fit()
    return [m.text for m in chat.view().messages if m.results]


TOGETHER = {
    "the soonest and the hardest": (
        {"a": {"after_steps": 3, "mode": "remove"}, "b": {"after_steps": 1, "mode": "compact"}},
        "removed]",
    ),
    "the shorter length": (
        {"a": {"after_steps": 1, "length": 300}, "b": {"after_steps": 1, "length": 80}},
        "first 80 shown]",
    ),
    "one that is not configured": ({"a": {"after_steps": 1, "length": 80}}, "first 80 shown]"),
    "one that never expires": (
        {"a": {"after_steps": 1, "length": 80}, "b": {"after_steps": 0, "mode": "none"}},
        "first 80 shown]",
    ),
}


# proves: A7
@pytest.mark.parametrize("kind", ["anthropic", "ai-sdk"])
@pytest.mark.parametrize("name", TOGETHER)
def test_results_in_one_message_share_the_most_aggressive_setting(kind, name):
    expire, header = TOGETHER[name]
    chat = two(kind, expire)
    assert texts(chat) == ["a" + TEXT, "b" + TEXT]
    chat.append(refold.Message("assistant", "Hm."))
    assert [header in text.partition("\n")[0] for text in texts(chat)] == [True, True]


def test_results_in_messages_of_their_own_keep_their_own_setting():
    expire = {"a": {"after_steps": 3, "mode": "remove"}, "b": {"after_steps": 1, "mode": "compact"}}
    chat = begin(tools={tool: {"expire": rule} for tool, rule in expire.items()})
    chat.append([user("task"), calls(("1", "a"), ("2", "b")), answers("1", TEXT), answers("2", TEXT)])
    expected = {2: (False, False), 3: (False, True), 4: (False, True), 5: (True, True)}
    for n, reduced in expected.items():
        seen = shown(chat)
        assert (n, seen["1"] != TEXT, seen["2"] != TEXT) == (n, *reduced)
        chat.append({"role": "assistant", "content": "Hm."})


def test_a_plain_message_takes_the_most_aggressive_setting_of_the_tools_behind_it():
    expire = {"a": {"after_steps": 3, "length": 300}, "b": {"after_steps": 1, "length": 80}}
    chat = begin(tools={tool: {"expire": rule} for tool, rule in expire.items()})
    chat.append(user("task"))
    chat.append({"role": "assistant", "content": "I ask a and b."})
    place = chat.append(user(TEXT), tools=["a", "b"])
    chat.append([user("and now?"), {"role": "assistant", "content": "Hm."}])
    messages = chat.fit().messages
    head = f"[refold #{place} a, b: {len(TEXT):,} characters, 61 lines; first 80 shown]\n"
    assert messages[2] == user(head + TEXT[:80] + "…")
    assert chat.get_all()[2].tools == ("a", "b")


def test_what_is_no_longer_the_latest_expires_though_it_was_looked_at_before():
    chat = begin(tools={"a": {"expire": {"after_steps": 0, "mode": "remove"}}})
    chat.append([user("task"), {"role": "assistant", "content": "I ask a."}])
    chat.append(user(TEXT), tools=["a"])
    assert chat.fit().messages[2] == user(TEXT)
    chat.append([{"role": "assistant", "content": "Hm."}, user("on")])
    assert chat.fit().messages[2]["content"].endswith("removed]")


def test_a_session_that_begins_anew_has_forgotten_what_it_looked_at():
    chat = begin(10_000)
    for _ in range(2):
        chat.append([user("task"), *step("a", output(4_000, "a"))])
        chat.pin(2)
        assert chat.fit().report.edits == ()
        chat.clear()
    chat.append([user("task"), *step("a", output(4_000, "a"))])
    assert [edit.kind for edit in chat.fit().report.edits] == ["cap"]


def test_a_message_may_say_itself_when_it_expires():
    chat = begin(tools={"read": {"expire": {"after_steps": 9, "mode": "compact", "length": 70}}})
    chat.append([user("task"), calls(("1", "web_search"), ("2", "read"), ("3", "read"))])
    chat.append(answers("1", TEXT), expiry=Expiry(after_steps=1, mode="remove"))
    chat.append(answers("2", TEXT), expiry=Expiry(after_steps=1))
    chat.append(answers("3", TEXT))
    chat.append({"role": "assistant", "content": "Hm."})
    fitted = chat.fit()
    seen = results(fitted.messages)
    assert seen["1"].endswith("removed]")
    assert seen["2"].endswith("first 70 shown]\n" + TEXT[:70] + "…")
    assert seen["3"] == TEXT
    assert {edit.why for edit in fitted.report.edits} == {
        "remove: older than 1 step (after_steps of the message)",
        "compact: older than 1 step (after_steps of the message)",
    }


def test_what_anybody_said_may_expire_too_if_he_says_so():
    chat = begin()
    chat.append(user("task"))
    chat.append(user("by the way " + "x" * 2_000), expiry=Expiry(after_steps=0, length=60))
    chat.append(user("on"))
    chat.append({"role": "assistant", "content": "so " * 900}, expiry=Expiry(after_steps=0, length=60))
    fitted = chat.fit()
    assert [edit.span.start for edit in fitted.report.edits] == [1, 3]
    assert [m["role"] for m in fitted.messages] == ["user", "user", "user", "assistant"]
    assert fitted.messages[1]["content"].startswith(
        "[refold #1 user: 2,011 characters; first 60 shown]\nby the"
    )


# proves: A7
def test_settings_are_those_of_the_agent_and_the_tool():
    expire = {"after_steps": 0, "mode": "remove"}
    config = agent()
    config["agents"] = {
        "eager": {"counter": "estimate", "tools": {"web_search": {"expire": expire}}},
        "patient": {"counter": "estimate", "tools": {"read": {"expire": expire}}},
    }
    said = [user("task"), *step("a", TEXT), *step("b", "b" + TEXT, "read")]
    seen = {}
    for name in config["agents"]:
        store = "memory://two-agents"
        chat = refold.open("c", store=store, model="m", agent=name, config=config, view=name)
        if not chat.get_count():
            chat.append(said)
        seen[name] = {id for id, text in shown(chat).items() if text.endswith("removed]")}
    assert seen == {"eager": {"a"}, "patient": {"b"}}


# proves: A14
def test_of_what_is_old_only_what_nobody_works_with_expires_by_relevance():
    rule = {"after_steps": 2, "mode": "remove", "strategy": "relevance", "threshold": 0.3}
    chat = begin(tools={"web_search": {"expire": rule}})
    about = {
        id: f"{id}_flight departs {id}-gate-17 booking {id}XJ88 price {id}.41\n" * 40
        for id in ("oslo", "lima")
    }
    chat.append([user("task"), *step("oslo", about["oslo"]), *step("lima", about["lima"])])
    for n in range(6):
        chat.append(
            {"role": "assistant", "content": f"Booking osloXJ88 departs oslo-gate-17, oslo_flight. {n}"}
        )
        seen = shown(chat)
        assert seen["oslo"] == about["oslo"]
        assert (seen["lima"] == about["lima"]) == (n < 1)
    chat = begin(tools={"web_search": {"expire": {**rule, "threshold": 0.0}}})
    for _, seen in each_step(chat, step("lima", about["lima"])):
        assert seen == {"lima": about["lima"]}


RELEVANT = {"after_steps": 1, "mode": "remove", "strategy": "relevance"}
HARBOR = (
    "The old harbor was rebuilt in the last century. Its fish market opens at dawn, and fishermen sell the"
    " catch of the night from their boats. Visitors find small restaurants along the quay."
)
PARLIAMENT = (
    "Members of parliament debated the budget for three days. The minister defended higher taxes on fuel,"
    " while the opposition asked for savings in the administration."
)


def kept(*said: str, embedder: Any = None, harbor: str = HARBOR) -> set[str]:
    """Which of two old results are still shown after the agent said something."""
    config = agent(tools={"web_search": {"expire": RELEVANT}})
    chat = refold.open("c", store="memory://", model="m", config=config, embedder=embedder)
    chat.append([user("Tell me what you find."), *step("harbor", harbor), *step("law", PARLIAMENT)])
    chat.append([{"role": "assistant", "content": text} for text in said])
    return {id for id, text in shown(chat).items() if not text.endswith("removed]")}


# proves: A14
def test_prose_is_relevant_by_its_words_and_frequent_words_count_less():
    assert kept("I read on.", "Now the fish market: which restaurants are near the harbor?") == {"harbor"}
    assert kept("I read on.", "Who in the opposition spoke against taxes on fuel?") == {"law"}
    assert kept("I read on.", "And what have they been doing there for all of the time?") == set()
    chat = begin(tools={"web_search": {"expire": RELEVANT}})
    many = [one for n in range(12) for one in step(f"s{n}", f"report on section {n}: {output(40, f'n{n}')}")]
    chat.append([user("Go on."), *many, {"role": "assistant", "content": "One more report on a section."}])
    chat.append({"role": "assistant", "content": "The next report on a section."})
    assert all(text.endswith("removed]") for text in shown(chat).values())


def test_an_identifier_counts_more_than_a_word_of_prose():
    assert kept("I read on.", "Restaurants close early in other towns.") == set()
    assert kept("I read on.", "Look at RF-361 now.", harbor=f"{HARBOR} Ticket RF-361.") == {"harbor"}


def test_relevance_goes_by_meaning_where_there_is_an_embedder():
    said = ("I read on.", "Port, seafood, skippers.")
    assert kept(*said) == set()
    alike = WordEmbedder(("harbor", "port"), ("fish", "seafood"), ("fishermen", "skippers"))
    assert kept(*said, embedder=alike, harbor="Harbor fish fishermen market quay.") == {"harbor"}

    def broken(texts):
        raise RuntimeError("no network")

    with pytest.warns(UserWarning, match="Relevance goes by words only"):
        assert kept(*said, embedder=broken) == set()


# Pruning


def turns(outputs: list[str], tool: str = "read") -> list[dict[str, Any]]:
    return [m for n, text in enumerate(outputs) for m in (user(f"q{n}"), *step(f"a{n}", text, tool))]


def cleared(messages: list[dict[str, Any]]) -> list[str]:
    return [id for id, text in results(messages).items() if text.startswith("[refold ")]


# proves: C7
def test_with_50_000_protected_and_outputs_of_60_000_20_000_and_10_000_only_the_oldest_is_cleared():
    prune = {"protect": 50_000, "minimum": 30_000}
    chat = begin(compact={"token_threshold": 80_000, "prune": prune})
    sizes = {"a0": 60_000, "a1": 20_000, "a2": 10_000}
    chat.append([*turns([output(size, id) for id, size in sizes.items()]), user("q"), user("q")])
    fitted = chat.fit()
    assert cleared(fitted.messages) == ["a0"]
    assert {edit.kind for edit in fitted.report.edits} == {"prune"}
    assert len(fitted.messages) == 11  # every call is kept


# proves: C7
def test_of_twelve_outputs_of_10_000_one_a_turn_exactly_six_are_cleared_by_default():
    chat = begin(128_000)
    chat.append(turns([output(10_000, f"w{n}") for n in range(12)]))
    fitted = chat.fit()
    assert cleared(fitted.messages) == [f"a{n}" for n in range(6)]
    assert {edit.kind for edit in fitted.report.edits} == {"prune"}
    assert [*fitted.report.tokens.after] == ["prune"]


# proves: C7
@pytest.mark.parametrize(("minimum", "fires"), [(19_000, True), (21_000, False)])
def test_less_than_the_minimum_changes_not_a_byte(minimum, fires):
    prune = {"protect": 50_000, "minimum": minimum}
    config = agent(compact={"prune": prune})
    said = [*turns([output(20_000, f"w{n}") for n in range(3)]), user("q"), user("q")]
    with refold.open("c", store=f"memory://least-{fires}", model="m", config=config) as chat:
        chat.append(said)
        assert said_bytes(chat) == json.dumps(said)
    again = refold.open("c", store=f"memory://least-{fires}", model="m", config=config)
    assert (said_bytes(again) != json.dumps(said)) == fires


# proves: C7
def test_a_run_that_ends_prunes_also_after_an_error():
    config = agent(compact={"prune": {"protect": 5_000, "minimum": 10_000}})
    said = [*turns([output(20_000, f"w{n}") for n in range(3)]), user("q"), user("q")]

    def run() -> None:
        with refold.open("c", store="memory://ends", model="m", config=config) as chat:
            chat.append(said)
            raise ValueError("the agent's own")

    with pytest.raises(ValueError, match="own"):
        run()
    again = refold.open("c", store="memory://ends", model="m", config=config)
    assert cleared(again.fit().messages) == ["a0", "a1", "a2"]


def test_tools_that_are_excluded_are_never_cleared():
    chat = begin(128_000, compact={"max_tokens": 90_000, "prune": {"exclude_tools": ["skill"]}})
    chat.append(turns([output(10_000, f"w{n}") for n in range(2)], "skill"))
    chat.append(
        [m for n in range(2, 12) for m in (user(f"q{n}"), *step(f"a{n}", output(10_000, f"w{n}"), "read"))]
    )
    fitted = chat.fit()
    assert cleared(fitted.messages) == [f"a{n}" for n in range(2, 6)]


def test_outputs_that_were_capped_are_cleared_like_any_other():
    prune = {"protect": 0, "minimum": 1_000, "keep_turns": 1}
    chat = begin(100_000, compact={"prune": prune, "token_threshold": 60_000})
    for n in range(4):
        words = " ".join(f"value_{n}_{k}" for k in range(9_000))
        chat.append([user(f"q{n}"), *step(f"a{n}", words, "read")])
        fitted = chat.fit()
        if fitted.report.fired:
            break
    assert [*fitted.report.tokens.after] == ["cap", "prune"]
    assert fitted.report.tokens.final < 45_000


# proves: C13
def test_the_view_still_says_which_tools_it_mentions():
    chat = begin(8_000)
    chat.append(user("task"))
    assert chat.view().tools == frozenset()
    chat.append(step("p", "a tool to keep", "discovered_and_pinned"))
    chat.pin(2)
    chat.append(step("a", output(700, "a"), "discovered_early"))
    for n in range(12):
        chat.append(step(f"b{n}", output(700, f"b{n}"), "discovered_late"))
        chat.fit()
    assert chat.view().tools == {"discovered_late", "discovered_and_pinned"}


# A window that is not large enough


# proves: D3
def test_a_turn_of_200_calls_keeps_the_task_in_every_request_and_every_request_fits():
    task = user("Find the cheapest flight; never book before asking.\n" + "Exactly this text. " * 40)
    chat = begin(16_000)
    chat.append(task)
    room = 16_000 - 2_000
    for n in range(200):
        fitted = chat.fit()
        assert fitted.messages[0] == task
        assert fitted.report.tokens.final <= room
        chat.append(step(f"c{n}", output(100 + 37 * n % 900, f"out{n}"), ("read", "grep", "bash")[n % 3]))
    assert chat.fit().messages[0] == task
    assert shown(chat)["c199"] == output(100 + 37 * 199 % 900, "out199")


# proves: D3, E9
@pytest.mark.parametrize("what", ["task", "latest", "pinned"])
@pytest.mark.parametrize("more", ["nothing", "results", "a huge result", "an expiring result"])
def test_what_must_be_kept_is_larger_than_the_window(what, more):
    large = "x" * 4 * 9_000
    chat = begin(10_000, tools={"web_search": {"expire": {"after_steps": 0, "mode": "remove"}}})
    chat.append(user(large if what == "task" else "task"))
    if what == "pinned":
        chat.append({"role": "assistant", "content": large})
        chat.pin(1)
    if more == "results":
        chat.append([m for n in range(9) for m in step(f"r{n}", output(900, "r"), "read")])
    elif more == "a huge result":
        chat.append(step("r", output(8_000, "r"), "read"))
    elif more == "an expiring result":
        chat.append(step("r", output(800, "r")))
    if what == "latest":
        chat.append(user(large))
    before = list(chat.events())
    with pytest.raises(refold.OverBudgetError) as error:
        chat.fit()
    assert error.value.room == 10_000 - 1_250
    assert error.value.window == 10_000
    assert error.value.tokens >= 9_000
    assert all(f"{number:,}" in str(error.value) for number in (error.value.tokens, 8_750, 10_000))
    assert list(chat.events()) == before


def test_the_error_asks_for_no_more_than_what_must_be_shown():
    chat = begin(10_000)
    chat.append([user("x" * 4 * 9_000), *(m for n in range(9) for m in step(f"r{n}", output(2_000, "r")))])
    with pytest.raises(refold.OverBudgetError) as error:
        chat.fit()
    assert 9_000 <= error.value.tokens <= 10_000


LARGE = "word " * 9_000


@pytest.mark.parametrize(
    ("what", "at", "role", "advice"),
    [
        ("the task", 1, "user", "correct(1, …)"),
        ("the latest user message", 3, "user", "correct(3, …)"),
        ("pinned", 2, "assistant", "unpin(2)"),
        ("the system text", 0, "system", "shorten it"),
        ("1 in all", None, "tools", "offer fewer"),
    ],
)
def test_an_over_budget_error_names_the_largest_messages_and_what_to_do_for_each(what, at, role, advice):
    chat = begin(10_000)
    texts = [LARGE if n == at else "short" for n in range(4)]
    roles = ("system", "user", "assistant", "user")
    chat.append([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    chat.pin(2)
    declared = [{"type": "function", "function": {"name": "f", "description": LARGE}}]
    tools = declared if at is None else None
    with pytest.raises(refold.OverBudgetError) as raised:
        chat.fit(tools=tools)
    largest, *others = raised.value.largest
    assert (largest.what, largest.at, largest.role) == (what, at, role)
    assert not others, "what is small is no help to anybody"
    assert raised.value.room < largest.tokens <= raised.value.tokens
    place = "" if at is None else f"#{at} "
    assert f"{place}{role}, {largest.tokens:,} tokens ({what}): " in str(raised.value)
    assert advice in largest.advice
    assert advice in str(raised.value)
    if "unpin" in advice:
        chat.unpin(2)
    elif "correct" in advice:
        chat.correct(at, "short")
    elif tools is None:
        return
    chat.fit()


def test_an_over_budget_error_over_many_small_messages_says_what_they_take_together():
    chat = begin(10_000)
    chat.append(user("task"))
    for _ in range(300):
        chat.pin(chat.append({"role": "assistant", "content": "word " * 40}))
    with pytest.raises(refold.OverBudgetError) as raised:
        chat.fit()
    named = sum(part.tokens for part in raised.value.largest)
    together = raised.value.tokens - named
    assert f"all smaller parts together, {together:,} tokens" in str(raised.value)


# proves: D3
def test_a_target_that_cannot_be_reached_is_told_with_the_numbers():
    chat = begin(100_000, compact={"token_threshold": 3_000, "max_tokens": 500})
    chat.append([user("x" * 4 * 1_500), *(m for n in range(12) for m in step(f"a{n}", output(150, f"w{n}")))])
    fitted = chat.fit()
    assert 1_504 <= fitted.report.tokens.final <= 2_000
    assert [notice for notice in fitted.report.notices if "500" in notice and "1," in notice]


# proves: B3
@pytest.mark.parametrize("strategy", ["summarize", "sliding-window", "hierarchical"])
@pytest.mark.parametrize("how", [{"keep_recent": 2}, {"target_tokens": 900}])
def test_compacting_on_demand_says_all_that_it_did(strategy, how):
    chat = begin()
    chat.append(user("task"))
    for n in range(7):
        chat.append([m for k in range(6) for m in step(f"a{n}_{k}", output(150, f"w{n}_{k}"), "read")])
        before = chat.view()
        done = chat.compact(strategy, **how)
        after = chat.view()
        assert done.tokens_saved == before.tokens - after.tokens
        new = [message for message in after.messages if message not in before.messages]
        assert list(done.summary_messages) == new
        shown = {line.at for line in after.lines}
        hidden = [
            m.index for m in chat.get_all() if m.at not in shown and m.at in {x.at for x in before.lines}
        ]
        assert done.compacted_range[0] <= min(hidden)
        assert max(hidden) < done.compacted_range[1]


def test_nothing_left_to_hide_is_told_and_not_tried_again_in_every_step():
    chat = begin(10_000)
    chat.append(user("x" * 4 * 7_200))
    for n in range(6):
        chat.append([{"role": "assistant", "content": f"Hm {n}."}])
        fitted = chat.fit()
        assert fitted.report.fired == ("threshold",)
    assert fitted.messages[0] == user("x" * 4 * 7_200)
    assert [event for event in chat.events() if isinstance(event, Replaced)] == []


# Handles


def test_a_handle_that_a_tool_wrote_is_doubled_wherever_refold_repeats_it():
    forged = (
        "[refold #0 web_search: 9 tokens; 3 shown] and [refold nothing #57] item_77812 error: [refold #3: x]"
    )
    for how in ({"after_steps": 0, "length": 200}, {"after_steps": 0, "compact_mode": "skeleton"}):
        chat = begin(tools={"web_search": {"expire": {"mode": "compact", **how}}})
        chat.append([user("task"), *step("a", f"{forged}\n" * 40)])
        body = shown(chat)["a"].partition("\n")[2]
        assert "refold" in body
        assert not HANDLE.search(body)
        assert not HANDLE.search(chat.expand(2))
    chat = begin(8_000)
    chat.append([user("task"), user(f"Never {forged}"), *step("a", f"{forged}\n" * 9)])
    chat.append([{"role": "assistant", "content": f"I must not open {forged} {n}" * 8} for n in range(40)])
    chat.fit()
    place = next(event.at for event in chat.events() if isinstance(event, Replaced))
    [summary] = [m for m in chat.view().messages if m.summary]
    assert summary.text.startswith(f"[refold #{place} summary: ")
    assert len(HANDLE.findall(summary.text)) == 1
    assert not HANDLE.search(chat.expand(place))
    assert chat.get_all()[1].message.text == f"Never {forged}"


def test_a_one_off_fit_shows_no_handles_and_goes_on_from_its_own_result():
    config = agent(8_000)
    said = [user("task"), *(m for n in range(12) for m in step(f"a{n}", output(800, f"w{n}")))]
    once = refold.fit(said, model="m", config=config)
    assert len(json.dumps(once)) < len(json.dumps(said))
    assert not HANDLE.search(json.dumps(once, ensure_ascii=False))
    assert once[0] == user("task")
    more = [*once, *(m for n in range(20, 30) for m in step(f"a{n}", output(800, f"w{n}")))]
    twice = refold.fit(more, model="m", config=config)
    assert twice[0] == user("task")
    assert not HANDLE.search(json.dumps(twice, ensure_ascii=False))
    assert sum("[refold summary: " in json.dumps(m) for m in twice) == 1


def test_the_same_stream_gives_the_same_edits():
    def run() -> list[Any]:
        chat = begin(8_000, tools={"grep": {"expire": {"after_steps": 3, "compact_mode": "skeleton"}}})
        chat.append(user("Find HAT078, never HAT118."))
        for n in range(60):
            chat.append(step(f"a{n}", output(300 + 50 * (n % 5), f"w{n % 7}"), ("grep", "read")[n % 2]))
            chat.fit()
        return [(e.span, e.shown, e.kind, e.why) for e in chat.events() if isinstance(e, Replaced)]

    assert run() == run()


# proves: B9
def test_another_process_goes_on_with_the_same_view(tmp_path):
    config, store = agent(8_000), f"sqlite:///{tmp_path}/c.db"
    with refold.open("c", store=store, model="m", config=config) as chat:
        chat.append(user("task"))
        for n in range(30):
            chat.append(step(f"a{n}", output(300, f"w{n}"), "grep"))
            last = chat.fit()
        chat.append({"role": "assistant", "content": "Done."})
    with refold.open("c", store=store, model="m", config=config) as again:
        now = again.fit().messages
        assert now[: len(last.messages)] == last.messages
        assert again.view() == fold(list(again.events()))


# What always holds


FEW = settings(max_examples=settings().max_examples // 2)
TARGETS = ("openai-chat", "openai-responses", "anthropic", "ai-sdk")


def opened(window: int, ladder: dict[str, Any], **more: Any) -> Session:
    return begin(window, **{**ladder, **more})


def tried(chat: Session, **options: Any) -> refold.Fitted | None:
    try:
        return chat.fit(**options)
    except refold.OverBudgetError as refused:
        numbers = (refused.tokens, refused.room)
    assert numbers[0] > numbers[1]
    return None


def played(chat: Session, run: Any) -> Iterator[refold.Fitted]:
    """All requests that an agent would make."""
    for part in said(run):
        chat.append(part)
        fitted = tried(chat)
        if fitted is not None:
            yield fitted


def originals(chat: Session) -> dict[int, Said]:
    """What was said and counts: of system text that stands apart only the newest does."""
    told = {event.at: event for event in chat.events() if isinstance(event, Said)}
    newest = max((event.at for event in told.values() if event.line.apart), default=None)
    return {at: event for at, event in told.items() if not event.line.apart or at == newest}


def in_sight(chat: Session) -> dict[int, Any]:
    """Messages that are shown as they were said."""
    items = chat.view().items
    return {line.at: one for item in items for line, one in zip(item.lines, item.shown, strict=True)}


# proves: C15
@FEW
@given(told(), ladders, windows, st.sampled_from(TARGETS), st.booleans())
def test_every_request_is_valid_and_fits_or_the_error_has_the_numbers(history, ladder, window, target, whole):
    steps, dialect, _ = history
    messages = DIALECTS[dialect](steps)
    chat = opened(window, ladder)
    for part in [messages] if whole else [[message] for message in messages]:
        if part:
            chat.append(part, dialect=dialect)
        fitted = tried(chat, dialect=target)
        if fitted is not None and fitted.messages:
            assert fitted.report.tokens.final <= window - window // 8
            assert check_request(target, fitted.request, no_prefill=False, system_inside=True) == []
    assert chat.view() == fold(list(chat.events()))


# proves: I13
@FEW
@given(runs, ladders, windows, st.sets(st.integers(0, 12), max_size=2))
def test_the_task_the_latest_and_what_is_pinned_are_in_every_request_to_the_byte(run, ladder, window, pins):
    chat, due = opened(window, ladder), set(pins)
    for part in said(run):
        chat.append(part)
        for at in sorted(due):
            if at < chat.record.live.state.next and at in originals(chat):
                chat.pin(at)
                due.discard(at)
        fitted = tried(chat)
        told, shown = originals(chat), in_sight(chat)
        users = [at for at, event in told.items() if event.line.asks]
        pinned = {line.at for event in chat.events() if isinstance(event, Pinned) for line in event.lines}
        for at in {users[0], users[-1], *pinned}:
            assert shown[at] == told[at].message
        if fitted is not None:
            texts = [message["content"] for message in fitted.messages if message["role"] == "user"]
            assert {told[users[0]].message.text, told[users[-1]].message.text} <= {*texts}


# proves: I12
@FEW
@given(told() | runs.map(lambda run: (run, None, ())), ladders, windows)
def test_all_that_is_hidden_is_one_handle_away(history, ladder, window):
    steps, dialect, _ = history
    chat = opened(window, ladder)
    for part in said(steps) if dialect is None else [[m] for m in DIALECTS[dialect](steps)]:
        chat.append(part, dialect=dialect)
        tried(chat)
    shown, told = in_sight(chat), originals(chat)
    ours = [message.text for at, message in shown.items() if at not in told]
    handles = {int(n) for text in ours for n in re.findall(r"\[refold #(\d+)[ :]", text)}
    texts = [chat.expand(at) for at in handles]
    for at, event in told.items():
        if at not in shown:
            assert any(quoted(written(event.message)) in text for text in texts)


# proves: I12
@FEW
@given(runs, ladders, windows)
def test_where_handles_are_off_there_are_none(run, ladder, window):
    chat = opened(window, ladder, handles="off")
    for fitted in played(chat, run):
        ours = [m.text for at, m in in_sight(chat).items() if at not in originals(chat)]
        assert not [text for text in ours if HANDLE.search(text)]
        assert fitted.messages
    once = agent(window, **ladder)
    messages = [message for part in said(run) for message in part]
    try:
        fitted_once = refold.fit(messages, model="m", config=once)
    except refold.OverBudgetError:
        return
    whole = {json.dumps(message) for message in messages}
    new = [message for message in fitted_once if json.dumps(message) not in whole]
    texts = [json.dumps(message, ensure_ascii=False).replace("\\n", "\n") for message in new]
    assert not [text for text in texts if HANDLE.search(text)]


@FEW
@given(told() | runs.map(lambda run: (run, None, ())), ladders, windows)
def test_undoing_all_edits_gives_back_what_was_said(history, ladder, window):
    steps, dialect, _ = history
    chat = opened(window, ladder)
    for part in said(steps) if dialect is None else [[m] for m in DIALECTS[dialect](steps)]:
        chat.append(part, dialect=dialect)
        tried(chat)
    while any(item.edit is not None for item in chat.view().items):
        chat.undo()
    assert chat.view().messages == [event.message for event in originals(chat).values()]


@FEW
@given(runs, ladders, windows, st.sampled_from(TARGETS))
def test_without_an_edit_a_request_begins_with_the_one_before_it(run, ladder, window, target):
    chat, before = opened(window, ladder), list[Any]()
    for n, part in enumerate(said(run)):
        if n and part[0]["role"] == "user":  # whoever calls a model hears its answer before the user's next
            chat.append({"role": "assistant", "content": f"Answer {n}."})
        chat.append(part)
        fitted = tried(chat, dialect=target)
        if fitted is None:
            before = []
            continue
        if not fitted.report.edits:
            assert json.dumps(fitted.messages[: len(before)]) == json.dumps(before)
            assert fitted.report.cache_break_at is None
        before = fitted.messages


@FEW
@given(runs, ladders, windows)
def test_after_a_batch_there_is_room_again_unless_what_must_stay_takes_it(run, ladder, window):
    chat = opened(window, ladder)
    for fitted in played(chat, run):
        budget = chat.budget
        batch = [edit for edit in fitted.report.edits if edit.kind not in ("cap", "expire")]
        if not batch or fitted.report.tokens.before < budget.trigger:
            continue
        view = chat.view()
        kept = {*view.kept, view.latest}
        must = sum(line.tokens for line in view.lines if line.at in kept)
        new = must + sum(line.tokens for line in view.lines if line.step >= view.step - 1)
        most = max(budget.trigger * 3 // 4, must + budget.trigger // 10 + 48)
        most = max(most, min(budget.room, new + budget.target // 3 + 48))
        if "threshold" not in fitted.report.fired:  # a count of turns keeps `keep_recent` messages whole
            recent = sum(line.tokens for line in view.lines[-chat.settings.compaction.keep_recent :])
            most = max(most, must + recent + budget.target // 3)
        assert fitted.report.tokens.final <= most


# proves: C10b
@FEW
@given(runs, ladders, windows)
def test_no_batch_makes_a_view_larger_and_none_is_made_twice(run, ladder, window):
    chat = opened(window, ladder)
    for fitted in played(chat, run):
        counts = [
            fitted.report.tokens.before,
            *fitted.report.tokens.after.values(),
            fitted.report.tokens.final,
        ]
        if "expire" not in fitted.report.tokens.after:
            assert counts == sorted(counts, reverse=True)
        again = tried(chat)
        assert again is not None
        assert again.report.edits == ()
        assert json.dumps(again.messages) == json.dumps(fitted.messages)


@FEW
@given(runs, ladders, windows)
def test_another_process_has_nothing_to_add(run, ladder, window):
    chat = opened(window, ladder)
    for fitted in played(chat, run):
        other = Session(chat.store, chat.key, model="m", config=chat.config)
        again = tried(other)
        assert again is not None
        assert again.report.edits == ()
        assert json.dumps(again.messages) == json.dumps(fitted.messages)


@FEW
@given(runs, ladders, windows, st.sampled_from(["remove", "compact"]))
def test_what_was_taken_back_of_cap_and_expire_is_not_done_again(run, ladder, window, how):
    rules = {tool: {"expire": {"after_steps": 2, "mode": how, "length": 9}} for tool in TOOLS[:2]}
    compact = {**ladder["compact"], "cap": {"share": 0.05}}
    chat = opened(window, ladder, tools=rules, compact=compact)
    for _ in played(chat, run):
        pass
    standing = {item.edit for item in chat.view().items}
    edits = [event for event in chat.events() if isinstance(event, Replaced) and event.at in standing]
    undone = [edit.span for edit in edits if edit.kind in ("cap", "expire")]
    for span in undone:
        chat.undo(span.start)
    for _ in range(2):
        fitted = tried(chat)
        if fitted is not None:
            spans = [edit.span for edit in fitted.report.edits if edit.kind in ("cap", "expire")]
            assert not {*spans} & {*undone}
        chat.append({"role": "assistant", "content": "Hm."})


# proves: I9
@FEW
@given(runs, ladders, windows)
def test_a_run_has_the_same_edits_whenever_it_is_played(run, ladder, window):
    streams = []
    for _ in range(2):
        chat = opened(window, ladder)
        requests = [json.dumps(fitted.messages) for fitted in played(chat, run)]
        edits = [(e.at, e.span, e.shown, e.why) for e in chat.events() if isinstance(e, Replaced)]
        streams.append((requests, edits))
    assert streams[0] == streams[1]


# Room to grow, and what stays together


def test_where_much_must_stay_there_is_room_to_grow_between_two_batches():
    chat = begin(20_000)
    chat.append([{"role": "system", "content": output(10_500, "s")}, user("task")])
    edited, told = list[int](), list[str]()
    for n in range(60):
        chat.append(step(f"c{n}", output(550, f"w{n}")))
        fitted = chat.fit()
        edited += [n] if fitted.report.edits else []
        told += fitted.report.notices
        assert fitted.report.tokens.final <= 20_000 - 2_500
    assert min(b - a for a, b in pairwise(edited)) >= 3
    assert len(told) == 1
    assert "cannot be hidden" in told[0]


def test_a_call_and_its_result_are_put_away_together_though_both_were_pinned_meanwhile():
    chat = begin(8_000)
    chat.append([user("task"), *step("c1", output(2_200, "a"))])
    assert chat.fit().report.edits[0].kind == "cap"
    pin = chat.pin(2)
    for n in range(2, 9):
        chat.append(step(f"c{n}", output(600, f"w{n}")))
        chat.fit()
    chat.undo(pin)
    chat.compact(keep_recent=2, target_tokens=1_200)
    assert not [notice for notice in chat.fit().report.notices if "interrupted" in notice]
    assert "never returned" not in said_bytes(chat)


def test_tools_that_are_excluded_are_neither_capped_nor_pointed_away():
    chat = begin(8_000, compact={"prune": {"exclude_tools": ["skill"]}})
    chat.append([user("task"), *step("a", output(2_200, "s"), "skill")])
    assert shown(chat) == {"a": output(2_200, "s")}
    chat = begin(8_000, compact={"prune": {"exclude_tools": ["skill"]}, "token_threshold": 1_500})
    chat.append([user("task"), *step("a", output(700, "s"), "skill"), *step("b", output(700, "s"), "skill")])
    chat.append(step("c", output(500, "t"), "read"))
    assert "same as" not in said_bytes(chat)


def test_results_of_one_step_are_pruned_together_or_not_at_all():
    chat = begin(128_000, compact={"prune": {"protect": 25_000, "minimum": 1_000, "keep_turns": 1}})
    chat.append([user("task"), calls(*((f"p{n}", "read") for n in range(4)))])
    chat.append([answers(f"p{n}", output(10_000, f"w{n}")) for n in range(4)])
    chat.append([user("and"), *step("n", output(20_000, "x"), "read"), user("on")])
    chat.append([{"role": "assistant", "content": output(36_000, "y")}, user("go on")])
    seen = shown(chat)
    assert len({seen[f"p{n}"].startswith("[refold ") for n in range(4)}) == 1


# A user's own policy


WRONG = {
    "nothing": lambda item: None,
    "a number": lambda item: 5,
    "no edit": lambda item: [1],
    "no kind": lambda item: [Edit(item.span, (short(item),), None, "w")],  # type: ignore[arg-type]
    "no call id": lambda item: [
        Edit(item.span, (Message("tool", (ToolResult(None, "s"),)),), "k", "w")  # type: ignore[arg-type]
    ],
    "no such role": lambda item: [Edit(item.span, (Message("wizard", "x"),), "k", "w")],  # type: ignore
    "before the record": lambda item: [Edit(Span(-5, item.span.end), (short(item),), "k", "w")],
    "after the record": lambda item: [Edit(Span(900, 901), (short(item),), "k", "w")],
    "a result without its call": lambda item: [Edit(item.span, (), "k", "w")],
    "a place elsewhere": lambda item: [Edit(item.span, (0,), "k", "w")],
    "a dict": lambda item: [Edit(item.span, ({"role": "tool"},), "k", "w")],  # type: ignore[arg-type]
}


def short(item: Any) -> Message:
    return Message("tool", (ToolResult(item.lines[0].answers, "short"),))


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_policy_that_plans_nonsense_is_refused_and_nothing_is_written(wrong):
    def mine(view, budget, count):
        return wrong(next(item for item in view.items if item.lines[0].answers))

    chat = refold.open("c", store="memory://", model="m", config=agent(4_000), policies=[mine])
    chat.append([user("task"), *(m for n in range(8) for m in step(f"c{n}", output(300, f"w{n}")))])
    before = list(chat.events())
    with pytest.raises(refold.RefoldError, match="policy mine"):
        chat.fit()
    assert list(chat.events()) == before


@FEW
@given(runs, ladders, windows)
def test_the_newest_results_are_whole_unless_they_are_capped_or_cannot_fit(run, ladder, window):
    chat = opened(window, ladder)
    for fitted in played(chat, run):
        view, budget = chat.view(), chat.budget
        kept = {*view.kept, view.latest}
        lines = [line for line in chat.record.entries.lines(Span(0, view.next)) if line.answers]
        new = [line for line in lines if line.step == view.step - 1]
        must = sum(line.tokens for line in view.lines if line.at in kept)
        if must + sum(line.tokens for line in new) + budget.trigger // 10 + 200 <= budget.threshold * 0.9:
            cut = [e for e in fitted.report.edits if e.kind == "shrink" and len(e.span) == 1]
            assert not {e.span.start for e in cut} & {line.at for line in new}


# Rules of the user


@pytest.mark.parametrize("words", [1_000, 1_600, 2_200, 2_800])
def test_a_rule_stays_when_something_large_takes_the_room(words):
    rule = "Never delete table_7."
    chat = begin(8_000, counter="auto")
    chat.append([user("Find why builds fail."), {"role": "assistant", "content": "Fine."}, user(rule)])
    for n in range(12):
        chat.append(step(f"c{n}", output(120, f"v_{n}")))
        chat.fit()
    chat.append(user("Look: " + " ".join(f"word{n % 50}" for n in range(words))))
    fitted = chat.fit()
    assert rule in json.dumps(fitted.messages)
    chat.append(user("Now go on."))
    for n in range(20, 60):
        chat.append(step(f"c{n}", output(120, f"v_{n}")))
        assert rule in json.dumps(chat.fit().messages)


def test_a_rule_that_finds_no_room_is_told():
    chat = begin(3_000)
    rules = " ".join(f"Never touch file_{n}.py, whatever anybody says." for n in range(60))
    chat.append([user("Go."), user(rules), {"role": "assistant", "content": "Fine."}])
    notices = []
    for n in range(12):
        chat.append(step(f"c{n}", output(200, f"v_{n}")))
        notices += chat.fit().report.notices
    chat.append(user("Look: " + " ".join(f"word{n % 50}" for n in range(1_050))))
    notices += chat.fit().report.notices
    assert any("of the user's rules did not fit into the summary #" in notice for notice in notices)
