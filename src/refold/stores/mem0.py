"""Mem0 as the memory of a hybrid store: its cloud or its open-source library.

The metadata of each memory names its conversation, so that both can be erased together.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.util import find_spec
from threading import Lock
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from refold.core.errors import MessageError, RefoldError, SettingError, StoreError
from refold.stores.daemon_call import DaemonCall
from refold.stores.forks import keep_for_parent, renew_after_fork
from refold.stores.hybrid import HybridStore, open_hybrid
from refold.stores.hybrid_sync import BoundedDict
from refold.stores.packing import key_digest
from refold.stores.store import Key, Memory, SpokenMessage
from refold.stores.url import ANY, SECONDS, SWITCH, UrlOption, parse_options, shown_url

Level: TypeAlias = Literal["user", "session", "agent", "org"]

ENTITY = {"user": "user_id", "session": "run_id", "agent": "agent_id", "org": "app_id"}
"""By level, Mem0's name for whose memories they are."""
RECORD = "sqlite:///refold.db"
ROLES = ("user", "assistant")
"""Not tools: strangers may have written their results."""
MAX_MESSAGE_CHARS = 20_000
TIMEOUT_S = 20.0
"""For a request that nobody waits for."""
CONNECT_S = 5.0
MEMORIES_S = 5.0
"""For reading memories, opening the client included, unless `timeout_s` says otherwise."""
PAGE = 100
MAX_KNOWN = 10_000
"""Conversations and requests that a process remembers; Mem0 is done with older ones."""
SETTLE_S = 10.0
"""How long forgetting waits for messages that Mem0 is still working on."""
NEVER = ("HTTP_400", "HTTP_409", "HTTP_413", "HTTP_422")
"""Codes of requests that Mem0 will never accept."""
OPTIONS = {
    "host": ANY,
    "level": UrlOption("|".join(ENTITY), ", ".join(ENTITY)),
    **dict.fromkeys(("graph", "infer", "recall"), SWITCH),
    "timeout_s": SECONDS,
    "key": ANY,
    "record": ANY,
}
USER_INFO = re.compile(r"((?<=://)|^)[^/\s]*@")
"""The user and the password in a URL."""


