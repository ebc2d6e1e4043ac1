"""What a client sees of an answer in which the model also called the gateway's own tools: all but that.

Rounds in which nothing but our own tools was called are gone on with, and look like one answer.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from refold.core.expiry import OWN_TOOLS
from refold.dialects.shape import kind_of
from refold.serve.incoming import Dialect

ENDS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
"""Types of the event that ends a stream."""
STOPS = {"tool_use": "end_turn", "tool_calls": "stop"}
"""How an answer ended, where the calls that it ended with are not shown."""


def visible(dialect: Dialect, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer of all rounds, without calls of our own tools."""
    last = rounds[-1]
    usage = _sum([one.get("usage") for one in rounds])
    beside = {} if usage is None else {"usage": usage}
    match dialect:
        case "anthropic":
            content = [block for one in rounds for block in one["content"] if not _is_own(block)]
            calls = any(kind_of(block) == "tool_use" for block in content)
            return {
                **last,
                **beside,
                "content": content,
                "stop_reason": _stop(last.get("stop_reason"), calls),
            }
        case "openai-responses":
            return {
                **last,
                **beside,
                "output": [o for one in rounds for o in one["output"] if not _is_own(o)],
            }
    return {
        **last,
        **beside,
        "choices": [_choice([one["choices"][0] for one in rounds]), *last["choices"][1:]],
    }


