"""Client of AgentCore Memory: allowed names, events, memory records, and errors as `StoreError`."""

import re
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

from refold.core.codec import to_bytes
from refold.core.errors import SettingError, StoreError
from refold.stores.forks import keep_for_parent, renew_after_fork
from refold.stores.store import Key, Memory

Json: TypeAlias = dict[str, Any]

DEFAULT_OWNER = "default"
TRIES = 3
"""Of one request. The SDK retries throttling, failures and broken connections."""
PAGE = 100
"""The most that the service lists at a time."""
FEW = 3
"""Events that are listed first, where few are expected to be new."""
MAX_FOUND = 100
"""Records that the service finds for a query, at most."""
MAX_QUERY_CHARS = 10_000
MEMORY = re.compile(
    r"(arn:(aws|aws-cn|aws-us-gov):bedrock-agentcore:[a-z0-9-]+:[0-9]{12}:memory/)?"
    r"[a-zA-Z][a-zA-Z0-9-_]{0,99}-[a-zA-Z0-9]{10}"
)
ACTOR = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-_/]*(?::[a-zA-Z0-9-_/]+)*")
PLAIN = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,99}")
NAMESPACE = re.compile(r"[a-zA-Z0-9/*][a-zA-Z0-9_/*:-]{0,700}")
ENCODED = re.compile(r"--[0-9a-f]{32}$")
LOGIN = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where a role gives them"
_DENIED = "access denied: the credentials need bedrock-agentcore:{verb} on this memory"
_EXPIRED = "the credentials have expired: log in again"
_THROTTLED = "requests are throttled: write less often, or ask for a higher quota"
ADVICE = {
    "ResourceNotFoundException": "there is no memory {memory!r} in this region: check its id and `region`",
    "AccessDeniedException": _DENIED,
    "UnrecognizedClientException": _DENIED,
    "InvalidSignatureException": _DENIED,
    "ExpiredTokenException": _EXPIRED,
    "ExpiredToken": _EXPIRED,
    "ThrottledException": _THROTTLED,
    "ThrottlingException": _THROTTLED,
    "ServiceQuotaExceededException": "a quota of the account is used up: ask for a higher one",
    "413": "the request is too large",
}
"""By the service's code of an error."""


class ActorSession(NamedTuple):
    """Where events are: a session of an actor."""

    actor: str
    session: str


