"""What the MCP tools answer: JSON, or a text, of at most so many characters, with the way to the rest."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec

from refold.core.codec import dumps
from refold.core.draft import Draft, part_id
from refold.core.errors import MessageError
from refold.core.event import Line, Replaced, Said, Unknown
from refold.core.message import Message
from refold.core.slices import slice_of
from refold.core.view import Item, View
from refold.session.expand import source, written
from refold.session.results import Explanation, Hit
from refold.session.session import Session
from refold.session.tools import within
from refold.stores.record import Record
from refold.stores.store import ConversationInfo

MOST = 100_000
"""Characters of an answer."""
TEXTS = (MOST, 20_000, 5_000, 1_000, 200)
"""Characters of each text in it: the first of these with which there is room for all."""
NOTE = 2_000
"""Characters that are kept free for what is told of the rest."""
NEWEST = 2_000
"""Messages that are looked at: there is never room for more."""
TITLE = 80


def safe(text: str) -> str:
    """Half a character, which no JSON can hold, as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def capped(text: str) -> str:
    """Whatever it is, it is not longer than an answer may be."""
    cut = f"\n[refold: cut at {MOST:,} characters; ask for less]"
    return text if len(text) <= MOST else text[: MOST - len(cut)] + cut


def told(value: Any) -> str:
    return dumps(value).decode()


def page(
    about: dict[str, Any],
    name: str,
    rows: Sequence[Any],
    rest: Callable[[int], str],
    *,
    total: int | None = None,
    newest: bool = False,
) -> str:
    """JSON with as many rows as there is room for, the first or the newest.

    Where that is not all, `rest` says how to get at the others, given how many there are.
    """
    texts = [told(row) for row in rows]
    kept = _first(reversed(texts) if newest else texts, MOST - NOTE - len(told(about)))
    if len(kept) < (len(rows) if total is None else total):
        about = {**about, "note": " ".join(filter(None, (about.get("note"), rest(len(kept)))))}
    return f'{told(about)[:-1]},"{name}":[{",".join(reversed(kept) if newest else kept)}]}}'


def _first(rows: Iterable[str], room: int) -> list[str]:
    kept = list[str]()
    for row in rows:
        room -= len(row) + 1
        if room < 0:
            break
        kept.append(row)
    return kept


def _shortened(rows_of: Callable[[int], list[Any]], about: dict[str, Any]) -> list[Any]:
    """Rows with texts that are as long as there is room for, all the same; `about` is told what was cut."""
    for chars in TEXTS:
        rows = rows_of(chars)
        if sum(len(told(row)) + 1 for row in rows) <= MOST - NOTE - len(told(about)):
            break
    if chars < MOST:
        about["note"] = f"Texts are cut at {chars:,} characters; expand shows all that is at a place."
    return rows


# Lists


def row(listed: ConversationInfo, record: Record | None) -> dict[str, Any]:
    """A conversation in a list of many; without a record where that cannot be read."""
    about: dict[str, Any] = {"id": listed.key.conversation, "created": _time(listed.created)}
    if listed.parent is not None:
        about["parent"] = {"id": listed.parent.conversation, "at": listed.fork_at - 1}
    if record is None:
        return {**about, "problem": "It cannot be read: `refold doctor` says why."}
    live, state = record.live, record.live.state
    last = record.event(state.next - 1)
    facts: dict[str, Any] = {
        "title": _title(record),
        "model": state.model,
        "updated": None if isinstance(last, Unknown) else _time(last.time),
        "messages": state.index,
        "tokens_said": state.total,
        "tokens_shown": live.tokens,
        "edits": sum(item.edit is not None for item in live.items),
    }
    return {**about, **{name: value for name, value in facts.items() if value is not None}}


def _title(record: Record) -> str:
    """As given, else how the first request begins, else the id."""
    state = record.live.state
    first = record.message(state.task).text if state.task and not state.title else ""
    words = " ".join((state.title or first)[: 10 * TITLE].split()) or record.key.conversation
    return words if len(words) <= TITLE else f"{words[: TITLE - 1]}…"


