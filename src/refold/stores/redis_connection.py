"""The way to a Redis server or cluster: asked in one go, and asked again when a connection breaks."""

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

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from refold.core.errors import SettingError, StoreError
from refold.stores.url import shown_url, split_url

FIRST_WAIT_S, LONGEST_WAIT_S = 0.01, 0.5
"""Between two tries."""
ERRORS = (redis.RedisError, exceptions.RedisClusterException)
PASSING = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,  # and MASTERDOWN
)
PASSING_WORDS = ("BUSY ", "NOREPLICAS", "UNBLOCKED")
"""What servers say where waiting helps."""
READS = {"tip", "read", "resume", "fetch", "find", "row", "use", "fields", "summary", "examine", "page"}
READS |= {"PING", "WAITAOF", "XREAD", "HGET", "HGETALL", "HSCAN", "SRANDMEMBER", "ZRANGE"}
READS |= {"PEXPIRE", "PERSIST"}
"""Verbs and commands that store nothing but when something was used."""
GENTLE = READS | {"release", "reparent", "erase", "settle"}
"""Verbs that take no memory, and so are allowed when there is none left."""
STORED = "it is stored, but not yet certain on disk"
"""What is told where the server has a write, and too few disks have it in time."""

Command: TypeAlias = tuple[Any, ...]


class ScriptCall(NamedTuple):
    """A verb of `lua/*.lua`, on keys that are all in one slot."""

    verb: str
    keys: Sequence[str]
    args: Sequence[Any] = ()


class RedisConnection:
    """Safe to use from many threads, and after a fork of the process."""

    def __init__(self, url: str, timeout_s: float, wait_aof: tuple[int, int], cluster: bool) -> None:
        self.shown = shown_url(url.partition("?")[0])
        self.timeout_s = timeout_s
        self._url, self._wait_aof, self._is_cluster = url, wait_aof, cluster
        self._made: dict[int, Any] = {}
        """By process: a connection must not cross a fork."""
        self._closed = False
        self._has_functions = True
        self._away_since = -math.inf
        """When the server was first found not to answer any more; it never did yet."""
        try:
            self._demand()
        except (TypeError, ValueError) as error:
            raise SettingError(f"store {self.shown!r}", f"an option is not allowed here: {error}") from error

    def close(self) -> None:
        """For good: whoever asks after that is refused."""
        self._closed = True
        made = self._made.pop(os.getpid(), None)
        if made is not None:
            made.close()

    # Asking

    def call(
        self, verb: str, keys: Sequence[str], *args: Any, durable: bool = False, unsafe: str = STORED
    ) -> Any:
        """What the verb answers; a `durable` one, when it is as safe as the store was told to make it, and
        where it is not, `unsafe` is told.

        Raises:
            StoreError: there was no answer in time, or none can be given.
        """
        return self.ask(keys[0], ScriptCall(verb, keys, args), durable=durable, unsafe=unsafe)[0]

    def ask(
        self, key: str, *asked: ScriptCall | Command, durable: bool = False, unsafe: str = STORED
    ) -> list[Any]:
        """The answers to commands on keys in the slot of `key`, by one connection in one round trip."""
        until = time.monotonic() + self.timeout_s
        again, client = False, None
        for attempt in count():
            try:
                client = self._client(key)
                answers = self._run(client, asked, again, durable, unsafe)
            except ERRORS as error:
                is_late = time.monotonic() > until
                problem = error if is_late or client is None else self._mend(client, error)
                if problem is None:
                    continue
                if _is_broken(problem):
                    self._away_since = min(self._away_since, time.monotonic())
                if is_late or not self._is_passing(problem):
                    raise self._told(problem, doubtful=not all(map(_is_read, asked))) from error
                self._look_again(client, problem)
            else:
                self._away_since = math.inf
                return answers
            again = True
            time.sleep(min(FIRST_WAIT_S * 2 ** min(attempt, 9), LONGEST_WAIT_S))
        raise AssertionError

    def each(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """What calls on any keys answer; those for one server in one round trip."""
        groups: dict[Any, list[int]] = {}
        for n, one in enumerate(calls):
            groups.setdefault(self._home(one.keys[0]), []).append(n)
        answers = dict[int, Any]()
        for places in groups.values():
            group = [calls[n] for n in places]
            found = self._together(group) if len(groups) > 1 else self.ask(group[0].keys[0], *group)
            answers.update(zip(places, found, strict=True))
        return [answers[n] for n in range(len(calls))]

    def _together(self, calls: Sequence[ScriptCall]) -> list[Any]:
        with suppress(*ERRORS):
            return self._run(self._client(calls[0].keys[0]), calls)
        return [self.ask(one.keys[0], one)[0] for one in calls]

    def servers(self) -> list[dict[str, Any]]:
        """What is said of itself by each that can be written to."""
        self.ask("", ("PING",))
        made = self._connected()
        nodes = made.get_primaries() if self._is_cluster else []
        clients = [made.get_redis_connection(node) for node in nodes] or [made]
        try:
            return [client.info() | self._fsync(client) for client in clients]
        except ERRORS as error:
            raise self._told(error) from error

    def _fsync(self, client: Any) -> dict[str, Any]:
        with suppress(exceptions.ResponseError):  # not to be asked for where somebody else runs the server
            return dict(client.config_get("appendfsync"))
        return {}

    def _run(
        self,
        client: Any,
        asked: Sequence[ScriptCall | Command],
        again: bool = False,
        durable: bool = False,
        unsafe: str = STORED,
    ) -> list[Any]:
        wire = [self._wire(one, again) if isinstance(one, ScriptCall) else one for one in asked]
        waits = durable and any(self._wait_aof)
        if waits:
            wire.append(("WAITAOF", *self._wait_aof, max(1, int(self.timeout_s * 500))))
        answers = _exchange(client.connection_pool, wire)
        if waits:
            self._demand_safe(answers.pop(), unsafe)
        return answers

    def _wire(self, call: ScriptCall, again: bool) -> Command:
        rest = (len(call.keys), *call.keys, *call.args, call.verb, int(again))
        gentle = call.verb in GENTLE
        if self._has_functions:
            return ("FCALL", _name() + ("_gentle" if gentle else ""), *rest)
        return ("EVALSHA", _sha(gentle), *rest)

    # Connecting

    def _connected(self) -> Any:
        pid = os.getpid()
        made = self._made.get(pid)
        if made is None:
            if self._closed:
                raise StoreError(f"{self.shown} was closed here; open the store anew to use it")
            mine = self._new()
            made = self._made.setdefault(pid, mine)
            if made is not mine:  # another thread was faster
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

    def _look_again(self, client: Any, error: Exception) -> None:
        """For where the servers are now."""
        with suppress(*ERRORS):
            if self._is_cluster:
                self._connected().nodes_manager.initialize()
            elif client is not None and isinstance(error, exceptions.ReadOnlyError):
                client.connection_pool.disconnect(inuse_connections=False)

    def _demand(self) -> None:
        """That there is a server that can do what it is needed for."""
        self.ask("", ("WAITAOF", *self._wait_aof, 1) if any(self._wait_aof) else ("PING",))

    def _mend(self, client: Any, error: Exception) -> Exception | None:
        """Teaches a server what it does not know, as after it was started anew; None, or what is wrong."""
        said = str(error)
        if self._has_functions and (isinstance(error, exceptions.NoPermissionError) or "'FCALL'" in said):
            self._has_functions = False
        elif not isinstance(error, exceptions.NoScriptError) and "Function not found" not in said:
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

    # What went wrong

    def _is_passing(self, error: Exception) -> bool:
        if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
            return False
        if isinstance(error, PASSING) or str(error).startswith(PASSING_WORDS):
            return True
        if _is_broken(error):  # a server that never answered, or not for so long, is not waited for
            return time.monotonic() - self._away_since <= self.timeout_s
        return self._is_cluster and isinstance(error, exceptions.AskError)  # or is just being moved

    def _demand_safe(self, reached: Sequence[int], unsafe: str) -> None:
        if any(have < want for have, want in zip(reached, self._wait_aof, strict=True)):
            raise StoreError(
                f"{self.shown}: {unsafe}: {list(reached)} of {list(self._wait_aof)} disks, here and of"
                " replicas. Read before you write it again"
            )

    def _told(self, error: Exception, *, doubtful: bool = False) -> StoreError:
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
                why = "is no cluster: leave cluster=1 out of the URL"
            case _ if _is_broken(error) and self._away_since == -math.inf:
                why = f"cannot be reached: {error}; check the URL and the server"
            case _ if _is_broken(error) or self._is_passing(error):
                doubt = "; whether the last write was stored is not known" if doubtful else ""
                lost = f"Nothing acknowledged is lost{doubt}. Retry when it is back"
                why = f"did not answer for {self.timeout_s:g} s: {error}. {lost}"
            case _:
                why = f"cannot be used: {error}"
        return StoreError(f"{self.shown} {why}")


def _is_read(asked: ScriptCall | Command) -> bool:
    return (asked.verb if isinstance(asked, ScriptCall) else asked[0]) in READS


def _is_broken(error: Exception) -> bool:
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | exceptions.RedisClusterException)


