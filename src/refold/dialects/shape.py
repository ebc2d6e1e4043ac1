"""What the dialects share: checks of shapes, and how to express what an API has no form for."""

from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

from refold.core.codec import dumps, read_json
from refold.core.errors import MessageError
from refold.core.message import CompactionMarker, Media, Message, Opaque, Part, Reasoning, Text
from refold.core.pairing import ID_SEPARATOR, original_id

OWN = ("metadata", "error", "expiry", "tags", "id")
"""Fields of a message that are for refold, in dialects whose API has no field of that name."""
EMPTY = "[empty]"
"""Replaces the text of a message or block that has none."""
CALL_ID_FIELDS = ("call_id", "tool_call_id", "tool_use_id", "toolCallId", "id")
"""Fields with the id of a call, in calls and results of all dialects; the first one that is there has it."""

AnyPart = TypeVar("AnyPart", bound=Part)


# Parsing


def expect(value: Any, kind: Any, where: str) -> None:
    """Raises MessageError if the value has another type."""
    if not isinstance(value, kind):
        raise MessageError(where, f"expected {getattr(kind, '__name__', kind)}, got {name_of(value)}")


def expect_one_of(value: Any, known: Collection[str], where: str) -> str:
    """Raises MessageError if the value is not one of the known ones."""
    if not isinstance(value, str) or value not in known:
        raise MessageError(where, f"{value!r} is not one of {', '.join(known)}")
    return value


def parse_content(
    content: Any, where: str, parse_part: Callable[[Any, str], AnyPart]
) -> list[AnyPart | Text]:
    """The parts of a text or of a list of parts.

    Raises:
        MessageError: the content is neither.
    """
    if isinstance(content, str):
        return [Text(content)]
    if not isinstance(content, list):
        raise MessageError(where, f"expected a text or a list of parts, got {name_of(content)}")
    return [parse_part(part, f"{where}[{n}]") for n, part in enumerate(content)]


def name_of(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def kind_of(block: Any) -> str | None:
    """The `type` of a block, item or event."""
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else None


def text_field(value: Mapping[str, Any], *names: str) -> str | None:
    """The first of these fields that is set, if it is a string."""
    found = next((value[name] for name in names if value.get(name) is not None), None)
    return found if isinstance(found, str) else None


def json_or(text: str, default: Any) -> Any:
    """The value of a JSON text; the default if the text is not JSON."""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return default


def stands_apart(value: Any, field: str) -> bool:
    """True for system text that is sent apart in a field of the request, such as `{"system": …}`."""
    return isinstance(value, Mapping) and field in value and value.keys().isdisjoint(("role", "type"))


def own_facts(value: dict[str, Any], own: Sequence[str] = OWN) -> dict[str, Any]:
    """The arguments of `Message` that these fields give. A value of another type is ignored, not refused:
    stored messages are parsed with this, too."""
    facts = dict[str, Any]()
    if "metadata" in own:
        facts["meta"] = value.get("metadata")
    if "error" in own:
        facts["error"] = _error_text(value.get("error"))
    if "id" in own:
        facts["id"] = own_id(value.get("id"))
    return facts


def own_id(value: Any) -> str | None:
    """The id of a message, which may be a number."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number or (isinstance(value, str) and value) else None


def _error_text(value: Any) -> str | None:
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        value = value["message"]
    return value if isinstance(value, str | None) else dumps(value).decode()


# Rendering: each function appends to `lost` what the dialect cannot express


def lost_name(message: Message) -> list[str]:
    """The start of `lost` in a dialect without names of authors."""
    return ["the author's name"] if message.name and message.role != "tool" else []


def expressible(message: Message, lost: list[str]) -> list[Part]:
    """The parts of a message without media that no provider accepts from its role."""
    parts = with_summary_texts(message)
    if message.role in ("user", "tool"):
        return parts
    lost += [f"{part.kind} data of the {message.role}" for part in parts if isinstance(part, Media)]
    return [part for part in parts if not isinstance(part, Media)]


def with_summary_texts(message: Message) -> list[Part]:
    """The parts of a message, with readable compaction markers as texts."""
    parts = list[Part]()
    for part in message.parts:
        if isinstance(part, CompactionMarker) and part.text:
            parts.append(Text(part.spoken))
        else:
            parts.append(part)
    return parts


def render_rest(part: Part, dialect: str, lost: list[str]) -> list[Any]:
    """The blocks of a part that has no form of its own in a dialect."""
    match part:
        case Opaque(value=value, dialect=origin) if origin in (None, dialect):
            return [value]
        case Opaque(value=value):
            lost.append(f"a {kind_of(value) or 'part'} of {part.dialect}")
        case Reasoning():
            lost.append("reasoning")
        case CompactionMarker():
            lost.append("a compaction that only its provider can read")
    return []


def with_results(message: Message, said: list[Any], results: list[Any]) -> list[Any]:
    """Results after what an assistant says, but before what a user says."""
    return [*said, *results] if message.role == "assistant" else [*results, *said]


def data_url(media: Media, mime: str) -> str | None:
    """A URL with the data of a medium, or its own URL; `mime` is the type if it names none."""
    own_mime, data = media.inline or ("", "")
    return f"data:{own_mime or mime};base64,{data}" if data else media.url


def fitting_id(id: str, longest: int | None = None, also: str | None = None) -> str:
    """The id if an API accepts it, else one derived from it.

    `longest` is the number of characters that it may have, and `also` are those that it may contain besides
    ASCII letters and digits; None allows all.
    """
    if also is None:
        is_allowed = ID_SEPARATOR not in id
    else:
        is_allowed = all((char.isascii() and char.isalnum()) or char in also for char in id)
    if id and is_allowed and (longest is None or len(id) <= longest):
        return id
    return "call_" + blake2b(id.encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()


def with_call_ids(value: Any, ids: list[str]) -> Any:
    """A message as it came, with unique ids in place of those of its calls, or of the call that it answers.

    Each of `ids` is taken out of the list when its place is found.
    """
    if isinstance(value, list):
        return [with_call_ids(inner, ids) for inner in value]
    if not isinstance(value, dict):
        return value
    new = value | {
        name: with_call_ids(value[name], ids) for name in ("content", "tool_calls") if name in value
    }
    field = next((name for name in CALL_ID_FIELDS if name in value), None)
    if ids and field and original_id(str(value[field])) == original_id(ids[0]):
        new[field] = fitting_id(ids.pop(0))
    return new


def without(value: Any, names: Sequence[str]) -> Any:
    """The value without some fields; the very same if it has none of them."""
    if not isinstance(value, dict) or value.keys().isdisjoint(names):
        return value
    return {key: inner for key, inner in value.items() if key not in names}


# Repairs


def is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []
