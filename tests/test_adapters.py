"""What adapters share: a history in a framework's words, kept once, and a view of it in the same words."""

import gc
import threading
import weakref
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import refold
from adapters.contract import CONFIG, MODEL, TASK, ledger
from refold.adapters.conversation import (
    ADAPTER_TAG,
    AGAIN,
    WARM_CONVERSATIONS,
    AdapterConversations,
    ModelCall,
    RequestMatch,
    lookup_tools,
)
from refold.core.errors import OverBudgetError, RefoldError
from refold.core.message import Message
from refold.dialects import openai_chat
from refold.session.history_sync import CONTENT_ID, align, insert_transient, match_request, overlap
from refold.stores.memory import MemoryStore
from refold.stores.store import Store

CALL = ModelCall(tools=[{"type": "function", "function": one} for one in lookup_tools()], max_output=500)


class Dicts:
    """A framework that has only dicts, without ids."""

    def parse(self, message: dict[str, Any]) -> Message:
        return openai_chat.parse(message)

    def render(self, message: Message, original: dict[str, Any] | None) -> dict[str, Any]:
        return openai_chat.render(message)[0][0]


class Named(Dicts):
    """The same with ids."""

    def parse(self, message: dict[str, Any]) -> Message:
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
def conversations(store):
    return new(store)


def new(store, converter=None):
    return AdapterConversations(converter or Dicts(), store=store, model=MODEL, config=CONFIG)


def kept(store, name="t"):
    with refold.open(name, store=store) as chat:
        return [one.message.text for one in chat.get_all()]


@given(st.text("abc", max_size=12), st.text("xyz", max_size=6))
def test_what_comes_after_all_that_is_known_is_new(known, new):
    assert align(list(known), list(known + new)) == (len(known), [*range(len(known))])


@given(st.integers(0, 8), st.integers(1, 8), st.integers(1, 8), st.text("xyz", max_size=3), st.text("xyz"))
def test_what_was_trimmed_still_holds_whatever_stands_for_it(head, cut, tail, summary, new):
    known = [f"{n}" for n in range(head + cut + tail)]
    there = align(known, [*known[:head], *summary, *known[head + cut :], *new])
    assert there.keep == len(known)
    assert there.places == [*range(head), *[None] * len(summary), *range(head + cut, len(known))]


@given(st.lists(st.sampled_from("abc"), max_size=10), st.lists(st.sampled_from("abc"), max_size=10))
def test_whatever_is_given_it_is_known_by_what_it_says_and_the_newest_is_never_taken_for_old(known, given):
    there = align(known, given)
    assert all(at is None or known[at] == one for at, one in zip(there.places, given, strict=False))
    assert len(there.places) <= len(given)
    assert all(at is None or at < there.keep for at in there.places)
    if there.keep == len(known) and len(there.places) < len(given) and there.places:
        assert there.places[-1] in (None, len(known) - 1)


def test_what_fits_is_handed_back_as_the_very_objects(conversations):
    messages = [user(TASK), *said(3)]
    shown = conversations.get("t").fit(messages, CALL)
    assert all(one is two for one, two in zip(shown, messages, strict=True))


def test_what_does_not_fit_is_reduced_and_nothing_that_was_given_is_changed(conversations, store):
    messages = [user(TASK), *said(60)]
    before = repr(messages)
    shown = conversations.get("t").fit(messages, CALL)
    assert repr(messages) == before
    assert shown[0] is messages[0]
    assert shown[-1] is messages[-1]
    assert len(repr(shown)) < len(before) / 2
    assert kept(store) == [openai_chat.parse(one).text for one in messages]


def test_only_what_is_new_is_stored(conversations, store):
    messages = [user(TASK)]
    for step in range(1, 20):
        conversations.get("t").fit(messages, CALL)
        messages += said(1, step)
    conversations.get("t").record(messages)
    assert len(kept(store)) == len(messages)


def test_the_same_words_twice_are_two_messages(conversations, store):
    messages = [user("yes"), {"role": "assistant", "content": "ok"}] * 3
    for n in range(1, 7):
        conversations.get("t").record(messages[:n])
    assert kept(store) == ["yes", "ok"] * 3
    new(store).get("t").record([*messages, user("yes")])
    assert kept(store) == [*["yes", "ok"] * 3, "yes"]


