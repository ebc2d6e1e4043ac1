"""Worked examples for the pure parts: budget, check and mending, the codec, the window."""

import doctest
import importlib
import json
import pkgutil

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refold
from pairing import check
from refold.core import codec
from refold.core.budget import Budget
from refold.core.codec import GENESIS, Entry, chain, decode, encode, head
from refold.core.errors import ConflictError, CorruptError
from refold.core.event import Line, Replaced, Said, Span, Unknown
from refold.core.message import Message, Text
from refold.core.pairing import MissingResult, OrphanResult, repair_pairs
from refold.core.plan import Edit, Stamp, settle
from refold.core.view import fold
from refold.policies.summarize import Window
from strategies import Stream, streams

# Budget


# proves: E2
def test_the_threshold_for_the_defaults_is_93_600():
    assert Budget().threshold == 93_600
    assert Budget().target == 70_200
    assert Budget().room == 124_000


def test_reserves_never_take_more_than_a_quarter_of_a_small_window():
    budget = Budget(window=4_000)
    assert budget.reserves == 1_000
    assert budget.threshold == 2_400
    assert budget.room == 3_000


# Check


def line(role: str, *, calls: tuple[str, ...] = (), answers: str | None = None, at: int = 0) -> Line:
    return Line(at, role, 1, 0, 0, calls, answers)  # type: ignore[arg-type]


ASK = line("user")
CALL = line("assistant", calls=("a", "b"))
A, B = line("tool", answers="a"), line("tool", answers="b")


@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        ([], []),
        ([ASK], []),
        ([ASK, CALL, A, B], []),
        ([ASK, CALL, B, A], []),
        ([ASK, CALL, A, ASK, B], []),  # interleaved: pairing is by id
        ([ASK, CALL, A], ["G6"]),
        ([ASK, CALL], ["G6", "G6"]),
        ([ASK, A], ["G5"]),
        ([ASK, CALL, A, B, A], ["G5"]),
        ([ASK, CALL, A, B, CALL, A, B], []),  # an id used again once it was answered
        ([ASK, CALL, CALL, A, B], ["G6", "G6"]),
    ],
)
def test_each_general_rule_is_found_by_name(lines, rules):
    assert check(lines) == rules


def test_results_are_brought_back_to_their_call():
    slots, notices = repair_pairs([ASK, CALL, A, ASK, B])
    assert slots == [ASK, CALL, A, B, ASK]
    assert notices == []


def test_each_kind_of_mending_has_a_notice():
    slots, notices = repair_pairs(
        [A, ASK, CALL, line("tool", answers="b", at=4), line("tool", answers="b", at=5)]
    )
    assert slots == [OrphanResult(A), ASK, CALL, line("tool", answers="b", at=5), MissingResult("a", "")]
    assert len(notices) == 3


# Codec


def never(dialect: str, value: object) -> Message:
    raise AssertionError("nothing here came in a dialect")


@given(streams())
def test_every_event_survives_storing(events):
    for event in events:
        assert decode(encode(event), never) == event


def test_the_stored_format_is_what_the_document_says():
    message = Message("user", [Text("hi")], id="x")
    said = Said(Line(0, "user", 5, 1, 0), message, 0, 5, 1.5)
    assert encode(said) == Entry(
        0,
        "said",
        "x",
        b'["user",5,0,1,0,5,[],null,[],false,null,null,false,false,false]',
        b'{"time":1.5,"message":{"role":"user","parts":[{"type":"text","text":"hi"}],"id":"x"}}',
    )
    edit = Replaced(3, "main", Span(0, 2), (1,), (Line(1, "user", 5, 1, 0),), "k", "w", (9, 5), 2.0, 1)
    assert (
        encode(edit).head
        == b'["main",[0,2],[[1,"user",5,1,0,[],null,[],0,false,null,null,false,null,false,false,false]],'
        b'"k",1,[9,5]]'
    )
    withheld = msgspec.structs.replace(edit, keeps_originals=False)
    assert encode(withheld).head == encode(edit).head[:-1] + b",false]"
    assert decode(encode(withheld), never) == withheld
    assert encode(edit).body == b'{"shown":[1],"why":"w","time":2.0}'


def test_the_chain_is_what_the_document_says():
    import hashlib

    entry = Entry(7, "said", "é", b"[1]", b"{}")
    text = b"1 1 4 2 3 2\n" + b"7" + b"said" + "é".encode() + b"[1]" + b"{}"
    assert chain(GENESIS, entry) == hashlib.blake2b(GENESIS + text, digest_size=16).digest()


@pytest.mark.parametrize("field", Entry._fields)
def test_every_field_is_in_the_chain(field):
    entry = Entry(7, "said", "x", b"[1]", b"{}")
    changed = {"at": 8, "kind": "Said", "id": None, "head": b"[2]", "body": b"{ }"}
    assert chain(GENESIS, entry) != chain(GENESIS, entry._replace(**{field: changed[field]}))


def test_an_empty_id_is_not_no_id():
    entry = Entry(7, "said", "", b"", b"")
    assert chain(GENESIS, entry) != chain(GENESIS, entry._replace(id=None))


