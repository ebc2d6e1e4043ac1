"""How much fits: a window, what is reserved in it, when to act and what to come down to."""

from math import floor

import msgspec


class Budget(msgspec.Struct, frozen=True):
    """All in tokens.

    >>> Budget().threshold
    93600
    """

    window: int = 128_000
    """What the model can take in all, answer included."""
    output_reserve: int = 4_000
    """Room for the answer."""
    system_reserve: int = 2_000
    """Room for system text that the application adds by itself."""
    safety_buffer: int = 5_000
    """Room for what counting gets wrong."""
    threshold_percent: float = 0.80
    """The share of the rest at which something is done."""
    max_tokens: int | None = None
    """What a compaction brings the view down to; unset, three quarters of the threshold."""
    overhead: int = 0
    """What the request takes besides its messages: tools, and system text given apart."""

    @property
    def reserves(self) -> int:
        """Never more than half the window, or a small model would have no room at all."""
        return min(self.output_reserve + self.system_reserve + self.safety_buffer, self.window // 2)

    @property
    def threshold(self) -> int:
        """From here on something is done."""
        return floor((self.window - self.reserves) * self.threshold_percent)

    @property
    def target(self) -> int:
        wanted = self.threshold * 3 // 4 if self.max_tokens is None else self.max_tokens
        return min(wanted, self.threshold)

    @property
    def room(self) -> int:
        """Above this the provider would refuse the request."""
        return self.window - min(self.output_reserve, self.window // 2)