def test_what_a_framework_trims_away_is_still_seen(conversations, store):
    messages = [user(TASK), *said(10)]
    conversations.get("t").record(messages)
    trimmed = [*messages[9:], user("Go on.")]
    shown = conversations.get("t").fit(trimmed, CALL)
    assert shown[0]["content"] == TASK
    assert shown[-1] is trimmed[-1]
    assert len(kept(store)) == len(messages) + 1


def test_a_summary_of_the_framework_s_own_does_not_make_it_all_new(conversations, store):
    messages = [user(TASK), *said(10)]
    conversations.get("t").record(messages)
    own = [user("Ten ledgers were read."), *messages[-4:], user("Go on.")]
    for _ in range(3):
        shown = conversations.get("t").fit(own, CALL)
        assert shown[0]["content"] == TASK
        assert shown[-1] is own[-1]
        own += said(1, 11 + _)
    assert len(kept(store)) == len(messages) + len(own) - 4 - 2


def test_a_summary_with_nothing_new_after_it_is_no_end(conversations, store):
    messages = [user(TASK), *said(3)]
    conversations.get("t").record(messages)
    own = [user("Summary."), *messages[-2:]]
    conversations.get("t").fit(own, CALL)
    own += [{"role": "assistant", "content": "Done."}, user("thanks")]
    for one in (conversations, new(store)):
        one.get("t").fit(own, CALL)
    assert len(kept(store)) == len(messages) + 3


def test_what_somebody_else_appended_with_an_id_forks_nothing(conversations, store):
    messages = [user("a"), {"role": "assistant", "content": "b"}]
    conversations.get("t").record(messages)
    with refold.open("t", store=store) as chat:
        chat.append({"role": "user", "content": "From elsewhere."}, id="theirs")
    new(store).get("t").record([*messages, user("c")])
    assert kept(store) == ["a", "b", "From elsewhere.", "c"]


def test_words_that_were_said_before_are_not_taken_for_those(conversations):
    ok = {"role": "assistant", "content": "b"}
    conversations.get("t").record([user("a"), user("go on"), ok, user("go on")])
    changed = [user("a"), user("go on"), user("other")]
    assert conversations.get("t").fit(changed, CALL) == changed


def test_what_another_version_recorded_under_ids_of_its_own_is_recognized(conversations, store):
    messages = [user("yes"), *said(1), user("yes")]
    with refold.open("t", store=store) as chat:
        for n, message in enumerate(messages):
            repeated = AGAIN + "1" if n == 3 else ""
            id = f"{CONTENT_ID}{0 if n == 3 else n:024}{repeated}"
            chat.append(message, id=id, tags=[ADAPTER_TAG])
    assert conversations.get("t").fit([*messages, user("no")], CALL) == [*messages, user("no")]
    assert kept(store) == [openai_chat.parse(one).text for one in [*messages, user("no")]]


def test_arguments_that_are_written_anew_and_spaces_at_the_end_are_no_change(conversations, store):
    call, result = said(1)
    conversations.get("t").record([user(TASK), call, result])
    function = {"name": "read_ledger", "arguments": "{ }"}
    written = {
        **call,
        "content": f"{call['content']} ",
        "tool_calls": [{**call["tool_calls"][0], "function": function}],
    }
    shown = conversations.get("t").fit([user(TASK), written, result, user("Go on.")], CALL)
    assert shown[2:] == [result, user("Go on.")]
    assert len(kept(store)) == 4
    assert [row.key.conversation for row in store.conversations()] == ["t"]


def test_what_a_request_leaves_out_is_shown_as_the_framework_has_it(conversations, store):
    history = [user(TASK), *said(2)]
    reminder = user("[reminder]")
    match = RequestMatch.of(history, [history[0], reminder, *history[3:]], repr)
    shown = conversations.get("t").fit_request(match, CALL)
    assert [id(one) for one in shown] == [id(one) for one in [*history[:3], reminder, *history[3:]]]
    assert len(kept(store)) == len(history)


