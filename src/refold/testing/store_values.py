"""Contract of stores that have a shelf or settings."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from refold.core.errors import ConflictError
from refold.core.event import Expiry
from refold.stores.shelf import Shelf
from refold.stores.store import LOCATED, Forks, Key, Lease, SelfCheck, Snapshot, ToolSetting
from refold.testing.samples import KEY, ODD_NAMES, Reopen, entries, require_reopen, requires, verified

OTHER = Key(KEY.owner, "another")
STRANGER = Key("somebody else", KEY.conversation)
NOWHERE = Key(KEY.owner, "not there yet")
SHARED = f"{LOCATED}shared"
BYTES = (b"", b"\x00", b"x", b"xx\x00", b"\x00\xff" * 8, b"words " * 5_000, bytes(range(256)) * 900)


class ShelfContract:
    @pytest.fixture
    def shelf(self, store: Any) -> Any:
        if not isinstance(store, Shelf):
            pytest.skip("this store has no shelf")
        for key in (KEY, OTHER, STRANGER):
            store.append(key, entries(0, 2))
        return store

    @pytest.mark.parametrize("scope", [None, KEY])
    def test_a_value_is_what_was_put_last_under_its_name(self, shelf: Any, scope: Key | None) -> None:
        assert shelf.get(scope, "a") is None
        for value in BYTES:
            for durable in (False, True):
                shelf.put(scope, "a", value, durable=durable)
                assert shelf.get(scope, "a") == value
        shelf.put(scope, "b", b"1")
        shelf.put(scope, "a", None)
        shelf.put(scope, "never put", None)
        assert [shelf.get(scope, name) for name in ("a", "b", "B")] == [None, b"1", None]

    def test_odd_names_and_scopes_stay_apart(self, shelf: Any) -> None:
        scopes = [None, *(Key(name, "a") for name in ODD_NAMES), *(Key("b", name) for name in ODD_NAMES)]
        for n, scope in enumerate(scopes):
            if scope is not None:
                shelf.append(scope, entries(0, 1))
            shelf.put(scope, "a", b"%d" % n)
        assert [shelf.get(scope, "a") for scope in scopes] == [b"%d" % n for n in range(len(scopes))]
        values = {name: b"%d" % n for n, name in enumerate(ODD_NAMES)}
        for scope in (None, KEY):
            for name, value in values.items():
                shelf.put(scope, name, value)
            assert {name: shelf.get(scope, name) for name in ODD_NAMES} == values
        shelf.put(OTHER, "a", b"of another")
        assert shelf.values(KEY, "a") == {name: v for name, v in values.items() if name.startswith("a")}
        assert shelf.values(NOWHERE, "a") == {}

    @pytest.mark.parametrize("scope", [None, KEY])
    def test_a_value_is_replaced_only_if_it_is_the_old_one(self, shelf: Any, scope: Key | None) -> None:
        assert not shelf.compare_and_set(scope, "a", b"1", b"2")
        assert shelf.compare_and_set(scope, "a", None, b"")
        assert not shelf.compare_and_set(scope, "a", None, b"2")
        assert shelf.compare_and_set(scope, "a", b"", b"\x00")
        assert shelf.compare_and_set(scope, "a", b"\x00", b"\x00")
        assert not shelf.compare_and_set(scope, "a", b"", b"2")
        assert shelf.get(scope, "a") == b"\x00"

    def test_of_those_who_replace_a_value_at_the_same_moment_one_succeeds(self, shelf: Any) -> None:
        barrier = Barrier(4)

        def count(_: int) -> None:
            barrier.wait()
            for _ in range(10):
                stored = shelf.get(KEY, "a")
                while not shelf.compare_and_set(KEY, "a", stored, b"%d" % (int(stored or 0) + 1)):
                    stored = shelf.get(KEY, "a")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(count, range(4)))
        assert shelf.get(KEY, "a") == b"40"

    def test_a_conversation_that_is_not_there_has_only_what_is_early(self, shelf: Any) -> None:
        shelf.put(NOWHERE, "a", b"1")
        assert not shelf.compare_and_set(NOWHERE, "a", None, b"1")
        assert shelf.get(NOWHERE, "a") is None
        assert shelf.compare_and_set(NOWHERE, "a", None, b"1", early=True)
        assert NOWHERE not in [row.key for row in shelf.conversations()]
        assert list(shelf.shelved("a")) == []
        shelf.append(NOWHERE, entries(0, 1))
        assert shelf.get(NOWHERE, "a") == b"1"

    def test_the_values_of_all_conversations_are_found_by_name(self, shelf: Any) -> None:
        for n, key in enumerate((KEY, OTHER, STRANGER)):
            shelf.put(key, "a", b"%d" % n)
        assert by_key(shelf.shelved("a")) == {KEY: b"0", OTHER: b"1", STRANGER: b"2"}
        shelf.append(OTHER, entries(2, 5))
        assert sorted(shelf.shelved("a", KEY.owner)) == sorted([(KEY, b"0", 2), (OTHER, b"1", 5)])
        assert by_key(shelf.shelved("b")) == {}
        shelf.put(OTHER, SHARED, b"1")
        assert by_key(shelf.shelved(SHARED, KEY.owner)) == {OTHER: b"1"}
        assert by_key(shelf.shelved(SHARED, STRANGER.owner)) == {}

    @pytest.mark.parametrize("scope", [KEY, NOWHERE])
    def test_values_are_erased_with_their_conversation_and_with_no_other(
        self, shelf: Any, scope: Key
    ) -> None:
        for key in (None, scope, OTHER, STRANGER):
            shelf.compare_and_set(key, "a", None, b"1", early=True)
            shelf.put(key, SHARED, b"1")
        shelf.erase(scope)
        shelf.append(scope, entries(0, 1))
        assert [shelf.get(key, "a") for key in (None, scope, OTHER, STRANGER)] == [b"1", None, b"1", b"1"]
        assert by_key(shelf.shelved(SHARED, KEY.owner)) == {OTHER: b"1"}
        shelf.erase(OTHER)
        assert by_key(shelf.shelved(SHARED, KEY.owner)) == {}
        assert not isinstance(shelf, SelfCheck) or not list(shelf.examine())

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_a_fork_has_a_shelf_of_its_own(self, shelf: Any, at: int) -> None:
        fork, last = forked(shelf, at)
        for n, key in enumerate((KEY, fork, last)):
            assert shelf.get(key, SHARED) is None
            shelf.put(key, SHARED, b"%d" % n)
        shelf.erase(KEY)
        assert [shelf.get(key, SHARED) for key in (KEY, fork, last)] == [None, b"1", b"2"]
        shelf.erase(fork, with_forks=True)
        assert by_key(shelf.shelved(SHARED)) == {}
        assert not isinstance(shelf, SelfCheck) or not list(shelf.examine())

    def test_values_are_there_when_the_store_is_opened_again(self, shelf: Any, reopen: Reopen | None) -> None:
        opening = require_reopen(reopen)
        for scope in (None, KEY):
            shelf.put(scope, SHARED, b"1")
        other: Any = opening()
        assert [other.get(scope, SHARED) for scope in (None, KEY)] == [b"1", b"1"]
        assert by_key(other.shelved(SHARED, KEY.owner)) == {KEY: b"1"}
        other.close()

    def test_the_newest_snapshot_of_each_view_is_kept(self, shelf: Any) -> None:
        first, second = Snapshot(1, b"\x00x1", b"digest"), Snapshot(2, b"words " * 999, b"digest")
        for view in ("main", "an\ud800other"):
            shelf.save(KEY, view, first)
        shelf.save(KEY, "main", second)
        assert shelf.saved(KEY) == {"main": second, "an\ud800other": first}

    # The fence of an append

    # proves: C14
    def test_only_the_current_holder_of_a_lease_appends_with_it(self, shelf: Any) -> None:
        late = shelf.acquire(KEY, "a\ud800", "late\x00", 100.0, 10.0)
        shelf.append(KEY, entries(2, 3), lease=late)  # though its time ran out
        current = shelf.acquire(KEY, "a\ud800", "a b\n\xe9\\", 200.0, 10.0)
        for batch in (entries(3, 5), entries(7, 8), []):
            with pytest.raises(ConflictError, match="no longer holds"):
                shelf.append(KEY, batch, lease=late)
        digest = shelf.append(KEY, entries(3, 4), lease=current)
        shelf.append(KEY, entries(4, 6), after=digest, lease=current)
        assert shelf.append(KEY, [], lease=current)
        with pytest.raises(ConflictError, match="goes on at 6"):
            shelf.append(KEY, entries(3, 4), lease=current)
        assert verified(shelf, KEY) == entries(0, 6)
        shelf.release(KEY, current)
        with pytest.raises(ConflictError, match="acquire it again"):
            shelf.append(KEY, entries(6, 7), lease=current)
        again = shelf.acquire(KEY, "a\ud800", "a b\n\xe9\\", 205.0, 10.0)
        shelf.append(KEY, entries(6, 7), lease=again)

    @pytest.mark.parametrize(
        "other", [{"name": "b"}, {"holder": "you"}, {"holder": "me\x00"}, {"fence": 9}, {"fence": 0}]
    )
    def test_a_lease_that_differs_from_the_current_one_appends_nothing(
        self, shelf: Any, other: dict[str, Any]
    ) -> None:
        lease = shelf.acquire(KEY, "a", "me", 100.0, 10.0)
        shelf.acquire(KEY, "b", "you", 100.0, 10.0)
        with pytest.raises(ConflictError, match="no longer holds"):
            shelf.append(KEY, entries(2, 3), lease=lease._replace(**other))
        assert verified(shelf, KEY) == entries(0, 2)

    def test_a_lease_is_of_one_conversation_and_goes_with_it(self, shelf: Any) -> None:
        lease = shelf.acquire(KEY, "a", "me", 100.0, 10.0)
        for key, stored in ((OTHER, entries(0, 2)), (NOWHERE, [])):
            with pytest.raises(ConflictError, match="no longer holds"):
                shelf.append(key, entries(len(stored), len(stored) + 1), lease=lease)
            assert verified(shelf, key) == stored
        shelf.erase(KEY)
        with pytest.raises(ConflictError, match="no longer holds"):
            shelf.append(KEY, entries(0, 1), lease=lease)
        assert KEY not in [row.key for row in shelf.conversations()]

    # proves: C14
    def test_a_late_holder_disturbs_nobody_who_appends_at_the_same_moment(self, shelf: Any) -> None:
        late = shelf.acquire(KEY, "a", "late", 100.0, 10.0)
        current = shelf.acquire(KEY, "a", "current", 200.0, 10.0)
        keys = [Key(KEY.owner, str(n)) for n in range(4)]
        barrier = Barrier(8)

        def write(key: Key, start: int, lease: Lease | None, text: str) -> int:
            """How many of ten appends were refused."""
            barrier.wait()
            refused = 0
            for at in range(start, start + 10):
                try:
                    shelf.append(key, entries(at, at + 1, text), lease=lease)
                except ConflictError:
                    refused += 1
            return refused

        tasks = [(key, 0, None, "") for key in keys] + [(KEY, 2, current, "current")]
        tasks += [(KEY, 2, late, "late")] * 3
        with ThreadPoolExecutor(8) as pool:
            refused = list(pool.map(write, *zip(*tasks, strict=True)))
        assert refused == [0] * 5 + [10] * 3
        assert [verified(shelf, key) for key in keys] == [entries(0, 10)] * 4
        assert verified(shelf, KEY) == entries(0, 2) + entries(2, 12, "current")


def by_key(found: Iterable[tuple[Key, bytes, int]]) -> dict[Key, bytes]:
    return {key: value for key, value, _ in found}


def forked(store: Any, at: int) -> tuple[Key, Key]:
    """A fork of the conversation, and one of the fork."""
    if not isinstance(store, Forks):
        pytest.skip("this store cannot fork")
    fork, last = Key(KEY.owner, "a fork"), Key(KEY.owner, "a fork of the fork")
    store.fork(KEY, fork, at)
    store.fork(fork, last, at)
    return fork, last


FULL = Expiry(0, "compact", "ai-summary", 0, "What\x00 \ud800\nmatters?", "relevance", 0.25)


class SettingsContract:
    settings = requires(Shelf, "this store has no shelf")

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
        settings.set_setting(ToolSetting("a", "grep", Expiry()))
        settings.set_setting(ToolSetting("b", "grep", Expiry()))
        assert list(settings.settings()) == [ToolSetting("", "grep", FULL)]

    def test_settings_have_any_name_and_outlive_conversations(
        self, settings: Any, reopen: Reopen | None
    ) -> None:
        made = {
            ToolSetting(name, name, Expiry(after_steps=n)) for n, name in enumerate(filter(None, ODD_NAMES))
        }
        settings.append(KEY, entries(0, 1))
        for one in made:
            settings.set_setting(one)
        settings.erase(KEY)
        assert set(settings.settings()) == made
        if reopen is not None:
            other: Any = reopen()
            assert set(other.settings()) == made
            other.close()
