"""Connections to a Redis server or cluster: pipelined commands and scripts, retries, errors as `StoreError`.

The verbs of `lua/*.lua` are a script, which is loaded into a server that does not have it.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha1
from importlib.resources import files
from itertools import count
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

from refold.core.errors import SettingError, StoreError
from refold.stores.forks import keep_for_parent, renew_after_fork
from refold.stores.url import shown_url

try:
    import redis
    from redis import exceptions
    from redis.backoff import ExponentialBackoff, NoBackoff
    from redis.cluster import RedisCluster
    from redis.retry import Retry
except ModuleNotFoundError as error:
    raise SettingError("redis://", 'needs redis-py: pip install "refold[redis]"') from error

RETRY_BACKOFF = ExponentialBackoff(cap=0.5, base=0.005)
DOUBT = "; the last write may or may not be stored"
READS = {
    *("tip", "read", "resume", "fetch", "find", "row", "use", "fields", "examine", "page"),
    *("PING", "WAITAOF", "XREAD", "HGET", "HGETALL", "HSCAN", "SRANDMEMBER", "ZRANGE", "PEXPIRE", "PERSIST"),
}
"""Script verbs and commands that change nothing but expiry times."""
ALLOWED_WHEN_FULL = READS | {"reparent", "erase", "settle"}
"""Verbs that need no new memory."""

ERRORS = (redis.RedisError, exceptions.RedisClusterException)
REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError)
TEMPORARY = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,  # and MASTERDOWN
)
TEMPORARY_PREFIXES = ("BUSY ", "NOREPLICAS", "UNBLOCKED")

Command: TypeAlias = tuple[Any, ...]


class ScriptCall(NamedTuple):
    """A verb of `lua/*.lua`; all keys are in one slot."""

    verb: str
    keys: Sequence[str]
    args: Sequence[Any] = ()


class RedisConnection:
    """Safe to use from many threads, and after a fork of the process."""

    def __init__(self, url: str, timeout_s: float, wait_aof: tuple[int, int], cluster: bool) -> None:
        self.shown = shown_url(url.partition("?")[0])
        self.timeout_s = timeout_s
        self._url = url
        self._wait_aof = wait_aof
        self._is_cluster = cluster
        self._driver: Any = None
        self._opening = Lock()
        self._closed = False
        self._is_away = True
        """The server was never reached, or not for `timeout_s`: it is not waited for."""
        renew_after_fork(self)
        try:
            self.send("", ("WAITAOF", *wait_aof, 1) if any(wait_aof) else ("PING",))
        except (TypeError, ValueError) as error:
            raise SettingError(f"store {self.shown!r}", f"an option is not allowed here: {error}") from error

    def close(self) -> None:
        """Closes the connections for good."""
        self._closed = True
        driver = self._driver
        self._driver = None
        if driver is not None:
            driver.close()

    def after_fork(self) -> None:
        """Connections must not cross a fork of the process; the child opens its own."""
        keep_for_parent(self._driver)
        self._driver = None
        self._opening = Lock()

    # Commands

    def call(self, verb: str, keys: Sequence[str], *args: Any, durable: bool = False) -> Any:
        """Runs one script verb. A `durable` one waits for as many disks as `wait_aof` demands.

        Raises:
            StoreError: there was no answer in time, the server refuses, or too few disks have it.
        """
        return self.send(keys[0], ScriptCall(verb, keys, args), durable=durable)[0]

    def call_each(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Runs calls on any keys: one round trip for all, or in a cluster one for each."""
        if self._is_cluster:
            return [self.send(one.keys[0], one)[0] for one in calls]
        return self.send(calls[0].keys[0], *calls) if calls else []

    def send(self, key: str, *commands: ScriptCall | Command, durable: bool = False) -> list[Any]:
        """Sends commands for the slot of `key` in one round trip, and retries; returns the replies."""
        until = time.monotonic() + self.timeout_s
        is_retry = False
        script_loads_left = 2  # a proxy may load the scripts into a server that does not run them
        for attempt in count(1):
            client = None
            try:
                client = self._client(key)
                answers = self._exchange(client, commands, is_retry, durable)
                self._is_away = False
                return answers
            except ERRORS as error:
                problem = error
                if isinstance(error, exceptions.NoScriptError) and script_loads_left:  # nothing was done
                    script_loads_left -= 1
                    try:
                        _load_scripts(client)
                        continue
                    except ERRORS as refusal:
                        problem = refusal
                is_waited_for = _is_broken(problem) and not self._is_away
                is_late = time.monotonic() > until
                if is_late or not (is_waited_for or self._is_passing(problem)):
                    is_read = all(_verb(one) in READS for one in commands)
                    explained = self._explained(problem, "" if is_read else DOUBT)
                    self._is_away = _is_broken(problem)
                    raise explained from error
                with suppress(*ERRORS):
                    if self._is_cluster:
                        self._connected().nodes_manager.initialize()
                    elif client is not None and isinstance(problem, exceptions.ReadOnlyError):
                        client.connection_pool.disconnect(inuse_connections=False)
            is_retry = True
            time.sleep(RETRY_BACKOFF.compute(attempt))
        raise AssertionError

    def _exchange(
        self,
        client: Any,
        commands: Sequence[ScriptCall | Command],
        is_retry: bool,
        durable: bool,
    ) -> list[Any]:
        """Sends commands once. They are packed here: redis-py itself needs 2 µs for each argument."""
        waits = durable and any(self._wait_aof)
        packed = list[bytes]()
        for one in commands:
            packed.append(_packed(_script(one, is_retry) if isinstance(one, ScriptCall) else one))
        if waits:
            packed.append(_packed(("WAITAOF", *self._wait_aof, max(1, int(self.timeout_s * 500)))))
        answers = list[Any]()
        connection = client.connection_pool.get_connection()
        try:
            connection.send_packed_command([b"".join(packed)])
            for _ in packed:
                try:
                    answers.append(connection.read_response())
                except exceptions.ResponseError as error:  # the other replies must be read too
                    answers.append(error)
        except BaseException:
            connection.disconnect()  # the next reply would belong to another command
            raise
        finally:
            client.connection_pool.release(connection)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        if waits:
            reached = answers.pop()
            if any(have < want for have, want in zip(reached, self._wait_aof, strict=True)):
                raise StoreError(
                    f"{self.shown}: the write is on {list(reached)} disks (here, on replicas), and wait_aof"
                    f" is {list(self._wait_aof)}. It may be stored: read it before you write it again"
                )
        return answers

    def servers(self) -> list[dict[str, Any]]:
        """`INFO` of each primary, and its `appendfsync`."""
        self.send("", ("PING",))
        driver = self._connected()
        nodes = driver.get_primaries() if self._is_cluster else []
        found = list[dict[str, Any]]()
        try:
            for client in [driver.get_redis_connection(node) for node in nodes] or [driver]:
                found.append(client.info())
                with suppress(exceptions.ResponseError):  # managed servers forbid it
                    found[-1] |= client.config_get("appendfsync")
        except ERRORS as error:
            raise self._explained(error) from error
        return found

    # Connecting

    def _connected(self) -> Any:
        with self._opening:
            if self._closed:
                raise StoreError(f"{self.shown} was closed; open the store again to use it")
            if self._driver is None:
                times = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), self.timeout_s)
                if self._is_cluster:
                    self._driver = RedisCluster.from_url(self._url, protocol=2, **times)
                else:
                    no_retry = Retry(NoBackoff(), 0)
                    self._driver = redis.Redis.from_url(self._url, protocol=2, **times, retry=no_retry)
            return self._driver

    def _client(self, key: str) -> Any:
        driver = self._connected()
        return driver.get_redis_connection(driver.get_node_from_key(key)) if self._is_cluster else driver

    # Errors

    def _is_passing(self, error: Exception) -> bool:
        """The server is there, and can soon do what it refuses now."""
        if isinstance(error, TEMPORARY) or str(error).startswith(TEMPORARY_PREFIXES):
            return True
        return self._is_cluster and isinstance(error, exceptions.AskError)  # a slot is being moved

    def _explained(self, error: Exception, doubt: str = "") -> StoreError:
        match error:
            case exceptions.AuthenticationError() | exceptions.AuthorizationError():
                why = f"refuses the user name or the password: {error}"
            case exceptions.OutOfMemoryError():
                why = "is full (maxmemory): nothing was stored. Free memory, raise maxmemory, or lower ttl_s"
            case exceptions.ResponseError() if "WAITAOF" in str(error).upper():
                why = f"cannot wait_aof, which needs Redis or Valkey 7.2 and appendonly yes: {error}"
            case exceptions.NoPermissionError():
                why = f"does not allow it: {error}"
            case exceptions.AskError() if not self._is_cluster:
                why = "is part of a cluster: add cluster=1 to the URL"
            case exceptions.RedisClusterException() if "not enabled" in str(error):
                why = "is not a cluster: leave cluster=1 out of the URL"
            case _ if _is_broken(error) and self._is_away:
                why = f"cannot be reached: {error}; check the URL and the server{doubt}"
            case _ if _is_broken(error) or self._is_passing(error):
                why = (
                    f"did not answer for {self.timeout_s:g} s: {error}. Nothing acknowledged is lost{doubt}."
                )
                why += " Retry when it is back"
            case _:
                why = f"cannot be used: {error}"
        return StoreError(f"{self.shown} {why}")


def _is_broken(error: Exception) -> bool:
    """The connection, or a node of the cluster, is gone."""
    if isinstance(error, REFUSED):
        return False
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | exceptions.RedisClusterException)


def _packed(command: Command) -> bytes:
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def _verb(one: ScriptCall | Command) -> str:
    return one.verb if isinstance(one, ScriptCall) else str(one[0])


def _script(call: ScriptCall, is_retry: bool) -> Command:
    sha = _script_sha(call.verb in ALLOWED_WHEN_FULL)
    return ("EVALSHA", sha, len(call.keys), *call.keys, *call.args, call.verb, int(is_retry))


@cache
def _script_sha(works_when_full: bool) -> str:
    return sha1(_lua_script(works_when_full)).hexdigest()


def _load_scripts(client: Any) -> None:
    for works_when_full in (False, True):
        client.script_load(_lua_script(works_when_full))


@cache
def _lua_script(works_when_full: bool) -> bytes:
    folder = files("refold.stores") / "lua"
    verbs = "".join((folder / f"{name}.lua").read_text() for name in ("conversation", "index"))
    flags = " flags=allow-oom" if works_when_full else ""
    return f"#!lua{flags}\n{verbs}return run(KEYS, ARGV)\n".encode()
