"""What everybody who writes summaries of one view shares: the limits, the money, the cache and the lease."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

from refold.config.config import Config
from refold.core import codec
from refold.core.errors import RefoldError
from refold.core.live import PERIOD_S
from refold.core.message import Usage
from refold.models.limits import ModelLimits, known_limits
from refold.stores.record import Record
from refold.stores.store import Lease, SummaryCache
from refold.summaries.lease import CompactionLease
from refold.summaries.summarizer import Summarizer

T = TypeVar("T")
LEASE_S = 10.0
"""What a lease lasts beyond the time that a call may take."""


class SummaryContext:
    """Its store is used by several threads; the rest is read only by others."""

    def __init__(
        self,
        record: Record,
        config: Config,
        agent: str | None,
        lease: CompactionLease,
        window: Callable[[], int],
    ) -> None:
        self.record, self.config = record, config
        self.settings = config.agent(agent).summarizer
        self.prompts = config.prompts(agent)
        self.folder = None if self.settings.prompts is None else Path(self.settings.prompts)
        self.loop: asyncio.AbstractEventLoop | None = None
        """Where coroutines of the user's are at home."""
        self.progress: Callable[[int, int], None] | None = None
        """Is told how many requests were answered, of how many."""
        self.lease = lease
        self._window = window
        self._made_at, self._tip = 0, ""
        self._hung: dict[int, Callable[[], bool]] = {}
        self._made, self._owed = 0, 0.0
        """Calls and USD that the record does not have yet."""

    def begin(self, made: int, tip: str) -> None:
        """What is written from now on is about the record as it is at a place."""
        self._made_at, self._tip = made, tip

    @property
    def is_gone(self) -> bool:
        """What is being written about was erased."""
        return self.record.digest_before(self._made_at) != self._tip

    def answered(self, n: int, of: int) -> None:
        if self.progress is not None:
            self.progress(n, of)

    # What it may cost

    def spend(self, cost: float) -> str | None:
        """Why one more call may not be made, that may cost so many USD; if it may, it is counted."""
        refused = self.refuse(1, cost)
        self._made += refused is None
        return refused

    def owe(self, cost: float) -> None:
        self._owed += cost

    def settled(self, calls: int, cost: float) -> None:
        """The record has them now."""
        self._made, self._owed = max(0, self._made - calls), max(0.0, self._owed - cost)

    def refuse(self, calls: int, cost: float) -> str | None:
        """Why so many calls may not be made now."""
        left, most = self._left(), self.settings.max_calls
        if calls > left:
            return f"it would take {calls} calls; {max(0, left)} of {most} in ten minutes are left"
        if not self._can_pay(cost):
            return f"it may cost ${cost:.4f}; ${self._spent():.4f} of ${self.settings.max_cost} is spent"
        return None

    def price(self, usage: Usage, limits: ModelLimits | None) -> float:
        """USD, as far as prices are known."""
        return 0.0 if limits is None else limits.price(usage)

    def _left(self) -> int:
        since = time.time() - PERIOD_S
        called = self.record.live.state.called
        return self.settings.max_calls - self._made - sum(n for at, n in called if at > since)

    def _spent(self) -> float:
        return self.record.live.state.spent + self._owed

    def _can_pay(self, cost: float) -> bool:
        most = self.settings.max_cost
        return most is None or self._spent() + cost <= most

    # What models take

    def window(self, summarizer: Summarizer) -> int:
        """Of its own model, as far as it is known; else as that of the conversation's model."""
        own = getattr(summarizer, "window", None)
        own = own if isinstance(own, int) and own > 0 else self.settings.window
        known = self.limits(getattr(summarizer, "name", None))
        return int(own or (known.window if known else self._window()))

    def limits(self, model: str | None) -> ModelLimits | None:
        return known_limits(model, self.config.models) if isinstance(model, str) else None

    def gave_up(self, summarizer: Summarizer, still_running: Callable[[], bool] | None) -> None:
        if still_running is not None:
            self._hung[id(summarizer)] = still_running

    def is_hung(self, summarizer: Summarizer) -> bool:
        """A call to it that nobody waits for any more is still under way."""
        still_running = self._hung.get(id(summarizer))
        return still_running is not None and still_running()

    # What was paid for

    def kept(self, digest: bytes, kind: type[T]) -> T | None:
        """What was kept under a digest. It is only money: whatever is wrong with it, it is not there."""
        store = self.record.store
        with suppress(RefoldError, msgspec.DecodeError):
            found = store.summary(self.record.key, digest) if isinstance(store, SummaryCache) else None
            return msgspec.json.decode(found, type=kind) if found else None
        return None

    def keep(self, digest: bytes, value: msgspec.Struct) -> None:
        store = self.record.store
        if isinstance(store, SummaryCache):
            with suppress(RefoldError):
                if self.is_gone:
                    return
                store.keep_summary(self.record.key, digest, codec.dumps(value))

    # Who may write

    def acquire(self) -> Lease | None:
        """The right to write, for as long as the next call may take."""
        return self.lease.acquire(self.settings.timeout_s + LEASE_S)


def digest_of(*texts: str) -> bytes:
    """Of what was asked, and of whom."""
    return blake2b(codec.dumps(texts), digest_size=16).digest()