def test_a_kind_from_a_newer_version_is_kept_and_passed_over():
    entry = Entry(2, "dreamt", None, b"[1,2]", b'{"of":"sheep"}')
    assert head(entry) is None
    event = decode(entry, never)
    assert event == Unknown(2, "dreamt", [1, 2], {"of": "sheep"})
    assert encode(event) == entry


def test_fields_from_a_newer_version_are_passed_over():
    entry = encode(Said(Line(0, "user", 5, 1, 0), Message("user", "hi"), 0, 5, 1.5))
    newer = entry._replace(head=entry.head[:-1] + b',"new"]', body=entry.body[:-1] + b',"new":1}')
    assert decode(newer, never) == decode(entry, never)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"time":"x"}', b'{"time":1}', b"\xff\xfe"])
def test_what_cannot_be_read_is_named(body):
    entry = encode(Said(Line(0, "user", 5, 1, 0), Message("user", "hi"), 0, 5, 1.5))
    with pytest.raises(CorruptError, match="Event 0"):
        decode(entry._replace(body=body), never)


def test_numbers_and_keys_stay_as_written():
    raw = b'{"role":"user","content":"x","b":1.50,"a":12345678901234567890123,"e":1e400,"s":"\\ud800"}'
    said = Said(Line(0, "user", 5, 1, 0), Message("user", "x"), 0, 5, 1.5, "d", raw)
    entry = encode(said)
    assert raw in entry.body
    again = codec.came(entry).value
    assert again["a"] == 12345678901234567890123
    assert list(again) == ["role", "content", "b", "a", "e", "s"]


# Plan and window


def talk(*roles: str, tokens: int = 10) -> Stream:
    stream = Stream()
    for role in roles:
        stream.say(Message(role, role), tokens)  # type: ignore[arg-type]
    return stream


def test_an_edit_that_would_cut_is_not_settled():
    stream = talk("user", "assistant", "user")
    stream.replace(Span(0, 2), ["short"], [], "main")
    edit = Edit(Span(1, 3), (), "test", "why")
    with pytest.raises(ConflictError):
        settle(edit, fold(stream.events), Stamp(4, 0.0), lambda message: 1)


def test_what_must_stay_is_kept_even_if_a_policy_forgets_it():
    stream = talk("user", "assistant", "user", "assistant")
    edit = Edit(Span(0, 4), (), "test", "why")
    event = settle(edit, fold(stream.events), Stamp(4, 0.0), lambda message: 1)
    assert [m.text for m in fold([*stream.events, event]).messages] == ["user", "user"]
    assert event.tokens == (40, 20)


def test_the_window_keeps_as_many_of_the_newest_as_fit():
    stream = talk("system", "user", *["assistant"] * 20)
    view = fold(stream.events)
    (edit,) = Window()(view, Budget(max_tokens=100), lambda message: 5)
    after = fold([*stream.events, settle(edit, view, Stamp(22, 0.0), lambda message: 5)])
    assert after.tokens == 95
    assert [m.role for m in after.messages] == ["system", "user", "user", *["assistant"] * 7]
    assert Window()(after, Budget(max_tokens=100), lambda message: 5) == ()


def test_the_window_hides_nothing_when_that_would_not_save_anything():
    stream = talk("user", "assistant", "assistant", tokens=3)
    assert Window()(fold(stream.events), Budget(max_tokens=4), lambda message: 5) == ()


# Documents in the code


MODULES = [name for _, name, _ in pkgutil.walk_packages(refold.__path__, "refold.") if "__main__" not in name]


@pytest.mark.parametrize("name", ["refold", *MODULES])
def test_examples_in_docstrings_run(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith("refold.adapters.") or str(error.name).startswith("refold"):
            raise
        pytest.skip(f"{error.name} is in an environment of its own: python scripts/adapters.py")
    result = doctest.testmod(module)
    assert result.failed == 0


def test_the_surface_is_small():
    assert len(refold.__all__) <= 28
    for name in refold.__all__:
        assert getattr(refold, name) is not None


@given(st.text("a\ud800é\x00", max_size=5))
def test_json_survives_any_text(text):
    assert codec.loads(codec.dumps({"a": text})) == {"a": text}
    assert json.loads(codec.dumps(msgspec.Raw(b"1"))) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("refold.formats.replies", "refold.dialects.replies"),
        ("refold.rules.targets", "refold.dialects.rules.targets"),
        ("refold.summarize.summarizer", "refold.summaries.summarizer"),
        ("refold.tokens.limits", "refold.models.limits"),
        ("refold.worker", "refold.session.worker"),
    ],
)
def test_a_module_is_found_under_the_path_that_docs_gave_it(old, new):
    found, now = vars(importlib.import_module(old)), vars(importlib.import_module(new))
    assert {name for name in now if not name.startswith("__")} <= found.keys()
    assert found["__name__"] == old
    assert now["__name__"] == new


def test_a_submodule_is_imported_from_a_package_that_moved():
    from refold.formats import flat

    assert flat.parse is importlib.import_module("refold.dialects.flat").parse


@pytest.mark.parametrize("name", ["refold.nowhere", "refold.tokens.nowhere"])
def test_a_module_that_never_was_is_not_found(name):
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        importlib.import_module(name)
