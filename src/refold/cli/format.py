"""Text for terminals: messages in one line or in full, without control characters; places, counts, times."""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from shlex import quote
from typing import Any
from unicodedata import category

from refold.core.codec import dumps
from refold.core.event import Span
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    StepStart,
    Text,
    ToolCall,
    ToolResult,
)
from refold.policies.sections import OPEN

GLANCE_CHARS = 2_000
"""More characters than any terminal's line has."""
LEAD_CELLS = 32
"""Text before a call is cut to this width, so that the call is visible."""
_HEADER = re.compile(r"\[refold [^\];\n]*; (?P<what>[^\]\n]*)\]\n?")
JOINERS = "\u200c\u200d"
"""Invisible characters that are part of letters and emoji."""


class _Escapes(dict[int, str]):
    """Maps control and formatting characters to their escapes, and every other character to itself."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in JOINERS:
            char = char.encode("unicode_escape").decode()
        self[code] = char
        return char


_ESCAPES = _Escapes()


def one_line(text: str) -> str:
    """The beginning of a text without line breaks, safe to print."""
    return " ".join(text[:GLANCE_CHARS].split()).translate(_ESCAPES)


def safe(text: str) -> str:
    """The whole text, its lines kept, safe to print."""
    lines = text.replace("\r\n", "\n").expandtabs(4).split("\n")
    return "\n".join(line.translate(_ESCAPES) for line in lines)


def clip(text: str, width: int) -> str:
    """Cuts a text to a width on the screen, where wide characters take two cells."""
    if cell_width(text) <= width:
        return text
    if text.isascii():
        return text[: width - 1].rstrip() + "…"
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1).rstrip() + "…"


def cell_width(text: str) -> int:
    """The width of a text on the screen."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def quoted(id: str) -> str:
    """An id, quoted for the shell."""
    return ("-- " if id.startswith("-") else "") + quote(one_line(id))


def glance(message: Message, tools: Sequence[str] = (), *, is_ours: bool = False) -> str:
    """A message in one line; `tools` names the tool behind a result that does not say so itself.

    Text that refold wrote (`is_ours`) is shown without its header line.
    """
    brief = _without_header if is_ours else one_line
    parts = [part for part in (_part_text(part, tools, brief, " ") for part in message.parts) if part]
    if message.calls:
        parts = [part if part.startswith("→") else clip(part, LEAD_CELLS) for part in parts]
    return " ".join(parts) or "(empty)"


def _without_header(text: str) -> str:
    header = _HEADER.match(text)
    if header is None:
        return one_line(text)
    rest = one_line(text[header.end() :].removeprefix(OPEN))
    if header["what"].endswith(" shown"):
        return rest or "(nothing)"
    return one_line(f"{header['what']} {rest}")


def full(message: Message, tools: Sequence[str] = ()) -> str:
    """All of a message, safe to print."""
    return (
        "\n".join(filter(None, (_part_text(part, tools, safe, "\n") for part in message.parts))) or "(empty)"
    )


def _part_text(part: Part, tools: Sequence[str], shown: Callable[[str], str], between: str) -> str:
    """A part for people; `shown` formats its texts."""
    match part:
        case Text(text=text):
            return shown(text)
        case Reasoning(text=text):
            return f"(thinks) {shown(text)}"
        case ToolCall(tool=tool, input=input):
            return f"→ {one_line(tool)}({shown(input)})"
        case ToolResult(output=str(text)):
            return f"← {_tool(part, tools)}: {shown(text) or '(empty)'}"
        case ToolResult(output=tuple(inner)):
            texts = between.join(_part_text(one, (), shown, between) for one in inner)
            return f"← {_tool(part, tools)}: {texts or '(empty)'}"
        case _:
            return shown(_other(part))


def _tool(result: ToolResult, tools: Sequence[str]) -> str:
    return one_line(result.tool or (tools[0] if len(tools) == 1 else "") or result.call_id)


def _other(part: Part) -> str:
    match part:
        case Media(kind=kind, name=name, url=url, data=data):
            about = name or (url[:80] if url else f"{len(data or ''):,} characters of base64")
            return f"[{kind}: {about}]"
        case Opaque(value=dict(value)):
            return f"[{value.get('type', 'part')}: {_json(value)}]"
        case Opaque(value=value):
            return f"[part: {_json(value)}]"
        case CompactionMarker(text=text):
            return text or "[a compaction that only its provider can decrypt]"
        case StepStart() | _:
            return ""


def _json(value: Any) -> str:
    return dumps(value).decode("utf-8", "replace")


def glance_json(value: Any) -> str:
    """Any JSON in one line, safe to print."""
    return one_line(_json(value))


# Numbers, places and times


def places(span: Span) -> str:
    """
    >>> places(Span(2, 120))
    '#2–#119'
    """
    return f"#{span.start}" if len(span) == 1 else f"#{span.start}–#{span.end - 1}"


def plural(n: int, what: str) -> str:
    """
    >>> plural(1, "message"), plural(1200, "message")
    ('1 message', '1,200 messages')
    """
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def saved_percent(recorded: int, shown: int) -> int:
    """Rounded down, so that 100 means everything; 0 if memories make the view larger than the record."""
    return max(0, int(100 * (recorded - shown) / recorded)) if recorded else 0


def local(time: float) -> str:
    """A time in the local time zone; a dash if the calendar has no such date."""
    try:
        return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "-"
