"""Limits and prices of models: a table of known models, and settings for others."""

import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from refold.core import codec
from refold.core.cache_cost import Prices
from refold.core.message import Usage


class ModelLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes in tokens, prices in USD per million tokens. The defaults are those of an unknown model."""

    window: int = 128_000
    """The tokens of a request and its reply."""
    max_output: int = 4_096
    """The longest reply, including reasoning."""
    max_input: int | None = None
    """The longest request, if the provider limits it below the window."""
    input: float | None = None
    """USD for a million input tokens that are not cached."""
    cache_read: float | None = None
    """USD for a million tokens read from the cache."""
    cache_write: float | None = None
    """USD for a million tokens written to the cache."""
    output: float | None = None
    """USD for a million output tokens."""
    provider: str | None = None
    """The provider: openai, anthropic, google, meta, mistral, deepseek, qwen or xai."""
    date: str | None = None
    """The day on which it was last verified."""
    note: str | None = None
    """What is uncertain about it."""
    flags: tuple[str, ...] = ()
    """Special rules for requests.

    system-inside   the role `system` works inside `messages`, not only before them
    no-prefill      the last message must not be the assistant's
    binds-thinking  signed thinking is refused once anything before it has changed
    """

    @property
    def cached(self) -> Prices | None:
        """What a prompt's tokens cost where they are cached, if that is known and saves anything."""
        write = self.cache_write or self.input
        is_known = write and self.cache_read and self.cache_read < write
        return Prices(self.cache_read or 0.0, write or 0.0) if is_known else None

    def price(self, usage: Usage) -> float:
        """USD, as far as prices are known."""
        each, fresh = self.input or 0.0, max(0, usage.input - usage.cache_read - usage.cache_write)
        read = each if self.cache_read is None else self.cache_read
        write = each if self.cache_write is None else self.cache_write
        sums = (fresh * each, usage.cache_read * read, usage.cache_write * write)
        return (sum(sums) + usage.output * (self.output or 0.0)) / 1_000_000


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user says of a model: what is left out stays as the table has it. Fields: see `ModelLimits`."""

    window: int | UnsetType = UNSET
    max_output: int | UnsetType = UNSET
    max_input: int | UnsetType = UNSET
    input: float | UnsetType = UNSET
    cache_read: float | UnsetType = UNSET
    cache_write: float | UnsetType = UNSET
    output: float | UnsetType = UNSET
    provider: str | UnsetType = UNSET
    flags: tuple[str, ...] | UnsetType = UNSET


class FoundModel(msgspec.Struct, frozen=True):
    limits: ModelLimits
    id: str | None = None
    """Which entry it was; None where there is none and the limits are the default."""


class ModelTable(msgspec.Struct, frozen=True):
    """The packaged table; `scripts/models.py` writes it."""

    date: str
    source: str
    models: dict[str, ModelLimits]
    aliases: dict[str, str]
    """Names that no rule leads to their model."""


codec.decoder(ModelTable)


def find(model: str | None, extra: Mapping[str, ModelSettings] = {}) -> FoundModel:
    """The limits of a model by its name, or by the longest beginning of the name that is known.

    Of two entries the one that explains more of the name is used, and of two equal ones the one in `extra`.
    An unknown model gets the defaults and a warning, once for each name.

    >>> find("openrouter/anthropic/claude-sonnet-4.5:beta").id
    'claude-sonnet-4-5'
    """
    found = _lookup(model or "", extra)
    if model and found.id is None:
        _warn_once(model[:_LONGEST_NAME])
    return found


def known_limits(model: str, extra: Mapping[str, ModelSettings] = {}) -> ModelLimits | None:
    """The limits of a model; None, without a warning, for an unknown one."""
    found = _lookup(model, extra)
    return found.limits if found.id is not None else None


def _lookup(model: str, extra: Mapping[str, ModelSettings]) -> FoundModel:
    model = model[:_LONGEST_NAME]
    known = _known(model)
    base = table().models[known.id] if known else ModelLimits()
    own = _Match(model, 0) if model in extra else _match(model, {parts(key): key for key in extra})
    if own and (known is None or own.left <= known.left):
        return FoundModel(_merged(base, extra[own.id]), own.id)
    return FoundModel(base, known.id if known else None)


def provider_of(model: str | None) -> str | None:
    """The provider of a model, by the family in its name: `claude` anywhere, or the first known word."""
    name = (model or "").lower()
    if "claude" in name:
        return "anthropic"
    words = parts(name.rpartition("/")[2]) + parts(name)
    return next((_MAKERS[word] for word in words if word in _MAKERS), None)


def same_model(one: str | None, other: str | None) -> bool:
    """True if two names may mean one model: they have the same entry, or one is unknown."""
    if one is None or other is None or one == other:
        return True
    first, second = (_known(name[:_LONGEST_NAME]) for name in (one, other))
    return first is None or second is None or first.id == second.id


@cache
def table() -> ModelTable:
    file = Path(__file__).with_name("models.json")
    return msgspec.json.decode(file.read_bytes(), type=ModelTable)


Parts: TypeAlias = tuple[str, ...]


def parts(name: str) -> Parts:
    """The parts of a name: spellings become equal, and `gpt-50` does not begin with `gpt-5`.

    >>> parts("Qwen3.8-Max:free")
    ('qwen', '3', '8', 'max', 'free')
    """
    return tuple(_PART.findall(name.lower()))


PROVIDERS = ("openai", "anthropic")
"""Providers whose models can be named `PROVIDER/MODEL`; OpenTelemetry's `gen_ai` names are the same."""
_LONGEST_NAME = 256
_MOST_WARNINGS = 1_000  # names come from requests too
_PART = re.compile(r"[a-z]{3,}(?=\d)|[^\W_]+")
_VERSION = re.compile(r"[a-z]?\d{1,2}")  # longer numbers are dates
_MINOR = re.compile(r"\d{1,2}")
_VERSIONED = re.compile(
    r"(?P<head>(?:[^-]+-)*?[a-z]?\d{1,2})(?:-(?P<minor>\d{1,2}))?(?P<tail>(?:-.+)?)", re.DOTALL
)
"""The parts of a name joined by `-`: up to its first number, the number after that, and the rest."""
_SIZES = frozenset(("mini", "nano", "lite", "flash", "small", "tiny"))
_MAKERS = {
    **dict.fromkeys(("gpt", "chatgpt", "codex", "o1", "o3", "o4", "o5"), "openai"),
    **dict.fromkeys(("gemini", "gemma"), "google"),
    **dict.fromkeys(("llama", "codellama", "muse"), "meta"),
    **dict.fromkeys(("mistral", "ministral", "mixtral", "codestral", "devstral"), "mistral"),
    **dict.fromkeys(("magistral", "pixtral", "voxtral"), "mistral"),
    **dict.fromkeys(("qwen", "qwq"), "qwen"),
    "deepseek": "deepseek",
    "grok": "xai",
}


