"""What can be set for an agent, each with its default."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from refold.config.validate import Path, hints, holds_structs, is_struct, kinds_of
from refold.core.event import Expiry
from refold.policies.dedupe import Dedupe
from refold.policies.prune import Cap, Prune

Switch: TypeAlias = Literal["on", "off"] | bool
"""YAML reads `on` and `off` as booleans; TOML and Python have both."""


def is_on(switch: object) -> bool:
    return switch not in ("off", False)


class Economy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a view is made smaller although it would fit, since that saves money."""

    keep_tokens: int = 10_000
    """What stays besides the system text, the task, the latest request and what is pinned."""
    risk: float = 0.05
    """What may be lost by it if the conversation ends at once: a share of what it would have cost whole."""
    cache_s: float = 300.0
    """For how long the provider's cache remembers what nobody asked it for."""


class Compact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a view is made smaller, by how much, and how. Defaults of the numbers: see `Budget`."""

    system_reserve: int = 2_000
    """Tokens for system text that the application adds by itself."""
    output_reserve: int = 4_000
    """Tokens for the answer; never more than the model can say."""
    safety_buffer: int = 5_000
    """Tokens for what counting gets wrong. All reserves together take at most a quarter of the window."""
    threshold_percent: float = 0.80
    """The share of the rest of the window at which something is done."""
    max_tokens: int | None = None
    """What a compaction brings the view down to, at most `token_threshold`; unset, 3/4 of the threshold. More
    than the threshold of a small window counts as that threshold."""
    token_threshold: int | None = None
    """Above so many tokens something is done as well."""
    turn_threshold: int | None = None
    """From so many turns since the last compaction on; without `max_tokens`, down to `keep_recent`."""
    message_threshold: int | None = None
    """Above so many messages since the last compaction, in the same way."""
    strategy: Literal["summarize", "sliding-window", "hierarchical"] = "summarize"
    """What becomes of messages that no longer fit."""
    keep_recent: int = 10
    """The newest messages, which a compaction leaves alone where they fit."""
    prune: Prune | Switch = Prune()
    """Old tool outputs are cleared before anything is summarized."""
    cap: Cap | Switch = Cap()
    """Large tool outputs are shown in part from the first request on."""
    economy: Economy | Switch = False
    """The view is made smaller before it must be, where the prices of the model say that it pays."""

    @property
    def thrift(self) -> Economy | None:
        return (
            self.economy if isinstance(self.economy, Economy) else Economy() if is_on(self.economy) else None
        )

    @property
    def pruning(self) -> Prune | None:
        return self.prune if isinstance(self.prune, Prune) else Prune() if is_on(self.prune) else None

    @property
    def capping(self) -> Cap | None:
        return self.cap if isinstance(self.cap, Cap) else Cap() if is_on(self.cap) else None


class SummarizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who writes summaries, and what that may cost. A text or a list instead of settings names the models."""

    SHORTHAND = "models"

    models: tuple[str, ...] = ()
    """Tried in this order."""
    profile: str = "general"
    """Which prompt it is given: `general`, `coding`, `content`, `research`, `support`, or your own."""
    max_tokens: int | None = None
    """The longest summary; unset, as the room allows."""
    check: Literal["values"] | Switch = "values"
    """Sentences with exact values that the messages do not have are struck; `off` takes all as written."""
    timeout_s: float = 30.0
    """Seconds after which a summary is given up."""
    wait_s: float = 10.0
    """Seconds that a request waits for one that is not ready; 0 means never."""
    run_in: Literal["thread", "worker"] = "thread"
    """Who writes ahead of need: a thread of this process, or `refold worker`, for a store in PostgreSQL."""
    prompts: str | None = None
    """The folder with prompts of your own, which take the place of those of the same name."""
    base_urls: dict[str, str] = {}
    """Where the API of a provider is, `openai` or `anthropic`; unset, as its SDK has it."""
    window: int | None = None
    """Tokens that the model takes; unset, as is known of it."""
    max_calls: int = 20
    """Calls that a view may cause in ten minutes; 0 means none."""
    max_cost: float | None = None
    """USD that the summaries of one conversation may cost; unset, there is no limit."""

    @property
    def checks_values(self) -> bool:
        return is_on(self.check)


class ToolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of a tool's results."""

    expire: Expiry = Expiry()
    """When this tool's results are reduced, and to what; without any, never."""


class ExpandSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model sees again because it asked."""

    lease_steps: int = 3
    """Steps for which it sees it at least; each time that it asks for the same again, twice as long."""
    max_tokens: int | None = None
    """The longest answer; unset, an eighth of the window."""


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one agent's conversations are kept within its model's window."""

    model: str | None = None
    """Whose window must not be exceeded, where the code names none."""
    compact: Compact | Switch = True
    """`off` turns every reduction off."""
    repair: Switch = True
    """Requests that the provider would refuse are mended."""
    counter: Literal["auto", "estimate"] = "auto"
    """Tokens are counted as the model does, or estimated: four characters a token."""
    summarizer: SummarizerSettings = SummarizerSettings()
    tools: dict[str, ToolSettings] = {}
    """`expire`, by the tool's name."""
    dedupe: Dedupe | Switch = Dedupe()
    """Older outputs that repeat a newer one point to it."""
    expand: ExpandSettings = ExpandSettings()
    handles: Switch = True
    """Reduced messages show how to get them back."""
    id: str | None = None
    """Another name by which `Agent.from_config` finds these settings."""
    system_prompt: str | None = None
    """The system text of `refold.agent.Agent`; `refold.open` and the gateway do not send it."""

    @property
    def is_off(self) -> bool:
        return not is_on(self.compact)

    @property
    def compaction(self) -> Compact:
        """As set, or the defaults; whether it is off is another question."""
        return self.compact if isinstance(self.compact, Compact) else Compact()

    @property
    def deduping(self) -> Dedupe | None:
        return self.dedupe if isinstance(self.dedupe, Dedupe) else Dedupe() if is_on(self.dedupe) else None

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


def every(settings: msgspec.Struct, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All that is set in a struct and the structs in it; where a switch is on, the defaults."""
    for name, hint in hints(type(settings)).items():
        value, here = getattr(settings, name), (*path, name)
        defaults = [kind() for kind in kinds_of(hint) if is_struct(kind)]
        if defaults and value in ("on", True):
            value = defaults[0]
        if isinstance(value, msgspec.Struct):
            yield from every(value, here)
        elif holds_structs(hint):
            for inner, one in value.items():
                yield from every(one, (*here, inner))
        elif isinstance(value, dict) and value:
            yield from (((*here, inner), one) for inner, one in value.items())
        else:
            yield here, None if value == {} else value
