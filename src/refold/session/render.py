"""Renders a view as a request in one dialect, and reuses the last request while the view only grows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from refold.core import codec
from refold.core.errors import RefoldError
from refold.core.event import Line, Piece
from refold.core.message import Message, Text, ToolResult
from refold.core.pairing import (
    NO_RESULT,
    MissingResult,
    OrphanResult,
    Slot,
    has_renamed_ids,
    repair_pairs,
    unique_call_ids,
    with_unique_ids,
)
from refold.dialects.message_list import MessageList
from refold.dialects.registry import DIALECTS, is_plain
from refold.dialects.rules.request import Facts, RequestRules, has_cache_mark
from refold.dialects.rules.targets import RULES
from refold.dialects.shape import with_call_ids, without
from refold.models.count import Units
from refold.stores.record import Record

REPAIR_TOKENS = 8
"""Tokens that one repair may add, such as a placeholder or a label."""
UNSUPPORTED = "{}: {} cannot be written in {}; it is left out of the request, not of the record"
STALE_THINKING = "{}: signed thinking is left out, because the messages before it were edited"
LONE_SURROGATE = "{}: a lone surrogate is escaped, since it cannot be sent as UTF-8"
LOST_REASONING = "{}: the item id is left out, because its reasoning item is hidden"
REPEATED_CALL_ID = "{}: several calls had the same id; each is sent with an id of its own"


class RenderRequest(msgspec.Struct, frozen=True):
    """The kind of request that a view is rendered for."""

    dialect: str
    facts: Facts = Facts()
    binds_thinking: bool = False
    """The model rejects signed thinking if the messages before it have changed."""
    all_stale: bool = False
    """System text or tools changed: all signed thinking is invalid."""
    repair: bool = True
    replaces_system: bool = False
    """The caller sends its own system text instead of the recorded one."""
    sends_own_fields: bool = False
    """Fields such as `tags` are sent too: a gateway's client means them for the provider."""


