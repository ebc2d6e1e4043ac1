"""What is built on a shelf, once for all stores; the shelf of each store is tested by `StoreContract`."""

import pytest

import refold
from refold.core.errors import CorruptError
from refold.stores.memory import MemoryStore
from refold.stores.shelf import KEPT_SUMMARIES, LEASE, SNAPSHOT
from refold.stores.store import Key
from refold.testing.samples import KEY, assert_view_is_fold, entries
from session_contract import calls_message

OTHER, STRANGER = Key(KEY.owner, "another"), Key("somebody else", KEY.conversation)


@pytest.fixture
def store():
    store = MemoryStore()
    for key in (KEY, OTHER, STRANGER):
        store.append(key, entries(0, 4))
    return store


# Leases


# proves: C14
def test_a_lease_has_one_holder_until_it_runs_out(store):
    lease = store.acquire(KEY, "a", "me", 100.0, 10.0)
    assert lease == ("a", "me", lease.fence, 110.0)
    assert store.acquire(KEY, "a", "you", 109.9, 10.0) is None
    assert list(store.leases(KEY, 109.9)) == [lease]
    assert list(store.leases(KEY, 110.0)) == []
    assert store.acquire(KEY, "a", "you", 110.0, 10.0).holder == "you"
    assert store.acquire(KEY, "b", "me", 110.0, 10.0).holder == "me"
    assert store.acquire(Key(KEY.owner, "no such"), "a", "me", 0.0, 10.0) is None


def test_a_lease_held_again_lasts_longer_and_keeps_its_fence(store):
    lease = store.acquire(KEY, "a\ud800", "me\x00", 100.0, 10.0)
    assert store.acquire(KEY, "a\ud800", "me\x00", 105.0, 10.0) == lease._replace(until=115.0)
    assert store.acquire(KEY, "a\ud800", "me", 114.0, 10.0) is None


def test_the_fence_grows_with_every_holder(store):
    held = [store.acquire(KEY, "a", str(n), 100.0 * n, 10.0) for n in range(5)]
    fences = [lease.fence for lease in held]
    assert fences == sorted(set(fences))
    store.release(KEY, held[-1])
    assert store.acquire(KEY, "a", "next", 401.0, 10.0).fence > fences[-1]


def test_only_the_current_fence_releases_a_lease(store):
    late = store.acquire(KEY, "a", "late", 100.0, 10.0)
    current = store.acquire(KEY, "a", "current", 200.0, 10.0)
    store.release(KEY, late)
    assert list(store.leases(KEY, 201.0)) == [current]
    store.release(KEY, current)
    assert list(store.leases(KEY, 201.0)) == []
    assert store.acquire(KEY, "a", "next", 201.0, 10.0) is not None


def test_a_late_release_frees_nothing_that_began_anew(store):
    late = store.acquire(KEY, "a", "late", 100.0, 10.0)
    store.erase(KEY)
    store.append(KEY, entries(0, 1))
    assert list(store.leases(KEY, 101.0)) == []
    current = store.acquire(KEY, "a", "current", 101.0, 10.0)
    store.release(KEY, late)
    assert list(store.leases(KEY, 102.0)) == [current]
    store.append(KEY, entries(1, 2), lease=current)


def test_whoever_replaces_a_lease_at_the_same_moment_is_seen(store, monkeypatch):
    plain = store.compare_and_set
    rivals = [lambda: MemoryStore.acquire(rival, KEY, "a", "you", 100.0, 10.0)]
    rival = store

    def late(scope, name, old, new, /, *, early=False):
        while rivals:
            monkeypatch.setattr(store, "compare_and_set", plain)
            rivals.pop()()
        return plain(scope, name, old, new, early=early)

    monkeypatch.setattr(store, "compare_and_set", late)
    assert store.acquire(KEY, "a", "me", 100.0, 10.0) is None
    assert [lease.holder for lease in store.leases(KEY, 101.0)] == ["you"]


# Cursors


def test_a_cursor_is_unset_until_it_is_set_and_never_goes_back(store):
    assert store.cursor(KEY, "a") is None
    for next, known in ((0, 0), (3, 3), (1, 3), (4, 4), (0, 4)):
        store.set_cursor(KEY, "a", next)
        assert store.cursor(KEY, "a") == known
    assert [store.cursor(KEY, name) for name in ("b", "A", "", "a ")] == [None] * 4


