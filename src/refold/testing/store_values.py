"""Contract of stores that keep snapshots, leases, notes, summaries, settings or cursors."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refold.core.errors import ConflictError, NotFoundError, OverBudgetError
from refold.core.event import Expiry
from refold.session.api import open
from refold.stores.store import (
    KEPT_SUMMARIES,
    Cursors,
    Forks,
    Key,
    Lease,
    Leases,
    Notes,
    SelfCheck,
    Settings,
    Snapshot,
    Snapshots,
    SummaryCache,
    ToolSetting,
)
from refold.testing.samples import (
    KEY,
    ODD_NAMES,
    TINY,
    Reopen,
    act,
    assert_view_is_fold,
    calls_message,
    entries,
    examples,
    require_reopen,
    requires,
    unique,
    verified,
)

DEEDS = ["user", "user", "calls", "result", "fit", "compact", "pin", "unpin", "undo", "restore", "reopen"]


class SnapshotsContract:
    snapshots = requires(Snapshots, "this store keeps no snapshots")

    def test_the_newest_snapshot_of_each_view_is_kept(self, snapshots: Any) -> None:
        snapshots.save(KEY, "main", Snapshot(1, b"of nothing", b"digest"))
        assert snapshots.saved(KEY) == {}
        snapshots.append(KEY, entries(0, 9))
        old, new, other = (Snapshot(at, b"\x00x%d" % at, b"digest") for at in (3, 5, 4))
        for view, snapshot in (("main", old), ("main", new), ("main", old), ("an\ud800other", other)):
            snapshots.save(KEY, view, snapshot)
        assert snapshots.saved(KEY) == {"main": new, "an\ud800other": other}
        snapshots.erase(KEY)
        snapshots.append(KEY, entries(0, 9))
        assert snapshots.saved(KEY) == {}

    @examples
    @given(st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 25)), min_size=10, max_size=60))
    def test_a_session_opened_from_a_snapshot_equals_the_fold(
        self, snapshots: Any, deeds: list[tuple[str, int]]
    ) -> None:
        opening = partial(open, f"conversation {next(unique)}", store=snapshots, model="tiny", config=TINY)
        session = opening()
        for deed, n in deeds:
            with suppress(NotFoundError, ConflictError, OverBudgetError):
                act(session, deed, n)
            if deed == "reopen":
                assert_view_is_fold(session)
                session.close()
                session = opening()
                saved = snapshots.saved(session.key)
                assert saved["main"].at if list(session.events()) else not saved
            assert_view_is_fold(session)
        assert len(verified(snapshots, session.key)) == len(list(session.events()))

    def test_snapshots_are_kept_whatever_the_ids_of_calls_are(self, snapshots: Any) -> None:
        session = open("a", store=snapshots)
        for n in range(80):
            session.append(calls_message(f"call \ud800 {n}"))
        assert snapshots.saved(session.key)["main"].at >= 64
        assert_view_is_fold(open("a", store=snapshots))


class LeasesContract:
    @pytest.fixture
    def leases(self, store: Any) -> Any:
        store.append(KEY, entries(0, 1))
        return store if isinstance(store, Leases) else pytest.skip("this store has no leases")

    # proves: C14
    def test_a_lease_has_one_holder_until_it_runs_out(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a", "me", 100.0, 10.0)
        assert lease == ("a", "me", lease.fence, 110.0)
        assert leases.acquire(KEY, "a", "you", 109.9, 10.0) is None
        assert list(leases.leases(KEY, 109.9)) == [lease]
        assert list(leases.leases(KEY, 110.0)) == []
        assert leases.acquire(KEY, "a", "you", 110.0, 10.0).holder == "you"
        assert leases.acquire(KEY, "b", "me", 110.0, 10.0).holder == "me"
        assert leases.acquire(Key(KEY.owner, "no such"), "a", "me", 0.0, 10.0) is None

    def test_a_lease_held_again_lasts_longer_and_keeps_its_fence(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a\ud800", "me\x00", 100.0, 10.0)
        assert leases.acquire(KEY, "a\ud800", "me\x00", 105.0, 10.0) == lease._replace(until=115.0)
        assert leases.acquire(KEY, "a\ud800", "me", 114.0, 10.0) is None

    def test_the_fence_grows_with_every_holder(self, leases: Any) -> None:
        held = [leases.acquire(KEY, "a", str(n), 100.0 * n, 10.0) for n in range(5)]
        fences = [lease.fence for lease in held]
        assert fences == sorted(set(fences))
        leases.release(KEY, held[-1])
        assert leases.acquire(KEY, "a", "next", 401.0, 10.0).fence > fences[-1]

    def test_only_the_current_fence_releases_a_lease(self, leases: Any) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        current = leases.acquire(KEY, "a", "current", 200.0, 10.0)
        leases.release(KEY, late)
        assert list(leases.leases(KEY, 201.0)) == [current]
        leases.release(KEY, current)
        assert list(leases.leases(KEY, 201.0)) == []
        assert leases.acquire(KEY, "a", "next", 201.0, 10.0) is not None

    def test_leases_are_erased_with_the_conversation(self, leases: Any) -> None:
        leases.acquire(KEY, "a", "me", 100.0, 10.0)
        leases.erase(KEY)
        leases.append(KEY, entries(0, 1))
        assert list(leases.leases(KEY, 101.0)) == []
        assert leases.acquire(KEY, "a", "you", 101.0, 10.0) is not None

    def test_a_late_release_frees_nothing_that_began_anew(self, leases: Any) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        leases.erase(KEY)
        leases.append(KEY, entries(0, 1))
        current = leases.acquire(KEY, "a", "current", 101.0, 10.0)
        leases.release(KEY, late)
        assert list(leases.leases(KEY, 102.0)) == [current]
        leases.append(KEY, entries(1, 2), lease=current)

    # The fence of an append

    def test_the_current_holder_appends_though_its_time_ran_out(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a\ud800", "me\x00", 100.0, 10.0)
        digest = leases.append(KEY, entries(1, 2), lease=lease)
        assert leases.acquire(KEY, "a\ud800", "me\x00", 500.0, 10.0).until > lease.until
        leases.append(KEY, entries(2, 3), after=digest, lease=lease)
        assert leases.append(KEY, [], lease=lease)
        assert verified(leases, KEY) == entries(0, 3)

    # proves: C14
    def test_a_late_holder_appends_nothing(self, leases: Any) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        current = leases.acquire(KEY, "a", "current", 200.0, 10.0)
        for batch in (entries(1, 3), entries(7, 8), []):
            with pytest.raises(ConflictError, match=r"'late' no longer holds 'a'"):
                leases.append(KEY, batch, lease=late)
        assert verified(leases, KEY) == entries(0, 1)
        leases.append(KEY, entries(1, 2, "current"), lease=current)
        with pytest.raises(ConflictError, match="goes on at 2"):
            leases.append(KEY, entries(1, 2), lease=current)
        leases.append(KEY, entries(2, 3))
        assert verified(leases, KEY) == entries(0, 1) + entries(1, 2, "current") + entries(2, 3)

    def test_a_released_lease_appends_nothing_until_it_is_acquired_again(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a", "me", 100.0, 10.0)
        leases.release(KEY, lease)
        with pytest.raises(ConflictError, match="acquire it again"):
            leases.append(KEY, entries(1, 2), lease=lease)
        assert verified(leases, KEY) == entries(0, 1)
        leases.append(KEY, entries(1, 2), lease=leases.acquire(KEY, "a", "me", 105.0, 10.0))
        assert verified(leases, KEY) == entries(0, 2)

    @pytest.mark.parametrize(
        "other", [{"name": "b"}, {"holder": "you"}, {"holder": "me\x00"}, {"fence": 9}, {"fence": 0}]
    )
    def test_a_lease_that_differs_from_the_current_one_appends_nothing(
        self, leases: Any, other: dict[str, Any]
    ) -> None:
        lease = leases.acquire(KEY, "a", "me", 100.0, 10.0)
        leases.acquire(KEY, "b", "you", 100.0, 10.0)
        with pytest.raises(ConflictError, match="no longer holds"):
            leases.append(KEY, entries(1, 2), lease=lease._replace(**other))
        assert verified(leases, KEY) == entries(0, 1)

    def test_a_lease_is_of_one_conversation_and_goes_with_it(self, leases: Any) -> None:
        lease = leases.acquire(KEY, "a", "me", 100.0, 10.0)
        other = Key(KEY.owner, "another")
        for stored in ([], entries(0, 1)):
            leases.append(other, stored)
            with pytest.raises(ConflictError, match="no longer holds"):
                leases.append(other, entries(len(stored), len(stored) + 1), lease=lease)
            assert verified(leases, other) == stored
        leases.erase(KEY)
        with pytest.raises(ConflictError, match="no longer holds"):
            leases.append(KEY, entries(0, 1), lease=lease)
        assert [row.key for row in leases.conversations()] == [other]

    def test_a_late_holder_disturbs_nobody_who_appends_at_the_same_moment(self, leases: Any) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        current = leases.acquire(KEY, "a", "current", 200.0, 10.0)
        keys = [Key(KEY.owner, str(n)) for n in range(4)]
        barrier = Barrier(8)

        def write(key: Key, start: int, lease: Lease | None, text: str) -> int:
            """How many of ten appends were refused."""
            barrier.wait()
            refused = 0
            for at in range(start, start + 10):
                try:
                    leases.append(key, entries(at, at + 1, text), lease=lease)
                except ConflictError:
                    refused += 1
            return refused

        tasks = [(key, 0, None, "") for key in keys] + [(KEY, 1, current, "current")]
        tasks += [(KEY, 1, late, "late")] * 3
        with ThreadPoolExecutor(8) as pool:
            refused = list(pool.map(write, *zip(*tasks, strict=True)))
        assert refused == [0] * 5 + [10] * 3
        assert [verified(leases, key) for key in keys] == [entries(0, 10)] * 4
        assert verified(leases, KEY) == entries(0, 1) + entries(1, 11, "current")

    def test_a_late_holder_is_told_from_the_current_one_when_the_store_is_opened_again(
        self, leases: Any, reopen: Reopen | None
    ) -> None:
        late = leases.acquire(KEY, "a", "late", 100.0, 10.0)
        other: Any = require_reopen(reopen)()
        other.append(KEY, entries(1, 2), lease=late)
        current = other.acquire(KEY, "a", "current", 200.0, 10.0)
        for store in (leases, other):
            with pytest.raises(ConflictError, match="no longer holds"):
                store.append(KEY, entries(2, 3), lease=late)
        leases.append(KEY, entries(2, 3), lease=current)
        assert verified(other, KEY) == entries(0, 3)
        other.close()


class NotesContract:
    notes = requires(Notes, "this store keeps no notes")

    def test_a_note_is_what_was_kept_last_under_its_name(self, notes: Any) -> None:
        assert notes.note("a") is None
        notes.keep_note("a", b"1")
        notes.keep_note("b\ud800\x00", b"\x00\xff")
        notes.keep_note("a", b"2")
        assert (notes.note("a"), notes.note("b\ud800\x00"), notes.note("A")) == (b"2", b"\x00\xff", None)

    def test_notes_outlive_the_conversations_they_came_from(self, notes: Any) -> None:
        notes.append(KEY, entries(0, 1))
        notes.keep_note("a", b"1")
        notes.erase(KEY)
        assert notes.note("a") == b"1"

    def test_notes_are_there_when_the_store_is_opened_again(self, notes: Any, reopen: Reopen | None) -> None:
        opening = require_reopen(reopen)
        notes.keep_note("a", b"1")
        other: Any = opening()
        assert other.note("a") == b"1"
        other.close()


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
        owners = [*ODD_NAMES, ""]
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
        opening = require_reopen(reopen)
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


FULL = Expiry(0, "compact", "ai-summary", 0, "What\x00 \ud800\nmatters?", "relevance", 0.25)


class SettingsContract:
    settings = requires(Settings, "this store keeps no settings")

    # proves: A13
    def test_a_setting_is_what_was_set_last_for_its_agent_and_tool(self, settings: Any) -> None:
        assert list(settings.settings()) == []
        settings.set_setting(ToolSetting("a", "grep", Expiry(after_steps=1, length=9)))
        settings.set_setting(ToolSetting("", "grep", FULL))
        settings.set_setting(ToolSetting("a", "grep", Expiry(after_steps=2)))
        assert sorted(settings.settings(), key=lambda one: one.agent) == [
            ToolSetting("", "grep", FULL),
            ToolSetting("a", "grep", Expiry(after_steps=2)),
        ]

    def test_a_setting_in_which_nothing_is_set_is_gone(self, settings: Any) -> None:
        for agent in ("", "a"):
            settings.set_setting(ToolSetting(agent, "grep", Expiry(mode="remove")))
        settings.set_setting(ToolSetting("a", "grep", Expiry()))
        settings.set_setting(ToolSetting("b", "grep", Expiry()))
        assert list(settings.settings()) == [ToolSetting("", "grep", Expiry(mode="remove"))]

    def test_settings_have_any_name_and_outlive_conversations(self, settings: Any) -> None:
        made = {
            ToolSetting(name, name, Expiry(after_steps=n)) for n, name in enumerate(filter(None, ODD_NAMES))
        }
        settings.append(KEY, entries(0, 1))
        for one in made:
            settings.set_setting(one)
        settings.erase(KEY)
        assert set(settings.settings()) == made

    # proves: A13
    def test_settings_are_in_force_in_conversations_opened_after(self, settings: Any) -> None:
        file = {"tools": {"grep": {"expire": {"after_steps": 9, "length": 100}}}}
        before = open("a", store=settings, config=file)
        settings.set_setting(ToolSetting("", "grep", Expiry(after_steps=0)))
        after = open("a", store=settings, config=file)
        assert before.settings.tools["grep"].expire == Expiry(after_steps=9, length=100)
        assert after.settings.tools["grep"].expire == Expiry(after_steps=0, length=100)

    def test_settings_are_there_when_the_store_is_opened_again(
        self, settings: Any, reopen: Reopen | None
    ) -> None:
        opening = require_reopen(reopen)
        settings.set_setting(ToolSetting("a", "grep", FULL))
        other: Any = opening()
        assert list(other.settings()) == [ToolSetting("a", "grep", FULL)]
        other.close()


class CursorsContract:
    cursors = requires(Cursors, "this store keeps no cursors")

    def test_a_cursor_is_unset_until_it_is_set_and_never_goes_back(self, cursors: Any) -> None:
        cursors.append(KEY, entries(0, 4))
        assert cursors.cursor(KEY, "a") is None
        for next, known in ((0, 0), (3, 3), (1, 3), (4, 4), (0, 4)):
            cursors.set_cursor(KEY, "a", next)
            assert cursors.cursor(KEY, "a") == known
        assert [cursors.cursor(KEY, name) for name in ("b", "A", "", "a ")] == [None] * 4

    def test_a_cursor_may_be_set_before_the_conversation_begins(self, cursors: Any) -> None:
        cursors.set_cursor(KEY, "a", 0)
        assert cursors.cursor(KEY, "a") == 0
        assert list(cursors.behind("a")) == list(cursors.conversations()) == []
        cursors.append(KEY, entries(0, 1))
        assert list(cursors.behind("a")) == [KEY]

    def test_those_are_behind_that_have_entries_at_or_after_their_cursor(self, cursors: Any) -> None:
        for key, entered, cursor in ((KEY, 3, 2), (OTHER, 3, 3), (STRANGER, 3, 0)):
            cursors.append(key, entries(0, entered))
            cursors.set_cursor(key, "a", cursor)
        cursors.append(Key(KEY.owner, "never followed"), entries(0, 3))
        assert sorted(cursors.behind("a")) == sorted([KEY, STRANGER])
        assert list(cursors.behind("b")) == []
        cursors.set_cursor(KEY, "a", 3)
        cursors.append(OTHER, entries(3, 4))
        assert sorted(cursors.behind("a")) == sorted([OTHER, STRANGER])

    def test_odd_names_and_owners_are_kept_apart(self, cursors: Any) -> None:
        names = [*ODD_NAMES, ""]
        for n, name in enumerate(names):
            cursors.append(Key(name, KEY.conversation), entries(0, 1))
            cursors.set_cursor(Key(name, KEY.conversation), "a", n)
            cursors.set_cursor(KEY, name + "a cursor", n)
        assert [cursors.cursor(Key(name, KEY.conversation), "a") for name in names] == [*range(len(names))]
        assert [cursors.cursor(KEY, name + "a cursor") for name in names] == [*range(len(names))]
        assert list(cursors.behind("a")) == [Key(names[0], KEY.conversation)]

    def test_cursors_are_erased_with_the_conversation_and_with_no_other(self, cursors: Any) -> None:
        for key in (KEY, OTHER, STRANGER):
            cursors.append(key, entries(0, 2))
            cursors.set_cursor(key, "a", 1)
        cursors.set_cursor(KEY, "b", 1)
        cursors.erase(KEY)
        cursors.append(KEY, entries(0, 2))
        assert [cursors.cursor(KEY, name) for name in ("a", "b")] == [None, None]
        assert sorted(cursors.behind("a")) == sorted([OTHER, STRANGER])
        assert not isinstance(cursors, SelfCheck) or not list(cursors.examine())

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_a_fork_has_cursors_of_its_own(self, cursors: Any, at: int) -> None:
        can_fork: bool = isinstance(cursors, Forks)
        if not can_fork:
            pytest.skip("this store cannot fork")
        fork = Key(KEY.owner, "a fork")
        cursors.append(KEY, entries(0, 2))
        cursors.set_cursor(KEY, "a", 2)
        cursors.fork(KEY, fork, at)
        assert cursors.cursor(fork, "a") is None
        cursors.set_cursor(fork, "a", at)
        assert list(cursors.behind("a")) == []
        cursors.append(fork, entries(at, at + 1, "fork"))
        assert list(cursors.behind("a")) == [fork]
        cursors.set_cursor(fork, "b", 0)
        assert list(cursors.behind("b")) == [fork]
        cursors.erase(KEY)
        assert (cursors.cursor(fork, "a"), list(cursors.behind("a"))) == (at, [fork])
        cursors.append(KEY, entries(0, 1))
        cursors.fork(fork, OTHER, at)
        cursors.set_cursor(OTHER, "a", 0)
        cursors.erase(fork, with_forks=True)
        assert [cursors.cursor(key, "a") for key in (fork, OTHER)] == [None, None]

    def test_cursors_are_there_when_the_store_is_opened_again(
        self, cursors: Any, reopen: Reopen | None
    ) -> None:
        opening = require_reopen(reopen)
        cursors.append(KEY, entries(0, 2))
        cursors.set_cursor(KEY, "a", 1)
        other: Any = opening()
        assert (other.cursor(KEY, "a"), list(other.behind("a"))) == (1, [KEY])
        other.set_cursor(KEY, "a", 2)
        other.close()
        assert (cursors.cursor(KEY, "a"), list(cursors.behind("a"))) == (2, [])