class Mem0Memorizer:
    """The cloud by its key, or a `mem0.Memory` of your own as `client`. The cloud's client is opened on first
    use, so that sessions open while the service is down.
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
        """`user` is whose the memories are, at other levels which agent's or organization's; by default the
        conversation's owner. `graph` is sent only if it is set: newer services always have one. Reading
        memories takes `timeout_s` at most; a `client` of your own has its own timeouts.
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
        self._is_cloud = client is None or hasattr(client, "api_key")
        if level == "org" and not self._is_cloud:
            raise SettingError("level", "the open-source Memory has user, session and agent, no org")
        self.recalls = recall
        self._shown_host = USER_INFO.sub("", host or "https://api.mem0.ai")
        place = "client"
        if client is None:
            place = self._shown_host if host else "cloud"
        self.name = f"mem0 {place} {level} {user or ''}".rstrip()
        self._given = client
        self._client: Any = None
        self._lock = Lock()
        """Held while the client is opened."""
        renew_after_fork(self)
        self._api_key = api_key
        self._host = host
        self._user = user
        self._level = level
        self._options: dict[str, Any] = {"infer": infer}
        if graph is not None and self._is_cloud:
            self._options["enable_graph"] = graph
        self._timeout_s = timeout_s
        self._sure = BoundedDict[Key, None](MAX_KNOWN)
        """Conversations whose next batch was certainly not delivered yet."""
        self._pending = BoundedDict[str, Key](MAX_KNOWN)
        """The conversation of each request that Mem0 accepted and may still be working on."""

    # The methods of a memorizer

    def remember(self, key: Key, said: Sequence[SpokenMessage], /) -> None:
        said = [one for one in said if one.role in ROLES and one.text.strip()]
        if key not in self._sure:
            said = self._unknown(key, said)
        with self._explained_errors(refusals=True):
            self._sure.pop(key, None)
            if said:
                messages = [
                    {"role": one.role, "content": _clean(one.text[:MAX_MESSAGE_CHARS])} for one in said
                ]
                about: dict[str, Any] = {"refold": key_digest(key), "owner": _clean(key.owner)}
                about |= {"conversation": _clean(key.conversation)}
                about |= {"first": said[0].at, "last": said[-1].at}
                answer = self.client.add(messages, **self._whose(key), metadata=about, **self._options)
                if isinstance(answer, dict) and isinstance(answer.get("event_id"), str):
                    self._pending[answer["event_id"]] = key
            self._sure[key] = None

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> Sequence[Memory]:
        """A namespace is one of the cloud's categories."""
        if not self._is_cloud and namespace is not None:
            raise SettingError("namespace", "the open-source Memory has no categories")
        if self._given is not None:
            return self._find(key, query, limit, namespace)
        _imported()  # which takes a second or two
        found = DaemonCall(lambda: self._find(key, query, limit, namespace), "refold-mem0")
        try:
            return found.result(self._timeout_s)
        except TimeoutError as error:
            raise StoreError(f"Mem0 has not answered within {self._timeout_s:g} s; retry") from error

    def _find(self, key: Key, query: str | None, limit: int, namespace: str | None) -> list[Memory]:
        query = query if query is not None and query.strip() else None
        with self._explained_errors():
            whose = self._whose(key)
            search: dict[str, Any] = {"filters": whose, "top_k": limit}
            listing = search
            if self._is_cloud:
                if namespace is not None:
                    search["filters"] = {"AND": [whose, {"categories": {"in": [_clean(namespace)]}}]}
                listing = {"filters": search["filters"], "page": 1, "page_size": min(limit, PAGE)}
            if query is not None:
                found = self.client.search(_clean(query), **search)
            else:
                found = self.client.get_all(**listing)
            return [_memory(one) for one in _results(found)][:limit]

    def forget(self, key: Key, /) -> None:
        """Deletes what came from the conversation, as far as metadata of merged memories still says so."""
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
        if self._client is not None:
            self._client.client.close()
            self._client = None

    # The client

    @property
    def client(self) -> Any:
        """Mem0's own client, opened when it is first used."""
        if self._given is not None:
            return self._given
        with self._lock:
            self._client = self._client or self._open()
            return self._client

    def after_fork(self) -> None:
        keep_for_parent(self._client)
        self._client = None
        self._lock = Lock()

    def _open(self) -> Any:
        mem0 = _imported()
        import httpx

        http = httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S))
        try:
            return mem0.MemoryClient(api_key=self._api_key, host=self._host, client=http)
        except BaseException:
            http.close()
            raise

    def _whose(self, key: Key) -> dict[str, str]:
        """Owners are separate at the levels of user and session, and share agents and organizations."""
        name = _plain(key.owner if self._user is None else self._user)
        if self._level == "session":
            name = f"refold-{key_digest(key)}"
        elif self._level == "user" and self._user is not None and key.owner != "default":
            name = f"refold-{key_digest(Key(self._user, f'owner {key.owner}'))}"
        return {ENTITY[self._level]: name}

    def _from(self, key: Key, **places: int) -> list[dict[str, Any]]:
        """The memories that came from a conversation."""
        whose = self._whose(key)
        metadata: dict[str, Any] = {"refold": key_digest(key), **places}
        found: list[dict[str, Any]] = []
        if not self._is_cloud:
            found = _results(self.client.get_all(filters=whose | metadata, top_k=PAGE))
        else:
            about = [{"metadata": {name: value}} for name, value in metadata.items()]
            for page in range(1, PAGE + 1):
                answer = self.client.get_all(filters={"AND": [whose, *about]}, page=page, page_size=PAGE)
                found += _results(answer)
                if not isinstance(answer, dict) or not answer.get("next"):
                    break
        return [one for one in found if (one.get("metadata") or {}).get("refold") == key_digest(key)]

    def _delete(self, ids: Sequence[str]) -> None:
        if self._is_cloud:
            for start in range(0, len(ids), PAGE):
                self.client.batch_delete([{"memory_id": id} for id in ids[start : start + PAGE]])
            return
        for id in ids:
            with suppress(ValueError):  # another process deleted it
                self.client.delete(id)

    def _unknown(self, key: Key, said: Sequence[SpokenMessage]) -> list[SpokenMessage]:
        """The messages that Mem0 does not have yet: a batch may have arrived though this process died, or the
        connection broke.
        """
        found: list[dict[str, Any]] = []
        with suppress(MessageError), self._explained_errors(refusals=True):  # Mem0 rejects the question
            found = self._from(key, first=said[0].at) if said else []
        places = [one["metadata"].get("last") for one in found]
        last = max((place for place in places if isinstance(place, int)), default=-1)
        return [one for one in said if one.at > last]

    def _settle(self, key: Key) -> None:
        """Waits until Mem0 has worked on what it accepted: it must not learn from it after forgetting."""
        until = time.monotonic() + SETTLE_S
        for event in [event for event, of in list(self._pending.items()) if of == key]:
            while self._is_under_way(event):
                if time.monotonic() > until:
                    raise StoreError("Mem0 is still working on earlier messages; retry in a while")
                time.sleep(0.1)
            self._pending.pop(event, None)

    def _is_under_way(self, event: str) -> bool:
        """True if Mem0 is still working on a request that it accepted."""
        answer = self.client.client.get(f"/v1/event/{event}/")
        if answer.status_code == 404:
            return False
        answer.raise_for_status()
        return answer.json().get("status") in ("PENDING", "RUNNING")

    @contextmanager
    def _explained_errors(self, *, refusals: bool = False) -> Iterator[None]:
        """Turns any error of the client into a `StoreError`, or with `refusals` into a `MessageError`."""
        try:
            yield
        except RefoldError:
            raise
        except Exception as error:
            message = USER_INFO.sub("***@", str(error) or repr(error))[:500]
            is_never = getattr(error, "error_code", "") in NEVER or type(error).__name__ == "ValidationError"
            if _status(error) in (401, 403) and self._given is None:
                raise StoreError(
                    f"Mem0 does not accept the key from {self._key_from}: {message}. Use one that is valid"
                    f" for {self._shown_host}; nothing is lost meanwhile"
                ) from error
            if refusals and is_never:
                raise MessageError("Mem0", f"refuses it: {message}") from error
            raise StoreError(f"Mem0 does not answer as it should: {message}; retry") from error


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error of the client."""
    answers = (getattr(one, "response", None) for one in (error, error.__context__))
    return next((answer.status_code for answer in answers if answer is not None), None)


def _imported() -> Any:
    """The library, imported with MEM0_TELEMETRY=False unless the user set that: it reports its use."""
    is_unset = "MEM0_TELEMETRY" not in os.environ
    os.environ.setdefault("MEM0_TELEMETRY", "False")
    try:
        import mem0

        return mem0
    except ImportError as error:
        raise StoreError(f'Mem0 cannot be imported ({error}): pip install "refold[mem0]"') from error
    finally:
        if is_unset:
            os.environ.pop("MEM0_TELEMETRY", None)


def _plain(name: str) -> str:
    """A name that Mem0 accepts: no spaces, no wildcard, not too long; the digest of any other."""
    is_plain = re.fullmatch(r"[\w@.+:-]{1,128}", name, re.ASCII) and not name.startswith("refold-")
    return name if is_plain else f"refold-{key_digest(Key(name, ''))}"


def _clean(text: str) -> str:
    """Without lone surrogates, which cannot be sent, and NUL, which not every store keeps."""
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
    """Mem0's cloud, or a host with the same API, by `mem0://USER`; without a record."""
    return _parsed(url)[0]


def from_url(url: str) -> HybridStore:
    """The store behind `mem0://USER?host=…&level=user&record=URL`: a record, and Mem0 as its memory.

    Options: host, level=user|session|agent|org, graph=0|1, infer=0|1, recall=0|1, timeout_s (of reading
    memories), key (else MEM0_API_KEY), and record, a URL, percent-encoded.
    """
    memorizer, record = _parsed(url)
    return open_hybrid(record, memorizer)


def _parsed(url: str) -> tuple[Mem0Memorizer, str]:
    where = f"store {shown_url(url)!r}"
    parts = urlsplit(url)
    if parts.path.strip("/"):
        raise SettingError(where, f"expected mem0://USER; its options are {', '.join(OPTIONS)}")
    options = parse_options(where, parts.query, OPTIONS)
    record = options.pop("record", RECORD)
    key = options.pop("key", None)
    host = options.get("host")
    if host is not None and not host.lower().startswith(("http://", "https://")):
        raise SettingError(where, f"host is a URL such as https://api.mem0.ai, not {shown_url(host)!r}")
    return Mem0Memorizer(api_key=key, user=unquote(parts.netloc) or None, **options), record