def _time(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def found(hits: Sequence[Hit]) -> str:
    rest = "These are the best {:,}; ask for something more special.".format
    return page({"total": len(hits)}, "hits", hits, rest)


# One conversation


def viewed(session: Session, at: int | None) -> str:
    """What the model sees now, or saw right after the event at a place."""
    with session.notifier:
        session.record.catch_up()
        record = session.record
        live = record.live if at is None else record.as_of(at)
        items = record.with_words(View(tuple(live.items[-NEWEST:]))).items
        total, end = len(live.items), live.state.next
        about: dict[str, Any] = {"conversation": session.conversation, "tokens": live.tokens}
        about |= {"total_items": total, **({} if at is None else {"at": at})}
        rows = _shortened(lambda chars: [_item(record, item, chars) for item in items], about)

    def rest(n: int) -> str:
        first = items[len(items) - n].span.start if n else end
        earlier = f"; show_view with at: {first - 1} shows what was before" if first else ""
        return f"These are the newest {n:,} of {total:,} items{earlier}."

    return page(about, "items", rows, rest, total=total, newest=True)


def _item(record: Record, item: Item, chars: int) -> dict[str, Any]:
    shown = [_message(line, item.words(line), chars) for line in item.lines]
    edit = None if item.edit is None else record.event(item.edit)
    how = {"edit": edit.at, "kind": edit.kind, "why": edit.why} if isinstance(edit, Replaced) else {}
    return {"span": item.span, **how, "tokens": item.tokens, "shown": shown}


def said(session: Session) -> str:
    """What was said, as it was said."""
    with session.notifier:
        session.record.catch_up()
        total, end = session.record.live.state.index, session.record.live.state.next
        newest = list(islice(session.record.backwards(), NEWEST))[::-1]
    about: dict[str, Any] = {"conversation": session.conversation, "total": total}
    rows = _shortened(lambda chars: [_said(one, chars) for one in newest], about)

    def rest(n: int) -> str:
        first = newest[len(newest) - n].at if n else end
        return f"These are the newest {n:,} messages; expand shows any that was said before #{first}."

    return page(about, "messages", rows, rest, total=total, newest=True)


def _said(one: Said, chars: int) -> dict[str, Any]:
    return {"index": one.index, **_message(one.line, one.message, chars)}


def _message(line: Line, message: Message, chars: int) -> dict[str, Any]:
    text = written(message)
    about: dict[str, Any] = {"at": line.place, "role": line.role, "tokens": line.tokens}
    about |= {"tools": line.tools} if line.tools else {}
    return {**about, "text": text[:chars], **({"cut": True} if len(text) > chars else {})}


def explained(conversation: str, why: Explanation) -> str:
    about = {"conversation": conversation, **msgspec.structs.asdict(why)}
    causes = about.pop("causes")
    rest = "The newest {:,} edits of it; explain with the place of an edit tells of that alone.".format
    return page(about, "causes", causes, rest)


def expanded(session: Session, at: int | str, part: dict[str, str]) -> str:
    """The text as it is; where it is too long, as much of it as there is room for and how to go on."""
    text = session.expand(at, **part)
    if len(text) <= MOST:
        return text
    with session.notifier:
        session.record.catch_up()
        behind = source(session.record, at)
    return within(behind, slice_of(part), MOST, len, "")


# What is appended


def appended(session: Session, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Stores all of them or none; what has an id beside its role is stored once.

    Raises:
        MessageError: one of them cannot be stored; nothing was.
    """
    ids = {n: _id(message, n) for n, message in enumerate(messages) if _is_named(message)}
    plain = [
        {key: value for key, value in message.items() if key != "id"} if n in ids else message
        for n, message in enumerate(messages)
    ]
    taken = session.intake().take(plain)
    drafts, ends = list(taken.drafts), [*taken.first[1:], len(taken.drafts)]
    for n, id in ids.items():
        for part, place in enumerate(range(taken.first[n], ends[n])):
            drafts[place] = _named(drafts[place], part_id(id, part))
    places = session.say(drafts)
    return [places[n] for n in taken.first]


def _is_named(message: dict[str, Any]) -> bool:
    """Of an item that has a type, the id is its provider's; of a UI message it is read anyway."""
    return "id" in message and "role" in message and not {"type", "parts"} & message.keys()


def _id(message: dict[str, Any], n: int) -> str:
    id = message["id"]
    if not isinstance(id, str) or not id:
        raise MessageError(f"messages[{n}].id", "an id is a text of at least one character, or left out")
    return id


def _named(draft: Draft, id: str | None) -> Draft:
    return msgspec.structs.replace(draft, message=msgspec.structs.replace(draft.message, id=id))
