"""What all requests share: the store and its health, open sessions, threads, live events and metrics."""

import asyncio
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, NamedTuple, ParamSpec, TypeVar

from refold.config.config import Config
from refold.core.errors import RefoldError
from refold.serve.conversations import Conversations
from refold.serve.events import EventBroker
from refold.serve.metrics import Metrics
from refold.serve.upstream import Upstream
from refold.session.notify import CompactionEvent, SessionEvent
from refold.session.session import Session
from refold.stores.shelf import Shelf
from refold.stores.store import Key, Store

P = ParamSpec("P")
T = TypeVar("T")

MAX_OPEN_SESSIONS = 500
"""More stay open only while they are used."""
THREADS = 16
SECRET = "serve:secret"
PROBE_TIMEOUT_S = 2.0
PROBED = Key("refold", "healthz")
"""A conversation that no store has."""
_LOG = logging.getLogger("refold.serve")


class Health:
    """Asks the store whether it answers: one probe at a time, shared by all who ask meanwhile."""

    def __init__(self, store: Store, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._probe: asyncio.Task[object] | None = None

    async def problem(self) -> str | None:
        """Why the service is not healthy, without internals; None if it is."""
        if self._probe is None or self._probe.done():
            # not in the service's own threads, which may all be busy
            probe = asyncio.to_thread(lambda: next(iter(self._store.read(PROBED, 0, 1)), None))
            self._probe = asyncio.create_task(probe)
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), self._timeout_s)
        except TimeoutError:
            return "the store does not answer in time"
        except Exception:
            _LOG.warning("the store is not available", exc_info=True)
            return "the store is not available"
        return None


class SessionKey(NamedTuple):
    conversation: Key
    model: str | None = None
    agent: str | None = None


class _SharedSession:
    def __init__(self) -> None:
        self.session: Session | None = None
        """None until the first user has opened it."""
        self.users = 0
        self.opening = Lock()

    def close(self) -> None:
        with suppress(RefoldError):  # the record is complete: closing only saves time for the next session
            if self.session is not None:
                self.session.close()


class Service:
    def __init__(self, config: Config, store: Store, *, summarizer: Any = None, embedder: Any = None) -> None:
        self.config = config
        self.settings = config.serve
        self.store = store
        self.conversations = Conversations(store)
        self.health = Health(store)
        self.events = EventBroker(self.conversations)
        self.upstream = Upstream()
        self.metrics = Metrics()
        self.metrics.sessions_kept.set_function(lambda: len(self._sessions))
        self._summarizer = summarizer
        self._embedder = embedder
        self._threads = ThreadPoolExecutor(THREADS, "refold")
        self._sessions: OrderedDict[SessionKey, _SharedSession] = OrderedDict()
        """The least recently used first."""
        self._lock = Lock()
        self._secret = None if isinstance(store, Shelf) else secrets.token_bytes(32)

    async def work(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs in a thread what may block on the store or on a lock."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: do(*args, **kwargs))

    @contextmanager
    def session(self, key: Key, model: str | None = None, agent: str | None = None) -> Iterator[Session]:
        """An open session, shared with others that use the same. For threads, not for the event loop."""
        wanted = SessionKey(key, model, agent)
        with self._lock:
            shared = self._sessions.setdefault(wanted, _SharedSession())
            self._sessions.move_to_end(wanted)
            shared.users += 1
        try:
            with shared.opening:
                if shared.session is None:
                    shared.session = self._open(wanted)
            yield shared.session
        finally:
            self._release(wanted, shared)

    def _release(self, wanted: SessionKey, shared: _SharedSession) -> None:
        """Closes the session of a conversation that was erased, and the least recently used of too many."""
        unused: list[_SharedSession] = []
        with self._lock:
            shared.users -= 1
            if not shared.users and self._sessions.get(wanted) is not shared:
                unused.append(shared)
            surplus = len(self._sessions) - MAX_OPEN_SESSIONS
            if surplus > 0:
                idle = [key for key, one in self._sessions.items() if not one.users]
                unused += [self._sessions.pop(key) for key in idle[:surplus]]
        for one in unused:
            one.close()

    def _open(self, wanted: SessionKey) -> Session:
        def publish(event: SessionEvent) -> None:
            if isinstance(event, CompactionEvent):
                self.metrics.compactions.labels(event.kind).inc()
            self.events.publish(wanted.conversation, event)

        return Session(
            self.store,
            wanted.conversation,
            model=wanted.model,
            agent=wanted.agent,
            config=self.config,
            summarizer=self._summarizer,
            embedder=self._embedder,
            on_event=publish,
            sends_own_fields=True,
        )

    def forget(self, key: Key) -> None:
        """Closes the sessions of a conversation that was erased; those in use, when they are released."""
        with self._lock:
            erased = [self._sessions.pop(one) for one in [*self._sessions] if one.conversation == key]
            unused = [shared for shared in erased if not shared.users]
        for shared in unused:
            shared.close()

    async def owner_of_key(self, api_key: str) -> str:
        """The owner that stands for an API key: a keyed hash, always the same, that reveals nothing."""
        if self._secret is None:
            self._secret = await self.work(self._load_secret)
        return "key-" + hmac.new(self._secret, api_key.encode(), "sha256").hexdigest()[:24]

    def _load_secret(self) -> bytes:
        """From the store, so that all processes have the same one, also after a restart."""
        assert isinstance(self.store, Shelf)
        self.store.compare_and_set(None, SECRET, None, secrets.token_bytes(32))
        secret = self.store.note(SECRET)
        assert secret is not None
        return secret

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for shared in sessions:
            shared.close()
        self.store.close()
