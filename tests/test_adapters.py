"""What adapters share: a history in a framework's words, kept once, and a view of it in the same words."""

import gc
import threading
import weakref
from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import refold
from refold.adapters.align import aligned, standing, woven
from refold.adapters.conversation import WARM, Ask, Talks, tools
from refold.adapters.synced_history import Otherwise
from refold.core.errors import OverBudgetError, RefoldError
from refold.core.message import Message
from refold.dialects import openai_chat
from refold.stores.memory import MemoryStore
from refold.stores.store import Store
from refold.testing.adapters import CONFIG, MODEL, TASK, ledger

ASK = Ask(tools=[{"type": "function", "function": one} for one in tools()], output=500)


class Dicts:
    """A framework that has only dicts, without ids."""

    def mark(self, message: dict[str, Any]) -> Hashable:
        return repr(message)

    def read(self, message: dict[str, Any]) -> Message:
        return openai_chat.parse(message)

    def write(self, message: Message, original: dict[str, Any] | None) -> dict[str, Any]:
        return openai_chat.render(message)[0][0]


class Named(Dicts):
    """The same with ids."""

    def read(self, message: dict[str, Any]) -> Message:
        return refold.Message(**{**_fields(openai_chat.parse(message)), "id": message["id"]})


def _fields(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def said(steps: int, begin: int = 1) -> Iterator[dict[str, Any]]:
    """A call and its result, again and again."""
    for n in range(begin, begin + steps):
        call = {"id": f"call_{n}", "type": "function", "function": {"name": "read_ledger", "arguments": "{}"}}
        yield {"role": "assistant", "content": f"Now ledger {n}.", "tool_calls": [call]}
        yield {"role": "tool", "tool_call_id": f"call_{n}", "content": ledger(n)}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
def talks(store):
    return new(store)


def new(store, tongue=None):
    return Talks(tongue or Dicts(), store=store, model=MODEL, config=CONFIG)


def kept(store, name="t"):
    with refold.open(name, store=store) as chat:
        return [one.message.text for one in chat.get_all()]


@given(st.text("abc", max_size=12), st.text("xyz", max_size=6))
def test_what_comes_after_all_that_is_known_is_new(known, new):
    assert aligned(list(known), list(known + new)) == (len(known), [*range(len(known))])


@given(st.integers(0, 8), st.integers(1, 8), st.integers(1, 8), st.text("xyz", max_size=3), st.text("xyz"))
def test_what_was_trimmed_still_holds_whatever_stands_for_it(head, cut, tail, summary, new):
    known = [f"{n}" for n in range(head + cut + tail)]
    there = aligned(known, [*known[:head], *summary, *known[head + cut :], *new])
    assert there.keep == len(known)
    assert there.places == [*range(head), *[None] * len(summary), *range(head + cut, len(known))]


@given(st.lists(st.sampled_from("abc"), max_size=10), st.lists(st.sampled_from("abc"), max_size=10))
def test_whatever_is_given_it_is_known_by_what_it_says_and_the_newest_is_never_taken_for_old(known, given):
    there = aligned(known, given)
    assert all(at is None or known[at] == one for at, one in zip(there.places, given, strict=False))
    assert len(there.places) <= len(given)
    assert all(at is None or at < there.keep for at in there.places)
    if there.keep == len(known) and len(there.places) < len(given) and there.places:
        assert there.places[-1] in (None, len(known) - 1)


def test_what_fits_is_handed_back_as_the_very_objects(talks):
    messages = [user(TASK), *said(3)]
    assert all(one is two for one, two in zip(talks.fit("t", messages, ASK), messages, strict=True))


def test_what_does_not_fit_is_reduced_and_nothing_that_was_given_is_changed(talks, store):
    messages = [user(TASK), *said(60)]
    before = repr(messages)
    shown = talks.fit("t", messages, ASK)
    assert repr(messages) == before
    assert shown[0] is messages[0]
    assert shown[-1] is messages[-1]
    assert len(repr(shown)) < len(before) / 2
    assert kept(store) == [openai_chat.parse(one).text for one in messages]


def test_only_what_is_new_is_stored(talks, store):
    messages = [user(TASK)]
    for step in range(1, 20):
        talks.fit("t", messages, ASK)
        messages += said(1, step)
    talks.keep("t", messages)
    assert len(kept(store)) == len(messages)


def test_the_same_words_twice_are_two_messages(talks, store):
    messages = [user("yes"), {"role": "assistant", "content": "ok"}] * 3
    for n in range(1, 7):
        talks.keep("t", messages[:n])
    assert kept(store) == ["yes", "ok"] * 3
    new(store).keep("t", [*messages, user("yes")])
    assert kept(store) == [*["yes", "ok"] * 3, "yes"]


def test_what_a_framework_trims_away_is_still_seen(talks, store):
    messages = [user(TASK), *said(10)]
    talks.keep("t", messages)
    trimmed = [*messages[9:], user("Go on.")]
    shown = talks.fit("t", trimmed, ASK)
    assert shown[0]["content"] == TASK
    assert shown[-1] is trimmed[-1]
    assert len(kept(store)) == len(messages) + 1


def test_a_summary_of_the_framework_s_own_does_not_make_it_all_new(talks, store):
    messages = [user(TASK), *said(10)]
    talks.keep("t", messages)
    own = [user("Ten ledgers were read."), *messages[-4:], user("Go on.")]
    for _ in range(3):
        shown = talks.fit("t", own, ASK)
        assert shown[0]["content"] == TASK
        assert shown[-1] is own[-1]
        own += said(1, 11 + _)
    assert len(kept(store)) == len(messages) + len(own) - 4 - 2


def test_a_summary_with_nothing_new_after_it_is_no_end(talks, store):
    messages = [user(TASK), *said(3)]
    talks.keep("t", messages)
    own = [user("Summary."), *messages[-2:]]
    talks.fit("t", own, ASK)
    own += [{"role": "assistant", "content": "Done."}, user("thanks")]
    for one in (talks, new(store)):
        one.fit("t", own, ASK)
    assert len(kept(store)) == len(messages) + 3


def test_what_somebody_else_appended_with_an_id_forks_nothing(talks, store):
    messages = [user("a"), {"role": "assistant", "content": "b"}]
    talks.keep("t", messages)
    with refold.open("t", store=store) as chat:
        chat.append({"role": "user", "content": "From elsewhere."}, id="theirs")
    new(store).keep("t", [*messages, user("c")])
    assert kept(store) == ["a", "b", "From elsewhere.", "c"]


def test_words_that_were_said_before_are_not_taken_for_those(talks):
    ok = {"role": "assistant", "content": "b"}
    talks.keep("t", [user("a"), user("go on"), ok, user("go on")])
    changed = [user("a"), user("go on"), user("other")]
    assert talks.fit("t", changed, ASK) == changed


def test_a_changed_past_goes_on_in_a_conversation_of_its_own(talks, store):
    first = [user("Hello."), {"role": "assistant", "content": "Hi."}, user("Paris?")]
    second = [*first[:2], user("Rome?")]
    talks.keep("t", first)
    assert talks.fit("t", second, ASK) == second
    assert kept(store) == ["Hello.", "Hi.", "Paris?"]
    assert kept(store, "t~1") == ["Hello.", "Hi.", "Rome?"]
    longer = [*second, {"role": "assistant", "content": "In Italy."}]
    assert new(store).fit("t", longer, ASK) == longer
    assert kept(store, "t~1")[-1] == "In Italy."


def test_a_name_that_looks_like_a_branch_is_none(store):
    talks = new(store)
    talks.keep("bob", [user("secret"), {"role": "assistant", "content": "ok"}])
    talks.keep("bob~1", [user("I am Mallory")])
    new(store).keep("bob", [user("secret"), {"role": "assistant", "content": "ok"}, user("PIN")])
    assert kept(store, "bob~1") == ["I am Mallory"]
    assert kept(store, "bob") == ["secret", "ok", "PIN"]
    new(store).keep("bob", [user("secret"), {"role": "assistant", "content": "ok"}, user("other")])
    assert kept(store, "bob~1") == ["I am Mallory"]
    assert kept(store, "bob~2") == ["secret", "ok", "other"]
    again = [user("secret"), {"role": "assistant", "content": "ok"}, user("other"), user("more")]
    assert new(store).fit("bob", again, ASK) == again


def test_two_processes_that_see_the_same_change_go_on_together(store):
    first, second = new(store), new(store)
    messages = [user("a"), user("b")]
    first.keep("t", messages)
    second.keep("t", messages)
    changed = [user("a"), user("c")]
    assert first.fit("t", changed, ASK) == changed
    assert second.fit("t", [*changed, user("d")], ASK) == [*changed, user("d")]
    assert kept(store, "t~1") == ["a", "c", "d"]


def test_what_has_an_id_is_stored_once_and_corrected_where_it_changed(store):
    talks = new(store, Named())
    first = {"id": "m1", **user("Hello.")}
    talks.keep("t", [first])
    talks.keep("t", [first, {"id": "m2", **user("Paris?")}])
    changed = {"id": "m2", **user("Rome?")}
    assert [openai_chat.parse(one).text for one in talks.fit("t", [first, changed], ASK)] == [
        "Hello.",
        "Rome?",
    ]
    assert kept(store) == ["Hello.", "Paris?"]


def test_a_call_that_never_returned_is_answered(talks):
    call, *_ = said(1)
    shown = talks.fit("t", [user(TASK), call, user("Go on.")], ASK)
    assert shown[0]["content"] == TASK
    assert shown[2]["tool_call_id"] == "call_1"
    assert "interrupted" in shown[2]["content"]
    later = talks.fit("t", [user(TASK), call, user("Go on."), *said(1, 2)], ASK)
    assert [one["role"] for one in later] == ["user", "assistant", "tool", "user", "assistant", "tool"]


def test_handles_are_shown_only_where_the_model_can_use_them(talks):
    messages = [user(TASK), *said(60)]
    assert "refold #" in repr(talks.fit("with", messages, ASK))
    assert "refold #" not in repr(talks.fit("without", messages, ASK._replace(tools=())))


def test_what_somebody_else_appended_is_seen_too(talks, store):
    messages = [user(TASK)]
    talks.keep("t", messages)
    with refold.open("t", store=store) as chat:
        chat.append({"role": "user", "content": "From elsewhere."})
    assert [one["content"] for one in talks.fit("t", messages, ASK)] == [TASK, "From elsewhere."]


def test_what_cannot_fit_is_refused_and_kept(talks, store):
    with pytest.raises(OverBudgetError):
        talks.fit("t", [user("word " * 20_000)], ASK)
    assert len(kept(store)) == 1


def test_what_changes_and_changes_back_is_shown_as_it_is_now(store):
    talks = new(store, Named())
    for text in ("Paris?", "Rome?", "Paris?", "Rome?"):
        shown = talks.fit("t", [{"id": "m1", **user(text)}], ASK)
        assert [openai_chat.parse(one).text for one in shown] == [text]
    assert kept(store) == ["Paris?"]


def test_what_was_changed_while_nobody_looked_is_shown_as_it_is_in_a_new_process(store):
    own = [{"id": f"m{n}", **one} for n, one in enumerate([user(TASK), *said(60)])]
    new(store, Named()).keep("t", own[:3])
    hidden = {**own[2], "content": own[2]["content"].replace("herring", "[fish]")}
    shown = new(store, Named()).fit("t", [*own[:2], hidden, *own[3:]], ASK)
    assert "herring" not in repr(shown[2])
    assert "refold #" in repr(shown)
    assert new(store, Named()).fit("t", [*own[:2], hidden, *own[3:]], ASK) == shown
    with refold.open("t", store=store) as chat:
        assert len([event for event in chat.events() if getattr(event, "kind", "") == "correct"]) == 1


def test_what_others_say_otherwise_in_one_request_is_shown_so_and_stored_as_it_was_said(talks, store):
    results = list(said(3))
    own = [user("My number is 4711."), *results]
    shown = [user("My number is ***."), *({**one, "content": "barrels"} for one in results)]
    asked = [Otherwise(*two) for two in zip(own, shown, strict=True)]
    assert all(one is two for one, two in zip(talks.fit("t", asked, ASK), shown, strict=True))
    talks.keep("t", own)
    assert kept(store) == [openai_chat.parse(one).text for one in own]
    assert talks.fit("t", asked, ASK) == shown


def test_what_others_say_otherwise_is_never_shortened_from_what_it_was(talks):
    own = [user(TASK), *said(60)]
    hides = [{**one, "content": one["content"].replace("herring", "[fish]")} for one in own]
    for n in range(1, len(own) + 1, 10):
        asked = [Otherwise(*two) for two in zip(own[:n], hides[:n], strict=True)]
        assert "herring" not in repr(talks.fit("t", asked, ASK))
    assert "refold #" in repr(talks.fit("t", asked, ASK))


def test_what_is_answered_otherwise_is_shown_whole_or_not_at_all(talks):
    """Another call cannot be put in its place; neither may it be shown in the old words."""
    call, result = said(1)
    other = {**result, "content": "[hidden]", "tool_call_id": "call_9"}
    messages = [user(TASK), call, result]
    talks.fit("t", messages, ASK)
    assert ledger(1) not in repr(talks.fit("t", [user(TASK), call, Otherwise(result, other)], ASK))


def test_who_knows_only_the_beginning_hears_how_it_went_on_and_was_changed(store):
    stale, other = new(store), new(store)
    ok = [{"role": "assistant", "content": f"{n}"} for n in range(4)]
    stale.keep("t", [user("one")])
    other.keep("t", [user("one"), ok[1], user("two"), ok[2]])
    other.fit("t", [user("one"), ok[1], user("other")], ASK)
    now = [user("one"), ok[1], user("other"), ok[3], user("next")]
    assert stale.fit("t", now, ASK) == now
    assert kept(store) == ["one", "1", "two", "2"]
    assert kept(store, "t~1") == ["one", "1", "other", "3", "next"]


def test_two_that_take_turns_store_all_of_it_once(store):
    turns, history = [new(store), new(store)], list[dict[str, Any]]()
    for n in range(6):
        history.append(user("go on"))
        assert turns[n % 2].fit("t", history, ASK) == history
        history.append({"role": "assistant", "content": "ok"})
        turns[n % 2].keep("t", history)
    assert kept(store) == [one["content"] for one in history]


def test_what_was_erased_begins_anew(talks, store):
    messages = [user("one"), {"role": "assistant", "content": "1"}]
    talks.fit("t", messages, ASK)
    with refold.open("t", store=store) as chat:
        chat.clear()
    assert talks.fit("t", [*messages, user("two")], ASK) == [*messages, user("two")]
    assert kept(store) == ["one", "1", "two"]


class Counted(Dicts):
    """A framework that counts how often it is asked what a message says."""

    def __init__(self) -> None:
        self.asked = 0

    def mark(self, message: dict[str, Any]) -> Hashable:
        self.asked += 1
        return super().mark(message)


def test_what_was_there_at_the_last_call_is_not_looked_at_again(store):
    talks, messages, asked = new(store, tongue := Counted()), [user(TASK)], list[int]()
    for step in range(1, 40):
        messages += said(1, step)
        before = tongue.asked
        talks.fit("t", list(messages), ASK)
        asked.append(tongue.asked - before)
    assert set(asked[1:]) == {asked[1]}


def test_what_is_changed_in_place_is_seen_at_the_next_call(talks):
    messages = [user("one"), {"role": "assistant", "content": "1"}]
    talks.fit("t", messages, ASK)
    messages[1]["content"] = "uno"
    messages.append(user("two"))
    assert talks.fit("t", messages, ASK) == messages


class Watched(dict[str, Any]):
    """A message that can be seen to go."""

    __hash__ = object.__hash__


class Marked(Dicts):
    """A framework that knows its messages by themselves."""

    def mark(self, message: dict[str, Any]) -> Hashable:
        return message


def test_what_a_framework_handed_over_is_let_go_of_after_the_run(store):
    talks = new(store, Marked())
    messages = [Watched(user(f"word {n}")) for n in range(3)]
    gone = [weakref.ref(one) for one in messages]
    talks.fit("t", messages, ASK)
    talks.keep("t", messages)
    messages.clear()
    gc.collect()
    assert [one() for one in gone] == [None] * 3


def test_of_many_conversations_only_the_newest_are_remembered_as_they_were_handed_over(store):
    talks, gone = new(store, Marked()), list[Any]()
    for n in range(3 * WARM):
        message = Watched(user(f"word {n}"))
        gone.append(weakref.ref(message))
        talks.fit(f"t{n}", [message], ASK)
    del message
    gc.collect()
    assert sum(one() is not None for one in gone) == WARM


def test_nobody_waits_while_another_conversation_is_opened(store):
    opening, done, waited = threading.Event(), threading.Event(), list[bool]()

    class Slow(MemoryStore):
        def read(self, key: Any, *rest: Any, **more: Any) -> Any:
            if key.conversation == "large":
                opening.set()
                waited.append(done.wait(10))
            return super().read(key, *rest, **more)

    talks = new(Slow())
    large = threading.Thread(target=talks.keep, args=("large", [user("a")]))
    large.start()
    assert opening.wait(10)
    try:
        assert talks.fit("small", [user("b")], ASK) == [user("b")]
    finally:
        done.set()
        large.join()
    assert all(waited)


def test_a_store_that_cannot_fork_says_what_to_do():
    class Straight:
        """One that only has what every store has."""

        def __init__(self) -> None:
            self._store = MemoryStore()
            for name in ("append", "read", "erase", "conversations", "close"):
                setattr(self, name, getattr(self._store, name))

    talks = new(Straight())
    talks.keep("t", [user("one"), user("two")])
    with pytest.raises(RefoldError, match="begin another conversation"):
        talks.fit("t", [user("one"), user("other")], ASK)


def test_what_stands_only_in_one_request_is_told_from_what_stands_for_something():
    assert standing("abc", "abcx") == {0: 0, 1: 1, 2: 2}
    assert standing("abc", "xabc") == {1: 0, 2: 1, 3: 2}
    assert standing("abcd", "aBxd") == {0: 0, 1: 1, 2: 2, 3: 3}
    assert standing("abcdef", "Sef") == {1: 4, 2: 5}
    assert standing("", "ab") == {}


@given(
    st.lists(st.integers(), unique=True), st.lists(st.booleans()), st.lists(st.integers(0, 20), max_size=4)
)
def test_whatever_is_put_between_a_history_it_stands_for_itself(history, left_out, put):
    kept = [one for one, out in zip_longest(history, left_out[: len(history)], fillvalue=False) if not out]
    request: list[Any] = list(kept)
    for n, at in enumerate(put):
        request.insert(at, f"put {n}")
    stand = standing(history, request)
    assert {n: at for n, at in stand.items() if request[n] in kept} == {
        n: history.index(one) for n, one in enumerate(request) if one in kept
    }
    passing = {n: one for n, one in enumerate(request) if n not in stand}
    assert woven([request[n] for n in stand], list(stand), passing) == request
