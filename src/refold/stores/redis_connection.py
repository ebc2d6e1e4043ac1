"""Connections to a Redis server or cluster: pipelined commands, retries, errors as `StoreError`."""

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import Any

from refold.core.errors import SettingError, StoreError
from refold.stores.forks import keep_for_parent, renew_after_fork
from refold.stores.redis_errors import ERRORS, is_broken, is_passing, refusal
from refold.stores.redis_scripts import (
    ALLOWED_WHEN_FULL,
    READS,
    ScriptCall,
    library,
    library_name,
    script,
    script_sha,
)
from refold.stores.redis_wire import Command, exchange
from refold.stores.url import shown_url

try:
    import redis
    from redis import exceptions
    from redis.backoff import ExponentialBackoff, NoBackoff
    from redis.cluster import RedisCluster
    from redis.retry import Retry
except ModuleNotFoundError as error:
    raise SettingError("redis://", 'needs redis-py: pip install "refold[redis]"') from error

PAUSES = ExponentialBackoff(cap=0.5, base=0.005)
"""Between retries, in seconds."""
STORED = "it is stored, but not yet confirmed on disk"


class RedisConnection:
    """Safe to use from many threads, and after a fork of the process."""

    def __init__(self, url: str, timeout_s: float, wait_aof: tuple[int, int], cluster: bool) -> None:
        self.shown = shown_url(url.partition("?")[0])
        self.timeout_s = timeout_s
        self._url = url
        self._wait_aof = wait_aof
        self._is_cluster = cluster
        self._made: Any = None
        self._opening = Lock()
        self._closed = False
        self._has_functions = True
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
        made = self._made
        self._made = None
        if made is not None:
            made.close()

    def after_fork(self) -> None:
        """Connections must not cross a fork of the process; the child opens its own."""
        keep_for_parent(self._made)
        self._made = None
        self._opening = Lock()

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
        for attempt in count(1):
            try:
                client = self._client(key)
                answers = self._run(client, commands, is_retry, durable, unsafe)
            except ERRORS as error:
                is_late = time.monotonic() > until
                problem = error if is_late or client is None else self._load_scripts(client, error)
                if problem is None:
                    continue
                is_waited_for = is_broken(problem) and not self._is_away
                if is_late or not (is_waited_for or is_passing(problem, self._is_cluster)):
                    explained = self._explained(problem, doubtful=not all(map(_is_read, commands)))
                    self._is_away = is_broken(problem)
                    raise explained from error
                self._reconnect(client, problem)
            else:
                self._is_away = False
                return answers
            is_retry = True
            time.sleep(PAUSES.compute(attempt))
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
        answers = exchange(client.connection_pool, wire)
        if waits:
            self._require_durable(answers.pop(), unsafe)
        return answers

    def _wire(self, call: ScriptCall, is_retry: bool) -> Command:
        rest = (len(call.keys), *call.keys, *call.args, call.verb, int(is_retry))
        gentle = call.verb in ALLOWED_WHEN_FULL
        if self._has_functions:
            return ("FCALL", library_name() + ("_gentle" if gentle else ""), *rest)
        return ("EVALSHA", script_sha(gentle), *rest)

    # Connecting

    def _connected(self) -> Any:
        with self._opening:
            if self._closed:
                raise StoreError(f"{self.shown} was closed; open the store again to use it")
            if self._made is None:
                self._made = self._new()
            return self._made

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

    def _load_scripts(self, client: Any, error: Exception) -> Exception | None:
        """Loads the scripts if they are missing, as after a restart; returns None, or the error to report."""
        text = str(error)
        if self._has_functions and (isinstance(error, exceptions.NoPermissionError) or "'FCALL'" in text):
            self._has_functions = False
        elif not isinstance(error, exceptions.NoScriptError) and "Function not found" not in text:
            return error
        try:
            if self._has_functions:
                client.execute_command("FUNCTION", "LOAD", "REPLACE", library())
            else:
                for gentle in (False, True):
                    client.execute_command("SCRIPT", "LOAD", script(gentle))
        except ERRORS as problem:
            if not (self._has_functions and isinstance(problem, exceptions.NoPermissionError)):
                return problem
            self._has_functions = False
        return None

    def _require_durable(self, reached: Sequence[int], unsafe: str) -> None:
        if any(have < want for have, want in zip(reached, self._wait_aof, strict=True)):
            raise StoreError(
                f"{self.shown}: {unsafe}: {list(reached)} of {list(self._wait_aof)} disks, here and of"
                " replicas. Read it before you write it again"
            )

    def _explained(self, error: Exception, *, doubtful: bool = False) -> StoreError:
        doubt = "; the last write may or may not be stored" if doubtful else ""
        why = refusal(error, self._is_cluster)
        if why is None and is_broken(error) and self._is_away:
            why = f"cannot be reached: {error}; check the URL and the server{doubt}"
        elif why is None and (is_broken(error) or is_passing(error, self._is_cluster)):
            lost = f"Nothing acknowledged is lost{doubt}. Retry when it is back"
            why = f"did not answer for {self.timeout_s:g} s: {error}. {lost}"
        return StoreError(f"{self.shown} {why or f'cannot be used: {error}'}")


def _is_read(command: ScriptCall | Command) -> bool:
    return (command.verb if isinstance(command, ScriptCall) else command[0]) in READS
