"""Items of OpenAI's Agents SDK in one of our conversations: kept as they came, known again, made to fit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from threading import RLock
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec

from refold.adapters.align import numbered, standing, woven
from refold.core import codec
from refold.core.draft import Draft
from refold.core.event import Said
from refold.core.expiry import EXPAND
from refold.core.pairing import ID_SEPARATOR
from refold.dialects.openai_responses import DIALECT, render, tool_id
from refold.dialects.repairs.openai_responses import PREFIXES
from refold.session.session import Session

Item: TypeAlias = dict[str, Any]
NO_ID = "__fake_id__"
"""What the SDK has for an id where there is none: it wants one, and never sends this."""


class History:
    def __init__(self, session: Session) -> None:
        self.session, self._lock = session, RLock()
        self._items: list[Item] = []
        self.places: list[int] = []
        """Of the message that each item is in: what the model said at once is one."""
        self._live: object = None
        self._next = 0
        self._turn: dict[str, Item] = {}
        """What was added since the user spoke, by its id."""
        self._seen: tuple[Sequence[Item], int] = ((), 0)
        """What was handed over last, and how many items were known then."""

    def items(self) -> list[Item]:
        """As they were added, also those that others added. Not to be changed."""
        with self._lock:
            self.session.get_count()
            live = self.session.record.live
            if live is not self._live:  # first seen, or erased meanwhile
                self._live, self._items, self.places, self._next, self._seen = live, [], [], 0, ((), 0)
                self._turn = {}
            for event in self.session.events(self._next) if live.state.next > self._next else ():
                self._next = event.at + 1
                for item in _said(event) if isinstance(event, Said) else ():
                    self._items.append(item)
                    self.places.append(event.at)
                    if item.get("role") == "user":
                        self._turn = {}
                    elif (id := _id(item)) is not None:
                        self._turn[id] = item
            return self._items

    def add(self, items: Sequence[Item]) -> None:
        """All of them or none; in one turn, those with an id once."""
        if not items:
            return
        with self._lock:
            self.items()
            new = [_parted(item) for item in items if self._turn.get(_id(item) or "") != item]
            taken = self.session.intake(DIALECT).take([item for item, _ in new])
            beside: dict[int, list[Any]] = {}
            for n, (first, (_, fields)) in enumerate(zip(taken.first, new, strict=True)):
                which = n - taken.first.index(first)
                beside.setdefault(first, []).extend([which, *field] for field in fields)
            self.session.say([_with(draft, beside.get(n)) for n, draft in enumerate(taken.drafts)])

    def covered(self, given: Sequence[Item], *, all_of_it: bool = False) -> int | None:
        """How many of the given are known, as the newest of what is; those after them come next.

        None where they are not. What is known besides may be older: it was trimmed away there, or, with
        `all_of_it`, there must be no such thing.
        """
        with self._lock:
            items = self.items()
            n = self._goes_on(items, given)
            if n is None:
                n = _known(items, given, all_of_it)
            if n is not None:
                self._seen = (given[:n], len(items))
            return n

    def _goes_on(self, items: Sequence[Item], given: Sequence[Item]) -> int | None:
        """The same where they are what was handed over last and what was added since: as a rule."""
        seen, new = self._seen[0], items[self._seen[1] :]
        begins = bool(seen) and given[: len(seen)] == seen and same(new, given[len(seen) :])
        return len(seen) + len(new) if begins else None

    def fit(self, request: Mapping[str, Any], model: str | None) -> list[Item]:
        """What the model is to see instead of all that is known.

        Raises:
            OverBudgetError: what must be shown is larger than the model's window.
        """
        with self._lock:
            session = self.session
            if model is not None and model != session.model:
                session.model = model
            names = {tool.get("name") for tool in request.get("tools", ())}
            session.reducer.handles = session.settings.shows_handles and EXPAND in names
            shown = session.fit(dialect=DIALECT, request=request).messages
            return [_as_output(item) for item in _told_apart(shown)]


# What is stored


def _parted(item: Item) -> tuple[Item, list[Any]]:
    """An item as the API takes it, and what it would refuse: each field with its place among the others."""
    wrong = {"id"} if _id(item) is None else ()
    left = [[n, key, value] for n, (key, value) in enumerate(item.items()) if _is_mark(key) or key in wrong]
    names = {key for _, key, _ in left}
    return {key: value for key, value in item.items() if key not in names}, left


def _id(item: Item) -> str | None:
    """Its own, where the model has given it one: others are made up."""
    id = item.get("id")
    is_own = isinstance(id, str) and id.startswith(PREFIXES.get(item.get("type", "message"), ""))
    return id if is_own else None


def _with(draft: Draft, beside: list[Any] | None) -> Draft:
    if not beside:
        return draft
    message = msgspec.structs.replace(draft.message, meta={"left_out": beside})
    return msgspec.structs.replace(draft, message=message)


def _said(said: Said) -> list[Item]:
    """What came in another dialect comes in this one."""
    if said.line.apart:
        return []
    if said.dialect != DIALECT or said.raw is None:
        return render(said.message)[0]
    value = codec.loads(said.raw)
    fields = [list(item.items()) for item in (value if isinstance(value, list) else [value])]
    for which, n, key, inner in (said.message.meta or {}).get("left_out", ()):
        fields[which].insert(n, (key, inner))
    return list(map(dict, fields))


# What is known again


def _known(items: Sequence[Item], given: Sequence[Item], all_of_it: bool) -> int | None:
    loose = _Loose.of(items, set(map(_call, given)))
    for n in range(len(given), 0 if items else -1, -1):
        start = _start(items, given[:n], loose)
        if start is not None and not (all_of_it and start):
            return n
    return None


class _Loose(NamedTuple):
    """Ids of calls that the SDK does not hand on as they were added."""

    open: set[str]
    """Without a result: it leaves the call out."""
    cut: set[str]
    """Whose call was trimmed away: it leaves the result out."""
    again: set[str]
    """That several calls have: it hands on one of them."""

    @classmethod
    def of(cls, items: Sequence[Item], given: set[str | None]) -> "_Loose":
        calls, answers = Counter(map(_call, items)), set(map(_answer, items))
        again = {id for id, times in calls.items() if id and times > 1}
        return cls({*filter(None, calls)} - answers, {id for id in answers if id and id not in given}, again)

    def may_lack(self, item: Item) -> bool:
        call, answer = _call(item), _answer(item)
        is_loose = call in self.open or answer in self.cut or (call or answer) in self.again
        return is_loose or item.get("type") == "reasoning"


def _start(items: Sequence[Item], given: Sequence[Item], loose: _Loose) -> int | None:
    """Where the given begin among the items, which end with them."""
    at = len(items)
    for one in reversed(given):
        if (_call(one) or _answer(one)) in loose.again:
            continue
        at -= 1
        while at >= 0 and not _same(items[at], one):
            if not loose.may_lack(items[at]):
                return None
            at -= 1
        if at < 0:
            return None
    return at


def _same(one: Item, two: Item) -> bool:
    return one == two or _essence(one) == _essence(two)


def _essence(item: Item) -> Item:
    """Without what the SDK may leave out as it hands an item on."""
    return {key: value for key, value in item.items() if key != "id" and not _is_mark(key)}


def _is_mark(key: str) -> bool:
    """It is a note of the SDK's own, which no model gets."""
    return key.startswith("_agents_") or key == "created_by"


