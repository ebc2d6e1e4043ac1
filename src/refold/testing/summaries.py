"""What was paid for once is not paid for again: for stores that keep summaries."""

from typing import Any

import pytest

from refold.stores.store import KEPT_SUMMARIES, Forks, Key, SelfCheck, SummaryCache
from refold.testing.words import KEY, ODD, Reopen, demand, entries

OTHER = Key(KEY.owner, "another")
STRANGER = Key("somebody else", KEY.conversation)
BYTES = (
    b"",
    b"\x00",
    b"x",
    b"xx\x00",
    b"{}",
    b"\x00\xff" * 8,
    b"x" * 5_000,
    b"words " * 5_000,
    bytes(range(256)) * 9,
)


class SummariesContract:
    @pytest.fixture
    def summaries(self, store: Any) -> Any:
        for key in (KEY, OTHER, STRANGER):
            store.append(key, entries(0, 2))
        return store if isinstance(store, SummaryCache) else pytest.skip("this store keeps no summaries")

    def test_a_summary_is_what_was_kept_last_under_its_digest(self, summaries: Any) -> None:
        assert summaries.summary(KEY, b"a") is None
        for digest, body in ((b"a", b"1"), (b"b", b"2"), (b"a", b"3")):
            summaries.keep_summary(KEY, digest, body)
        assert [summaries.summary(KEY, digest) for digest in (b"a", b"b", b"A", b"")] == [
            b"3",
            b"2",
            None,
            None,
        ]

    def test_digests_and_bodies_are_any_bytes(self, summaries: Any) -> None:
        kept = dict(zip(BYTES, reversed(BYTES), strict=True))
        for digest, body in kept.items():
            summaries.keep_summary(KEY, digest, body)
        assert {digest: summaries.summary(KEY, digest) for digest in kept} == kept

    def test_others_of_the_same_owner_find_it_unless_they_have_their_own(self, summaries: Any) -> None:
        new = Key(KEY.owner, "not there yet")
        summaries.keep_summary(KEY, b"a", b"1")
        assert [summaries.summary(key, b"a") for key in (KEY, OTHER, new)] == [b"1"] * 3
        summaries.keep_summary(OTHER, b"a", b"2")
        assert (summaries.summary(KEY, b"a"), summaries.summary(OTHER, b"a")) == (b"1", b"2")
        assert summaries.summary(new, b"a") in (b"1", b"2")

    def test_another_owner_never_sees_it(self, summaries: Any) -> None:
        owners = [*ODD, ""]
        for n, owner in enumerate(owners):
            assert summaries.summary(Key(owner, "a"), b"a") is None
            summaries.append(Key(owner, "a"), entries(0, 1))
            summaries.keep_summary(Key(owner, "a"), b"a", b"%d" % n)
        assert [summaries.summary(Key(owner, "b"), b"a") for owner in owners] == [
            b"%d" % n for n in range(len(owners))
        ]
        assert summaries.summary(STRANGER, b"a") is None

    def test_of_a_conversation_that_is_not_there_nothing_is_kept(self, summaries: Any) -> None:
        new = Key(KEY.owner, "not there yet")
        summaries.keep_summary(new, b"a", b"1")
        summaries.append(new, entries(0, 1))
        assert [summaries.summary(key, b"a") for key in (new, KEY)] == [None, None]

    def test_the_oldest_go_where_there_are_too_many(self, summaries: Any) -> None:
        digests = [b"%d" % n for n in range(KEPT_SUMMARIES)]
        for digest in digests:
            summaries.keep_summary(KEY, digest, digest)
        summaries.keep_summary(OTHER, b"0 of another", b"")
        summaries.keep_summary(KEY, b"0", b"kept again, so it is new")
        assert [summaries.summary(KEY, digest) for digest in digests[1:]] == digests[1:]
        summaries.keep_summary(KEY, b"a", b"")
        summaries.keep_summary(KEY, b"b", b"")
        gone = [one for one in (*digests, b"a", b"b", b"0 of another") if summaries.summary(KEY, one) is None]
        assert gone == digests[1:3]

    def test_summaries_are_erased_with_the_conversation(self, summaries: Any) -> None:
        summaries.keep_summary(KEY, b"a", b"1")
        summaries.keep_summary(KEY, b"b", b"1")
        summaries.keep_summary(OTHER, b"b", b"2")
        summaries.erase(KEY)
        summaries.append(KEY, entries(0, 2))
        assert [summaries.summary(KEY, digest) for digest in (b"a", b"b")] == [None, b"2"]
        assert not isinstance(summaries, SelfCheck) or not list(summaries.examine())

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_a_fork_keeps_its_own_and_finds_those_of_its_parent_until_it_is_erased(
        self, summaries: Any, at: int
    ) -> None:
        fork, last = demand_forks(summaries, at)
        summaries.keep_summary(KEY, b"a", b"1")
        summaries.keep_summary(fork, b"b", b"2")
        summaries.keep_summary(last, b"c", b"3")
        assert [summaries.summary(fork, digest) for digest in (b"a", b"b", b"c")] == [b"1", b"2", b"3"]
        summaries.erase(KEY)
        assert [summaries.summary(fork, digest) for digest in (b"a", b"b", b"c")] == [None, b"2", b"3"]
        summaries.erase(fork, with_forks=True)
        assert [summaries.summary(OTHER, digest) for digest in (b"a", b"b", b"c")] == [None] * 3
        assert not isinstance(summaries, SelfCheck) or not list(summaries.examine())

    def test_summaries_are_there_when_the_store_is_opened_again(
        self, summaries: Any, reopen: Reopen | None
    ) -> None:
        opening = demand(reopen)
        summaries.keep_summary(KEY, b"a", b"1")
        other: Any = opening()
        assert other.summary(OTHER, b"a") == b"1"
        other.keep_summary(KEY, b"a", b"2")
        other.close()
        assert summaries.summary(KEY, b"a") == b"2"


def demand_forks(store: Any, at: int) -> tuple[Key, Key]:
    """A fork of the conversation, and one of the fork."""
    if not isinstance(store, Forks):
        pytest.skip("this store cannot fork")
    fork, last = Key(KEY.owner, "a fork"), Key(KEY.owner, "a fork of the fork")
    store.fork(KEY, fork, at)
    store.fork(fork, last, at)
    return fork, last
