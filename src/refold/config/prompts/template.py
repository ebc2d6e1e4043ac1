"""Prompt templates: text with `{{name}}` for values, and no other syntax."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from refold.core.errors import SettingError
from refold.core.lazy import regex

VARIABLES: dict[str, tuple[str, ...]] = {
    "system": (),
    "conversation": (
        "task",
        "rules",
        "requests",
        "previous",
        "messages",
        "focus",
        "round",
        "headings",
        "profile",
        "max_tokens",
        "max_words",
    ),
    "message": (
        "task",
        "tool",
        "message_type",
        "turn_added",
        "content",
        "original_length",
        "prompt",
        "length",
        "max_tokens",
    ),
}
SECTIONS = (
    "Requests of the user",
    "Work done",
    "Decisions",
    "Current state",
    "Errors, and what followed",
    "Pending",
    "Next action",
)
"""The sections of a summary of a conversation, unless its template names others."""
NONE = "(none)"
"""Shown for an empty value."""
WORDS_PER_TOKEN = 0.6
"""In text with many identifiers."""
_GAP = regex(r"\{\{(.*?)\}\}")
_OPENED = regex(r"---[ \t]*\r?\n[ \t]*(?:models|sections)[ \t]*:")
_FRONT = regex(r"\A---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)


class FrontMatter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[str, ...] | None = None
    sections: tuple[str, ...] | None = None


class Template(msgspec.Struct, frozen=True):
    """
    >>> Template("greeting", "{{who}}, {{when}}", "built-in").render(who="{{when}}", when=None)
    '{{when}}, (none)'
    """

    name: str
    text: str
    origin: str
    """`built-in`, the file, or both for a text inside of a frame."""
    models: tuple[str, ...] = ()
    """Tried in this order; empty, those of the settings."""
    sections: tuple[str, ...] = ()
    """Headings of the answer."""

    @property
    def variables(self) -> frozenset[str]:
        return frozenset(gap.strip() for gap in _GAP.findall(self.text))

    def render(self, **values: object) -> str:
        """The text with all values filled in; `{{…}}` inside of a value stays.

        `headings` default to the sections, and `max_words` follows from `max_tokens`.

        Raises:
            KeyError: a variable has no value, not even None.
        """
        known = {"headings": "\n".join(f"## {title}" for title in self.sections), **values}
        match known.get("max_tokens"):
            case int(tokens):
                known.setdefault("max_words", int(tokens * WORDS_PER_TOKEN))
        return fill(self.text, {name: _shown(known[name]) for name in self.variables})


def fill(text: str, values: Mapping[str, str]) -> str:
    """Fills in some values; other variables stay."""
    return _GAP.sub(lambda gap: values.get(gap[1].strip(), gap[0]), text)


def parse(name: str, text: str, origin: str, known: Sequence[str]) -> Template:
    """Raises SettingError if a variable is not `known`, or the front matter is not valid."""
    front = _FRONT.match(text)
    if front is None and _OPENED.match(text):
        raise SettingError(f"{origin}:1", "the front matter has no end: close it with a line of ---")
    start = front.end() if front else 0
    for gap in _GAP.finditer(text, start):
        if gap[1].strip() not in known:
            line = text.count("\n", 0, gap.start()) + 1
            allowed = ", ".join(known) or "none"
            raise SettingError(f"{origin}:{line}", f"{gap[0]} is not known; known here: {allowed}")
    return Template(name, text[start:].strip(), origin, **_front_matter(front[1] if front else "", origin))


def _front_matter(front: str, origin: str) -> dict[str, tuple[str, ...]]:
    if not front.strip():
        return {}
    try:
        tree = msgspec.yaml.decode(front, type=FrontMatter | None) or FrontMatter()
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        known = ", ".join(FrontMatter.__struct_fields__)
        raise SettingError(origin, f"the front matter is not valid: {error}; known here: {known}") from error
    return {"models": tree.models or (), "sections": tree.sections or ()}


def _shown(value: object) -> str:
    text = "" if value is None else str(value)
    return text if text.strip() else NONE
