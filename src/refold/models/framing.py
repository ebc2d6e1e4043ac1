"""The tokens that providers add to the texts of a request, and the vocabulary that is nearest to theirs.

`docs/counting.md` says where each number comes from.
"""

import re
from typing import Literal, TypeAlias

import msgspec

from refold.models.images import Crops, Flat, Grid, Patches, Rates, Rule, Tiles
from refold.models.limits import parts

Version: TypeAlias = tuple[int, int]


class Framing(msgspec.Struct, frozen=True):
    """The overheads of one model's requests. The defaults are OpenAI's."""

    vocabulary: str | None = "o200k_base"
    """None counts four characters as a token."""
    margin: float = 1.0
    """The factor of a count with a vocabulary that is not the model's own."""
    request: int = 3
    message: int = 4
    call: int = 0
    result: int = 0
    tool: int = 0
    """The tokens of each besides its text."""
    prompt: tuple[int, int] = (0, 0)
    """The provider's prompt about tools: where the model may use one, and where it must."""
    deferred: int = 0
    """The prompt about tools that are loaded later."""
    shape: int = 10
    """The prompt about a JSON schema of the reply, besides the schema."""
    input: Literal["json", "values"] = "json"
    """How the model sees the input of a call: as JSON, or value by value."""
    schemas: Literal["json", "types"] = "json"
    served: tuple[tuple[str, int], ...] = ()
    """The description of a provider's own tool, by the beginning of its type."""
    media: Rates = Rates(Patches(1.2, 2_500, 2_048), page=1_500, second=32)


ESTIMATE = Framing(None, request=0)
"""Four characters are a token."""
PLAIN = Framing()
"""For an unknown model."""
SERVED = 500
"""The description of any other tool of a provider."""
REFERENCE = 120
"""A reference to a tool that was declared before: a declaration of usual length."""


def framing(model: str | None, provider: str | None) -> Framing:
    """The overheads of a model, by its name and its provider."""
    if model is None:
        return PLAIN
    name, version = "-".join(parts(model)), _version(parts(model))
    match provider:
        case "openai":
            return _openai(name, version)
        case "anthropic":
            return _anthropic(version)
        case "google":
            rates = Rates(Flat(1_120), page=560) if version >= (3, 0) else Rates(Crops(), page=258)
            return Framing("gemma4", 1.05, call=12, tool=8, media=rates)
        case "meta":
            return Framing("llama3", 1.05, message=5, call=12, tool=16, media=Rates(Flat(2_500)))
        case "mistral":
            return Framing("mistral_v3", 1.05, call=12, tool=12, media=Rates(Grid(28, 1_540, 3_080)))
        case "deepseek":
            return Framing("deepseek_v3", 1.05, call=12, tool=12, media=Rates(Flat(1_600)))
        case "qwen":
            media = Rates(Grid(28, 65_535, 16_386))
            return Framing("qwen3", 1.05, message=5, call=12, tool=12, media=media)
        case "xai":
            return Framing(margin=1.1, call=12, tool=12, media=Rates(Flat(1_792)))
    return Framing(margin=1.1, call=12, tool=12)


def _openai(name: str, version: Version) -> Framing:
    vocabulary = "cl100k_base" if _OLD_GPT.search(name) else "o200k_base"
    prompt = 3 if "gpt" in name and (0, 0) < version < (5, 0) else 84
    media = Rates(_picture(name, version), page=1_200, second=10)
    return Framing(vocabulary, call=13, prompt=(prompt, prompt), schemas="types", media=media)


def _picture(name: str, version: Version) -> Rule:
    """OpenAI's rule for images with `detail: auto`."""
    if "gpt" not in name:  # the o series
        return Patches(1.72, 1_536, 2_048) if "o4" in name else Tiles(75, 150)
    if "mini" in name or "nano" in name:
        factor = 2.46 if "nano" in name else 1.62
        return Patches(factor, 1_536, 2_048) if version >= (4, 1) else Tiles(2_833, 5_667)
    if version >= (5, 2):
        budget, side = _RESOLUTION[min(max(version, (5, 3)), (5, 6))]
        return Patches(1.2, budget, side)
    return Tiles(70, 140) if version >= (5, 0) else Tiles(85, 170)


_RESOLUTION = {
    (5, 3): (1_536, 2_048),
    (5, 4): (2_500, 2_048),
    (5, 5): (10_000, 6_000),
    (5, 6): (30_000, 65_535),
}


def _anthropic(version: Version) -> Framing:
    newer = version >= (4, 7)
    media = Rates(Grid(28, 2_576, 4_784), page=6_000) if newer else Rates(Grid(28, 1_568, 1_568), page=3_000)
    return Framing(
        margin=1.6 if newer else 1.25,
        request=5,
        message=5,
        call=40,
        result=22,
        tool=15,
        prompt=next(prompt for since, prompt in _TOOL_PROMPTS if version >= since),
        deferred=130 if newer else 0,
        shape=150,
        input="values",
        served=_SERVED,
        media=media,
    )


_TOOL_PROMPTS: tuple[tuple[Version, tuple[int, int]], ...] = (
    ((5, 0), (354, 474)),
    ((4, 8), (290, 410)),
    ((4, 7), (675, 804)),
    ((4, 6), (497, 589)),
    ((4, 5), (496, 588)),
    ((4, 0), (313, 315)),
    ((0, 0), (346, 340)),
)
_SERVED = (
    ("bash", 245),
    ("text_editor", 700),
    ("computer", 735),
    ("web_search", 2_200),
    ("web_fetch", 600),
    ("code_execution", 1_800),
    ("memory", 1_100),
    ("tool_search", 200),
)


def _version(name: tuple[str, ...]) -> Version:
    """The first number in a name and the one after it; a longer one is a date."""
    for at, part in enumerate(name):
        if found := _NUMBER.fullmatch(part):
            after = name[at + 1] if at + 1 < len(name) else ""
            return int(found[1]), int(after) if _SMALL.fullmatch(after) else 0
    return (0, 0)


_OLD_GPT = re.compile(r"gpt-(?:3|4$|4-(?!\d{1,2}(?:-|$)))")
_NUMBER = re.compile(r"[a-z]?(\d{1,2})[a-z]?")
_SMALL = re.compile(r"\d{1,2}")