def _choice(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = rounds[-1]
    said = [one["message"].get("content") for one in rounds]
    calls = [call for one in rounds for call in one["message"].get("tool_calls") or () if not _is_own(call)]
    message = {key: value for key, value in last["message"].items() if key != "tool_calls"}
    message["content"] = "".join(filter(None, said)) or last["message"].get("content")
    if calls:
        message["tool_calls"] = calls
    return {**last, "message": message, "finish_reason": _stop(last.get("finish_reason"), bool(calls))}


def _is_own(call: Any) -> bool:
    """Of a block, an item or a call in any of the dialects."""
    if not isinstance(call, dict):
        return False
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else call.get("name")
    return name in OWN_TOOLS and kind_of(call) in ("tool_use", "function_call", "function", None)


def _stop(reason: Any, calls: bool) -> Any:
    return reason if calls else STOPS.get(reason, reason)


def _sum(counts: Sequence[Any]) -> Any:
    """Numbers of the same name added, whatever else there is from the last."""
    if len(counts) == 1 or not all(isinstance(one, dict) for one in counts):
        return counts[-1]
    total: dict[str, Any] = {}
    for one in counts:
        for name, value in one.items():
            old = total.get(name)
            if isinstance(value, int | float) and isinstance(old, int | float):
                total[name] = old + value
            elif isinstance(value, dict) and isinstance(old, dict):
                total[name] = _sum([old, value])
            else:
                total[name] = value
    return total


class Splice(Protocol):
    """Turns the streams of several rounds into one."""

    def begin(self) -> None:
        """Another round."""

    def feed(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What the client sees of an event; how it ends is held back."""

    def end(self) -> Iterator[dict[str, Any]]:
        """What was held back, once no more rounds come."""


def splice_of(dialect: Dialect) -> Splice:
    kinds: dict[Dialect, type[Splice]] = {"anthropic": _Messages, "openai-responses": _Responses}
    return kinds.get(dialect, _Chat)()


class _Messages:
    def __init__(self) -> None:
        self._rounds, self._blocks, self._calls = 0, 0, False
        self._places: dict[int, int | None] = {}
        self._held: list[dict[str, Any]] = []
        self._usage: dict[int, dict[str, Any]] = {}
        """By round; a later count of the same stands for an earlier one."""

    def begin(self) -> None:
        self._rounds += 1
        self._places, self._held, self._usage[self._rounds] = {}, [], {}

    def feed(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        match kind_of(event):
            case "message_start":
                self._count(event.get("message"))
                if self._rounds == 1:
                    yield event
            case "content_block_start":
                block, index = event["content_block"], event["index"]
                self._places[index] = None if _is_own(block) else self._blocks
                if not _is_own(block):
                    self._blocks += 1
                    self._calls = self._calls or kind_of(block) == "tool_use"
                    yield {**event, "index": self._places[index]}
            case "content_block_delta" | "content_block_stop":
                place = self._places.get(event["index"])
                if place is not None:
                    yield {**event, "index": place}
            case "message_delta":
                self._held.append(event)
                self._count(event)
            case "message_stop":
                self._held.append(event)
            case _:
                yield event

    def end(self) -> Iterator[dict[str, Any]]:
        for event in self._held:
            if kind_of(event) == "message_delta":
                delta = event.get("delta") or {}
                delta = {**delta, "stop_reason": _stop(delta.get("stop_reason"), self._calls)}
                event = {**event, "delta": delta}
                event |= {"usage": _sum(list(self._usage.values()))} if self._rounds > 1 else {}
            yield event

    def _count(self, told: Any) -> None:
        usage = told.get("usage") if isinstance(told, dict) else None
        known = usage.items() if isinstance(usage, dict) else ()
        self._usage[self._rounds] |= {name: count for name, count in known if count is not None}


class _Chat:
    def __init__(self) -> None:
        self._calls, self._rounds, self._id = 0, 0, None
        self._places: dict[int, int | None] = {}
        self._finish: dict[str, Any] | None = None
        self._usage: dict[int, dict[str, Any]] = {}
        """By round: an earlier one's is no end of this one."""

    def begin(self) -> None:
        self._rounds += 1
        self._places, self._finish = {}, None

    def feed(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._id = self._id or event.get("id")
        event = {**event, "id": self._id} if self._rounds > 1 and "id" in event else event
        choices = event.get("choices")
        if not choices:
            if event.get("usage"):
                self._usage[self._rounds] = event
            else:
                yield event
            return
        choice = choices[0]
        delta = dict(choice.get("delta") or {})
        calls = [one for call in delta.pop("tool_calls", None) or () for one in self._placed(call)]
        delta |= {"tool_calls": calls} if calls else {}
        if event.get("usage"):
            self._usage[self._rounds] = {**event, "choices": []}
            event = {name: value for name, value in event.items() if name != "usage"}
        shown = {**event, "choices": [{**choice, "delta": delta, "finish_reason": None}]}
        if choice.get("finish_reason") is not None:
            self._finish = {**event, "choices": [{**choice, "delta": {}}]}
        says = any(value for key, value in delta.items() if key != "role")
        if says or (self._rounds == 1 and "role" in delta):
            yield shown

    def _placed(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        index = call.get("index", 0)
        if index not in self._places:
            self._places[index] = None if _is_own(call) else self._calls
            self._calls += not _is_own(call)
        place = self._places[index]
        if place is not None:
            yield {**call, "index": place}

    def end(self) -> Iterator[dict[str, Any]]:
        if self._finish is not None:
            choice = self._finish["choices"][0]
            reason = _stop(choice.get("finish_reason"), bool(self._calls))
            yield {**self._finish, "choices": [{**choice, "finish_reason": reason}]}
        if last := self._usage.get(self._rounds):
            yield {**last, "usage": _sum([one["usage"] for one in self._usage.values()])}


class _Responses:
    def __init__(self) -> None:
        self._rounds, self._items, self._number = 0, 0, 0
        self._places: dict[int, int | None] = {}
        self._ends: dict[int, dict[str, Any]] = {}
        """By round, too."""

    def begin(self) -> None:
        self._rounds += 1
        self._places = {}

    def feed(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        kind = kind_of(event) or ""
        if kind in ENDS:
            self._ends[self._rounds] = event
        elif kind in ("response.created", "response.in_progress", "response.queued"):
            if self._rounds == 1:
                yield self._numbered(event)
        elif "output_index" not in event:
            yield self._numbered(event)
        else:
            index = event["output_index"]
            if index not in self._places:
                own = _is_own(event.get("item"))
                self._places[index] = None if own else self._items
                self._items += not own
            place = self._places[index]
            if place is not None:
                yield self._numbered({**event, "output_index": place})

    def end(self) -> Iterator[dict[str, Any]]:
        if last := self._ends.get(self._rounds):
            rounds = [one["response"] for one in self._ends.values()]
            whole = {**visible("openai-responses", rounds), "id": rounds[0].get("id")}  # as it began
            yield self._numbered({**last, "response": whole})

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        numbered = {**event, "sequence_number": self._number} if "sequence_number" in event else event
        self._number += 1
        return numbered
