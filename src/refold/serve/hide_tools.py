"""Hides the gateway's own tools from the client: one class for each dialect.

Rounds in which the model called nothing but the gateway's tools are continued, and look like one answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from refold.core.expiry import OWN_TOOLS
from refold.dialects.shape import kind_of
from refold.serve.incoming import ClientDialect

STREAM_ENDS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
"""Types of the last event of a stream."""
STOP_WITHOUT_CALLS = {"tool_use": "end_turn", "tool_calls": "stop"}


def tool_hider(dialect: ClientDialect) -> "ToolHider":
    match dialect:
        case "anthropic":
            return _AnthropicHider()
        case "openai-responses":
            return _ResponsesHider()
    return _ChatHider()


class ToolHider(ABC):
    """Makes one reply, or one stream, of the replies or streams of several rounds."""

    def __init__(self) -> None:
        self._rounds = 0
        self._shown = 0
        """Blocks, items or calls that the client has seen."""
        self._indices: dict[int, int | None] = {}
        """What the client sees as the index of each of this round; None for what is hidden."""
        self.held_back: list[dict[str, Any]] = []
        """Events at the end of this round."""

    @abstractmethod
    def reply(self, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One reply made of those of all rounds."""

    def begin_stream(self) -> None:
        self._rounds += 1
        self._indices = {}
        self.held_back = []

    @abstractmethod
    def feed(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What the client sees of an event. The end of the stream is held back."""

    @abstractmethod
    def end(self, visible: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The end of the stream, after the last round. `visible` is the reply that all of it makes."""

    def _visible_index(self, index: int, call: Any) -> int | None:
        if index not in self._indices:
            is_own = _is_own(call)
            self._indices[index] = None if is_own else self._shown
            self._shown += not is_own
        return self._indices[index]


class _AnthropicHider(ToolHider):
    def reply(self, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
        content = [block for one in rounds for block in one["content"] if not _is_own(block)]
        has_calls = any(kind_of(block) == "tool_use" for block in content)
        reason = _stop_reason(rounds[-1].get("stop_reason"), has_calls)
        return _with_all_usage(rounds) | {"content": content, "stop_reason": reason}

    def feed(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        match kind_of(event):
            case "message_start":
                if self._rounds == 1:
                    yield event
            case "content_block_start":
                index = self._visible_index(event["index"], event["content_block"])
                if index is not None:
                    yield {**event, "index": index}
            case "content_block_delta" | "content_block_stop":
                index = self._indices.get(event["index"])
                if index is not None:
                    yield {**event, "index": index}
            case "message_delta" | "message_stop":
                self.held_back.append(event)
            case _:
                yield event

    def end(self, visible: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for event in self.held_back:
            if kind_of(event) == "message_delta":
                delta = {**(event.get("delta") or {}), "stop_reason": visible.get("stop_reason")}
                event = {**event, "delta": delta}
                if self._rounds > 1:
                    event["usage"] = visible.get("usage")
            yield event


class _ChatHider(ToolHider):
    """Expand and search are offered only where the model makes one choice."""

    def __init__(self) -> None:
        super().__init__()
        self._id: Any = None

    def reply(self, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
        choices = [one["choices"][0] for one in rounds]
        last = choices[-1]
        texts = [choice["message"].get("content") for choice in choices]
        calls: list[Any] = []
        for choice in choices:
            calls += [call for call in choice["message"].get("tool_calls") or () if not _is_own(call)]
        message = {key: value for key, value in last["message"].items() if key != "tool_calls"}
        message["content"] = "".join(filter(None, texts)) or last["message"].get("content")
        if calls:
            message["tool_calls"] = calls
        reason = _stop_reason(last.get("finish_reason"), bool(calls))
        return _with_all_usage(rounds) | {"choices": [{**last, "message": message, "finish_reason": reason}]}

    def feed(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._id = self._id or event.get("id")
        if self._rounds > 1 and "id" in event:
            event = {**event, "id": self._id}
        choices = event.get("choices")
        if event.get("usage"):
            with_usage = {**event, "choices": []}
            self.held_back = [one for one in self.held_back if not one.get("usage")] + [with_usage]
            event = {name: value for name, value in event.items() if name != "usage"}
            if not choices:
                return
        if not choices:
            yield event
            return
        choice = choices[0]
        delta = dict(choice.get("delta") or {})
        calls = []
        for call in delta.pop("tool_calls", None) or ():
            index = self._visible_index(call.get("index", 0), call)
            if index is not None:
                calls.append({**call, "index": index})
        if calls:
            delta["tool_calls"] = calls
        if choice.get("finish_reason") is not None:
            self.held_back.insert(0, {**event, "choices": [{**choice, "delta": {}}]})
        has_content = any(value for key, value in delta.items() if key != "role")
        if has_content or (self._rounds == 1 and "role" in delta):
            yield {**event, "choices": [{**choice, "delta": delta, "finish_reason": None}]}

    def end(self, visible: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for event in self.held_back:
            if event.get("usage"):
                yield {**event, "usage": visible["usage"]}
            else:
                reason = visible["choices"][0].get("finish_reason")
                yield {**event, "choices": [{**event["choices"][0], "finish_reason": reason}]}


class _ResponsesHider(ToolHider):
    def __init__(self) -> None:
        super().__init__()
        self._sequence_number = 0

    def reply(self, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
        output = [item for one in rounds for item in one["output"] if not _is_own(item)]
        return _with_all_usage(rounds) | {"output": output}

    def feed(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        kind = kind_of(event) or ""
        if kind in STREAM_ENDS:
            self.held_back.append(event)
        elif kind in ("response.created", "response.in_progress", "response.queued"):
            if self._rounds == 1:
                yield self._numbered(event)
        elif "output_index" not in event:
            yield self._numbered(event)
        else:
            index = self._visible_index(event["output_index"], event.get("item"))
            if index is not None:
                yield self._numbered({**event, "output_index": index})

    def end(self, visible: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for event in self.held_back:
            yield self._numbered({**event, "response": visible})

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        if "sequence_number" in event:
            event = {**event, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return event


def _is_own(call: Any) -> bool:
    """True for a call of the gateway's own tools, in any dialect."""
    if not isinstance(call, dict):
        return False
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else call.get("name")
    return name in OWN_TOOLS and kind_of(call) in ("tool_use", "function_call", "function", None)


def _stop_reason(reason: Any, has_calls: bool) -> Any:
    return reason if has_calls else STOP_WITHOUT_CALLS.get(reason, reason)


def _with_all_usage(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last reply, with the usage of all rounds."""
    usages = [one["usage"] for one in rounds if isinstance(one.get("usage"), dict)]
    return {**rounds[-1], "usage": _sum(usages)} if usages else dict(rounds[-1])


def _sum(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of the same name added; everything else from the last."""
    total: dict[str, Any] = {}
    for usage in usages:
        for name, value in usage.items():
            before = total.get(name)
            if isinstance(value, int | float) and isinstance(before, int | float):
                total[name] = before + value
            elif isinstance(value, dict) and isinstance(before, dict):
                total[name] = _sum([before, value])
            else:
                total[name] = value
    return total
