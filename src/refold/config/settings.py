"""The settings of an agent and their defaults."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from refold.config.validate import Path, accepted_types, field_types, holds_structs, is_struct
from refold.core.event import Expiry
from refold.policies.dedupe import Dedupe
from refold.policies.prune import Cap, Prune

T = TypeVar("T")
Switch: TypeAlias = Literal["on", "off"] | bool
"""YAML reads `on` and `off` as booleans; TOML and Python have both."""


def is_on(switch: object) -> bool:
    return switch not in ("off", False)


def _enabled(value: T | Switch, kind: Callable[[], T]) -> T | None:
    """The settings, the defaults if it is switched on, None if off."""
    if isinstance(value, bool | str):
        return kind() if is_on(value) else None
    return value


class Economy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compaction before the window requires it, where that saves money."""

    keep_tokens: int = 10_000
    """Tokens kept besides the system text, the task, the latest request and pinned messages."""
    max_loss: float = 0.05
    """The most that may be lost if the conversation ends right after: a share of its cost without economy."""
    cache_s: float = 300.0
    """Seconds after which the provider's cache forgets an unused prefix."""


class Compact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a view is compacted, down to how many tokens, and how."""

    system_reserve: int = 2_000
    """Tokens reserved for system text that the application adds."""
    output_reserve: int = 4_000
    """Tokens reserved for the answer; at most the model's output limit."""
    safety_buffer: int = 5_000
    """Tokens reserved for counting errors. All reserves together take at most a quarter of the window."""
    threshold_percent: float = 0.80
    """The share of the unreserved window at which the view is compacted."""
    max_tokens: int | None = None
    """The target of a compaction, at most `token_threshold`; unset, 3/4 of the threshold. In a small window,
    at most its threshold."""
    token_threshold: int | None = None
    """Compacts above so many tokens."""
    turn_threshold: int | None = None
    """Compacts at so many turns since the last compaction; without `max_tokens`, down to `keep_recent`."""
    message_threshold: int | None = None
    """Compacts above so many messages since the last compaction, in the same way."""
    strategy: Literal["summarize", "sliding-window", "hierarchical"] = "summarize"
    """What happens to messages that no longer fit."""
    keep_recent: int = 10
    """The newest messages, which a compaction keeps where they fit."""
    prune: Prune | Switch = Prune()
    """Clears old tool outputs before anything is summarized."""
    cap: Cap | Switch = Cap()
    """Shows large tool outputs in part from the first request on."""
    economy: Economy | Switch = False
    """Compacts before the window requires it, where the model's prices say that it pays."""

    @property
    def economizing(self) -> Economy | None:
        return _enabled(self.economy, Economy)

    @property
    def pruning(self) -> Prune | None:
        return _enabled(self.prune, Prune)

    @property
    def capping(self) -> Cap | None:
        return _enabled(self.cap, Cap)


class SummarizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which models write summaries, and their limits. A text or a list instead names the models."""

    SHORTHAND = "models"

    models: tuple[str, ...] = ()
    """Tried in this order."""
    profile: str = "general"
    """The prompt: `general`, `coding`, `content`, `research`, `support`, or your own."""
    max_tokens: int | None = None
    """The longest summary; unset, what fits."""
    check: Literal["values"] | Switch = "values"
    """Strikes sentences with exact values that the messages do not have; `off` keeps all."""
    timeout_s: float = 30.0
    """Seconds before a call is abandoned."""
    wait_s: float = 10.0
    """Seconds that `fit` waits for a summary that is not ready; 0 means never."""
    executor: Literal["thread", "worker"] = "thread"
    """Where summaries are written in advance: in a thread of this process, or by `refold worker`."""
    prompts: str | None = None
    """A folder with your own prompts, which replace the built-in ones of the same name."""
    base_urls: dict[str, str] = {}
    """Base URLs by provider, `openai` or `anthropic`; unset, the SDK's default."""
    window: int | None = None
    """The window of the model; unset, from the model table."""
    max_calls: int = 20
    """Calls per view in ten minutes; 0 means none."""
    max_cost: float | None = None
    """USD for the summaries of one conversation; unset, no limit."""

    @property
    def checks_values(self) -> bool:
        return is_on(self.check)


class ToolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to a tool's results."""

    expire: Expiry = Expiry()
    """When this tool's results are reduced, and to what; unset, never."""


class ExpandSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model reads again with `refold_expand`."""

    lease_steps: int = 3
    """Steps for which the text stays in view; doubles each time the same is expanded again."""
    max_tokens: int | None = None
    """The longest text; unset, an eighth of the window."""


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one agent's conversations are kept within its model's window."""

    model: str | None = None
    """The model whose window applies, unless the code names one."""
    compact: Compact | Switch = True
    """`off` turns every reduction off."""
    repair: Switch = True
    """Repairs requests that the provider would reject."""
    counter: Literal["auto", "estimate"] = "auto"
    """Counts tokens as the model does, or estimates four characters per token."""
    summarizer: SummarizerSettings = SummarizerSettings()
    tools: dict[str, ToolSettings] = {}
    """`expire`, by the tool's name."""
    dedupe: Dedupe | Switch = Dedupe()
    """Replaces older outputs that repeat a newer one by a reference to it."""
    expand: ExpandSettings = ExpandSettings()
    handles: Switch = True
    """Reduced messages show a handle for `refold_expand`."""
    id: str | None = None
    """Another name by which `Agent.from_config` finds these settings."""
    system_prompt: str | None = None
    """The system text of `refold.agent.Agent`; `refold.open` and the gateway do not send it."""

    @property
    def is_off(self) -> bool:
        return not is_on(self.compact)

    @property
    def compaction(self) -> Compact:
        """The settings, or the defaults, also where compaction is off."""
        return self.compact if isinstance(self.compact, Compact) else Compact()

    @property
    def deduping(self) -> Dedupe | None:
        return _enabled(self.dedupe, Dedupe)

    @property
    def repairs(self) -> bool:
        return is_on(self.repair)

    @property
    def shows_handles(self) -> bool:
        return is_on(self.handles)


class Setting(NamedTuple):
    """One setting in force.

    >>> str(Setting(("tools", "grep", "expire", "after_steps"), 3, "agent.yaml:12"))
    "after_steps = 3 (tool 'grep', agent.yaml:12)"
    """

    path: Path
    value: Any
    origin: str

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def __str__(self) -> str:
        if self.path[0] == "tools":
            return f"{self.path[-1]} = {self.shown} (tool {self.path[1]!r}, {self.origin})"
        return f"{self.name} = {self.shown} ({self.origin})"

    @property
    def shown(self) -> str:
        """The value as YAML has it."""
        match self.value:
            case None:
                return "unset"
            case bool(value):
                return "on" if value else "off"
            case float(value):
                return f"{value:g}"
            case tuple(values):
                return f"[{', '.join(values)}]"
            case value:
                return str(value)


def all_settings(settings: msgspec.Struct, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The paths and values of all settings in a struct; where a switch is on, its defaults."""
    for name, hint in field_types(type(settings)).items():
        value = getattr(settings, name)
        here = (*path, name)
        defaults = [kind() for kind in accepted_types(hint) if is_struct(kind)]
        if defaults and value in ("on", True):
            value = defaults[0]
        if isinstance(value, msgspec.Struct):
            yield from all_settings(value, here)
        elif holds_structs(hint):
            for inner, one in value.items():
                yield from all_settings(one, (*here, inner))
        elif isinstance(value, dict) and value:
            yield from (((*here, inner), one) for inner, one in value.items())
        else:
            yield here, None if value == {} else value