def test_a_changed_past_goes_on_in_a_conversation_of_its_own(conversations, store):
    first = [user("Hello."), {"role": "assistant", "content": "Hi."}, user("Paris?")]
    second = [*first[:2], user("Rome?")]
    conversations.get("t").record(first)
    assert conversations.get("t").fit(second, CALL) == second
    assert kept(store) == ["Hello.", "Hi.", "Paris?"]
    assert kept(store, "t~1") == ["Hello.", "Hi.", "Rome?"]
    longer = [*second, {"role": "assistant", "content": "In Italy."}]
    assert new(store).get("t").fit(longer, CALL) == longer
    assert kept(store, "t~1")[-1] == "In Italy."


def test_a_name_that_looks_like_a_branch_is_none(store):
    conversations = new(store)
    conversations.get("bob").record([user("secret"), {"role": "assistant", "content": "ok"}])
    conversations.get("bob~1").record([user("I am Mallory")])
    new(store).get("bob").record([user("secret"), {"role": "assistant", "content": "ok"}, user("PIN")])
    assert kept(store, "bob~1") == ["I am Mallory"]
    assert kept(store, "bob") == ["secret", "ok", "PIN"]
    new(store).get("bob").record([user("secret"), {"role": "assistant", "content": "ok"}, user("other")])
    assert kept(store, "bob~1") == ["I am Mallory"]
    assert kept(store, "bob~2") == ["secret", "ok", "other"]
    again = [user("secret"), {"role": "assistant", "content": "ok"}, user("other"), user("more")]
    assert new(store).get("bob").fit(again, CALL) == again


def test_two_processes_that_see_the_same_change_go_on_together(store):
    first, second = new(store), new(store)
    messages = [user("a"), user("b")]
    first.get("t").record(messages)
    second.get("t").record(messages)
    changed = [user("a"), user("c")]
    assert first.get("t").fit(changed, CALL) == changed
    assert second.get("t").fit([*changed, user("d")], CALL) == [*changed, user("d")]
    assert kept(store, "t~1") == ["a", "c", "d"]


def test_what_has_an_id_is_stored_once_and_corrected_where_it_changed(store):
    conversations = new(store, Named())
    first = {"id": "m1", **user("Hello.")}
    conversations.get("t").record([first])
    conversations.get("t").record([first, {"id": "m2", **user("Paris?")}])
    changed = {"id": "m2", **user("Rome?")}
    assert [openai_chat.parse(one).text for one in conversations.get("t").fit([first, changed], CALL)] == [
        "Hello.",
        "Rome?",
    ]
    assert kept(store) == ["Hello.", "Paris?"]


def test_a_call_that_never_returned_is_answered(conversations):
    call, *_ = said(1)
    shown = conversations.get("t").fit([user(TASK), call, user("Go on.")], CALL)
    assert shown[0]["content"] == TASK
    assert shown[2]["tool_call_id"] == "call_1"
    assert "interrupted" in shown[2]["content"]
    later = conversations.get("t").fit([user(TASK), call, user("Go on."), *said(1, 2)], CALL)
    assert [one["role"] for one in later] == ["user", "assistant", "tool", "user", "assistant", "tool"]


def test_handles_are_shown_only_where_the_model_can_use_them(conversations):
    messages = [user(TASK), *said(60)]
    assert "refold #" in repr(conversations.get("with").fit(messages, CALL))
    assert "refold #" not in repr(conversations.get("without").fit(messages, CALL._replace(tools=())))


def test_what_somebody_else_appended_is_seen_too(conversations, store):
    messages = [user(TASK)]
    conversations.get("t").record(messages)
    with refold.open("t", store=store) as chat:
        chat.append({"role": "user", "content": "From elsewhere."})
    assert [one["content"] for one in conversations.get("t").fit(messages, CALL)] == [TASK, "From elsewhere."]


def test_what_cannot_fit_is_refused_and_kept(conversations, store):
    with pytest.raises(OverBudgetError):
        conversations.get("t").fit([user("word " * 20_000)], CALL)
    assert len(kept(store)) == 1


