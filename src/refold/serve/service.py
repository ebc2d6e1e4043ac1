"""All that requests share: the store, the sessions that are kept open, the threads in which they work."""

import hmac
import secrets
from asyncio import get_running_loop
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from threading import Lock
from time import sleep
from typing import Any, NamedTuple, ParamSpec, TypeVar

from refold.config.config import Config
from refold.core.errors import RefoldError
from refold.serve.events import Hub
from refold.serve.metrics import Metrics
from refold.session.notify import CompactionEvent, Happened
from refold.session.session import Session
from refold.stores.store import Key, Notes, Store

P = ParamSpec("P")
T = TypeVar("T")

KEPT = 500
"""Sessions that stay open when nobody uses them."""
THREADS = 16
SECRET = "serve:secret"
SETTLE_S = 0.1
"""After which a secret that several processes made at once is the same for all: the last one kept."""


class Wanted(NamedTuple):
    """Which session: of a conversation, for a model, as an agent."""

    key: Key
    model: str | None = None
    agent: str | None = None


class _Kept:
    def __init__(self, session: Session) -> None:
        self.session, self.users = session, 0


class Service:
    def __init__(self, config: Config, store: Store, *, summarizer: Any = None, embedder: Any = None) -> None:
        self.config, self.settings, self.store = config, config.serve, store
        self.hub, self.metrics = Hub(), Metrics()
        self._how: dict[str, Any] = {"config": config, "summarizer": summarizer, "embedder": embedder}
        self._threads = ThreadPoolExecutor(THREADS, "refold")
        self._kept: OrderedDict[Wanted, _Kept] = OrderedDict()
        self._lock = Lock()
        self._secret: bytes | None = None
        self._secret_lock = Lock()
        self.metrics.gauge("sessions_kept", lambda: len(self._kept))
        self._closing: list[Callable[[], Awaitable[None]]] = []

    async def work(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does what may wait, for the store or for a lock, in a thread."""
        return await get_running_loop().run_in_executor(self._threads, lambda: do(*args, **kwargs))

    @contextmanager
    def session(self, key: Key, model: str | None = None, agent: str | None = None) -> Iterator[Session]:
        """An open session, shared with others who want the same one. For threads, not for the event loop."""
        wanted = Wanted(key, model, agent)
        kept = self._taken(wanted)
        try:
            yield kept.session
        finally:
            self._given_back(wanted, kept)

    def _taken(self, wanted: Wanted) -> _Kept:
        with self._lock:
            kept = self._kept.get(wanted)
            if kept is not None:
                self._kept.move_to_end(wanted)
                kept.users += 1
                return kept
        made = _Kept(self._new(wanted))
        with self._lock:
            kept = self._kept.setdefault(wanted, made)
            kept.users += 1
        if kept is not made:  # another thread was faster
            _close(made.session)
        return kept

    def _new(self, wanted: Wanted) -> Session:
        owner = wanted.key.owner

        def tell(event: Happened) -> None:
            if isinstance(event, CompactionEvent):
                self.metrics.count("compactions", kind=event.kind)
            self.hub.tell(owner, event)

        session = Session(
            self.store, wanted.key, model=wanted.model, agent=wanted.agent, on_event=tell, **self._how
        )
        session.fitter.sends_own = True  # what clients say is said to the provider
        return session

    def _given_back(self, wanted: Wanted, kept: _Kept) -> None:
        with self._lock:
            kept.users -= 1
            is_forgotten = not kept.users and self._kept.get(wanted) is not kept
            idle = (wanted for wanted, one in self._kept.items() if not one.users)
            over = [self._kept.pop(wanted) for wanted in list(islice(idle, max(0, len(self._kept) - KEPT)))]
        for one in [*over, kept] if is_forgotten else over:
            _close(one.session)

    def forget(self, key: Key) -> None:
        """Sessions of a conversation that was erased are of no use any more."""
        with self._lock:
            wanted = [wanted for wanted in self._kept if wanted.key == key]
            idle = [one for one in map(self._kept.pop, wanted) if not one.users]
        for one in idle:  # the others are closed when they are given back
            _close(one.session)

    async def owner_of_key(self, api_key: str) -> str:
        """Who stands behind a key that is stored nowhere: always the same name, which tells nothing of it."""
        if self._secret is None:
            self._secret = await self.work(self._one_secret)
        return "key-" + hmac.new(self._secret, api_key.encode(), "sha256").hexdigest()[:24]

    def _one_secret(self) -> bytes:
        """However many ask for it first."""
        with self._secret_lock:
            self._secret = self._secret or self._kept_secret()
            return self._secret

    def _kept_secret(self) -> bytes:
        """In the store, so that all processes have the same, also after a restart."""
        if not isinstance(self.store, Notes):
            return secrets.token_bytes(32)
        known = self.store.note(SECRET)
        if known is None:
            self.store.keep_note(SECRET, secrets.token_bytes(32))
            sleep(SETTLE_S)  # notes are overwritten: others may have looked before, too
            known = self.store.note(SECRET)
        return known or secrets.token_bytes(32)

    def on_close(self, do: Callable[[], Awaitable[None]]) -> None:
        self._closing.append(do)

    async def finish(self) -> None:
        """Before the event loop ends: what is open elsewhere is closed."""
        for do in self._closing:
            await do()

    def close(self) -> None:
        """What sessions have in mind is kept, then the store is closed."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            sessions, self._kept = [one.session for one in self._kept.values()], OrderedDict()
        for session in sessions:
            _close(session)
        self.store.close()


def _close(session: Session) -> None:
    with suppress(RefoldError):  # the record is whole without it
        session.close()
    session.reducer.summaries = None  # they know the session, which would stay until somebody looks for it
