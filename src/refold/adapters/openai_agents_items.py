"""Items of OpenAI's Agents SDK: recorded as they came, recognized when they are passed again, and fitted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from threading import RLock
from typing import Any, TypeAlias

import msgspec

from refold.adapters.conversation import prepare_session
from refold.core import codec
from refold.core.event import Said
from refold.core.pairing import ID_SEPARATOR
from refold.dialects.openai_responses import DIALECT, PREFIXES, render, tool_id
from refold.session.history_sync import overlap
from refold.session.session import Session

Item: TypeAlias = dict[str, Any]
NO_ID = "__fake_id__"
"""The SDK's placeholder for an id, which it never sends."""


class ItemHistory:
    """The items of one conversation. Safe to use from threads."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._lock = RLock()
        self._epoch: object = None
        self._reset()

    def _reset(self) -> None:
        self._items: list[Item] = []
        self.places: list[int] = []
        """The place of each item's message: all items of one reply are one message."""
        self._next = 0
        self._turn: dict[str, Item] = {}
        """Items since the user's last message, by id."""
        self._last: tuple[Sequence[Item], int] = ((), 0)
        """The known items of the last request, and how many items there were then."""

    def items(self) -> list[Item]:
        """All items as they were added, by this process or another. Not to be modified."""
        with self._lock:
            self.session.get_count()
            inspect = self.session.inspect
            if inspect.epoch is not self._epoch:  # first seen, or erased meanwhile
                self._epoch = inspect.epoch
                self._reset()
            if inspect.state.next > self._next:
                for event in self.session.events(self._next):
                    self._next = event.at + 1
                    for item in _recorded_items(event) if isinstance(event, Said) else ():
                        self._read(item, event.at)
            return self._items

    def _read(self, item: Item, place: int) -> None:
        self._items.append(item)
        self.places.append(place)
        id = _own_id(item)
        if item.get("role") == "user":
            self._turn = {}
        elif id is not None:
            self._turn[id] = item

    def add(self, items: Sequence[Item]) -> None:
        """Appends all of them or none. An item with an id is recorded once per turn."""
        if not items:
            return
        with self._lock:
            self.items()
            new = [item for item in items if self._turn.get(_own_id(item) or "") != item]
            taken = self.session.intake(DIALECT).take([_sendable(item) for item in new])
            left_out: dict[int, list[Any]] = {}
            for n, (first, item) in enumerate(zip(taken.first, new, strict=True)):
                index = n - taken.first.index(first)  # among the items of one reply
                fields = [[index, position, key, item[key]] for position, key in _sdk_fields(item)]
                left_out.setdefault(first, []).extend(fields)
            drafts = [*taken.drafts]
            for n, draft in enumerate(drafts):
                if left_out.get(n):
                    message = msgspec.structs.replace(draft.message, meta={"left_out": left_out[n]})
                    drafts[n] = msgspec.structs.replace(draft, message=message)
            self.session.say(drafts)

    def count_known(self, passed: Sequence[Item], *, whole: bool = False) -> int | None:
        """How many of the passed items are the newest known ones; those after them are new.

        None if they are not. Older known items may be missing, since they were trimmed; with `whole`, none.
        """
        with self._lock:
            items = self.items()
            last, count = self._last
            added = items[count:]
            if last and passed[: len(last)] == last and begins_with(passed[len(last) :], added):
                known: int | None = len(last) + len(added)  # what was added since the last request
            else:
                known = _count_known(items, passed, whole)
            if known is not None:
                self._last = (passed[:known], len(items))
            return known

    def fit(self, request: Mapping[str, Any], model: str | None) -> list[Item]:
        """The items to send instead of all known ones.

        Raises:
            OverBudgetError: what must be shown is larger than the model's window.
        """
        with self._lock:
            prepare_session(self.session, model, {tool.get("name") for tool in request.get("tools", ())})
            return _for_sdk(self.session.fit(dialect=DIALECT, request=request).messages)


# Recording


def _sdk_fields(item: Item) -> list[tuple[int, str]]:
    """Fields that the API refuses, with their position: the SDK's notes, and ids that are made up."""
    has_own_id = _own_id(item) is not None
    fields = enumerate(item)
    return [(n, key) for n, key in fields if _is_sdk_note(key) or (key == "id" and not has_own_id)]


