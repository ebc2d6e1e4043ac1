"""What the store contract is written with: sample entries and messages, actions, and assertions."""

from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, settings

from refold.core.codec import GENESIS, Entry, chain
from refold.core.view import fold
from refold.session.api import open
from refold.session.session import Session
from refold.stores.store import Ability, Key, Store, missing_ability

Reopen: TypeAlias = Callable[[], Store]

KEY = Key("somebody", "a conversation")
ODD_NAMES = (
    "a|A|a | a|a\n|a\0|a\0b|a.|á|a\u0301|../a|..|/a|a/|a\\|*|a*|?|{}|{a}|:|a:b|a:|'|\"|a'b|%|%61|a%|_|-- a"
    "|\ud800|\udc00|a\ud800|🙂|0|00|None|" + "x" * 500 + "|" + "x" * 499 + "y"
).split("|")
"""Names that some engine might confuse, truncate or reject."""
unique = count()
"""Generated examples share a store, and number their conversations."""
examples = settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


def entry(at: int, text: str = "", *, id: str | None = None) -> Entry:
    return Entry(at, "noted", id, b"[%d]" % at, b'"%s"' % text.encode())


def entries(start: int, stop: int, text: str = "") -> list[Entry]:
    return [entry(at, text) for at in range(start, stop)]


def verified(store: Store, key: Key) -> list[Entry]:
    """All entries, after their places and digests were checked."""
    result: list[Entry] = []
    digest = GENESIS
    for place, link in enumerate(store.read(key)):
        digest = chain(digest, link.entry)
        assert (link.entry.at, link.digest) == (place, digest)
        result.append(link.entry)
    return result


def requires(protocol: type[Any], reason: str) -> Any:
    """A fixture that gives the store, or skips the test if the store does not have the protocol."""

    @pytest.fixture
    def capable(self: Any, store: Any) -> Any:
        return store if isinstance(store, protocol) else pytest.skip(reason)

    return capable


def require_reopen(reopen: Reopen | None) -> Reopen:
    return reopen or pytest.skip("this store lives in one process")


def require_ability(store: Store, ability: Ability) -> None:
    """Skips the test if the store declares that it lacks the ability."""
    if (why := missing_ability(store, ability)) is not None:
        pytest.skip(why)


def assert_view_is_fold(session: Session) -> None:
    """The view of a session, and of a new one, equals `fold` of all events."""
    expected = fold(list(session.events()))
    again = Session(session.store, session.key)
    assert session.view() == again.view() == expected
    assert session.view().messages == again.view().messages == expected.messages


def user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def write_numbered(store: Store, writer: str, stop: int) -> None:
    """Appends `writer 0`, `writer 1` …, one by one and in batches."""
    session = open("race", store=store)
    for n in range(0, stop, 5):
        session.append(user_message(f"{writer} {n}"))
        session.append([user_message(f"{writer} {m}") for m in range(n + 1, n + 5)])


def write_elsewhere(reopen: Reopen, writer: str, stop: int) -> None:
    """The same in another process."""
    write_numbered(reopen(), writer, stop)


def assert_all_written(store: Store, writers: dict[str, int]) -> None:
    """Everything that was acknowledged is there once, in its writer's order."""
    session = open("race", store=store)
    texts = [one.message.text.split() for one in session.get_all()]
    for writer, stop in writers.items():
        assert [int(n) for name, n in texts if name == writer] == list(range(stop))
    assert len(verified(store, session.key)) == len(texts) == sum(writers.values())
    assert_view_is_fold(session)
