"""Mem0 as the memory of a hybrid store: its cloud or its open-source library.

The metadata of each memory names its conversation, so that both can be erased together.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from importlib.util import find_spec
from threading import RLock
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from refold.core.errors import MessageError, RefoldError, SettingError, StoreError
from refold.stores.hybrid import HybridStore, is_number, open_hybrid
from refold.stores.hybrid_sync import BoundedDict
from refold.stores.packing import key_digest
from refold.stores.store import Key, Memory, SpokenMessage
from refold.stores.url import shown_url

Level: TypeAlias = Literal["user", "session", "agent", "org"]

ENTITY = {"user": "user_id", "session": "run_id", "agent": "agent_id", "org": "app_id"}
"""By level: whose memories they are. Mem0 keeps those of one kind apart from those of another."""
RECORD = "sqlite:///refold.db"
ROLES = ("user", "assistant")
"""Who is listened to. What tools say is not: strangers may have written it."""
MOST_CHARS = 20_000
"""Of one message: what is longer is handed over by its beginning."""
TIMEOUT_S, CONNECT_S = 20.0, 5.0
"""For a request that nobody waits for, and for its connection."""
MEMORIES_S = 5.0
"""For asking for memories, opening the client included, unless `timeout_s` says otherwise."""
PARTS = {"pool": 0.125, "connect": 0.25, "write": 0.125, "read": 0.5}
"""What each step of such a request may take of what is left."""
PAGE = 100
MAX_KNOWN = 10_000
"""Conversations and requests that a process remembers; Mem0 has worked through older ones long since."""
SETTLE_S = 10.0
"""How long forgetting waits for what Mem0 has not worked through yet."""
NEVER = ("HTTP_400", "HTTP_409", "HTTP_413", "HTTP_422")
"""What Mem0 will not take, however often it is asked."""
OPTIONS = "host, level=user|session|agent|org, graph=0|1, infer=0|1, recall=0|1, timeout_s, key and record"
USER_INFO = re.compile(r"((?<=://)|^)[^/\s]*@")
"""In a URL: who asks, and the password."""

_UNTIL: ContextVar[float | None] = ContextVar("until", default=None)
"""When memories that are asked for must be there."""


class Mem0Memorizer:
    """The cloud by its key, or a `mem0.Memory` of your own as `client`. Opened when first used: a service
    that is down is no reason not to begin.
    """

    def __init__(
        self,
        client: Any = None,
        *,
        api_key: str | None = None,
        host: str | None = None,
        user: str | None = None,
        level: Level = "user",
        graph: bool | None = None,
        infer: bool = True,
        recall: bool = True,
        timeout_s: float = MEMORIES_S,
    ) -> None:
        """`user` is whose the memories are, or at other levels which agent's or organization's; unset, the
        conversation's owner. `graph` is sent only where it is set: newer services always have one. Asking
        for memories takes `timeout_s` at most; a `client` that was given has times of its own.
        """
        if client is None:
            self._key_from = "`api_key` or `key`" if api_key else "MEM0_API_KEY"
            api_key = api_key or os.environ.get("MEM0_API_KEY")
            if not api_key:
                raise SettingError(
                    "mem0", "set MEM0_API_KEY, or give the key: `api_key=` in Python, `key=` in a URL"
                )
            if find_spec("mem0") is None:
                raise SettingError("mem0", 'is not installed: pip install "refold[mem0]"')
        if level not in ENTITY:
            raise SettingError("level", f"{level!r} is not known; known: {', '.join(ENTITY)}")
        if client is not None and level == "org" and not hasattr(client, "api_key"):
            raise SettingError("level", "the open-source Memory has user, session and agent, no org")
        self.recalls = recall
        self._told_host = USER_INFO.sub("", host or "https://api.mem0.ai")
        place = (self._told_host if host else "cloud") if client is None else "client"
        self.name = f"mem0 {place} {level} {user or ''}".rstrip()
        self._client, self._is_given = client, client is not None
        self._api_key, self._host, self._user, self._level = api_key, host, user, level
        self._settings: dict[str, Any] = {"infer": infer} | ({} if graph is None else {"enable_graph": graph})
        self._timeout_s = timeout_s
        self._lock, self._pid = RLock(), os.getpid()
        self._sure = BoundedDict[Key, None](MAX_KNOWN)
        """Conversations whose next batch cannot have been handed over already."""
        self._pending = BoundedDict[str, Key](MAX_KNOWN)
        """What Mem0 took in and may not have worked through, and where it came from."""

    # What a hybrid store asks for

    def remember(self, key: Key, said: Sequence[SpokenMessage], /) -> None:
        said = [one for one in said if one.role in ROLES and one.text.strip()]
        if key not in self._sure:
            said = self._unknown(key, said)
        with self._explained_errors(refusals=True):
            self._sure.pop(key, None)
            if said:
                messages = [{"role": one.role, "content": _clean(one.text[:MOST_CHARS])} for one in said]
                about: dict[str, Any] = {"refold": key_digest(key), "owner": _clean(key.owner)}
                about |= {"conversation": _clean(key.conversation)}
                about |= {"first": said[0].at, "last": said[-1].at}
                whose = {ENTITY[self._level]: self._whose(key)}
                answer = self.client.add(messages, **whose, metadata=about, **self._add_settings)
                if isinstance(answer, dict) and isinstance(answer.get("event_id"), str):
                    self._pending[answer["event_id"]] = key
            self._sure[key] = None

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> Sequence[Memory]:
        """A namespace is one of the cloud's categories."""
        with self._explained_errors(), self._within(self._timeout_s):
            if namespace is not None and not self._is_cloud:
                raise SettingError("namespace", "the open-source Memory has no categories")
            more = [] if namespace is None else [{"categories": {"in": [_clean(namespace)]}}]
            filters = self._filters(key, *more)
            if query is not None and query.strip():
                found = self.client.search(_clean(query), filters=filters, top_k=limit)
            elif self._is_cloud:
                found = self.client.get_all(filters=filters, page=1, page_size=min(limit, PAGE))
            else:
                found = self.client.get_all(filters=filters, top_k=limit)
            return [_memory(one) for one in _results(found)][:limit]

    def forget(self, key: Key, /) -> None:
        """What came from the conversation; where Mem0 merged it with other things, what still says so."""
        with self._explained_errors():
            self._settle(key)
            for _ in range(PAGE):
                ids = [one["id"] for one in self._from(key)]
                if not ids:
                    self._sure.pop(key, None)
                    return
                self._delete(ids)
        raise StoreError(f"Mem0 still returns memories of {key.conversation!r} after deleting them; retry")

    def close(self) -> None:
        if self._is_given or self._pid != os.getpid() or not self._lock.acquire(blocking=False):
            return  # it may just be opened, by somebody who waits for a host that never answers
        try:
            client, self._client = self._client, None
            if client is not None:
                client.client.close()
        finally:
            self._lock.release()

    # The client

    @property
    def client(self) -> Any:
        """Mem0's own client, opened when first asked for."""
        if self._is_given:
            return self._client
        if self._pid != os.getpid():  # neither connections nor locks may cross a fork
            self._client, self._lock, self._pid = None, RLock(), os.getpid()
        if not self._lock.acquire(timeout=_left() or TIMEOUT_S):
            raise StoreError("Mem0's host has not answered yet while its client is being opened; retry")
        try:
            self._client = self._client or self._opened()
            return self._client
        finally:
            self._lock.release()

    def _opened(self) -> Any:
        mem0 = _imported()
        import httpx

        def hurry(request: Any) -> None:
            if (left := _left()) is not None:
                request.extensions["timeout"] |= {what: left * part for what, part in PARTS.items()}

        times = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
        http = httpx.Client(timeout=times, event_hooks={"request": [hurry]})
        try:
            return mem0.MemoryClient(api_key=self._api_key, host=self._host, client=http)
        except BaseException:
            http.close()
            raise

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        if not self._is_given:
            _imported()  # which takes a second or two, and is not the service's fault
        before = _UNTIL.set(time.monotonic() + seconds)
        try:
            yield
        finally:
            _UNTIL.reset(before)

    @property
    def _is_cloud(self) -> bool:
        return not self._is_given or hasattr(self._client, "api_key")

    @property
    def _add_settings(self) -> dict[str, Any]:
        return self._settings if self._is_cloud else {"infer": self._settings["infer"]}

    def _whose(self, key: Key) -> str:
        """At the levels of user and session, owners are kept apart whatever the URL says; agents and
        organizations are shared by all.
        """
        if self._level == "session":
            return f"refold-{key_digest(key)}"
        name = key.owner if self._user is None else self._user
        if self._level == "user" and self._user is not None and key.owner != "default":
            return f"refold-{key_digest(Key(self._user, f'owner {key.owner}'))}"
        return _plain(name)

    def _filters(self, key: Key, *more: dict[str, Any]) -> dict[str, Any]:
        whose = {ENTITY[self._level]: self._whose(key)}
        if not self._is_cloud:
            return {**whose, **{name: value for one in more for name, value in one["metadata"].items()}}
        return {"AND": [whose, *more]} if more else whose

    def _from(self, key: Key, **places: int) -> list[dict[str, Any]]:
        """The memories that came from a conversation."""
        about: list[dict[str, Any]] = [{"metadata": {"refold": key_digest(key)}}]
        about += [{"metadata": {name: value}} for name, value in places.items()]
        filters, found = self._filters(key, *about), list[dict[str, Any]]()
        if not self._is_cloud:
            found = _results(self.client.get_all(filters=filters, top_k=PAGE))
        for page in range(1, PAGE + 1) if self._is_cloud else ():
            answer = self.client.get_all(filters=filters, page=page, page_size=PAGE)
            found += _results(answer)
            if not isinstance(answer, dict) or not answer.get("next"):
                break
        return [one for one in found if (one.get("metadata") or {}).get("refold") == key_digest(key)]

    def _unknown(self, key: Key, said: Sequence[SpokenMessage]) -> list[SpokenMessage]:
        """Without what Mem0 learned from already, before this process died or the line was cut."""
        found = list[dict[str, Any]]()
        with (
            suppress(MessageError),
            self._explained_errors(refusals=True),
        ):  # it cannot be asked: so be it
            found = self._from(key, first=said[0].at) if said else []
        places = [one["metadata"].get("last") for one in found]
        last = max((place for place in places if isinstance(place, int)), default=-1)
        return [one for one in said if one.at > last]

    def _settle(self, key: Key) -> None:
        """Waits for what Mem0 took in just now: it must not learn from it after it forgot."""
        until = time.monotonic() + SETTLE_S
        for event in [event for event, of in list(self._pending.items()) if of == key]:
            while self._is_under_way(event):
                if time.monotonic() > until:
                    raise StoreError("Mem0 is still working on earlier messages; retry in a while")
                time.sleep(0.1)
            self._pending.pop(event, None)

    def _is_under_way(self, event: str) -> bool:
        answer = self.client.client.get(f"/v1/event/{event}/")
        if answer.status_code == 404:
            return False
        answer.raise_for_status()
        return answer.json().get("status") in ("PENDING", "RUNNING")

    def _delete(self, ids: Sequence[str]) -> None:
        for start in range(0, len(ids), PAGE) if self._is_cloud else ():
            self.client.batch_delete([{"memory_id": id} for id in ids[start : start + PAGE]])
        for id in ids if not self._is_cloud else ():
            with suppress(ValueError):  # another process deleted it
                self.client.delete(id)

    @contextmanager
    def _explained_errors(self, *, refusals: bool = False) -> Iterator[None]:
        """Turns any error of the client into a `StoreError`, or with `refusals` into a `MessageError`."""
        try:
            yield
        except RefoldError:
            raise
        except Exception as error:
            told = USER_INFO.sub("***@", str(error) or repr(error))[:500]
            is_never = getattr(error, "error_code", "") in NEVER or type(error).__name__ == "ValidationError"
            if _status(error) in (401, 403) and not self._is_given:
                raise StoreError(
                    f"Mem0 does not accept the key from {self._key_from}: {told}. Use one that is valid"
                    f" for {self._told_host}; nothing is lost meanwhile"
                ) from error
            if refusals and is_never:
                raise MessageError("Mem0", f"refuses it: {told}") from error
            raise StoreError(f"Mem0 does not answer as it should: {told}; retry") from error