def test_what_changes_and_changes_back_is_shown_as_it_is_now(store):
    conversations = new(store, Named())
    for text in ("Paris?", "Rome?", "Paris?", "Rome?"):
        shown = conversations.get("t").fit([{"id": "m1", **user(text)}], CALL)
        assert [openai_chat.parse(one).text for one in shown] == [text]
    assert kept(store) == ["Paris?"]


def test_what_was_changed_while_nobody_looked_is_shown_as_it_is_in_a_new_process(store):
    own = [{"id": f"m{n}", **one} for n, one in enumerate([user(TASK), *said(60)])]
    new(store, Named()).get("t").record(own[:3])
    hidden = {**own[2], "content": own[2]["content"].replace("herring", "[fish]")}
    shown = new(store, Named()).get("t").fit([*own[:2], hidden, *own[3:]], CALL)
    assert "herring" not in repr(shown[2])
    assert "refold #" in repr(shown)
    assert new(store, Named()).get("t").fit([*own[:2], hidden, *own[3:]], CALL) == shown
    with refold.open("t", store=store) as chat:
        assert len([event for event in chat.events() if getattr(event, "kind", "") == "correct"]) == 1


def test_what_others_say_otherwise_in_one_request_is_shown_so_and_stored_as_it_was_said(conversations, store):
    results = list(said(3))
    own = [user("My number is 4711."), *results]
    shown = [user("My number is ***."), *({**one, "content": "barrels"} for one in results)]
    fitted = conversations.get("t").fit(own, CALL, shown)
    assert all(one is two for one, two in zip(fitted, shown, strict=True))
    conversations.get("t").record(own)
    assert kept(store) == [openai_chat.parse(one).text for one in own]
    assert conversations.get("t").fit(own, CALL, shown) == shown


def test_what_others_say_otherwise_is_never_shortened_from_what_it_was(conversations):
    own = [user(TASK), *said(60)]
    hides = [{**one, "content": one["content"].replace("herring", "[fish]")} for one in own]
    for n in range(1, len(own) + 1, 10):
        fitted = conversations.get("t").fit(own[:n], CALL, hides[:n])
        assert "herring" not in repr(fitted)
    assert "refold #" in repr(fitted)


def test_what_is_answered_otherwise_is_shown_whole_or_not_at_all(conversations):
    """Another call cannot be put in its place; neither may it be shown in the old words."""
    call, result = said(1)
    other = {**result, "content": "[hidden]", "tool_call_id": "call_9"}
    messages = [user(TASK), call, result]
    conversations.get("t").fit(messages, CALL)
    shown = conversations.get("t").fit(messages, CALL, [user(TASK), call, other])
    assert ledger(1) not in repr(shown)


def test_who_knows_only_the_beginning_hears_how_it_went_on_and_was_changed(store):
    stale, other = new(store), new(store)
    ok = [{"role": "assistant", "content": f"{n}"} for n in range(4)]
    stale.get("t").record([user("one")])
    other.get("t").record([user("one"), ok[1], user("two"), ok[2]])
    other.get("t").fit([user("one"), ok[1], user("other")], CALL)
    now = [user("one"), ok[1], user("other"), ok[3], user("next")]
    assert stale.get("t").fit(now, CALL) == now
    assert kept(store) == ["one", "1", "two", "2"]
    assert kept(store, "t~1") == ["one", "1", "other", "3", "next"]


def test_two_that_take_turns_store_all_of_it_once(store):
    turns, history = [new(store), new(store)], list[dict[str, Any]]()
    for n in range(6):
        history.append(user("go on"))
        assert turns[n % 2].get("t").fit(history, CALL) == history
        history.append({"role": "assistant", "content": "ok"})
        turns[n % 2].get("t").record(history)
    assert kept(store) == [one["content"] for one in history]


def test_what_was_erased_begins_anew(conversations, store):
    messages = [user("one"), {"role": "assistant", "content": "1"}]
    conversations.get("t").fit(messages, CALL)
    with refold.open("t", store=store) as chat:
        chat.clear()
    assert conversations.get("t").fit([*messages, user("two")], CALL) == [*messages, user("two")]
    assert kept(store) == ["one", "1", "two"]


