"""Streams at AgentCore Memory, against a stub that reads every request by botocore's own model."""

import json
import os
import random
import re
from contextlib import suppress
from functools import partial

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

import refold
from agentcore_stub import MEMORY, AgentCoreStub, Refusal
from refold.core.codec import Entry
from refold.core.errors import ConflictError, CorruptError, MessageError, NewerError, SettingError, StoreError
from refold.stores.agentcore import AgentCoreStore, from_url, memorizer
from refold.stores.agentcore_client import ACTOR, PLAIN, TRIES, ActorSession, allowed_name
from refold.stores.hybrid import HybridStore
from refold.stores.hybrid_sync import BoundedDict
from refold.stores.shelf import Shelf
from refold.stores.store import (
    Forks,
    Key,
    Memories,
    MessageListener,
    SpokenMessage,
    missing_ability,
    open_store,
)
from refold.testing import StoreContract
from refold.testing.samples import KEY, ODD_NAMES, entries, entry, require_ability, user_message, verified
from session_contract import SessionsContract

LAYOUT = "/strategies/facts-1/actors/{}/"


@pytest.fixture
def stub(monkeypatch):
    with AgentCoreStub() as stub:
        for name, value in stub.environment.items():
            monkeypatch.setenv(name, value)
        yield stub


@pytest.fixture
def store(stub):
    return from_url(stub.url)


@pytest.fixture
def once(stub):
    """A client that tries nothing twice."""
    return boto3.client("bedrock-agentcore", config=Config(retries={"total_max_attempts": 1}))


# proves: B4e
class TestAgentCore(StoreContract, SessionsContract):
    @pytest.fixture
    def store(self, stub):
        return AgentCoreStore(stub.memory_id)

    @pytest.fixture
    def reopen(self, stub):
        return partial(AgentCoreStore, stub.memory_id)


def test_what_the_store_is_able_to_do(store):
    assert all(isinstance(store, one) for one in (MessageListener, Memories))
    assert not any(isinstance(store, one) for one in (Forks, Shelf))
    assert "one process at a time" in missing_ability(store, "compare-and-append")
    assert missing_ability(store, "whole-batches") is missing_ability(store, "any-size") is None
    with pytest.raises(pytest.skip.Exception, match="one process at a time"):
        require_ability(store, "compare-and-append")


# What travels how


def texts(event):
    found = [item["conversational"] for item in event["payload"] if "conversational" in item]
    return [(one["role"], one["content"]["text"]) for one in found]


def blobs(event):
    return [item["blob"] for item in event["payload"] if "blob" in item]


# proves: B4e
def test_what_is_said_travels_as_text_beside_its_exact_bytes(stub):
    chat = refold.open("task-42", store=stub.url, owner="ann")
    chat.append([user_message("Hello"), {"role": "assistant", "content": "Hi!"}])
    chat.append(user_message("What is new?"))
    first, second = stub.events("ann", "task-42")
    assert texts(first) == [("USER", "Hello"), ("ASSISTANT", "Hi!")]
    assert texts(second) == [("USER", "What is new?")]
    assert len(blobs(first)) == len(blobs(second)) == 1
    again = refold.open("task-42", store=stub.url, owner="ann")
    assert [one.message.text for one in again.get_all()] == ["Hello", "Hi!", "What is new?"]


def test_roles_are_those_of_the_service(stub, store):
    roles = ["user", "assistant", "tool", "system", "developer"]
    store.listen(lambda one: SpokenMessage(one.at, roles[one.at], "words", 0.0))
    store.append(KEY, entries(0, 5))
    assert [role for role, _ in texts(*stub.events())] == ["USER", "ASSISTANT", "TOOL", "OTHER", "OTHER"]


# proves: B4e
def test_an_edit_is_a_blob_alone_and_is_there_when_opened_again(stub):
    chat = refold.open("a", store=stub.url)
    chat.append([user_message(f"{n} words " * 20) for n in range(8)])
    chat.compact(keep_recent=1)
    edit = stub.events()[-1]
    assert texts(edit) == []
    assert len(blobs(edit)) == 1
    assert refold.open("a", store=stub.url).view() == chat.view()


