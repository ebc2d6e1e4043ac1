"""Connections to a Redis server or cluster: pipelined commands, retries, errors as `StoreError`."""

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha1
from importlib.resources import files
from itertools import count
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, urlencode

from refold.core.errors import SettingError, StoreError
from refold.stores.url import shown_url, split_url

try:
    import redis
    from redis import exceptions
    from redis.backoff import NoBackoff
    from redis.cluster import RedisCluster
    from redis.retry import Retry
except ModuleNotFoundError as error:
    raise SettingError("redis://", 'needs redis-py: pip install "refold[redis]"') from error

FIRST_RETRY_S, MAX_RETRY_S = 0.01, 0.5
ERRORS = (redis.RedisError, exceptions.RedisClusterException)
TEMPORARY = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,  # and MASTERDOWN
)
TEMPORARY_PREFIXES = ("BUSY ", "NOREPLICAS", "UNBLOCKED")
READS = {
    *("tip", "read", "resume", "fetch", "find", "row", "use", "fields", "examine", "page"),
    *("PING", "WAITAOF", "XREAD", "HGET", "HGETALL", "HSCAN", "SRANDMEMBER", "ZRANGE", "PEXPIRE", "PERSIST"),
}
"""Script verbs and commands that change nothing but expiry times."""
ALLOWED_WHEN_FULL = READS | {"reparent", "erase", "settle"}
"""Verbs that need no new memory."""
STORED = "it is stored, but not yet confirmed on disk"

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
        self._clients: dict[int, Any] = {}
        """By process id: a connection must not cross a fork."""
        self._closed = False
        self._has_functions = True
        self._unreachable_since = -math.inf
        """-inf: it was never reached; inf: it is reachable."""
        try:
            self._check_server()
        except (TypeError, ValueError) as error:
            raise SettingError(f"store {self.shown!r}", f"an option is not allowed here: {error}") from error

    def close(self) -> None:
        """Closes the connections for good."""
        self._closed = True
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()

    # Commands

    def call(
        self, verb: str, keys: Sequence[str], *args: Any, durable: bool = False, unsafe: str = STORED
    ) -> Any:
        """Runs one script verb. A `durable` one waits for as many disks as `wait_aof` demands.

        Raises:
            StoreError: there was no answer in time, the server refuses, or (`unsafe`) too few disks have it.
        """
        return self.send(keys[0], ScriptCall(verb, keys, args), durable=durable, unsafe=unsafe)[0]

    def send(
        self, key: str, *commands: ScriptCall | Command, durable: bool = False, unsafe: str = STORED
    ) -> list[Any]:
        """Sends commands for the slot of `key` in one round trip, and retries; returns the replies."""
        until = time.monotonic() + self.timeout_s
        is_retry = False
        client = None
        for attempt in count():
            try:
                client = self._client(key)
                answers = self._run(client, commands, is_retry, durable, unsafe)
            except ERRORS as error:
                is_late = time.monotonic() > until
                problem = error if is_late or client is None else self._load_scripts(client, error)
                if problem is None:
                    continue
                if _is_broken(problem):
                    self._unreachable_since = min(self._unreachable_since, time.monotonic())
                if is_late or not self._is_temporary(problem):
                    raise self._explained(problem, doubtful=not all(map(_is_read, commands))) from error
                self._reconnect(client, problem)
            else:
                self._unreachable_since = math.inf
                return answers
            is_retry = True
            time.sleep(min(FIRST_RETRY_S * 2 ** min(attempt, 9), MAX_RETRY_S))
        raise AssertionError

    def call_each(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Runs calls on any keys: one round trip per server."""
        groups: dict[Any, list[int]] = {}
        for n, one in enumerate(calls):
            groups.setdefault(self._home(one.keys[0]), []).append(n)
        answers = dict[int, Any]()
        for places in groups.values():
            group = [calls[n] for n in places]
            found = self._together(group) if len(groups) > 1 else self.send(group[0].keys[0], *group)
            answers.update(zip(places, found, strict=True))
        return [answers[n] for n in range(len(calls))]

    def _together(self, calls: Sequence[ScriptCall]) -> list[Any]:
        with suppress(*ERRORS):
            return self._run(self._client(calls[0].keys[0]), calls)
        return [self.send(one.keys[0], one)[0] for one in calls]

    def servers(self) -> list[dict[str, Any]]:
        """`INFO` of each primary."""
        self.send("", ("PING",))
        made = self._connected()
        nodes = made.get_primaries() if self._is_cluster else []
        clients = [made.get_redis_connection(node) for node in nodes] or [made]
        try:
            return [client.info() | self._fsync(client) for client in clients]
        except ERRORS as error:
            raise self._explained(error) from error

    def _fsync(self, client: Any) -> dict[str, Any]:
        with suppress(exceptions.ResponseError):  # managed servers forbid it
            return dict(client.config_get("appendfsync"))
        return {}

    def _run(
        self,
        client: Any,
        commands: Sequence[ScriptCall | Command],
        is_retry: bool = False,
        durable: bool = False,
        unsafe: str = STORED,
    ) -> list[Any]:
        wire = [self._wire(one, is_retry) if isinstance(one, ScriptCall) else one for one in commands]
        waits = durable and any(self._wait_aof)
        if waits:
            wire.append(("WAITAOF", *self._wait_aof, max(1, int(self.timeout_s * 500))))
        answers = _exchange(client.connection_pool, wire)
        if waits:
            self._require_durable(answers.pop(), unsafe)
        return answers

    def _wire(self, call: ScriptCall, is_retry: bool) -> Command:
        rest = (len(call.keys), *call.keys, *call.args, call.verb, int(is_retry))
        gentle = call.verb in ALLOWED_WHEN_FULL
        if self._has_functions:
            return ("FCALL", _name() + ("_gentle" if gentle else ""), *rest)
        return ("EVALSHA", _sha(gentle), *rest)

    # Connecting

    def _connected(self) -> Any:
        pid = os.getpid()
        made = self._clients.get(pid)
        if made is None:
            if self._closed:
                raise StoreError(f"{self.shown} was closed; open the store again to use it")
            mine = self._new()
            made = self._clients.setdefault(pid, mine)
            if made is not mine:  # another thread connected first
                mine.close()
        return made

    def _new(self) -> Any:
        times = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), self.timeout_s)
        how: dict[str, Any] = {"protocol": 2, **times}
        if self._is_cluster:
            return RedisCluster.from_url(self._url, **how)
        return redis.Redis.from_url(self._url, **how, retry=Retry(NoBackoff(), 0))

    def _client(self, key: str) -> Any:
        made = self._connected()
        return made.get_redis_connection(made.get_node_from_key(key)) if self._is_cluster else made

    def _home(self, key: str) -> Any:
        if self._is_cluster:
            with suppress(*ERRORS):
                return self._connected().get_node_from_key(key).name
        return None

    def _reconnect(self, client: Any, error: Exception) -> None:
        with suppress(*ERRORS):
            if self._is_cluster:
                self._connected().nodes_manager.initialize()
            elif client is not None and isinstance(error, exceptions.ReadOnlyError):
                client.connection_pool.disconnect(inuse_connections=False)

    def _check_server(self) -> None:
        self.send("", ("WAITAOF", *self._wait_aof, 1) if any(self._wait_aof) else ("PING",))

    def _load_scripts(self, client: Any, error: Exception) -> Exception | None:
        """Loads the scripts if they are missing, as after a restart; returns None, or the error to report."""
        text = str(error)
        if self._has_functions and (isinstance(error, exceptions.NoPermissionError) or "'FCALL'" in text):
            self._has_functions = False
        elif not isinstance(error, exceptions.NoScriptError) and "Function not found" not in text:
            return error
        try:
            if self._has_functions:
                client.execute_command("FUNCTION", "LOAD", "REPLACE", _library())
            else:
                for gentle in (False, True):
                    client.execute_command("SCRIPT", "LOAD", _script(gentle))
        except ERRORS as problem:
            if not (self._has_functions and isinstance(problem, exceptions.NoPermissionError)):
                return problem
            self._has_functions = False
        return None

    # Errors

    def _is_temporary(self, error: Exception) -> bool:
        if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
            return False
        if isinstance(error, TEMPORARY) or str(error).startswith(TEMPORARY_PREFIXES):
            return True
        if _is_broken(error):  # do not wait for a server that was never reached, or not for long
            return time.monotonic() - self._unreachable_since <= self.timeout_s
        return self._is_cluster and isinstance(error, exceptions.AskError)  # a slot is being moved

    def _require_durable(self, reached: Sequence[int], unsafe: str) -> None:
        if any(have < want for have, want in zip(reached, self._wait_aof, strict=True)):
            raise StoreError(
                f"{self.shown}: {unsafe}: {list(reached)} of {list(self._wait_aof)} disks, here and of"
                " replicas. Read it before you write it again"
            )

    def _explained(self, error: Exception, *, doubtful: bool = False) -> StoreError:
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
            case _ if _is_broken(error) and self._unreachable_since == -math.inf:
                why = f"cannot be reached: {error}; check the URL and the server"
            case _ if _is_broken(error) or self._is_temporary(error):
                doubt = "; the last write may or may not be stored" if doubtful else ""
                lost = f"Nothing acknowledged is lost{doubt}. Retry when it is back"
                why = f"did not answer for {self.timeout_s:g} s: {error}. {lost}"
            case _:
                why = f"cannot be used: {error}"
        return StoreError(f"{self.shown} {why}")


def _is_read(command: ScriptCall | Command) -> bool:
    return (command.verb if isinstance(command, ScriptCall) else command[0]) in READS


def _is_broken(error: Exception) -> bool:
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | exceptions.RedisClusterException)


def _exchange(pool: Any, wire: Sequence[Command]) -> list[Any]:
    """Sends commands and reads the replies. redis-py itself needs 2 µs for each argument."""
    connection = pool.get_connection()
    try:
        connection.send_packed_command([b"".join(map(_packed, wire))])
        answers = [_answer(connection) for _ in wire]
    except BaseException:
        connection.disconnect()  # the next reply would belong to another command
        raise
    finally:
        pool.release(connection)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _packed(command: Command) -> bytes:
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:  # the other replies must be read too
        return error


@cache
def _verbs() -> str:
    folder = files("refold.stores") / "lua"
    return "".join((folder / f"{name}.lua").read_text() for name in ("conversation", "index"))


@cache
def _name() -> str:
    """Names the function library by its text, so that versions do not replace each other."""
    return f"refold_{sha1(_verbs().encode()).hexdigest()[:12]}"


def _library() -> str:
    register = "redis.register_function{function_name = '%s', callback = run%s}\n"
    gentle = register % (f"{_name()}_gentle", ", flags = {'allow-oom'}")
    return f"#!lua name={_name()}\n{_verbs()}{register % (_name(), '')}{gentle}"


@cache
def _script(gentle: bool) -> bytes:
    flags = " flags=allow-oom" if gentle else ""
    return f"#!lua{flags}\n{_verbs()}return run(KEYS, ARGV)\n".encode()


@cache
def _sha(gentle: bool) -> str:
    return sha1(_script(gentle)).hexdigest()


_NUMBER, _POSITIVE, _ANY = r"\d{1,9}", r"(?=.*[1-9])\d{1,6}(\.\d+)?", (r".+", "a value")
OURS = {
    "cluster": (r"[01]", "0 or 1"),
    "prefix": (r"[\w.:-]+", "letters, digits and . : - _"),
    "timeout_s": (_POSITIVE, "seconds"),
    "ttl_s": (rf"{_NUMBER}(\.\d+)?", "seconds, or 0 for never"),
    "wait_aof": (r"[01](,\d)?", "1, or 1,2 for two replicas besides"),
}
THEIRS = {
    "db": (_NUMBER, "the number of a database"),
    "health_check_interval": (_NUMBER, "seconds"),
    "max_connections": (r"[1-9]\d{0,8}", "a number above 0"),
    "socket_connect_timeout": (_POSITIVE, "seconds"),
    **dict.fromkeys(("client_name", "socket_keepalive", "ssl_ca_certs", "ssl_ca_path"), _ANY),
    **dict.fromkeys(("ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"), _ANY),
}
_READ: dict[str, Callable[[str], Any]] = {
    "cluster": lambda value: value == "1",
    "prefix": str,
    "timeout_s": float,
    "ttl_s": float,
    "wait_aof": lambda value: tuple(map(int, f"{value},0".split(",")[:2])),
}


def parse_url(url: str) -> tuple[str, dict[str, Any]]:
    """Splits the URL for redis-py from the options of the store.

    Raises:
        SettingError: an option is unknown or its value not allowed; redis-py would ignore it.
    """
    parts = split_url(url)
    plain = url.partition("?")[0]
    allowed = OURS | THEIRS
    where = f"store {shown_url(plain)!r}"
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in options.items():
        if name not in allowed:
            known = f"its options are {', '.join(OURS)}, and of redis-py {', '.join(THEIRS)}"
            raise SettingError(where, f"{name!r} is not known; {known}")
        pattern, expected = allowed[name]
        if not re.fullmatch(pattern, value, re.ASCII):
            raise SettingError(where, f"{name}={value} is not allowed; expected {expected}")
    if parts.scheme != "unix" and not re.fullmatch(rf"/?|/{_NUMBER}", parts.path, re.ASCII):
        raise SettingError(where, "expected nothing after the host, or the number of a database")
    ours = {name: _READ[name](options.pop(name)) for name in OURS if name in options}
    if ours.get("cluster") and (parts.scheme == "unix" or int(options.get("db") or parts.path[1:] or 0)):
        raise SettingError(where, "a cluster is reached by redis:// or rediss://, and has only database 0")
    return f"{plain}?{urlencode(options)}" if options else plain, ours
