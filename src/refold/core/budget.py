"""How much fits: a window, what is reserved in it, when to act and what to come down to."""

from collections.abc import Sequence
from math import ceil, floor

import msgspec
from msgspec import structs

CROWDED = 0.6
"""Of the trigger: what must be there may take so much before that moves."""
LEAST_ROOM = 0.1
"""Of the trigger: what is left for anything else, then."""
SOON = 0.85
"""Of the trigger: from here on summaries are prepared."""
STEP = 0.05
"""Of the trigger: by how much a view goes beyond it, in the step that does."""
LEAST, LEAST_TOKENS = 0.05, 48
"""What is worth a change at all: of the scale, and in tokens."""
WINDOW = "threshold"
"""The trigger that the window itself sets; the user sets the others."""


class Budget(msgspec.Struct, frozen=True):
    """All in tokens.

    >>> Budget().threshold
    93600
    """

    window: int = 128_000
    """What the model can take in all, answer included."""
    max_input: int | None = None
    """The longest request, where that is less than the window would allow."""
    output_reserve: int = 4_000
    """Room for the answer."""
    asked: bool = False
    """The request itself asks for an answer so long: then all of it is left free."""
    system_reserve: int = 2_000
    """Room for system text that the application adds by itself."""
    safety_buffer: int = 5_000
    """Room for what counting gets wrong."""
    threshold_percent: float = 0.80
    """The share of the rest at which something is done."""
    max_tokens: int | None = None
    """What a compaction brings the view down to, at most the threshold; unset, three quarters of it."""
    token_threshold: int | None = None
    """Above so many tokens something is done as well."""
    turn_threshold: int | None = None
    """From so many turns since the last compaction on."""
    message_threshold: int | None = None
    """Above so many messages since the last compaction."""
    overhead: int = 0
    """What is counted for the request besides its messages (tools, system text apart), less `unsent`."""
    unsent: int = 0
    """What is counted for messages that stay in any case, and is not sent in the request's dialect."""
    ratio: float = 1.0
    """How many tokens of the model's one counted token is."""
    due: int = 0
    """Below so many tokens nothing is done, whatever the triggers say."""
    growth: int = 0
    """By how many tokens the view will grow before what is planned now is done."""
    margin: float = 1.0
    """The same before anything was measured: what rests on it does not change with every answer."""
    constant: int = 0
    """What every request takes, whatever is in it."""
    keeps_recent: bool = False
    """A compaction stops at the newest `keep_recent` messages: it has no number of tokens to reach."""

    @property
    def reserves(self) -> int:
        """Never more than a quarter of the window, or a small model would have no room."""
        wanted = self.output_reserve + self.system_reserve + self.safety_buffer
        return max(min(wanted, self.window // 4), self.output)

    @property
    def threshold(self) -> int:
        """From here on something is done."""
        most = min(self.window - self.reserves, self.max_input or self.window)
        return floor(most * self.threshold_percent)

    @property
    def trigger(self) -> int:
        """The same, or earlier where a number of tokens is set for it."""
        return min(self.threshold, self.token_threshold or self.threshold)

    @property
    def target(self) -> int:
        wanted = self.trigger * 3 // 4 if self.max_tokens is None else self.max_tokens
        return min(wanted, self.threshold)

    @property
    def scale(self) -> int:
        """The trigger that would go with the target: what is little or much is measured against it."""
        return min(self.trigger, self.target * 4 // 3)

    @property
    def enough(self) -> int:
        """Down to this a summary that was made ahead need not be followed by anything else."""
        if self.max_tokens is not None:
            return self.target
        return min(self.room, (self.target + self.trigger) // 2)

    def ahead(self, tokens: int) -> "Budget":
        """The same for a view that will grow from so many tokens to its trigger before anything is done."""
        left = max(0, max(self.trigger, self.due) - tokens)
        return structs.replace(self, growth=min(left + int(STEP * self.trigger), self.target // 2))

    @property
    def goal(self) -> int:
        """What the view is brought down to now, so that it is at its target when that counts."""
        return self.target - self.growth

    def compacting(self, fired: Sequence[str], least: int) -> "Budget":
        """The budget of a compaction that triggers set off, where `least` tokens cannot be hidden.

        A trigger that the user set acts at once. Turns and messages say when, not down to how many tokens:
        without `max_tokens` all but the newest messages is compacted.
        """
        by_size = {WINDOW, "token_threshold"} & {*fired}
        if fired and not by_size and self.max_tokens is None:
            return structs.replace(self, keeps_recent=True)
        return self if {*fired} - {WINDOW} else self.above(least)

    def above(self, least: int) -> "Budget":
        """The same, where so much must be there that it would hardly ever be below its trigger.

        Then a compaction has to leave room to grow, or there would be one in every step.
        """
        if least <= CROWDED * self.trigger:
            return self
        most = min(self.room, least + int((1 - CROWDED) * self.trigger))
        return structs.replace(self, due=most, max_tokens=least + int(LEAST_ROOM * self.trigger))

    def down_to(self, target: int, trigger: int) -> "Budget":
        """The same as if it were full at the trigger, so that stages act as they do there."""
        share = trigger / max(1, min(self.window - self.reserves, self.max_input or self.window))
        return structs.replace(self, max_tokens=target, threshold_percent=share, token_threshold=None)

    @property
    def output(self) -> int:
        """What is really left for the answer."""
        return min(self.output_reserve, self.window if self.asked else self.window // 4)

    @property
    def room(self) -> int:
        """Above this the provider would refuse the request."""
        return min(self.window - self.output, self.max_input or self.window)

    @property
    def worthwhile(self) -> int:
        """What a batch of edits saves at least, as it is counted: for less nothing is changed."""
        return self.counted(max(int(LEAST * self.scale), LEAST_TOKENS))

    def counted(self, tokens: int) -> int:
        """How much may be counted for so many tokens of the model's."""
        return max(0, floor((tokens - self.constant) / self.ratio))

    def tokens(self, counted: int) -> int:
        """The model's tokens for what is counted so."""
        return ceil(counted * self.ratio) + self.constant

    def fired(self, tokens: int, turns: int, messages: int) -> tuple[str, ...]:
        """Which triggers a view of this size has set off, turns and messages since the last compaction."""
        over = {
            WINDOW: tokens >= self.threshold,
            "token_threshold": self.token_threshold is not None and tokens > self.token_threshold,
            "turn_threshold": self.turn_threshold is not None and turns >= self.turn_threshold,
            "message_threshold": self.message_threshold is not None and messages > self.message_threshold,
        }
        return tuple(name for name, is_over in over.items() if is_over)

    def nearing(self, tokens: int, turns: int, messages: int) -> tuple[str, ...]:
        """Which triggers will fire soon: it is time to prepare a summary for them."""
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