class _Match(NamedTuple):
    id: str
    left: float
    """Number of parts of the name that it does not explain; infinite for a sibling."""


@lru_cache(1_024)
def _known(model: str) -> _Match | None:
    return _match(model, _index()) or _sibling(model)


@cache
def _index() -> dict[Parts, str]:
    aliases = {parts(name): id for name, id in table().aliases.items()}
    return aliases | {parts(id): id for id in table().models}


@cache
def _versions() -> list[tuple[re.Match[str], str]]:
    found = [(_VERSIONED.fullmatch("-".join(name)), id) for name, id in _index().items()]
    return [(version, id) for version, id in found if version]


def _match(model: str, index: Mapping[Parts, str]) -> _Match | None:
    """The longest beginning of the name, or of what follows a provider in it, that has an entry."""
    for name in _names(model):
        for end in range(len(name), 0, -1):
            if name[:end] in index and not _is_another(name[end - 1], name[end:]):
                return _Match(index[name[:end]], len(name) - end)
    return None


def _is_another(last: str, rest: Parts) -> bool:
    """True if the rest of a name makes it another version or size than the entry."""
    if rest and _VERSION.fullmatch(last) and _MINOR.fullmatch(rest[0]) and int(rest[0]):
        return True
    return not _SIZES.isdisjoint(rest)


def _sibling(model: str) -> _Match | None:
    """The newest known version before it, with the same first number: `gpt-5.4-mini` for `gpt-5.9-mini`."""
    for name in _names(model):
        wanted = _VERSIONED.fullmatch("-".join(name))
        if wanted is None:
            continue
        older: list[tuple[int, int, str]] = []
        for known, id in _versions():
            minor = int(known["minor"] or 0)
            is_before = known["head"] == wanted["head"] and minor <= int(wanted["minor"] or 0)
            begins_alike = f"{wanted['tail']}-".startswith(f"{known['tail']}-")
            rest = wanted["tail"].removeprefix(known["tail"])
            if is_before and begins_alike and _SIZES.isdisjoint(rest.split("-")):
                older.append((len(known["tail"]), minor, id))
        if older:
            return _Match(max(older)[-1], float("inf"))
    return None


def _names(model: str) -> Iterator[Parts]:
    """The name, and what follows each provider in it, as in `bedrock/eu.anthropic.claude-x`."""
    yield parts(model)
    for separator in re.finditer(r"[/:.]", model):
        yield parts(model[separator.end() :])


def _merged(base: ModelLimits, settings: ModelSettings) -> ModelLimits:
    given = {name: value for name, value in msgspec.structs.asdict(settings).items() if value is not UNSET}
    if "window" in given:
        given.setdefault("max_input", None)  # a window that is set may be used in full
    limits = msgspec.structs.replace(base, **given)
    return msgspec.structs.replace(limits, max_output=min(limits.max_output, limits.window))


_warned: set[str] = set()


def _warn_once(model: str) -> None:
    if model in _warned or len(_warned) == _MOST_WARNINGS:
        return
    _warned.add(model)
    default = ModelLimits()
    warnings.warn(
        f"The model {model!r} is not known: its window is assumed to be {default.window:,} tokens, and its"
        f" longest reply {default.max_output:,}. Set both in the configuration:"
        f" models: {{{model}: {{window: …, max_output: …}}}}",
        UserWarning,
        stacklevel=3,
    )