class Counted(Dicts):
    """A framework that counts how often it is asked what a message says."""

    def __init__(self) -> None:
        self.asked = 0

    def parse(self, message: dict[str, Any]) -> Message:
        self.asked += 1
        return super().parse(message)


def test_what_was_there_at_the_last_call_is_not_looked_at_again(store):
    conversations, messages, asked = new(store, converter := Counted()), [user(TASK)], list[int]()
    for step in range(1, 40):
        messages += said(1, step)
        before = converter.asked
        conversations.get("t").fit(list(messages), CALL)
        asked.append(converter.asked - before)
    assert set(asked[1:]) == {asked[1]}


def test_what_is_changed_in_place_is_seen_at_the_next_call(conversations):
    messages = [user("one"), {"role": "assistant", "content": "1"}]
    conversations.get("t").fit(messages, CALL)
    messages[1]["content"] = "uno"
    messages.append(user("two"))
    assert conversations.get("t").fit(messages, CALL) == messages


class Wrapped(NamedTuple):
    message: dict[str, Any]


class Wraps:
    """A framework whose messages are made anew for each request around what can be changed in place."""

    def parse(self, wrapped: Wrapped) -> Message:
        return openai_chat.parse(wrapped.message)

    def render(self, message: Message, original: Wrapped | None) -> Wrapped:
        return Wrapped(openai_chat.render(message)[0][0])


def test_what_is_changed_in_place_within_a_tuple_is_seen_at_the_next_call(store):
    conversation = AdapterConversations(Wraps(), store=store, model=MODEL, config=CONFIG).get("t")
    messages = [user("one"), {"role": "assistant", "content": "1"}]
    conversation.fit([*map(Wrapped, messages)], CALL)
    messages[1]["content"] = "uno"
    messages.append(user("two"))
    assert conversation.fit([*map(Wrapped, messages)], CALL) == [*map(Wrapped, messages)]
    sight = refold.open("t~1", store=store, model=MODEL, config=CONFIG)
    assert [one.message.text for one in sight.get_range(0, 3)] == ["one", "uno", "two"]


class Watched:
    """A field of a message that can be seen to go."""


def test_what_a_framework_handed_over_is_let_go_of_after_the_run(store):
    conversations = new(store)
    messages = [{**user(f"word {n}"), "watched": Watched()} for n in range(3)]
    gone = [weakref.ref(one["watched"]) for one in messages]
    conversations.get("t").fit(messages, CALL)
    conversations.get("t").record(messages)
    messages.clear()
    gc.collect()
    assert [one() for one in gone] == [None] * 3


def test_of_many_conversations_only_the_newest_are_remembered_as_they_were_handed_over(store):
    conversations, gone = new(store), list[Any]()
    for n in range(3 * WARM_CONVERSATIONS):
        message = {**user(f"word {n}"), "watched": Watched()}
        gone.append(weakref.ref(message["watched"]))
        conversations.get(f"t{n}").fit([message], CALL)
    del message
    gc.collect()
    assert sum(one() is not None for one in gone) == WARM_CONVERSATIONS


def test_nobody_waits_while_another_conversation_is_opened(store):
    opening, done, waited = threading.Event(), threading.Event(), list[bool]()

    class Slow(MemoryStore):
        def read(self, key: Any, *rest: Any, **more: Any) -> Any:
            if key.conversation == "large":
                opening.set()
                waited.append(done.wait(10))
            return super().read(key, *rest, **more)

    conversations = new(Slow())
    large = threading.Thread(target=conversations.get("large").record, args=([user("a")],))
    large.start()
    assert opening.wait(10)
    try:
        assert conversations.get("small").fit([user("b")], CALL) == [user("b")]
    finally:
        done.set()
        large.join()
    assert all(waited)


def test_a_store_that_cannot_fork_says_what_to_do():
    class Straight:
        """One that only has what every store has."""

        def __init__(self) -> None:
            self._store = MemoryStore()
            for name in ("append", "read", "find", "erase", "conversations", "close"):
                setattr(self, name, getattr(self._store, name))

    conversations = new(Straight())
    conversations.get("t").record([user("one"), user("two")])
    with pytest.raises(RefoldError, match="begin another conversation"):
        conversations.get("t").fit([user("one"), user("other")], CALL)


