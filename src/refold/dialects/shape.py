"""What the formats have in common: expecting a shape, and saying what another dialect cannot."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from refold.core.codec import dumps
from refold.core.errors import MessageError
from refold.core.message import CompactionMarker, Media, Message, Opaque, Part, Reasoning, Text

OWN = ("metadata", "error", "expiry", "tags", "id")
"""Fields of a dict message that are for refold, in dialects whose API has no field of that name."""
EMPTY = "[empty]"
"""Stands where a message or block would be empty."""


def stands_apart(value: Any, field: str) -> bool:
    """True for system text that is sent apart in a field of the request, such as `{"system": …}`."""
    return isinstance(value, Mapping) and field in value and value.keys().isdisjoint(("role", "type"))


def own_facts(value: dict[str, Any], own: Sequence[str] = OWN) -> dict[str, Any]:
    """What a `Message` takes from these fields. What has no sense in one is left out, not refused: messages
    that were stored before are read by this too."""
    facts = dict[str, Any]()
    if "metadata" in own:
        facts["meta"] = value.get("metadata")
    if "error" in own:
        facts["error"] = _error_text(value.get("error"))
    if "id" in own:
        facts["id"] = own_id(value.get("id"))
    return facts


def own_id(value: Any) -> str | None:
    """The id of a row, which may be a number."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number or (isinstance(value, str) and value) else None


def without(value: Any, names: Sequence[str]) -> Any:
    """The same without some fields, or the very same where it has none of them."""
    if not isinstance(value, dict) or value.keys().isdisjoint(names):
        return value
    return {key: inner for key, inner in value.items() if key not in names}


def _error_text(value: Any) -> str | None:
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        value = value["message"]
    return value if isinstance(value, str | None) else dumps(value).decode()


def expect(value: Any, kind: Any, where: str) -> None:
    """
    Raises:
        MessageError: it is something else.
    """
    if not isinstance(value, kind):
        raise MessageError(where, f"expected {getattr(kind, '__name__', kind)}, got {name_of(value)}")


def expect_parts(content: Any, where: str) -> None:
    """For what is not a text.

    Raises:
        MessageError: it is no list either.
    """
    if not isinstance(content, list):
        raise MessageError(where, f"expected a text or a list of parts, got {name_of(content)}")


def named(value: Any, known: Collection[str], where: str) -> str:
    """
    Raises:
        MessageError: it is not one of the known ones.
    """
    if not isinstance(value, str) or value not in known:
        raise MessageError(where, f"{value!r} is not one of {', '.join(known)}")
    return value


def name_of(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def kind_of(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else None


def rest_of(part: Part, dialect: str, lost: list[str]) -> list[Any]:
    """What can be sent of a part that has no form of its own in a dialect; what cannot is named in `lost`."""
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


def sayable(message: Message, lost: list[str]) -> list[Part]:
    """Its parts, less those that no provider takes from this role."""
    parts = worded(message)
    if message.role in ("user", "tool"):
        return parts
    lost += [f"{part.kind} data of the {message.role}" for part in parts if isinstance(part, Media)]
    return [part for part in parts if not isinstance(part, Media)]


def worded(message: Message) -> list[Part]:
    """Its parts, with summaries that came as markers as text."""
    parts = list[Part]()
    for part in message.parts:
        if isinstance(part, CompactionMarker) and part.text:
            parts.append(Text(part.spoken))
        else:
            parts.append(part)
    return parts


def id_within(id: str, length: int, also: str) -> str:
    """The same id if its letters and its length are allowed; else one made from it, always the same."""
    if 0 < len(id) <= length and all((c.isascii() and c.isalnum()) or c in also for c in id):
        return id
    return "call_" + blake2b(id.encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()


def is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def repeated(ids: Sequence[Hashable]) -> list[bool]:
    """For each id, whether it occurs earlier in the list."""
    seen: set[Hashable] = set()
    result = []
    for id in ids:
        result.append(id in seen)
        seen.add(id)
    return result