def test_a_cursor_may_be_set_before_the_conversation_begins(store):
    new = Key(KEY.owner, "not there yet")
    store.set_cursor(new, "a", 0)
    assert store.cursor(new, "a") == 0
    assert list(store.behind("a")) == []
    store.append(new, entries(0, 1))
    assert list(store.behind("a")) == [new]


def test_those_are_behind_that_have_entries_at_or_after_their_cursor(store):
    for key, cursor in ((KEY, 3), (OTHER, 4), (STRANGER, 0)):
        store.set_cursor(key, "a", cursor)
    store.append(Key(KEY.owner, "never followed"), entries(0, 3))
    assert sorted(store.behind("a")) == sorted([KEY, STRANGER])
    assert list(store.behind("b")) == []
    store.set_cursor(KEY, "a", 4)
    store.append(OTHER, entries(4, 5))
    assert sorted(store.behind("a")) == sorted([OTHER, STRANGER])
    store.erase(OTHER)
    store.append(OTHER, entries(0, 1))
    assert sorted(store.behind("a")) == [STRANGER]


# Summaries and notes


def test_a_summary_is_what_was_kept_last_under_its_digest(store):
    assert store.summary(KEY, b"a") is None
    for digest, body in ((b"a", b"1"), (b"b", b"x" * 5_000), (b"a", b"x")):
        store.keep_summary(KEY, digest, body)
    found = [store.summary(KEY, digest) for digest in (b"a", b"b", b"A", b"")]
    assert found == [b"x", b"x" * 5_000, None, None]


def test_others_of_the_same_owner_find_a_summary_unless_they_have_their_own(store):
    new = Key(KEY.owner, "not there yet")
    store.keep_summary(KEY, b"a", b"1")
    assert [store.summary(key, b"a") for key in (KEY, OTHER, new, STRANGER)] == [b"1", b"1", b"1", None]
    store.keep_summary(OTHER, b"a", b"2")
    assert (store.summary(KEY, b"a"), store.summary(OTHER, b"a")) == (b"1", b"2")
    store.keep_summary(new, b"b", b"1")
    store.append(new, entries(0, 1))
    assert store.summary(new, b"b") is None
    store.erase(KEY)
    store.erase(OTHER)
    assert store.summary(new, b"a") is None


def test_the_oldest_summaries_go_where_there_are_too_many(store):
    digests = [b"%d" % n for n in range(KEPT_SUMMARIES)]
    for digest in digests:
        store.keep_summary(KEY, digest, digest)
    store.keep_summary(OTHER, b"0 of another", b"")
    store.keep_summary(KEY, b"0", b"kept again, so it is new")
    assert [store.summary(KEY, digest) for digest in digests[1:]] == digests[1:]
    store.keep_summary(KEY, b"a", b"")
    store.keep_summary(KEY, b"b", b"")
    gone = [one for one in (*digests, b"a", b"b", b"0 of another") if store.summary(KEY, one) is None]
    assert gone == digests[1:3]


def test_notes_outlive_the_conversations_they_came_from(store):
    store.keep_note("a", b"1")
    store.keep_note("a", b"2")
    store.erase(KEY)
    assert (store.note("a"), store.note("A")) == (b"2", None)


# Snapshots


def test_snapshots_are_kept_whatever_the_ids_of_calls_are():
    session = refold.open("a", store=MemoryStore())
    for n in range(80):
        session.append(calls_message(f"call \ud800 {n}"))
    assert session.store.saved(session.key)["main"].at >= 64
    assert_view_is_fold(refold.open("a", store=session.store))


@pytest.mark.parametrize(
    "value", [b"", b"x", b"1", b"1 ", b"1 x", b"one \x92\xc4\x00\xc4\x00", b"1 \x92\xc4\x01x\xc4\x00"]
)
def test_altered_snapshots_are_damage(store, value):
    store.put(KEY, f"{SNAPSHOT}main", value)
    with pytest.raises(CorruptError):
        store.saved(KEY)


@pytest.mark.parametrize("value", [b"x", b"1 2", b"one 2 me", b"1 two me", b"1 2 \xff"])
def test_altered_leases_are_damage(store, value):
    store.put(KEY, f"{LEASE}a", value)
    with pytest.raises(CorruptError, match="stored"):
        store.leases(KEY, 0.0)
