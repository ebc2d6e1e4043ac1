"""A prompt with gaps: text in which `{{name}}` stands for a value, and nothing else has a meaning."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
"""What may stand in the templates of each kind."""
SECTIONS = (
    "Requests of the user",
    "Work done",
    "Decisions",
    "Current state",
    "Errors, and what followed",
    "Pending",
    "Next action",
)
"""What a summary of a conversation must have, unless its template says otherwise."""
NONE = "(none)"
"""Stands for a value that is empty."""
WORDS = 0.6
"""In a token, where there are many identifiers."""
FRONT = ("models", "sections")
_GAP = regex(r"\{\{(.*?)\}\}")
_OPENED = regex(r"---[ \t]*\r?\n[ \t]*(?:models|sections)[ \t]*:")
_FRONT = regex(r"\A---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)


class Template(msgspec.Struct, frozen=True):
    """
    >>> Template("greeting", "{{who}}, {{when}}", "built-in").render(who="{{when}}", when=None)
    '{{when}}, (none)'
    """

    name: str
    text: str
    origin: str
    """`built-in`, its file, or both where one stands in the other."""
    models: tuple[str, ...] = ()
    """Tried in this order; none, those of the settings."""
    sections: tuple[str, ...] = ()
    """Titles that the answer must have."""

    @property
    def variables(self) -> frozenset[str]:
        return frozenset(gap.strip() for gap in _GAP.findall(self.text))

    def render(self, **values: object) -> str:
        """The text with all its gaps filled; what is in a value stays as it is.

        `headings` are the sections and `max_words` follow from `max_tokens`, unless given.

        Raises:
            KeyError: a variable that stands in it was not given, not even as None.
        """
        told = {"headings": "\n".join(f"## {title}" for title in self.sections), **values}
        match told.get("max_tokens"):
            case int(tokens):
                told.setdefault("max_words", int(tokens * WORDS))
        return fill(self.text, {name: _shown(told[name]) for name in self.variables})


def fill(text: str, values: Mapping[str, str]) -> str:
    """Other gaps than those of `values` are left."""
    return _GAP.sub(lambda gap: values.get(gap[1].strip(), gap[0]), text)


def parse(name: str, text: str, origin: str, known: Sequence[str]) -> Template:
    """
    Raises:
        SettingError: it has a variable that is not `known`, or front matter that cannot be understood.
    """
    front = _FRONT.match(text)
    if front is None and _OPENED.match(text):
        raise SettingError(f"{origin}:1", "its front matter has no end: close it with a line of ---")
    start = front.end() if front else 0
    for gap in _GAP.finditer(text, start):
        if gap[1].strip() not in known:
            line = text.count("\n", 0, gap.start()) + 1
            allowed = ", ".join(known) or "none"
            raise SettingError(f"{origin}:{line}", f"{gap[0]} is not known; known here: {allowed}")
    return Template(name, text[start:].strip(), origin, **_told(front[1] if front else "", origin))


def _told(front: str, origin: str) -> dict[str, tuple[str, ...]]:
    """What stands between the `---` lines."""
    if not front.strip():
        return {}
    import yaml  # 15 ms, paid only by those who have such a file

    try:
        tree = yaml.safe_load(front)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingError(origin, f"its front matter is not valid YAML: {error}") from error
    if not isinstance(tree, dict | None):
        raise SettingError(origin, f"its front matter names nothing; known here: {', '.join(FRONT)}")
    return {name: _texts(name, value, origin) for name, value in (tree or {}).items() if value is not None}


def _texts(name: object, value: Any, origin: str) -> tuple[str, ...]:
    if name not in FRONT:
        raise SettingError(f"{origin}: {name}", f"is not known; known here: {', '.join(FRONT)}")
    try:
        return msgspec.convert(value, tuple[str, ...])
    except (msgspec.ValidationError, RecursionError) as error:
        raise SettingError(f"{origin}: {name}", f"expected a list of texts, got {value!r:.64}") from error


def _shown(value: object) -> str:
    text = "" if value is None else str(value)
    return text if text.strip() else NONE