class AgentCoreClient:
    """A memory at AgentCore. Safe to use from many threads.

    Raises `StoreError` where the service cannot be used, and says what to do about it.
    """

    def __init__(
        self,
        memory_id: str,
        actor: str | None = None,
        *,
        region: str | None = None,
        client: Any = None,
        namespace: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        if not MEMORY.fullmatch(memory_id):
            raise SettingError(
                f"memory id {memory_id!r}", "expected an id such as notes-AbCdEf1234, or the ARN of a memory"
            )
        if actor is not None and (len(actor) > 150 or not ACTOR.fullmatch(actor)):
            raise SettingError(
                f"actor {actor!r}", "expected up to 150 letters, digits, and - _ / : within them"
            )
        self.memory_id, self.actor = memory_id, actor
        self.namespace = namespace if namespace is None else _namespace(namespace)
        self._region = region
        self._timeout_s = timeout_s
        self._given = client
        self._made: Any = None if client is not None else _client(region, timeout_s)
        renew_after_fork(self)
        self._newest = 0
        self._lock = Lock()

    def place(self, key: Key) -> ActorSession:
        """Where a conversation's events are. No two conversations have the same place."""
        owner = allowed_name(key.owner)
        if self.actor is not None:
            owner = self.actor if key.owner == DEFAULT_OWNER else f"{self.actor}:{owner}"
        return ActorSession(owner, allowed_name(key.conversation))

    # Events

    def create(self, place: ActorSession, payload: list[Json], token: str, after: str = "") -> str:
        """Creates an event, and returns its id. If the service knows the token, it creates nothing and the id
        is that of the first event with it.

        Ids begin with the time in milliseconds. The event's id is greater than `after`.
        """
        last = int(after.partition("#")[0] or 0)
        with self._lock:  # events with the same time have no order
            self._newest = max(int(time.time() * 1000), self._newest + 1, last + 1)
            at = datetime.fromtimestamp(self._newest / 1000, UTC)
        answer = self._call("create_event", place, payload=payload, clientToken=token, eventTimestamp=at)
        return str(answer["event"]["eventId"])

    def delete(self, place: ActorSession, id: str) -> None:
        self._call("delete_event", place, missing={}, eventId=id)

    def events(self, place: ActorSession, size: int = PAGE) -> Iterator[Json]:
        """All events, the newest first."""
        return self._pages("list_events", "events", place, {"maxResults": size})

    def since(self, place: ActorSession, id: str) -> tuple[list[Json], bool]:
        """The events after one, and whether that one is still there."""
        found: list[Json] = []
        for size in (FEW, PAGE):
            found = []
            for event in self.events(place, size):
                if event["eventId"] <= id:
                    return found, event["eventId"] == id
                found.append(event)
                if len(found) == FEW == size:
                    break
        return found, False

    def sessions(self, actor: str) -> Iterator[str]:
        only = {"actorId": actor, "maxResults": PAGE, "filter": {"eventFilter": "HAS_EVENTS"}}
        rows = self._pages("list_sessions", "sessionSummaries", None, only)
        return (row["sessionId"] for row in rows)

    def actors(self) -> Iterator[str]:
        """The actors of owners."""
        for row in self._pages("list_actors", "actorSummaries", None, {"maxResults": PAGE}):
            actor = row["actorId"]
            if self.actor is None or actor == self.actor or actor.startswith(f"{self.actor}:"):
                yield actor

    # Records

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None) -> list[Memory]:
        """Only what is in a namespace of the key's actor, or of the one that was configured."""
        place = self.place(key)
        until = time.monotonic() + self._timeout_s
        path = filled(_namespace(namespace or self.namespace or "/"), place)
        only: Json = {"namespacePath": path, "maxResults": min(max(limit, 1), PAGE)}
        operation = "list_memory_records"
        if query is not None and query.strip():
            operation = "retrieve_memory_records"
            text = query.encode("utf-8", "replace").decode()[:MAX_QUERY_CHARS]
            only["searchCriteria"] = {"searchQuery": text, "topK": MAX_FOUND}
        found = list[Memory]()
        for row in self._pages(operation, "memoryRecordSummaries", None, only):
            names = row.get("namespaces") or [""]
            if len(found) < limit and self._is_shown(names[0], place):
                made = row["createdAt"].timestamp()
                text = row["content"].get("text", "")
                found.append(Memory(row["memoryRecordId"], text, row.get("score"), names[0], made))
            if len(found) >= limit:
                break
            if time.monotonic() > until:
                raise StoreError(
                    "AgentCore Memory took too long to search its records: name a `namespace`, or raise"
                    " `timeout_s`"
                )
        return found

    def _is_shown(self, namespace: str, place: ActorSession) -> bool:
        """True if a record may be shown to an actor, wherever the search looked."""
        inside = f"/{namespace.strip('/')}/"
        if self.namespace is None:  # the service's own layout: /strategies/ID/actors/ACTOR/…
            return f"/actors/{place.actor}/" in inside
        before, actor, after = self.namespace.partition("{actorId}")
        guard = filled(before + actor + after.partition("/")[0], place).strip("/")
        return inside.startswith(f"/{guard}/" if guard else "/")

    def forget_records(self, place: ActorSession) -> None:
        """Deletes what was learned from one session, where the namespace keeps sessions apart."""
        if self.namespace is None or "{sessionId}" not in self.namespace:
            return
        only = {"namespacePath": filled(self.namespace, place), "maxResults": PAGE}
        rows = list(self._pages("list_memory_records", "memoryRecordSummaries", None, only))
        for start in range(0, len(rows), PAGE):
            ids = [{"memoryRecordId": row["memoryRecordId"]} for row in rows[start : start + PAGE]]
            self._call("batch_delete_memory_records", None, records=ids)

    # Calls

    @property
    def _client(self) -> Any:
        if self._given is None and self._made is None:
            self._made = _client(self._region, self._timeout_s)
        return self._given or self._made

    def after_fork(self) -> None:
        """Connections must not cross a fork of the process; the child opens its own."""
        keep_for_parent(self._made)
        self._made = None
        self._lock = Lock()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _pages(
        self, operation: str, name: str, place: ActorSession | None, arguments: Json
    ) -> Iterator[Json]:
        token: Json = {}
        while True:
            page = self._call(operation, place, missing={}, **arguments, **token)
            yield from page.get(name, ())
            if not page.get("nextToken"):
                return
            token = {"nextToken": page["nextToken"]}

    def _call(
        self, operation: str, place: ActorSession | None, *, missing: Json | None = None, **arguments: Any
    ) -> Mapping[str, Any]:
        """What the service answers; `missing` if it has no such event, session or actor."""
        from botocore.exceptions import BotoCoreError, ClientError

        if place is not None:
            arguments |= {"actorId": place.actor, "sessionId": place.session}
        try:
            answer: Mapping[str, Any] = getattr(self._client, operation)(memoryId=self.memory_id, **arguments)
            return answer
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            message = error.response.get("Error", {}).get("Message", "")
            gone = code == "ResourceNotFoundException"
            if gone and missing is not None and not re.search(r"\bmemory\b", message, re.IGNORECASE):
                return missing
            verb = "".join(word.capitalize() for word in operation.split("_"))
            advice = ADVICE.get(code, code or "an unknown error").format(memory=self.memory_id, verb=verb)
            shown = f" ({message})" if message else ""
            raise StoreError(f"AgentCore Memory, {verb}: {advice}{shown}") from error
        except BotoCoreError as error:
            name = type(error).__name__
            problem = f"cannot be reached in time: {error}; retry"
            if name == "ParamValidationError":
                problem = f"rejects the request: {error}"
            if "Credential" in name or "Token" in name or "SSO" in name:
                raise StoreError(f"AgentCore Memory: no AWS credentials ({error}); {LOGIN}") from error
            raise StoreError(f"AgentCore Memory {problem}") from error

    @staticmethod
    def code(error: StoreError) -> str:
        """The service's code of an error; empty if it did not answer."""
        response = getattr(error.__cause__, "response", None) or {}
        return str(response.get("Error", {}).get("Code", ""))