def test_a_text_too_long_for_the_service_is_cut_for_it_and_whole_in_the_record(stub):
    text = "🙂" * 150_000
    chat = refold.open("a", store=stub.url)
    chat.append([user_message(text), user_message("\0\ud800"), user_message("   ")])
    (event,) = stub.events()
    assert texts(event) == [("USER", "🙂" * 50_000), ("USER", " ?")]
    assert [one.message.text for one in chat.get_all()] == [text, "\0\ud800", "   "]


def test_a_store_that_was_told_nothing_of_what_entries_say_stores_them_all_the_same(stub, store):
    store.append(KEY, entries(0, 3))
    (event,) = stub.events()
    assert texts(event) == []
    assert verified(store, KEY) == entries(0, 3)


def test_a_batch_of_many_messages_is_all_there_for_the_service(stub, store):
    store.listen(lambda one: SpokenMessage(one.at, "user", f"message {one.at}", 0.0))
    store.append(KEY, entries(0, 250))
    assert [text for event in stub.events() for _, text in texts(event)] == [
        f"message {n}" for n in range(250)
    ]
    assert len(stub.events()) == 3
    assert verified(from_url(stub.url), KEY) == entries(0, 250)


def noise(at, size=3_000_000):
    return Entry(at, "noted", None, b"[]", random.Random(at).randbytes(size))


def test_a_batch_too_large_for_one_event_comes_back_to_the_byte(stub, store):
    batch = [entry(0), noise(1), entry(2), noise(3, 10)]
    store.append(KEY, batch)
    store.append(KEY, [entry(4)])
    assert len(stub.events()) == 6
    for one in (store, from_url(stub.url)):
        assert verified(one, KEY) == [*batch, entry(4)]
    assert store.erase(KEY) == stub.events() == []


# proves: B4e
@pytest.mark.parametrize("stored", [0, 2])
@pytest.mark.parametrize("created", range(5))
def test_a_large_batch_that_was_interrupted_is_not_there_at_all(stub, once, stored, created):
    store = AgentCoreStore(stub.memory_id, client=once)
    store.append(KEY, entries(0, stored))
    passed = 0

    def fail_after(request, **_):
        nonlocal passed
        passed += 1
        if passed > created:
            stub.fail("ServiceException", 500, operation="CreateEvent")

    once.meta.events.register("before-send.bedrock-agentcore.CreateEvent", fail_after)
    with pytest.raises(StoreError):
        store.append(KEY, [noise(stored)])
    assert len(stub.events()) == bool(stored) + created
    for one in (store, from_url(stub.url)):
        assert verified(one, KEY) == entries(0, stored)
    from_url(stub.url).append(KEY, [entry(stored)])
    assert verified(store, KEY) == entries(0, stored + 1)


def test_an_event_that_the_service_finds_too_large_is_a_clear_error(stub, store):
    stub.most_bytes = 20_000
    with pytest.raises(StoreError, match="too large"):
        store.append(KEY, [noise(0, 50_000)])
    assert list(store.conversations()) == []


# Paging, and what a step costs