def _sendable(item: Item) -> Item:
    left_out = {key for _, key in _sdk_fields(item)}
    return {key: value for key, value in item.items() if key not in left_out}


def _own_id(item: Item) -> str | None:
    """The id, if the model's API gave it."""
    id = item.get("id")
    is_own = isinstance(id, str) and id.startswith(PREFIXES.get(item.get("type", "message"), ""))
    return id if is_own else None


def _recorded_items(said: Said) -> list[Item]:
    """Messages in other dialects are rendered as items."""
    if said.line.apart:
        return []
    if said.dialect != DIALECT or said.raw is None:
        return render(said.message)[0]
    value = codec.loads(said.raw)
    fields = [list(item.items()) for item in (value if isinstance(value, list) else [value])]
    for index, position, key, inner in (said.message.meta or {}).get("left_out", ()):
        fields[index].insert(position, (key, inner))
    return list(map(dict, fields))


# Recognizing


def _count_known(items: Sequence[Item], passed: Sequence[Item], whole: bool) -> int | None:
    """Compares without the items that the SDK may leave out of what it passes.

    These are reasoning, calls without results, results whose calls were trimmed, and all but one of several
    calls with the same id.
    """
    calls = Counter(filter(None, map(_call_id, items)))
    results = {*filter(None, map(_result_id, items))}
    optional_calls = {id for id, times in calls.items() if times > 1 or id not in results}
    trimmed = results - {*map(_call_id, passed)}
    optional_results = trimmed | {id for id, times in calls.items() if times > 1}

    def is_optional(item: Item) -> bool:
        is_reasoning = item.get("type") == "reasoning"
        return is_reasoning or _call_id(item) in optional_calls or _result_id(item) in optional_results

    known = [n for n, item in enumerate(items) if not is_optional(item)]
    compared = [n for n, item in enumerate(passed) if not is_optional(item)]
    length = overlap([_content(items[n]) for n in known], [_content(passed[n]) for n in compared])
    if length < len(known) and (whole or not length):
        return None
    count = compared[length - 1] + 1 if length else 0
    for item in items[known[-1] + 1 if known else 0 :]:  # the newest are optional, and may be passed
        if count < len(passed) and _is_same(item, passed[count]):
            count += 1
    return count if count or not items else None


def _is_same(one: Item, two: Item) -> bool:
    return one == two or _content(one) == _content(two)


def _content(item: Item) -> Item:
    """Without what the SDK may leave out when it passes an item on."""
    return {key: value for key, value in item.items() if key != "id" and not _is_sdk_note(key)}


def _is_sdk_note(key: str) -> bool:
    """True for fields that the SDK does not send."""
    return key.startswith("_agents_") or key == "created_by"


def _call_id(item: Item) -> str | None:
    return None if _is_result(item) else item.get("call_id")


def _result_id(item: Item) -> str | None:
    return item.get("call_id") if _is_result(item) else None


def _is_result(item: Item) -> bool:
    return str(item.get("type")).endswith("_output")


def lacks_calls(items: Sequence[Item]) -> bool:
    """True if there are results without their calls: the provider has the rest of the history."""
    return not set(map(_result_id, items)) <= {None, *map(_call_id, items)}


def begins_with(items: Sequence[Item], beginning: Sequence[Item]) -> bool:
    return len(beginning) <= len(items) and all(map(_is_same, beginning, items))


# Sending


def _for_sdk(items: list[Item]) -> list[Item]:
    """With different ids for calls that share one, and with an id for each message of the model.

    Of calls with the same id, the SDK would send only the newest; and it requires ids of messages.
    """
    times = Counter[str]()
    prepared: list[Item] = []
    for item in items:
        id = item.get("call_id")
        if id:
            times[id] += not _is_result(item)
            if times[id] > 1:
                item = {**item, "call_id": tool_id(f"{id}{ID_SEPARATOR}{times[id]}")}
        elif item.get("type") == "message" and item.get("role") == "assistant" and "id" not in item:
            item = {"id": NO_ID, **item}
        prepared.append(item)
    return prepared


def content_key(item: Item) -> bytes:
    return codec.dumps(_content(item))