def _status(error: BaseException) -> int | None:
    """Of the answer that an error was made of: the client tells it only sometimes."""
    answers = (getattr(one, "response", None) for one in (error, error.__context__))
    return next((answer.status_code for answer in answers if answer is not None), None)


def _left() -> float | None:
    """The seconds that are left, where something must be there by a time."""
    until = _UNTIL.get()
    return None if until is None else max(0.001, until - time.monotonic())


def _imported() -> Any:
    """The library. It reports what it does to its makers unless MEM0_TELEMETRY says no: nobody was asked, so
    it is imported with that said, unless the user said otherwise or has imported it already.
    """
    name, before = "MEM0_TELEMETRY", os.environ.get("MEM0_TELEMETRY")
    if before is None:
        os.environ[name] = "False"
    try:
        import mem0

        return mem0
    except ImportError as error:
        raise StoreError(f'Mem0 cannot be imported ({error}): pip install "refold[mem0]"') from error
    finally:
        if before is None:
            os.environ.pop(name, None)


def _plain(name: str) -> str:
    """A name as Mem0 takes it: no spaces, no wildcard, not too long; others by their digest."""
    is_plain = re.fullmatch(r"[\w@.+:-]{1,128}", name, re.ASCII) and not name.startswith("refold-")
    return name if is_plain else f"refold-{key_digest(Key(name, ''))}"