def allowed_name(name: str) -> str:
    """A name that the service allows: the same where it is plain, and otherwise one that is nobody else's."""
    if PLAIN.fullmatch(name) and not ENCODED.search(name):
        return name
    readable = re.sub(r"[^a-zA-Z0-9_-]+", "-", name)[:40].strip("-_") or "x"
    return f"{readable}--{digest(to_bytes(name))}"


def digest(*parts: bytes) -> str:
    """Of parts that cannot run into each other."""
    return blake2b(b"".join(b"%d " % len(part) + part for part in parts), digest_size=16).hexdigest()


def _namespace(template: str) -> str:
    if not NAMESPACE.fullmatch(filled(template, ActorSession("a", "a"))):
        raise SettingError(
            f"namespace {template!r}",
            "expected a path such as /facts/{actorId}/, which may have {actorId} and {sessionId}",
        )
    return template


def filled(namespace: str, place: ActorSession) -> str:
    return namespace.replace("{actorId}", place.actor).replace("{sessionId}", place.session)


def _client(region: str | None, timeout_s: float) -> Any:
    try:
        import boto3
        import botocore.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, UnknownServiceError
    except ImportError as error:
        raise SettingError("agentcore://", 'needs boto3: pip install "refold[agentcore]"') from error
    config = Config(
        retries={"total_max_attempts": TRIES, "mode": "standard"},
        connect_timeout=timeout_s / TRIES / 3,
        read_timeout=timeout_s / TRIES,
        max_pool_connections=50,
    )
    core = botocore.session.Session()
    core.register_component("data_loader", _loader())
    session = boto3.session.Session(botocore_session=core)
    try:
        return session.client("bedrock-agentcore", region_name=region, config=config)
    except UnknownServiceError as error:
        raise SettingError("agentcore://", "needs a newer boto3, which knows bedrock-agentcore") from error
    except (BotoCoreError, ValueError) as error:
        what = "give `region`, or set AWS_DEFAULT_REGION" if "region" in str(error).lower() else str(error)
        raise SettingError("agentcore://", what) from error


@cache
def _loader() -> Any:
    """Caches the SDK's service models, which are most of the cost of a client."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")