def _exchange(pool: Any, wire: Sequence[Command]) -> list[Any]:
    """Sends commands and reads what is answered. Redis-py's own way takes 2 µs for each argument."""
    connection = pool.get_connection()
    try:
        connection.send_packed_command([b"".join(map(_packed, wire))])
        answers = [_answer(connection) for _ in wire]
    except BaseException:
        connection.disconnect()  # whatever comes now is the answer to something else
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
    except exceptions.ResponseError as error:  # those to other commands are still to be read
        return error


@cache
def _verbs() -> str:
    folder = files("refold.stores") / "lua"
    return "".join((folder / f"{name}.lua").read_text() for name in ("conversation", "index"))


@cache
def _name() -> str:
    """Of the library: another text is another library, so that versions do not get into each other's way."""
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
"""Options, with what is allowed."""
THEIRS = {
    "db": (_NUMBER, "the number of a database"),
    "health_check_interval": (_NUMBER, "seconds"),
    "max_connections": (r"[1-9]\d{0,8}", "a number above 0"),
    "socket_connect_timeout": (_POSITIVE, "seconds"),
    **dict.fromkeys(("client_name", "socket_keepalive", "ssl_ca_certs", "ssl_ca_path"), _ANY),
    **dict.fromkeys(("ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"), _ANY),
}
"""The same of redis-py."""
_READ: dict[str, Callable[[str], Any]] = {
    "cluster": lambda value: value == "1",
    "prefix": str,
    "timeout_s": float,
    "ttl_s": float,
    "wait_aof": lambda value: tuple(map(int, f"{value},0".split(",")[:2])),
}


def parse_url(url: str) -> tuple[str, dict[str, Any]]:
    """The URL as redis-py knows it, and what of it is for the store.

    Raises:
        SettingError: something in it is not known or not allowed.
    """
    parts, plain, allowed = split_url(url), url.partition("?")[0], OURS | THEIRS
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