@pytest.mark.parametrize("page", [1, 7, 100])
def test_long_conversations_are_read_page_by_page(stub, store, page):
    stub.page = page
    for at in range(40):
        store.append(KEY, [entry(at)])
    with stub.counted() as calls:
        assert verified(from_url(stub.url), KEY) == entries(0, 40)
    assert calls == ["ListEvents"] * -(-40 // page)


def test_many_conversations_and_owners_are_listed_page_by_page(stub, store):
    stub.page = 4
    keys = [Key(f"owner {n % 9}", f"conversation {n}") for n in range(30)]
    for key in keys:
        store.append(key, entries(0, 1))
    assert [row.key for row in store.conversations()] == keys[::-1]
    assert [row.key for row in store.conversations("owner 3")] == keys[::-1][keys[::-1].index(keys[21]) :: 9]


def test_a_step_costs_the_same_however_long_the_conversation_is(stub, store):
    costs = []
    for at in range(150):
        with stub.counted() as calls:
            store.append(KEY, [entry(at)])
            assert [link.entry.at for link in store.read(KEY, at)] == [at]
            assert [link.entry.at for link in store.read(KEY, 0, 1)] == [0]
        costs.append(calls)
    assert costs[1] == costs[-1] == ["CreateEvent", "ListEvents", "ListEvents"]


@pytest.mark.parametrize("more", [1, 2, 3, 24, 25, 26, 130])
def test_what_another_process_wrote_is_taken_in(stub, store, more):
    other = from_url(stub.url)
    store.append(KEY, entries(0, 2))
    assert verified(other, KEY) == entries(0, 2)
    for at in range(2, 2 + more):
        store.append(KEY, [entry(at)])
    with pytest.raises(ConflictError):
        other.append(KEY, [entry(2, "late")])
    assert verified(other, KEY) == entries(0, 2 + more)
    assert len(stub.events()) == 1 + more


def test_what_was_read_is_forgotten_by_whole_conversations(stub, store, monkeypatch):
    monkeypatch.setattr(store, "_known", BoundedDict(3))
    keys = [Key("a", str(n)) for n in range(6)]
    for n, key in enumerate(keys * 3):
        store.append(key, [entry(n // 6, "x" * 30)])
        assert len(store._known) <= 3
    assert all(verified(store, key) == entries(0, 3, "x" * 30) for key in keys)


# Faults


@pytest.mark.parametrize(
    ("code", "status", "operation"),
    [
        ("ThrottledException", 429, "CreateEvent"),
        ("ThrottledException", 429, "ListEvents"),
        ("ServiceException", 500, "CreateEvent"),
        ("ServiceException", 500, "ListEvents"),
        ("RetryableConflictException", 409, "CreateEvent"),
    ],
)
def test_throttling_and_passing_failures_are_retried(stub, store, code, status, operation):
    stub.fail(code, status, operation=operation)
    store.append(KEY, entries(0, 2))
    assert verified(store, KEY) == entries(0, 2)
    assert len(stub.events()) == 1


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("operation", ["CreateEvent", "ListEvents", ""])
def test_a_connection_cut_after_the_effect_leaves_one_event(stub, store, operation, times):
    store.append(KEY, entries(0, 1))
    stub.cut(operation, times)
    store.append(KEY, entries(1, 3))
    assert len(stub.events()) == 2
    assert verified(from_url(stub.url), KEY) == entries(0, 3)


def test_an_append_that_took_effect_unseen_is_stored_once_when_tried_again(stub, once):
    store = AgentCoreStore(stub.memory_id, client=once)
    store.append(KEY, entries(0, 1))
    stub.cut("CreateEvent")
    with pytest.raises(StoreError, match="cannot be reached"):
        store.append(KEY, entries(1, 2))
    store.append(KEY, entries(1, 2))
    assert verified(store, KEY) == entries(0, 2)
    assert len(stub.events()) == 2


@pytest.mark.parametrize("operation", ["DeleteEvent", "ListEvents"])
def test_an_erasure_that_was_interrupted_can_be_repeated(stub, once, operation):
    store = AgentCoreStore(stub.memory_id, client=once)
    store.append(KEY, entries(0, 3))
    store.append(KEY, entries(3, 4))
    stub.fail("ServiceException", 500, operation=operation, times=2)
    for _ in range(4):
        with suppress(StoreError):
            store.erase(KEY)
    assert stub.events() == list(store.conversations()) == []


@pytest.mark.parametrize(
    ("code", "status", "advice"),
    [
        ("ThrottledException", 429, "higher quota"),
        ("ServiceQuotaExceededException", 402, "higher one"),
        ("AccessDeniedException", 403, "need bedrock-agentcore:ListEvents"),
        ("ExpiredTokenException", 403, "log in again"),
        ("ResourceNotFoundException", 404, "check its id and `region`"),
        ("ValidationException", 400, "ValidationException .as the test wanted it"),
    ],
)
def test_what_the_service_refuses_is_a_clear_error(stub, once, code, status, advice):
    stub.fail(code, status)
    if code == "ResourceNotFoundException":
        store = AgentCoreStore("another-0123456789", client=once)
        stub._faults.clear()
    else:
        store = AgentCoreStore(stub.memory_id, client=once)
    with pytest.raises(StoreError, match=advice):
        list(store.read(KEY))


def test_a_service_that_does_not_answer_in_time_is_a_clear_error(stub):
    store = from_url(f"{stub.url}?timeout_s=0.05")
    stub.seconds = 0.4
    with pytest.raises(StoreError, match="cannot be reached"):
        list(store.read(KEY))


def test_a_service_that_does_not_answer_is_waited_for_within_the_tries(stub):
    store = from_url(f"{stub.url}?timeout_s=0.5")
    stub.seconds = 2.0
    for ask in (
        lambda: list(store.read(KEY)),
        lambda: store.append(KEY, entries(0, 1)),
        lambda: store.memories(KEY, "tea", 10, None),
    ):
        with stub.counted() as calls, pytest.raises(StoreError, match="cannot be reached in time"):
            ask()
        assert len(calls) <= TRIES


def test_looking_through_many_memories_has_an_end(stub):
    store = from_url(f"{stub.url}?timeout_s=2")
    stub.page, stub.seconds = 1, 0.1
    for n in range(100):
        stub.add_record(LAYOUT.format("bob"), f"fact {n}")
    with stub.counted() as calls, pytest.raises(StoreError, match="name a `namespace`"):
        store.memories(Key("ann", "a"), None, 1, None)
    assert len(calls) < 30


def test_an_event_that_is_never_listed_is_told_after_the_last_look(stub, store, monkeypatch):
    stub.lag = 1_000_000
    asked = []
    monkeypatch.setattr("time.sleep", lambda seconds: asked.append(len(stub.calls)))
    with pytest.raises(StoreError, match="does not list it yet"):
        store.append(KEY, entries(0, 1))
    assert len(stub.calls) > asked[-1]


# proves: B4e
def test_without_credentials_or_a_region_it_says_what_to_set(stub, monkeypatch, tmp_path):
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="no AWS credentials"):
        list(from_url(stub.url).read(KEY))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(SettingError, match="give `region`"):
        from_url(stub.url)
    assert from_url(f"{stub.url}?region=eu-west-1")


# Several writers, and a service that keeps less than it promises


def test_of_two_who_claim_a_place_the_first_counts_though_tokens_are_forgotten(stub, store):
    stub.remembers_tokens = False
    other = from_url(stub.url)
    store.append(KEY, entries(0, 1))
    assert verified(other, KEY) == entries(0, 1)
    store.append(KEY, entries(1, 2, "first"))
    with pytest.raises(ConflictError, match="another writer"):
        other.append(KEY, entries(1, 3, "second"))
    assert verified(other, KEY) == verified(store, KEY) == entries(0, 1) + entries(1, 2, "first")


def test_a_loser_that_nobody_took_back_is_passed_over(stub, store, once):
    stub.remembers_tokens = False
    other = AgentCoreStore(stub.memory_id, client=once)
    store.append(KEY, entries(0, 1))
    assert verified(other, KEY) == entries(0, 1)
    store.append(KEY, entries(1, 2, "first"))
    stub.fail("ServiceException", 500, operation="ListEvents")
    with pytest.raises(StoreError):
        other.append(KEY, entries(1, 3, "second"))
    assert len(stub.events()) == 3
    for one in (store, other, from_url(stub.url)):
        assert verified(one, KEY) == entries(0, 1) + entries(1, 2, "first")
    store.append(KEY, entries(2, 3))
    assert verified(from_url(stub.url), KEY)[2:] == entries(2, 3)
    assert store.erase(KEY) == stub.events() == []


@pytest.mark.parametrize("lag", [1, 3])
def test_what_is_listed_late_is_waited_for(stub, store, lag):
    stub.lag = lag
    store.append(KEY, entries(0, 1))
    store.append(KEY, entries(1, 3))
    assert verified(store, KEY) == entries(0, 3)
    assert store.erase(KEY) == []
    assert verified(store, KEY) == []


def test_who_writes_to_what_another_has_erased_is_told_so(stub, store):
    other = from_url(stub.url)
    store.append(KEY, entries(0, 3))
    assert len(verified(other, KEY)) == 3
    store.erase(KEY)
    with pytest.raises(ConflictError):
        other.append(KEY, entries(3, 4))
    assert stub.events() == []
    store.append(KEY, entries(0, 3, "anew"))
    with pytest.raises(ConflictError):
        other.append(KEY, entries(3, 4), after=verified_digest(entries(0, 3)))
    assert verified(other, KEY) == entries(0, 3, "anew")


def verified_digest(stream):
    from refold.core.codec import GENESIS, chain

    digest = GENESIS
    for one in stream:
        digest = chain(digest, one)
    return digest


def test_what_is_erased_again_and_again_begins_anew_each_time(stub, store):
    for n in range(30):
        store.append(KEY, [entry(0, str(n))])
        assert store.erase(KEY) == []
    assert stub.events() == []
    from_url(stub.url).append(KEY, entries(0, 1))
    assert verified(store, KEY) == entries(0, 1)


def test_an_event_altered_at_the_service_is_found(stub, store):
    store.append(KEY, entries(0, 3))
    (event,) = stub.events()
    (blob,) = blobs(event)
    for altered, error, why in (
        (blob[:-9] + "AAAA" + blob[-5:], CorruptError, "cannot be unpacked"),
        (re.sub('"last": ".', '"last": "x', blob), CorruptError, "altered"),
        (blob.replace('{"kind"', '{"kin'), CorruptError, "altered"),
        (blob.replace("event 1", "event 2"), NewerError, "upgrade"),
    ):
        event["payload"][:] = [{"blob": altered}]
        with pytest.raises(error, match=why):
            list(from_url(stub.url).read(KEY))


# Names


def test_odd_names_become_ones_that_the_service_allows_and_no_two_the_same(stub, store):
    names = [*ODD_NAMES, "", "x--" + "0" * 32, *map(allowed_name, ODD_NAMES)]
    places = [store._client.place(Key(name, name)) for name in dict.fromkeys(names)]
    assert len({place.actor for place in places}) == len({place.session for place in places}) == len(places)
    assert all(PLAIN.fullmatch(place.session) and PLAIN.fullmatch(place.actor) for place in places)
    assert store._client.place(Key("ann", "task-42")) == ActorSession("ann", "task-42")


# proves: B4e
def test_owners_are_actors_and_see_nothing_of_each_other(stub, store):
    for owner in ("ann", "bob"):
        store.append(Key(owner, "same"), entries(0, 1, owner))
    assert {event["actorId"] for event in stub.events()} == {"ann", "bob"}
    assert verified(store, Key("ann", "same")) == entries(0, 1, "ann")
    store.erase(Key("ann", "same"))
    assert [row.key for row in store.conversations()] == [Key("bob", "same")]


# proves: B4e
def test_a_configured_actor_is_the_default_owner_and_others_stay_apart(stub, store):
    fixed = from_url(f"{stub.url}/team%2Fblue")
    assert fixed._client.place(Key("default", "a")) == ActorSession("team/blue", "a")
    owners = ["default", "ann", "team/blue", "ann:b", ":"]
    for owner in owners:
        fixed.append(Key(owner, "a"), entries(0, 1, owner))
        place = fixed._client.place(Key(owner, "a"))
        assert ACTOR.fullmatch(place.actor)
        assert place.actor == "team/blue" or place.actor.startswith("team/blue:")
    store.append(Key("ann", "a"), entries(0, 1, "of nobody's team"))
    assert [row.key.owner for row in fixed.conversations()] == owners[::-1]
    assert all(verified(fixed, Key(owner, "a")) == entries(0, 1, owner) for owner in owners)


def test_events_of_other_programs_are_passed_over_and_left_alone(stub, store, once):
    where = {"memoryId": stub.memory_id, "actorId": "somebody", "eventTimestamp": 1_700_000_000}
    hello = {"conversational": {"role": "USER", "content": {"text": "hello"}}}
    for session in ("a", "b"):
        once.create_event(**where, sessionId=session, payload=[hello, {"blob": {"any": ["json"]}}])
    assert list(store.conversations()) == list(store.read(Key("somebody", "a"))) == []
    assert store.erase(Key("somebody", "a")) == []
    assert len(stub.events()) == 2
    store.append(Key("somebody", "a"), entries(0, 2))
    assert verified(store, Key("somebody", "a")) == entries(0, 2)
    store.erase(Key("somebody", "a"))
    assert [event["sessionId"] for event in stub.events()] == ["b"]


# What the service learned


# proves: B4e
def test_memories_are_searched_listed_and_paged(stub, store):
    stub.page = 3
    ids = [stub.add_record(LAYOUT.format("ann"), f"fact {n} likes tea") for n in range(8)]
    stub.add_record(LAYOUT.format("ann"), "green tea above all")
    found = store.memories(Key("ann", "a"), "green tea", 20, None)
    assert [one.text for one in found][:1] == ["green tea above all"]
    assert (len(found), found[0].score) == (9, 1.0)
    assert [one.id for one in store.memories(Key("ann", "a"), None, 5, None)] == ids[:5]
    assert len(store.memories(Key("ann", "a"), " ", 100, None)) == 9
    one = store.memories(Key("ann", "a"), None, 1, None)[0]
    assert (one.namespace, one.score) == (LAYOUT.format("ann"), None)
    assert one.created is not None


@pytest.mark.parametrize(
    "asked", [None, "/", "/strategies", LAYOUT.format("bob"), "/strategies/facts-1/actors/"]
)
@pytest.mark.parametrize("query", [None, "secret"])
def test_memories_of_others_are_never_shown(stub, store, asked, query):
    for owner in ("ann", "bob", "strategies", "actors", "ann-2"):
        stub.add_record(LAYOUT.format(owner), f"secret of {owner}")
        stub.add_record(LAYOUT.format(owner) + "sessions/ann/", f"secret of {owner}")
    for owner in ("ann", "strategies", "actors", "facts-1"):
        found = store.memories(Key(owner, "a"), query, 100, asked)
        assert {one.text for one in found} <= {f"secret of {owner}"}


def test_a_namespace_may_be_configured_and_asked_for(stub):
    store = from_url(f"{stub.url}?namespace=/users/{{actorId}}/facts/")
    for owner in ("ann", "bob"):
        stub.add_record(f"/users/{owner}/facts/", f"fact of {owner}")
        stub.add_record(f"/users/{owner}/taste/", f"taste of {owner}")
    stub.add_record("/shared/", "for all")

    def texts_of(namespace):
        return [one.text for one in store.memories(Key("ann", "a"), None, 9, namespace)]

    assert texts_of(None) == ["fact of ann"]
    assert texts_of("/users/{actorId}/taste/") == ["taste of ann"]
    assert texts_of("/users/bob/") == texts_of("/shared/") == []
    shared = from_url(f"{stub.url}?namespace=/shared/")
    assert [one.text for one in shared.memories(Key("ann", "a"), None, 9, None)] == ["for all"]
    for wrong in ("{memoryStrategyId}", "/é", "a b"):
        with pytest.raises(SettingError, match="actorId"):
            store.memories(KEY, None, 1, wrong)


# proves: B4e
def test_a_session_asks_for_memories_and_shows_them_where_it_is_told_to(stub):
    stub.learn = lambda actor, session, role, text: (LAYOUT.format(actor), f"{role} said: {text}")
    chat = refold.open("a", store=f"{stub.url}?long_term=1", model="gpt-5", owner="ann")
    assert chat.store.recalls
    chat.append(user_message("I prefer React"))
    assert [one.text for one in chat.memories("React")] == ["USER said: I prefer React"]
    later = refold.open("b", store=f"{stub.url}?long_term=1", model="gpt-5", owner="ann")
    later.append(user_message("What do I prefer ?"))
    assert "I prefer React" in json.dumps(later.fit().messages)
    assert not from_url(stub.url).recalls


def test_what_was_learned_from_a_session_is_erased_with_it_where_it_is_kept_apart(stub):
    store = from_url(f"{stub.url}?namespace=/users/{{actorId}}/{{sessionId}}/")
    for session in ("a", "b"):
        store.append(Key("ann", session), entries(0, 1))
        stub.add_record(f"/users/ann/{session}/", session)
    store.erase(Key("ann", "a"))
    assert [record["content"]["text"] for record in stub._records.values()] == ["b"]


def test_a_memorizer_is_told_what_was_said_and_forgets_it(stub):
    stub.learn = lambda actor, session, role, text: (LAYOUT.format(actor), text)
    one = memorizer(f"{stub.url}/app")
    key = Key("ann", "a")
    batch = [SpokenMessage(n, "user", f"fact {n}", 0.0) for n in range(120)]
    for _ in range(2):
        one.remember(key, batch)
    assert [text for event in stub.events() for _, text in texts(event)] == [
        user_message.text for user_message in batch
    ]
    assert {event["actorId"] for event in stub.events()} == {"app:ann"}
    assert one.memories(key, "fact 7", 1, None)[0].text == "fact 7"
    assert (one.name, one.recalls) == (f"agentcore://{MEMORY}/app", True)
    one.forget(key)
    assert stub.events() == []
    stub.fail("ValidationException", 400)
    with pytest.raises(MessageError, match="message 0"):
        one.remember(key, batch)
    one.close()


def test_a_memorizer_is_told_the_same_words_again_after_it_forgot_them(stub):
    one, key = memorizer(stub.url), Key("ann", "a")
    for time in (1.0, 2.0):  # of two conversations with the same name, one after the other
        one.remember(key, [SpokenMessage(0, "user", "hello", time)])
        assert [text for event in stub.events() for _, text in texts(event)] == ["hello"]
        one.forget(key)
    one.close()


def test_a_memorizer_takes_each_message_once_however_they_are_batched(stub):
    one, key = memorizer(stub.url), Key("ann", "a")
    batch = [SpokenMessage(n, "user", f"fact {n}", float(n)) for n in range(6)]
    for some in (batch[:3], batch[:5], batch[1:2], batch[2:]):
        one.remember(key, some)
    assert [text for event in stub.events() for _, text in texts(event)] == [
        user_message.text for user_message in batch
    ]
    one.close()


def test_what_is_refused_in_the_middle_of_a_batch_doubles_nothing(stub, monkeypatch):
    store = HybridStore(open_store("memory://"), memorizer(stub.url), sync="end")
    client = store.memorizer._client._client
    create = client.create_event

    def refusing(**asked):
        if "fact 2" in str(asked["payload"]):
            stub.fail("ValidationException", 400)
        return create(**asked)

    monkeypatch.setattr(client, "create_event", refusing)
    with refold.open("a", store=store, owner="ann") as chat:
        chat.append([user_message(f"fact {n}") for n in range(4)])
        assert store.drain(chat.key)
        assert [one.at for one in store.refused(chat.key)] == [2]
    told = [text for event in stub.events("ann", "a") for _, text in texts(event)]
    assert told == ["fact 0", "fact 1", "fact 3"]
    store.close()


def test_a_hybrid_store_hands_what_is_said_to_it(stub, tmp_path):
    from urllib.parse import quote

    record, memory = (quote(url, safe="") for url in (f"sqlite:///{tmp_path}/a.db", stub.url))
    with refold.open("a", store=f"hybrid://?record={record}&memory={memory}", owner="ann") as chat:
        chat.append(user_message("I prefer React"))
    assert [texts(event) for event in stub.events("ann", "a")] == [[("USER", "I prefer React")]]


# URLs


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("agentcore://", "expected agentcore://MEMORY_ID/ACTOR"),
        ("agentcore://short", "such as notes-AbCdEf1234"),
        (f"agentcore://{MEMORY}/a%20b", "letters, digits"),
        (f"agentcore://{MEMORY}/-a", "letters, digits"),
        (f"agentcore://{MEMORY}?regoin=x", "region, long_term, namespace, timeout_s"),
        (f"agentcore://{MEMORY}?long_term=yes", "0 or 1"),
        (f"agentcore://{MEMORY}?timeout_s=soon", "number of seconds"),
        (f"agentcore://{MEMORY}?timeout_s=0", "number of seconds"),
        (f"agentcore://{MEMORY}?namespace=/{{who}}/", "actorId"),
    ],
)
def test_a_url_that_cannot_be_opened_says_why(stub, url, why):
    for opening in (open_store, memorizer):
        with pytest.raises(SettingError, match=re.escape(why)):
            opening(url)


def test_a_memory_may_be_named_by_its_arn(stub):
    arn = "arn:aws:bedrock-agentcore:us-west-2:123456789012:memory/notes-AbCdEf1234"
    stub.memory_id = arn
    store = open_store(f"agentcore://{arn.replace(':', '%3A').replace('/', '%2F')}/me?region=us-west-2")
    store.append(KEY, entries(0, 1))
    assert verified(store, KEY) == entries(0, 1)


# The stub


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"actorId": "a b"}, "actorId: does not match"),
        ({"sessionId": "s" * 101}, "sessionId: 101 is more than 100"),
        ({"payload": [{"blob": "x"}] * 101}, "payload: 101 is more"),
        ({"payload": [{"conversational": {"role": "BOSS", "content": {"text": "x"}}}]}, "'BOSS' is none of"),
        (
            {"payload": [{"conversational": {"role": "USER", "content": {"text": "x" * 100_001}}}]},
            "100001 is",
        ),
        ({"branch": {"name": "new"}}, "a branch begins at an event"),
        ({"branch": {"name": "new", "rootEventId": "1#a"}}, "a branch begins at an event"),
        ({"metadata": {"a": {"stringValue": "ü"}}}, "metadata.a.stringValue: does not match"),
    ],
)
def test_the_stub_refuses_what_the_model_of_the_service_does_not_allow(stub, once, asked, why):
    right = {"actorId": "a", "sessionId": "s", "eventTimestamp": 1_700_000_000, "payload": []}
    once.create_event(memoryId=stub.memory_id, **right)
    with pytest.raises(ClientError, match=re.escape(why)) as error:
        once.create_event(memoryId=stub.memory_id, **right | asked)
    assert error.value.response["Error"]["Code"] == "ValidationException"
    assert len(stub.events()) == 1


def test_the_stub_refuses_what_the_sdk_would_not_send(stub):
    for body, why in (
        (b"[]", "object"),
        (b"{", "Expecting"),
        (b"{}", "actorId"),
        (b'{"actorId": 1}', "actorId"),
    ):
        with pytest.raises(Refusal, match=why):
            stub.answer("POST", f"/memories/{MEMORY}/events", body)


def test_connections_do_not_cross_a_fork_of_the_process(stub, store):
    store.append(KEY, entries(0, 1))
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            store.append(KEY, entries(1, 2))
            os.write(writing, b"%d" % id(store._client._client))
        finally:
            os._exit(0)
    os.wait()
    told = os.read(reading, 100)
    assert told not in (b"", b"%d" % id(store._client._client))
    assert verified(store, KEY) == entries(0, 2)