def _call(item: Item) -> str | None:
    """The id of the call that it is."""
    return None if _is_answer(item) else item.get("call_id")


def _answer(item: Item) -> str | None:
    """The id of the call that it answers."""
    return item.get("call_id") if _is_answer(item) else None


def _is_answer(item: Item) -> bool:
    return str(item.get("type")).endswith("_output")


def is_part(items: Sequence[Item]) -> bool:
    """There are results without their calls: the provider has the rest."""
    return not set(map(_answer, items)) <= {None, *map(_call, items)}


def same(some: Sequence[Item], others: Sequence[Item]) -> bool:
    """The others begin with these."""
    return len(some) <= len(others) and all(map(_same, some, others))


# What is shown


def _told_apart(items: list[Item]) -> list[Item]:
    """Of calls with one id the SDK would send only the newest: the others' ids are told apart."""
    times, shown = Counter[str](), list[Item]()
    for item in items:
        id = item.get("call_id")
        if id:
            times[id] += not _is_answer(item)
            item = {**item, "call_id": tool_id(f"{id}{ID_SEPARATOR}{times[id]}")} if times[id] > 1 else item
        shown.append(item)
    return shown


def _as_output(item: Item) -> Item:
    """What the model said, as the SDK wants it."""
    is_output = item.get("type") == "message" and item.get("role") == "assistant" and "id" not in item
    return {"id": NO_ID, **item} if is_output else item


# What a filter of the user's made of it


class Standing(NamedTuple):
    """What stands in one request, of all that was said."""

    items: list[Item]
    places: Mapping[bytes, int] = MappingProxyType({})
    """Where each stands, by what it says."""
    passing: Mapping[int, Item] = MappingProxyType({})
    """What is in this request only."""
    is_otherwise: bool = False
    """Something is said in other words."""

    def placed(self, shown: list[Item]) -> list[Item]:
        """With what is in this request only."""
        return woven(shown, [self.places.get(_key(one)) for one in shown], self.passing)


def standing_in(history: Sequence[Item], request: Sequence[Item]) -> Standing:
    keys = [*map(_key, history)], [*map(_key, request)]
    stand = standing(*map(numbered, keys))
    return Standing(
        [request[n] for n in stand],
        {keys[1][n]: n for n in stand},
        {n: one for n, one in enumerate(request) if n not in stand},
        any(keys[1][n] != keys[0][at] for n, at in stand.items()),
    )


def _key(item: Item) -> bytes:
    return codec.dumps(_essence(item))
