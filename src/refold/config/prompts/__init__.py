"""What summarizers are asked: templates that come with refold, and the user's own in their place.

system        who summarizes, and what holds for every summary
conversation  the frame of a summary of many messages; what one profile says goes into it
message       the frame of a summary of one message; what one tool's prompt says goes into it
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
"""The origin of templates that come with refold."""
MATERIAL = {"conversation": "messages", "message": "content"}
"""What a whole prompt must show; a text without it is guidance that goes into the frame."""
GUIDANCE = {"conversation": "profile", "message": "prompt"}
"""Where in the frame that is."""
FILES = (".md", ".txt")
"""How a prompt ends that is a file."""
_HERE = Path(__file__).parent


class Prompts(msgspec.Struct, frozen=True):
    """All that summarizers are asked for one agent."""

    system: Template
    conversation: Template
    message: Template
    """Of results of tools that have none of their own."""
    tools: Mapping[str, Template]
    """Of tools that are set to be summarized, or have a prompt."""


def load(name: str, folder: Path | None = None) -> Template:
    """A template by its name: the file in the user's folder, or else the one that comes with refold.

    Raises:
        SettingError: there is none of that name, or it is not as it must be.
    """
    for place in _places(folder):
        file = place / f"{name}.md"
        if _is_file(file):
            return _read(file, name, BUILT_IN if place == _HERE else str(file))
    raise SettingError(f"prompt {name!r}", f"is not known; known are: {', '.join(profiles(folder))}")


def profiles(folder: Path | None = None) -> list[str]:
    """The names of all there are, the user's own included."""
    found = {file.stem for place in _places(folder) for file in place.glob("*.md") if file.is_file()}
    return sorted(found - VARIABLES.keys())


def conversation_template(profile: str, folder: Path | None = None) -> Template:
    """What is asked of a conversation; to be rendered without `profile`.

    Raises:
        SettingError: there is no such profile, or a template is not as it must be.
    """
    if profile not in (known := profiles(folder)):
        hint = f"write {profile}.md into the folder of prompts, or take one of these"
        if profile in VARIABLES:
            hint = "that is a frame and no profile; take one of these"
        raise SettingError(f"profile {profile!r}", f"is not known; {hint}: {', '.join(known)}")
    own = load(profile, folder)
    made = own if _is_whole(own, "conversation") else _framed("conversation", own, folder)
    return made if made.sections else msgspec.structs.replace(made, sections=SECTIONS)


def message_template(prompt: str | None, folder: Path | None = None) -> Template:
    """What is asked of one message; to be rendered without `prompt`.

    `prompt` is a text, or a file in the folder of prompts or the working directory.

    Raises:
        SettingError: there is no such file, or it is not as it must be.
    """
    if prompt is None or not prompt.strip():
        frame = load("message", folder)
        return msgspec.structs.replace(frame, text=fill(frame.text, {"prompt": NONE}))
    own = _prompt(prompt, folder)
    return own if _is_whole(own, "message") else _framed("message", own, folder)


def _places(folder: Path | None) -> list[Path]:
    if folder is not None and not folder.is_dir():
        raise SettingError(str(folder), "there is no such folder; make it, or leave prompts unset")
    return [_HERE] if folder is None else [folder, _HERE]


def _prompt(prompt: str, folder: Path | None) -> Template:
    known = _guiding("message")
    if not prompt.endswith(FILES) or "\n" in prompt:
        return parse("prompt", prompt, "prompt", known)
    places = [place / prompt for place in (folder, Path()) if place is not None]
    for file in places:
        if _is_file(file):
            return parse(file.stem, _text(file), str(file), known)
    looked = " or ".join(str(file.absolute()) for file in places)
    raise SettingError(prompt, f"there is no such file; write {looked}, or set the text itself")


def _read(file: Path, name: str, origin: str) -> Template:
    known = VARIABLES[name] if name in VARIABLES else _guiding("conversation")
    template = parse(name, _text(file), origin, known)
    if name in MATERIAL and not _is_whole(template, name):
        raise SettingError(origin, f"has no {{{{{MATERIAL[name]}}}}}, so that nothing would be summarized")
    return template


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise SettingError(str(file), f"cannot be read: {error}") from error


def _guiding(kind: str) -> list[str]:
    """The variables of what goes into a frame of this kind."""
    return [name for name in VARIABLES[kind] if name != GUIDANCE[kind]]


def _is_whole(template: Template, kind: str) -> bool:
    return MATERIAL[kind] in template.variables


def _framed(kind: str, own: Template, folder: Path | None) -> Template:
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
    except OSError:  # it is too long to be a name
        return False