class Rendered(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    """Copies that the caller may change."""
    system: Any = None
    """System text, where the dialect has it apart from the messages."""
    repair_tokens: int = 0
    """Tokens that repairs added."""
    notices: tuple[str, ...] = ()
    """Repairs, and what the dialect cannot express."""
    is_system_new: bool = False
    """The system text differs from that of the previous request."""
    settled: int = 0
    """The number of messages up to the last edited one; 0 if unknown."""


class RenderedLine(NamedTuple):
    """A line as values of the dialect."""

    values: list[Any]
    piece: Piece | None = None
    came: bool = False
    """It is as its sender wrote it."""
    notes: tuple[str, ...] = ()
    unsent: int = 0
    """Tokens of a summary that only another provider can decrypt."""


class Renderer:
    """Renders one view of a record for one kind of request."""

    def __init__(self, record: Record, request: RenderRequest, counter: Units) -> None:
        self._record = record
        self._request = request
        self._counter = counter
        self._sent_system: Any = None
        self._rendered_lines: dict[tuple[int, int], RenderedLine] = {}
        self._live = record.live
        self._start(-1)

    def _start(self, edition: int) -> None:
        self._edition = edition
        self._items = 0
        self._settled = 0
        self._unsent = 0
        self._message_list = self._empty_list()
        self._checked = 0
        """Messages that the rules have seen; the newest one may still grow."""
        self._rules = RULES[self._request.dialect](self._request.facts)
        self._notes: dict[str, list[int]] = {}
        was_reopened = self._live is not self._record.live
        self._live = self._record.live
        if was_reopened or self._request.binds_thinking or DIALECTS[self._request.dialect].has_items:
            self._rendered_lines = {}  # for these two, a line depends on the lines before it
        lines = {(line.at, line.n) for item in self._record.live.items for line in item.lines}
        self._rendered_lines = {key: line for key, line in self._rendered_lines.items() if key in lines}

    def _empty_list(self) -> MessageList:
        return MessageList(DIALECTS[self._request.dialect], self._request.facts.system_inside)

    def unsent(self) -> int:
        """Tokens of shown messages that are not sent: summaries that only another provider can decrypt."""
        self._catch_up()
        return self._unsent

    def _catch_up(self) -> None:
        live = self._record.live
        if self._edition != live.edition:
            self._start(live.edition)
        items = live.items[self._items :]
        new = [line for item in items for line in item.lines]
        self._record.load(new)
        for item in items:
            for line in item.lines:
                self._unsent += self._add_line(self._message_list, line, self._notes).unsent
            self._settled = len(self._message_list.messages) if item.edit is not None else self._settled
        self._items = len(live.items)

    def render(self) -> Rendered:
        self._catch_up()
        live = self._record.live
        rules = self._checked_rules()
        system = self._message_list.system
        is_system_new = self._sent_system is not None and system != self._sent_system
        self._sent_system = system
        faults = _violations(rules)
        if faults and self._request.repair:
            paired = not any(fault.rule in rules.PAIRING for fault in faults)
            repaired = self._render_repaired([line for item in live.items for line in item.lines], paired)
            return msgspec.structs.replace(repaired, is_system_new=is_system_new)
        notices = [
            *self._notices_of(self._notes),
            *self._message_list.notices,
            *(f"{f.rule}: {f.message}" for f in faults),
        ]
        rendered = _rendered(self._message_list, self._message_list.messages, notices)
        return msgspec.structs.replace(rendered, is_system_new=is_system_new, settled=self._settled)

    def _checked_rules(self) -> RequestRules:
        """Validates the request. The newest message may still grow, so it is validated every time."""
        message_list = self._message_list
        settled = max(0, len(message_list.messages) - 1)
        self._rules.feed(message_list.messages[self._checked : settled])
        self._checked = settled
        rules = self._rules.copy()
        rules.facts = self._facts(message_list)
        rules.feed(message_list.messages[settled:])
        return rules

    def _facts(self, message_list: MessageList) -> Facts:
        """With the cache marks of the system text."""
        facts = self._request.facts
        system = message_list.system
        sent = isinstance(system, list) and not self._request.replaces_system
        marks = sum(map(has_cache_mark, system)) if sent else 0
        return msgspec.structs.replace(facts, marks=facts.marks + marks) if marks else facts

    def _render_repaired(self, lines: list[Line], paired: bool) -> Rendered:
        lines = [self._with_unique_calls(line) for line in lines]
        slots, notices = (list[Slot](lines), list[str]()) if paired else repair_pairs(lines)
        self._record.load(lines)
        message_list = self._empty_list()
        notes = dict[str, list[int]]()
        tokens = 0
        left_out = set(lines)
        for slot in slots:
            if isinstance(slot, Line):
                self._add_line(message_list, slot, notes)
                left_out.discard(slot)
                continue
            placeholder = self._placeholder(slot)
            for value in DIALECTS[self._request.dialect].render(placeholder)[0]:
                message_list.add(_escape_surrogates(value), -1)
            if isinstance(slot, OrphanResult):
                tokens += REPAIR_TOKENS
                left_out.discard(slot.line)
            else:
                tokens += self._counter.message(placeholder)
        tokens -= sum(line.tokens for line in left_out)
        facts = self._facts(message_list)
        messages = message_list.messages
        repairs: list[str] = []
        rules = self._check(messages, facts)
        if _violations(rules):
            messages = DIALECTS[self._request.dialect].repair(messages, repairs, facts)
            rules = self._check(messages, facts)
        if paired and any(fault.rule in rules.PAIRING for fault in rules.violations):
            return self._render_repaired(lines, False)
        for fault in _violations(rules):
            if fault.rule == "S1":
                raise RefoldError(f"The request is not valid and cannot be repaired: {fault.message}")
            raise RefoldError(f"refold built an invalid request. This is a bug, please report it: {fault}")
        all_notices = (*self._notices_of(notes), *message_list.notices, *notices, *repairs)
        added = tokens + REPAIR_TOKENS * len(repairs)
        return _rendered(message_list, messages, all_notices, added)

    def _with_unique_calls(self, line: Line) -> Line:
        """For logs of earlier versions, in which the calls of one reply may share an id."""
        calls = unique_call_ids(line.calls)
        if calls == line.calls:
            return line
        self._rendered_lines.pop((line.at, line.n), None)
        return msgspec.structs.replace(line, calls=calls)

    def _check(self, messages: list[dict[str, Any]], facts: Facts) -> RequestRules:
        rules = RULES[self._request.dialect](facts)
        rules.feed(messages)
        return rules

    def _add_line(self, message_list: MessageList, line: Line, notes: dict[str, list[int]]) -> RenderedLine:
        rendered = self._rendered_lines.get((line.at, line.n))
        if rendered is None:
            rendered = self._rendered_lines[line.at, line.n] = self._render_line(line)
        for value in rendered.values:
            message_list.add(value, line.at, rendered.piece, rendered.came)
        for note in rendered.notes:
            notes.setdefault(note, []).append(line.at)
        return rendered

    def _render_line(self, line: Line) -> RenderedLine:
        entry = self._record.entry(line.at)
        dialect = DIALECTS[self._request.dialect]
        came = codec.came(entry)
        has_surrogate = b"\\ud" in entry.body or b"\\uD" in entry.body
        notes = (
            [LONE_SURROGATE]
            if has_surrogate and _escape_surrogates(text := self._record.message(line).text) != text
            else []
        )
        is_renamed = has_renamed_ids(line)
        notes += [REPEATED_CALL_ID] if line.calls and is_renamed else []
        is_row = came is not None and came.dialect == "flat"  # its text may be the JSON of its parts
        is_own = came is not None and came.dialect == dialect.name
        if came is not None and (is_own or (not is_row and is_plain(came.value, dialect))):
            value = came.value if self._request.sends_own_fields else _for_api(came.value, came.dialect)
            if is_renamed:
                value = with_call_ids(value, list(line.calls) or [line.answers or ""])
            value = self._without_invalid(line, _escape_surrogates(value) if has_surrogate else value, notes)
            return RenderedLine([] if value is None else [value], came.piece, is_own, tuple(notes))
        message = _with_tool(with_unique_ids(self._record.message(line), line), line)
        if came is None and not message.parts and message.role == "assistant":
            return RenderedLine([])  # the answer never came
        if line.apart and dialect.system_field:
            return RenderedLine([{dialect.system_field: message.text}], notes=tuple(notes))
        values, lost = dialect.render(message)
        if not values and message.role == "user":  # a user message is never left out
            mark = Message("user", (Text(f"[{', '.join(lost)}: cannot be shown here]"),))
            values, _ = dialect.render(mark)
        sealed = [self._counter.json(marker.value) for marker in message.markers if marker.is_sealed]
        unsent = line.tokens if sealed and not values else sum(sealed)
        cleaned = [_escape_surrogates(value) for value in values]
        return RenderedLine(cleaned, notes=(*notes, *dict.fromkeys(lost)), unsent=unsent)

    def _without_invalid(self, line: Line, value: Any, notes: list[str]) -> Any:
        """The value without what an edit has made invalid."""
        is_stale = False
        if self._request.binds_thinking and line.role == "assistant":
            stale = self._record.live.state.stale
            is_stale = self._request.all_stale or any(line.at in span for span in stale)
        if is_stale:
            from refold.dialects.anthropic import without_thinking

            new = without_thinking(value)
            notes += [STALE_THINKING] if new is not value else []
            return new
        if isinstance(value, dict) and "id" in value and self._lost_its_reasoning(line, value):
            notes.append(LOST_REASONING)
            return {key: inner for key, inner in value.items() if key != "id"}
        return value

    def _lost_its_reasoning(self, line: Line, value: dict[str, Any]) -> bool:
        """True for an item of Responses whose reasoning item, right before it, is hidden."""
        if not DIALECTS[self._request.dialect].has_items or line.role != "assistant" or not line.at:
            return False
        before = self._record.live.item_at(line.at - 1)
        hidden = before is not None and line.at - 1 not in {shown.at for shown in before.lines}
        if not hidden or value.get("type") in ("reasoning", "item_reference"):
            return False
        came = codec.came(self._record.entry(line.at - 1))
        return came is not None and isinstance(came.value, dict) and came.value.get("type") == "reasoning"

    def _notices_of(self, notes: dict[str, list[int]]) -> list[str]:
        notices = list[str]()
        for note, places in notes.items():
            if note in (STALE_THINKING, LONE_SURROGATE, LOST_REASONING, REPEATED_CALL_ID):
                notices.append(note.format(_places(places)))
            else:
                notices.append(UNSUPPORTED.format(_places(places), note, self._request.dialect))
        return notices

    def _placeholder(self, slot: MissingResult | OrphanResult) -> Message:
        if isinstance(slot, MissingResult):
            return Message("tool", (ToolResult(slot.call, NO_RESULT, slot.tool or None, is_error=True),))
        tool = f" of {slot.line.tools[0]}" if slot.line.tools else ""
        text = self._record.message(slot.line).text
        return Message("user", (Text(f"[refold: result{tool} without its call]\n{text}"),))


def _rendered(
    message_list: MessageList,
    messages: list[dict[str, Any]],
    notices: Sequence[str],
    repair_tokens: int = 0,
) -> Rendered:
    """Copies, since the caller may change a request."""
    copied = msgspec.to_builtins(messages)
    system = msgspec.to_builtins(message_list.system)
    return Rendered(copied, system, repair_tokens, tuple(notices))


def _for_api(value: Any, dialect: str) -> Any:
    """The value without the fields that are for refold."""
    own = DIALECTS[dialect].own_fields
    if isinstance(value, list):
        return [without(item, own(item)) for item in value]
    return without(value, own(value))


def _with_tool(message: Message, line: Line) -> Message:
    """A result with the name of its tool, which its sender may have left out."""
    if line.answers is None or not any(line.tools) or any(result.tool for result in message.results):
        return message
    parts = tuple(
        msgspec.structs.replace(part, tool=line.tools[0]) if isinstance(part, ToolResult) else part
        for part in message.parts
    )
    return msgspec.structs.replace(message, parts=parts)


def _places(places: Sequence[int]) -> str:
    unique = list(dict.fromkeys(places))
    shown = ", ".join(f"#{at}" for at in unique[:3])
    return shown if len(unique) <= 3 else f"{shown} and {len(unique) - 3} more"


def _violations(rules: RequestRules) -> list[Any]:
    """Without G2: an empty conversation is not an error."""
    return [fault for fault in rules.violations if fault.rule != "G2"]


def _escape_surrogates(value: Any) -> Any:
    """Escapes lone surrogates, which cannot be sent as UTF-8; different ids stay different."""
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                return value.encode("utf-8", "backslashreplace").decode()
            return value
        case dict():
            return {_escape_surrogates(key): _escape_surrogates(inner) for key, inner in value.items()}
        case list():
            return list(map(_escape_surrogates, value))
    return value
