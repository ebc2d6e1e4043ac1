"""Contract of stores that can fork, and of stores that find entries by id."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refold.core.codec import Entry
from refold.core.errors import ConflictError, NotFoundError
from refold.stores.store import LOCATED, Forks, Key, LocatesIds, SelfCheck
from refold.testing.samples import KEY, ODD_NAMES, entries, entry, examples, requires, unique, verified

FORK_DEEDS = ["append", "append", "fork", "fork", "erase", "erase with forks"]


class ForksContract:
    forks = requires(Forks, "this store cannot fork")

    def test_a_fork_of_what_is_not_there_or_to_what_is_there_is_refused(self, forks: Any) -> None:
        forks.append(KEY, entries(0, 2))
        new = Key(KEY.owner, "new")
        for of, at in ((KEY, 3), (KEY, -1), (new, 0)):
            with pytest.raises(NotFoundError):
                forks.fork(of, Key(KEY.owner, "newer"), at)
        forks.fork(KEY, new, 1)
        for taken in (new, KEY):
            with pytest.raises(ConflictError):
                forks.fork(KEY, taken, 1)
        assert [row.key for row in forks.conversations()] == [new, KEY]

    def test_forks_twenty_deep_read_as_one_stream(self, forks: Any) -> None:
        keys = [Key(KEY.owner, str(n)) for n in range(21)]
        forks.append(keys[0], entries(0, 2))
        for n, (parent, fork) in enumerate(pairwise(keys), 1):
            forks.fork(parent, fork, 2 * n)
            forks.append(fork, entries(2 * n, 2 * n + 2))
        assert verified(forks, keys[-1]) == entries(0, 42)
        assert [link.entry.at for link in forks.read(keys[-1], 7, 12)] == [7, 8, 9, 10, 11]
        assert all(forks.erase(key) for key in keys[:-1:2])
        assert verified(forks, keys[-1]) == entries(0, 42)
        forks.erase(keys[1], with_forks=True)
        assert list(forks.conversations()) == []

    # proves: B9
    @examples
    @given(
        st.lists(st.tuples(st.sampled_from(FORK_DEEDS), *[st.integers(0, 9)] * 3), min_size=5, max_size=40)
    )
    def test_any_forks_and_erasures_leave_every_other_stream_as_it_was(
        self, forks: Any, deeds: list[tuple[str, int, int, int]]
    ) -> None:
        owner = f"owner {next(unique)}"
        streams: dict[Key, list[Entry]] = {}
        parents: dict[Key, Key | None] = {}
        shared: dict[Key, int] = {}
        for deed, a, b, n in deeds:
            key, new = Key(owner, str(a % 5)), Key(owner, str(b % 5))
            stream = streams.get(key, [])
            children = [fork for fork, parent in parents.items() if parent == key]
            match deed:
                case "append":
                    more = entries(len(stream), len(stream) + n % 3 + 1, f"{key.conversation} {n}")
                    forks.append(key, more)
                    streams[key] = stream + more
                    parents.setdefault(key, None)
                    shared.setdefault(key, 0)
                case "fork" if stream and new not in streams:
                    forks.fork(key, new, min(n, len(stream)))
                    streams[new] = stream[:n]
                    parents[new] = key
                    shared[new] = len(streams[new])
                case "erase":
                    assert sorted(forks.erase(key)) == sorted(children)
                    parents |= dict.fromkeys(children, parents.pop(key, None))
                    shared |= {fork: min(shared[fork], shared[key]) for fork in children}
                    for gone in (streams, shared):
                        gone.pop(key, None)
                case "erase with forks":
                    assert forks.erase(key, with_forks=True) == []
                    erased_keys = [key]
                    for one in erased_keys:
                        erased_keys += [fork for fork, parent in parents.items() if parent == one]
                    for one in erased_keys:
                        streams.pop(one, None)
                        parents.pop(one, None)
                        shared.pop(one, None)
            listed = {row.key: (row.next, row.parent, row.fork_at) for row in forks.conversations(owner)}
            assert listed == {
                one: (len(stream), parents[one], shared[one]) for one, stream in streams.items()
            }
            for one, stream in streams.items():
                assert verified(forks, one) == stream
        assert not isinstance(forks, SelfCheck) or not list(forks.examine())


class IdsContract:
    def test_ids_that_differ_in_anything_are_different(self, store: Any) -> None:
        store.append(KEY, [entry(at, id=id) for at, id in enumerate(ODD_NAMES)])
        assert store.find(KEY, [*ODD_NAMES, "not there"]) == {id: at for at, id in enumerate(ODD_NAMES)}
        assert store.find(KEY, ODD_NAMES[3:4]) == {ODD_NAMES[3]: 3}
        assert store.find(KEY, []) == store.find(Key("b", KEY.conversation), ODD_NAMES) == {}


class LocatedContract:
    located = requires(LocatesIds, "this store does not locate ids")

    def test_an_id_is_located_in_whatever_conversation_of_the_owner_said_it(self, located: Any) -> None:
        ids = [f"{LOCATED}{n}" for n in range(6)]
        one, other, stranger = Key("o", "one"), Key("o", "../* {two}"), Key("p", "one")
        located.append(one, [entry(n, id=ids[n]) for n in range(3)])
        located.append(other, [entry(0, id=ids[3]), entry(1, id="another"), entry(2)])
        located.append(stranger, [entry(0, id=ids[4]), entry(1, id=ids[0])])
        assert located.locate("o", ids) == {**{ids[n]: (one, n) for n in range(3)}, ids[3]: (other, 0)}
        assert located.locate("p", ids) == {ids[4]: (stranger, 0), ids[0]: (stranger, 1)}
        assert located.locate("q", ids) == located.locate("o", []) == {}

    def test_of_several_that_said_the_same_the_newest_is_located(self, located: Any) -> None:
        old, new = Key("o", "old"), Key("o", "new")
        located.append(old, [entry(0, id="~x")])
        located.append(new, [entry(0), entry(1, id="~x")])
        located.append(old, [entry(1)])
        assert located.locate("o", ["~x"]) == {"~x": (new, 1)}
        located.erase(new)
        assert located.locate("o", ["~x"]) == {"~x": (old, 0)}
        located.erase(old)
        assert located.locate("o", ["~x"]) == {}

    def test_what_forks_share_is_located_where_it_was_said_and_then_in_those_that_keep_it(
        self, located: Any, forks: Any
    ) -> None:
        parent, fork, below = Key("o", "parent"), Key("o", "fork"), Key("o", "below")
        located.append(parent, [entry(n, id=f"~{n}") for n in range(4)])
        located.fork(parent, fork, 2)
        located.fork(fork, below, 1)
        located.append(fork, [entry(2, id="~own")])
        assert located.locate("o", ["~0", "~3", "~own"]) == {
            "~0": (parent, 0),
            "~3": (parent, 3),
            "~own": (fork, 2),
        }
        located.erase(parent)
        found = located.locate("o", ["~0", "~1", "~3"])
        assert found.keys() == {"~0", "~1"}
        assert found["~0"] in [(fork, 0), (below, 0)]
        assert found["~1"] == (fork, 1)
        located.erase(fork)
        assert located.locate("o", ["~0", "~1", "~own"]) == {"~0": (below, 0)}
