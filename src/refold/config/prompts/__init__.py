"""Prompts for summarizers: the built-in templates, and the user's own that replace them.

system        the system prompt of every summary
conversation  the frame for a summary of many messages, with a profile inside
message       the frame for a summary of one message, with a tool's prompt inside
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from refold.config.prompts.template import NONE, SECTIONS, VARIABLES, Template, fill, parse
from refold.core.errors import SettingError

__all__ = [
    "BUILT_IN",
    "SECTIONS",
    "VARIABLES",
    "Prompts",
    "Template",
    "conversation_template",
    "load",
    "message_template",
    "profiles",
]

BUILT_IN = "built-in"
MATERIAL = {"conversation": "messages", "message": "content"}
"""The variable that makes a text a whole prompt; without it, the text goes into the frame."""
GUIDANCE = {"conversation": "profile", "message": "prompt"}
"""The variable of the frame that it replaces."""
FILES = (".md", ".txt")
"""A prompt with such an ending is a file name."""
_HERE = Path(__file__).parent


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of one agent."""

    system: Template
    conversation: Template
    message: Template
    """For results of tools without a prompt of their own."""
    tools: Mapping[str, Template]
    """By tools that are summarized or have a prompt."""


def load(name: str, folder: Path | None = None) -> Template:
    """A template by name: the file in the user's folder, otherwise the built-in one.

    Raises:
        SettingError: there is none of that name, or it is not valid.
    """
    for place in _places(folder):
        file = place / f"{name}.md"
        if not _is_file(file):
            continue
        origin = BUILT_IN if place == _HERE else str(file)
        known = VARIABLES[name] if name in VARIABLES else _guiding("conversation")
        template = parse(name, _text(file), origin, known)
        if name in MATERIAL and not _is_whole(template, name):
            raise SettingError(origin, f"has no {{{{{MATERIAL[name]}}}}}, so nothing would be summarized")
        return template
    raise SettingError(f"prompt {name!r}", f"is not known; known: {', '.join(profiles(folder))}")


def profiles(folder: Path | None = None) -> list[str]:
    """The names of all profiles, the user's own included."""
    found = {file.stem for place in _places(folder) for file in place.glob("*.md") if file.is_file()}
    return sorted(found - VARIABLES.keys())


def conversation_template(profile: str, folder: Path | None = None) -> Template:
    """The prompt for conversations; rendered without `profile`.

    Raises:
        SettingError: there is no such profile, or a template is not valid.
    """
    if profile not in (known := profiles(folder)):
        where = f"create {profile}.md in the folder of prompts, or use one of these"
        hint = "it is a frame, not a profile; use one of these" if profile in VARIABLES else where
        raise SettingError(f"profile {profile!r}", f"is not known; {hint}: {', '.join(known)}")
    made = _framed("conversation", load(profile, folder), folder)
    return made if made.sections else msgspec.structs.replace(made, sections=SECTIONS)


def message_template(prompt: str | None, folder: Path | None = None) -> Template:
    """The prompt for one message; rendered without `prompt`.

    `prompt` is a text, or a file in the folder of prompts or the working directory.

    Raises:
        SettingError: there is no such file, or it is not valid.
    """
    known = _guiding("message")
    if prompt is None or not prompt.strip():
        frame = load("message", folder)
        return msgspec.structs.replace(frame, text=fill(frame.text, {"prompt": NONE}))
    if not prompt.endswith(FILES) or "\n" in prompt:
        return _framed("message", parse("prompt", prompt, "prompt", known), folder)
    places = [place / prompt for place in (folder, Path()) if place is not None]
    for file in places:
        if _is_file(file):
            return _framed("message", parse(file.stem, _text(file), str(file), known), folder)
    looked = " or ".join(str(file.absolute()) for file in places)
    raise SettingError(prompt, f"there is no such file; create {looked}, or set the text itself")


def _places(folder: Path | None) -> list[Path]:
    if folder is not None and not folder.is_dir():
        raise SettingError(str(folder), "there is no such folder; create it, or leave prompts unset")
    return [_HERE] if folder is None else [folder, _HERE]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise SettingError(str(file), f"cannot be read: {error}") from error


def _guiding(kind: str) -> list[str]:
    """The variables that text inside of a frame may use."""
    return [name for name in VARIABLES[kind] if name != GUIDANCE[kind]]


def _is_whole(template: Template, kind: str) -> bool:
    return MATERIAL[kind] in template.variables


def _framed(kind: str, own: Template, folder: Path | None) -> Template:
    """The text inside its frame, unless it is a whole prompt."""
    if _is_whole(own, kind):
        return own
    frame = load(kind, folder)
    return Template(
        own.name,
        fill(frame.text, {GUIDANCE[kind]: own.text or NONE}),
        " + ".join(dict.fromkeys((frame.origin, own.origin))),
        own.models or frame.models,
        own.sections or frame.sections,
    )


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # too long for a file name
        return False
