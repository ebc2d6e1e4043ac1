"""What all summarizers of one view share: settings and prompts, budget, answer cache and lease."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from refold.config.config import Config
from refold.core import codec
from refold.core.errors import RefoldError
from refold.core.live import PERIOD_S
from refold.core.message import Usage
from refold.models.limits import ModelLimits, known_limits
from refold.stores.daemon_call import DaemonCall
from refold.stores.record import Record
from refold.stores.shelf import Shelf
from refold.stores.store import Lease
from refold.summaries.lease import CompactionLease
from refold.summaries.summarizer import Summarizer

T = TypeVar("T")
LEASE_S = 10.0
"""How much longer than a call's timeout the lease lasts."""


class SummaryContext:
    """Written to by the thread that summarizes; other threads only read it."""

    def __init__(self, record: Record, config: Config, agent: str | None, lease: CompactionLease) -> None:
        self.record = record
        self.config = config
        self.settings = config.agent(agent).summarizer
        self.prompts = config.prompts(agent)
        self.prompt_folder = None if self.settings.prompts is None else Path(self.settings.prompts)
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the user's coroutines."""
        self.progress: Callable[[int, int], None] | None = None
        """Called with the number of answered requests, and of all requests."""
        self.lease = lease
        self._conversation_window = 0
        self.covered = 0
        self.digest = ""
        self.abandoned: dict[int, DaemonCall[Any]] = {}
        """Calls that timed out, by the id of their summarizer."""
        self._unrecorded_calls = 0
        self._unrecorded_cost = 0.0

    def start(self, covered: int, digest: str, window: int) -> None:
        """From now on, summaries are written about the first `covered` events, which have this digest.

        `window` is that of the conversation's model.
        """
        self._conversation_window = window
        self.covered = covered
        self.digest = digest

    @property
    def is_erased(self) -> bool:
        """True if the conversation was erased since `start`."""
        return self.record.digest_before(self.covered) != self.digest

    # The budget

    def reserve_call(self, cost: float) -> str | None:
        """Counts a call that may cost so many USD; if it is over the budget, returns why."""
        refusal = self.refusal(1, cost)
        self._unrecorded_calls += refusal is None
        return refusal

    def add_cost(self, cost: float) -> None:
        self._unrecorded_cost += cost

    def mark_recorded(self, calls: int, cost: float) -> None:
        """The record now has these calls and their cost."""
        self._unrecorded_calls = max(0, self._unrecorded_calls - calls)
        self._unrecorded_cost = max(0.0, self._unrecorded_cost - cost)

    def refusal(self, calls: int, cost: float) -> str | None:
        """Why so many calls may not be made now; None if they may."""
        since = time.time() - PERIOD_S
        state = self.record.live.state
        recent = sum(n for at, n in state.called if at > since)
        max_calls = self.settings.max_calls
        left = max_calls - self._unrecorded_calls - recent
        if calls > left:
            return f"it needs {calls} calls, but {max(0, left)} of {max_calls} per ten minutes are left"
        max_cost = self.settings.max_cost
        spent = state.spent + self._unrecorded_cost
        if max_cost is not None and spent + cost > max_cost:
            return f"it may cost ${cost:.4f}, but ${spent:.4f} of ${max_cost} is spent"
        return None

    # The models

    def window(self, summarizer: Summarizer) -> int:
        """Of the summarizer's model if it is known, otherwise of the conversation's model."""
        own = getattr(summarizer, "window", None)
        if isinstance(own, int) and own > 0:
            return own
        if self.settings.window:
            return self.settings.window
        limits = self.limits(getattr(summarizer, "name", None))
        return limits.window if limits else self._conversation_window

    def limits(self, model: str | None) -> ModelLimits | None:
        return known_limits(model, self.config.models) if isinstance(model, str) else None

    # The cache of answers: what cannot be read or kept is paid for again

    def cached(self, digest: bytes, kind: type[T]) -> T | None:
        store = self.record.store
        if not isinstance(store, Shelf):
            return None
        with suppress(RefoldError, msgspec.DecodeError):
            found = store.summary(self.record.key, digest)
            return msgspec.json.decode(found, type=kind) if found else None
        return None

    def cache(self, digest: bytes, value: msgspec.Struct) -> None:
        store = self.record.store
        if isinstance(store, Shelf):
            with suppress(RefoldError):
                if not self.is_erased:
                    store.keep_summary(self.record.key, digest, codec.dumps(value))

    def acquire_lease(self) -> Lease | None:
        """The right to write summaries of the view, for as long as the next call may take."""
        return self.lease.acquire(self.settings.timeout_s + LEASE_S)


def price_of(usage: Usage, limits: ModelLimits | None) -> float:
    """USD; 0 if the model's prices are unknown."""
    return 0.0 if limits is None else limits.price(usage)


def digest_of(*texts: str) -> bytes:
    return blake2b(codec.dumps(texts), digest_size=16).digest()