def _clean(text: str) -> str:
    """A lone surrogate cannot be sent, and NUL not be stored by all."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _results(answer: Any) -> list[dict[str, Any]]:
    found = answer.get("results", []) if isinstance(answer, dict) else answer
    return [one for one in found or [] if isinstance(one, dict) and "id" in one]


def _memory(found: dict[str, Any]) -> Memory:
    score, categories = found.get("score"), found.get("categories") or []
    try:
        created = datetime.fromisoformat(found["created_at"]).timestamp()
    except (KeyError, TypeError, ValueError):
        created = None
    namespace = str(categories[0]) if isinstance(categories, list) and categories else None
    known = float(score) if isinstance(score, int | float) else None
    return Memory(str(found["id"]), str(found.get("memory") or ""), known, namespace, created)


def memorizer(url: str) -> Mem0Memorizer:
    """Mem0's cloud, or a host that speaks as it does, by `mem0://USER`; without a record."""
    return _parsed(url)[0]


def from_url(url: str) -> HybridStore:
    """The store behind `mem0://USER?host=…&level=user&record=URL`: a record, and Mem0 told of it at once.

    Options: host, level=user|session|agent|org, graph=0|1, infer=0|1, recall=0|1, timeout_s (of asking for
    memories), key (else MEM0_API_KEY), and record, a URL, percent-encoded.
    """
    memorizer, record = _parsed(url)
    return open_hybrid(record, memorizer)


def _parsed(url: str) -> tuple[Mem0Memorizer, str]:
    where = f"store {shown_url(url)!r}"
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    record, level = options.pop("record", RECORD), options.pop("level", "user")
    given = {name: options.pop(name, None) for name in ("graph", "infer", "recall")}
    host, key, seconds = (
        options.pop("host", None),
        options.pop("key", None),
        options.pop("timeout_s", f"{MEMORIES_S}"),
    )
    if options or parts.path.strip("/") or not {*given.values()} <= {None, "0", "1"} or level not in ENTITY:
        raise SettingError(where, f"expected mem0://USER; its options are {OPTIONS}")
    if host is not None and not host.lower().startswith(("http://", "https://")):
        raise SettingError(where, f"host is a URL such as https://api.mem0.ai, not {shown_url(host)!r}")
    if not is_number(seconds) or not float(seconds):
        raise SettingError(where, f"timeout_s is a number of seconds, not {seconds!r}")
    flags: dict[str, Any] = {name: value == "1" for name, value in given.items() if value is not None}
    flags |= {"level": level, "timeout_s": float(seconds)}
    return Mem0Memorizer(api_key=key, host=host, user=unquote(parts.netloc) or None, **flags), record
