"""The budget of a view: the window, the reserves in it, the threshold and the target of compactions."""

from collections.abc import Sequence
from math import ceil, floor

import msgspec
from msgspec import structs

CROWDED = 0.6
"""Share of the trigger. If messages that cannot be hidden take more, the next compaction comes later."""
LEAST_ROOM = 0.1
"""Share of the trigger that is then left for other messages."""
SOON = 0.85
"""Share of the trigger from which on summaries are prepared."""
STEP = 0.05
"""Share of the trigger by which the step that crosses it is assumed to exceed it."""
MIN_SAVED_SHARE = 0.05
"""Share of the scale that a batch of edits must save."""
MIN_SAVED_TOKENS = 48
WINDOW = "threshold"
"""The trigger that the window itself sets; the user sets the others."""


class Budget(msgspec.Struct, frozen=True):
    """Sizes in tokens of the model, unless they are called counted.

    >>> Budget().threshold
    93600
    """

    window: int = 128_000
    """The longest request and its answer together."""
    max_input: int | None = None
    """The longest request, if the provider limits it below the window."""
    output_reserve: int = 4_000
    """Room for the answer."""
    asked: bool = False
    """True if the request itself sets the length of its answer; then the reserve is not scaled down."""
    system_reserve: int = 2_000
    """Room for system text that the application adds to the request."""
    safety_buffer: int = 5_000
    """Room for errors of the token count."""
    threshold_percent: float = 0.80
    """The threshold, as a share of the window without the reserves."""
    max_tokens: int | None = None
    """The target of a compaction, at most the threshold; unset, three quarters of the trigger."""
    token_threshold: int | None = None
    """Compact above so many tokens."""
    turn_threshold: int | None = None
    """Compact after so many turns since the last compaction."""
    message_threshold: int | None = None
    """Compact above so many messages since the last compaction."""
    overhead: int = 0
    """Counted tokens of the request besides its messages (tools, separate system text), less `unsent`."""
    unsent: int = 0
    """Counted tokens of fixed messages that the request's dialect does not send."""
    ratio: float = 1.0
    """Tokens of the model for one counted token."""
    due: int = 0
    """Below so many tokens nothing is compacted, even if a trigger fires."""
    growth: int = 0
    """Tokens by which the view will grow before a plan that is made now is carried out."""
    margin: float = 1.0
    """The ratio without measurements, for decisions that must not change with every answer."""
    constant: int = 0
    """Tokens that every request takes besides its content."""
    keeps_recent: bool = False
    """A compaction has no target in tokens: it stops at the newest `keep_recent` messages."""

    @property
    def reserves(self) -> int:
        """The sum of the reserves, at most a quarter of the window, so that small models have room."""
        wanted = self.output_reserve + self.system_reserve + self.safety_buffer
        return max(min(wanted, self.window // 4), self.output)

    @property
    def threshold(self) -> int:
        """The size from which on the window itself triggers a compaction."""
        most = min(self.window - self.reserves, self.max_input or self.window)
        return floor(most * self.threshold_percent)

    @property
    def trigger(self) -> int:
        """The size that triggers a compaction: the threshold, or `token_threshold` if that is lower."""
        return min(self.threshold, self.token_threshold or self.threshold)

    @property
    def target(self) -> int:
        """The size that a compaction reaches."""
        wanted = self.trigger * 3 // 4 if self.max_tokens is None else self.max_tokens
        return min(wanted, self.threshold)

    @property
    def scale(self) -> int:
        """The trigger that belongs to the target; shares of savings are measured against it."""
        return min(self.trigger, self.target * 4 // 3)

    @property
    def enough(self) -> int:
        """The size at which a prepared summary needs no further stage."""
        if self.max_tokens is not None:
            return self.target
        return min(self.room, (self.target + self.trigger) // 2)

    def ahead(self, tokens: int) -> "Budget":
        """The budget of a plan for later, when a view of so many tokens has grown to its trigger."""
        left = max(0, max(self.trigger, self.due) - tokens)
        return structs.replace(self, growth=min(left + int(STEP * self.trigger), self.target // 2))

    @property
    def goal(self) -> int:
        """The size to plan for now, so that the view is at its target after it has grown."""
        return self.target - self.growth

    def compacting(self, fired: Sequence[str], least: int) -> "Budget":
        """The budget of a compaction by triggers that `fired`, if `least` tokens cannot be hidden.

        A trigger that the user set acts at once. Turns and messages define no target: without `max_tokens`,
        everything but the newest messages is compacted.
        """
        by_size = {WINDOW, "token_threshold"} & {*fired}
        if fired and not by_size and self.max_tokens is None:
            return structs.replace(self, keeps_recent=True)
        return self if {*fired} - {WINDOW} else self.above(least)

    def above(self, least: int) -> "Budget":
        """The budget for a view of which `least` tokens cannot be hidden.

        If these take most of the room below the trigger, trigger and target move up, so that the view can
        grow before the next compaction; otherwise there would be one in every step.
        """
        if least <= CROWDED * self.trigger:
            return self
        most = min(self.room, least + int((1 - CROWDED) * self.trigger))
        return structs.replace(self, due=most, max_tokens=least + int(LEAST_ROOM * self.trigger))

    def down_to(self, target: int, trigger: int) -> "Budget":
        """A budget with this target and trigger, for the same window."""
        share = trigger / max(1, min(self.window - self.reserves, self.max_input or self.window))
        return structs.replace(self, max_tokens=target, threshold_percent=share, token_threshold=None)

    @property
    def output(self) -> int:
        """The reserve for the answer, after scaling."""
        return min(self.output_reserve, self.window if self.asked else self.window // 4)

    @property
    def room(self) -> int:
        """The longest request that the provider accepts with room for the answer."""
        return min(self.window - self.output, self.max_input or self.window)

    @property
    def worthwhile(self) -> int:
        """Counted tokens that a batch of edits must save; for less, nothing is changed."""
        return self.counted(max(int(MIN_SAVED_SHARE * self.scale), MIN_SAVED_TOKENS))

    def counted(self, tokens: int) -> int:
        """The counted tokens that make so many tokens of the model."""
        return max(0, floor((tokens - self.constant) / self.ratio))

    def tokens(self, counted: int) -> int:
        """The model's tokens for so many counted ones."""
        return ceil(counted * self.ratio) + self.constant

    def fired(self, tokens: int, turns: int, messages: int) -> tuple[str, ...]:
        """The triggers that fire for a view; turns and messages count since its last compaction."""
        over = {
            WINDOW: tokens >= self.threshold,
            "token_threshold": self.token_threshold is not None and tokens > self.token_threshold,
            "turn_threshold": self.turn_threshold is not None and turns >= self.turn_threshold,
            "message_threshold": self.message_threshold is not None and messages > self.message_threshold,
        }
        return tuple(name for name, is_over in over.items() if is_over)

    def nearing(self, tokens: int, turns: int, messages: int) -> tuple[str, ...]:
        """The triggers that will fire soon, so that summaries are prepared for them."""
        early = structs.replace(
            self,
            threshold_percent=SOON * self.threshold_percent,
            token_threshold=_soon(self.token_threshold),
            turn_threshold=self.turn_threshold and self.turn_threshold - 1,
            message_threshold=_soon(self.message_threshold),
        )
        return early.fired(tokens, turns, messages)


def _soon(threshold: int | None) -> int | None:
    return None if threshold is None else int(SOON * threshold)
