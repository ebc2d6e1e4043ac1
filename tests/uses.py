"""All that can be done with a store, each thing once."""

from collections.abc import Callable
from typing import Any

from refold.core.event import Expiry
from refold.core.query import parse_query
from refold.stores.store import Key, Lease, Snapshot, ToolSetting
from refold.testing.samples import KEY, entries


def uses(store: Any) -> dict[str, Callable[[], Any]]:
    """By name; nothing that the store can do is left out, but for closing it."""
    deeds = {
        "acquire": lambda: store.acquire(KEY, "a", "me", 1.0, 1.0),
        "append": lambda: store.append(KEY, entries(1, 2)),
        "behind": lambda: list(store.behind("a")),
        "conversations": lambda: list(store.conversations()),
        "cursor": lambda: store.cursor(KEY, "a"),
        "embed": lambda: list(store.embed(KEY, "a", lambda some: [[b""]] * len(some))),
        "erase": lambda: store.erase(KEY),
        "examine": lambda: list(store.examine()),
        "fetch": lambda: store.fetch(KEY, [0]),
        "find": lambda: store.find(KEY, ["a"]),
        "locate": lambda: store.locate(KEY.owner, ["~a"]),
        "fork": lambda: store.fork(KEY, Key(KEY.owner, "fork"), 1),
        "index": lambda: list(store.index(KEY, lambda one: None)),
        "get": lambda: store.get(KEY, "a"),
        "put": lambda: store.put(KEY, "~a", b"1"),
        "compare_and_set": lambda: store.compare_and_set(KEY, "b", None, b"1"),
        "values": lambda: store.values(KEY, "a"),
        "shelved": lambda: list(store.shelved("~a", KEY.owner)),
        "keep_note": lambda: store.keep_note("a", b"b"),
        "keep_summary": lambda: store.keep_summary(KEY, b"a", b"b"),
        "leases": lambda: store.leases(KEY, 1.0),
        "nearest": lambda: store.nearest(KEY, "a", b"", 1),
        "note": lambda: store.note("a"),
        "read": lambda: list(store.read(KEY)),
        "release": lambda: store.release(KEY, Lease("a", "me", 1, 1.0)),
        "resume": lambda: list(store.resume(KEY, "main")[1]),
        "save": lambda: store.save(KEY, "main", Snapshot(0, b"{}", b"digest")),
        "saved": lambda: store.saved(KEY),
        "search": lambda: store.search(KEY, parse_query("a"), 1),
        "set_cursor": lambda: store.set_cursor(KEY, "a", 1),
        "set_setting": lambda: store.set_setting(ToolSetting("", "grep", Expiry(after_steps=1))),
        "settings": lambda: store.settings(),
        "summary": lambda: store.summary(KEY, b"a"),
        "wait": lambda: store.wait(KEY, 5, 1.0),
    }
    can = {name for name in dir(type(store)) if not name.startswith("_")} - {"close"}
    assert can <= set(deeds)
    return {name: deeds[name] for name in sorted(can)}