def test_what_stands_only_in_one_request_is_told_from_what_stands_for_something():
    assert match_request("abc", "abcx") == {0: 0, 1: 1, 2: 2}
    assert match_request("abc", "xabc") == {1: 0, 2: 1, 3: 2}
    assert match_request("abcd", "aBxd") == {0: 0, 1: 1, 2: 2, 3: 3}
    assert match_request("abcdef", "Sef") == {1: 4, 2: 5}
    assert match_request("", "ab") == {}


def test_a_message_that_was_moved_does_not_keep_others_from_being_matched():
    history = ["a0", "a", "c2", "a3", "b4", "c5", "c"]
    request = ["a0", "X", "c2", "b4", "a", "c5", "c"]
    assert match_request(history, request) == {0: 0, 1: 1, 2: 2, 3: 4, 5: 5, 6: 6}


class CountedKey:
    """Counts how often any of them is compared or hashed."""

    used = 0

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        CountedKey.used += 1
        return isinstance(other, CountedKey) and self.text == other.text

    def __hash__(self) -> int:
        CountedKey.used += 1
        return hash(self.text)


MANY = 4_000
REPEATED = ["ok"] * MANY
HISTORIES = {
    "every second changed": ([f"{n}" for n in range(MANY)], [f"{n}{' new' * (n % 2)}" for n in range(MANY)]),
    "all calls changed, all results the same": (
        ["ok" if n % 2 else f"{n}" for n in range(MANY)],
        ["ok" if n % 2 else f"{n} new" for n in range(MANY)],
    ),
    "all the same": (REPEATED, REPEATED),
    "all the same, but more": (REPEATED, [*REPEATED, "new", *REPEATED]),
    "all the same, with others around": (["old", *REPEATED, "newest"], [*REPEATED, "new"]),
    "all the same, with others between": (["old", *REPEATED, "newest"], [*REPEATED, "new", *REPEATED, "new"]),
}


@pytest.mark.parametrize(("known", "given"), HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("match", [align, match_request, overlap])
@pytest.mark.parametrize("ends", [[], ["newest of all"]], ids=["", "with the newest"])
def test_the_work_of_matching_is_in_proportion_to_the_number_of_messages(match, known, given, ends):
    CountedKey.used = 0
    match([CountedKey(one) for one in known + ends], [CountedKey(one) for one in given + ends])
    assert CountedKey.used < 50 * (len(known) + len(given))


@given(st.lists(st.sampled_from("ab"), max_size=8), st.lists(st.sampled_from("ab"), max_size=8))
def test_an_overlap_is_the_longest_end_that_a_history_begins_with(recorded, sent):
    lengths = range(min(len(recorded), len(sent)) + 1)
    assert overlap(recorded, sent) == max(
        length for length in lengths if recorded[len(recorded) - length :] == sent[:length]
    )


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=8), st.text("ab", min_size=1, max_size=8))
def test_without_the_oldest_and_the_newest_the_longest_run_still_holds(middle, run):
    known = ["old", *middle, "newest"]
    there = align(known, [*run, "new"])
    length = max(n for n in range(len(run) + 1) if run[:n] in "".join(middle))
    if length:
        assert there.places == [*range(there.keep - length, there.keep)]
        assert known[there.keep - length : there.keep] == [*run[:length]]


@given(
    st.lists(st.integers(), unique=True), st.lists(st.booleans()), st.lists(st.integers(0, 20), max_size=4)
)
def test_whatever_is_put_between_a_history_it_stands_for_itself(history, left_out, put):
    kept = [one for one, out in zip_longest(history, left_out[: len(history)], fillvalue=False) if not out]
    request: list[Any] = list(kept)
    for n, at in enumerate(put):
        request.insert(at, f"put {n}")
    stand = match_request(history, request)
    assert {n: at for n, at in stand.items() if request[n] in kept} == {
        n: history.index(one) for n, one in enumerate(request) if one in kept
    }
    passing = {n: one for n, one in enumerate(request) if n not in stand}
    assert insert_transient([request[n] for n in stand], list(stand), passing) == request
