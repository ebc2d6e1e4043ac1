"""A history is known again by what it says, and never taken for another."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refold.serve.incoming import ClientDialect, read_request
from refold.session.history_sync import PROBES, longest_known_prefix, prefix_ids
from refold.stores.store import LOCATED, Key

KEY = Key("o", "c")


def marks(dialect: ClientDialect, messages: Sequence[Any], **fields: Any) -> list[str]:
    name = "input" if dialect == "openai-responses" else "messages"
    return read_request(dialect, json.dumps({"model": "m", name: messages, **fields}).encode()).prefix_ids()


@given(st.integers(0, 300), st.data())
def test_the_longest_known_beginning_is_found_in_few_looks(count: int, data: st.DataObject) -> None:
    all = prefix_ids(b"", [b"%d" % n for n in range(count)])
    known = data.draw(st.integers(0, count))
    looks: list[int] = []

    def locate(some: Sequence[str]) -> dict[str, tuple[Key, int]]:
        looks.append(len(some))
        return {mark: (KEY, at) for mark in some if (at := all.index(mark)) < known}

    spot = longest_known_prefix(all, locate)
    assert (spot and (spot.length, spot.at)) == ((known, known - 1) if known else None)
    assert len(looks) <= 5
    assert max(looks, default=0) <= PROBES


@given(st.lists(st.binary(max_size=3), max_size=6), st.lists(st.binary(max_size=3), max_size=6))
def test_marks_are_the_same_only_where_all_before_them_is(one: list[bytes], other: list[bytes]) -> None:
    for n, (mine, theirs) in enumerate(zip(prefix_ids(b"", one), prefix_ids(b"", other), strict=False), 1):
        assert (mine == theirs) == (one[:n] == other[:n])
        assert mine.startswith(LOCATED)


SAME: dict[str, tuple[ClientDialect, Any, Any]] = {
    "a string and one block of text": (
        "anthropic",
        {"role": "user", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ),
    "marks for a cache": (
        "anthropic",
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ),
    "the order of keys": (
        "openai-chat",
        {"role": "user", "content": "a"},
        {"content": "a", "role": "user"},
    ),
    "fields that are null or empty": (
        "openai-chat",
        {"role": "assistant", "content": "a", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "assistant", "content": "a"},
    ),
    "arguments that were written anew": (
        "openai-chat",
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1.0,"b":[2]}'}}
            ],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{ "b": [2], "a": 1 }'},
                }
            ],
        },
    ),
    "thinking that was left out": (
        "anthropic",
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "text", "text": "a"},
            ],
        },
        {"role": "assistant", "content": "a"},
    ),
    "a result as text and as a block": (
        "anthropic",
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]}
            ],
        },
    ),
    "white space around a text": (
        "openai-chat",
        {"role": "assistant", "content": "a \n"},
        {"role": "assistant", "content": "a"},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_what_makes_no_difference(case: str) -> None:
    dialect, one, other = SAME[case]
    assert marks(dialect, [one]) == marks(dialect, [other])


def test_reasoning_items_make_no_difference() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    ask, result = (
        {"role": "user", "content": "a"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    )
    whole, bare = [ask, reasoning, {**call, "id": "fc_1"}, result], [ask, call, result]
    assert marks("openai-responses", whole) == marks("openai-responses", bare)
    assert marks("openai-responses", "a") == marks("openai-responses", [ask])


OTHER: dict[str, tuple[ClientDialect, Any, Any]] = {
    "another word": ("openai-chat", {"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
    "another role": ("openai-chat", {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}),
    "another image": (
        "openai-chat",
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/1.png"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/2.png"}}]},
    ),
    "a result of another call": (
        "openai-chat",
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": "r"},
    ),
    "an error and the same text": (
        "anthropic",
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r", "is_error": True}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
    ),
}


@pytest.mark.parametrize("case", OTHER)
def test_what_makes_a_difference(case: str) -> None:
    dialect, one, other = OTHER[case]
    assert marks(dialect, [one]) != marks(dialect, [other])


def test_system_text_at_the_beginning_may_change() -> None:
    asked = {"role": "user", "content": "a"}
    old, new = ({"role": "system", "content": f"It is {hour} o'clock."} for hour in (9, 10))
    assert marks("openai-chat", [old, asked]) == marks("openai-chat", [new, asked])
    assert marks("openai-chat", [old, asked]) != marks("openai-chat", [asked])
    assert len(marks("openai-chat", [old])) == 1
