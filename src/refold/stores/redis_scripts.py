"""The verbs of `lua/*.lua`, as a library of functions or as scripts."""

from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

READS = {
    *("tip", "read", "resume", "fetch", "find", "row", "use", "fields", "examine", "page"),
    *("PING", "WAITAOF", "XREAD", "HGET", "HGETALL", "HSCAN", "SRANDMEMBER", "ZRANGE", "PEXPIRE", "PERSIST"),
}
"""Script verbs and commands that change nothing but expiry times."""
ALLOWED_WHEN_FULL = READS | {"reparent", "erase", "settle"}
"""Verbs that need no new memory."""


class ScriptCall(NamedTuple):
    """A verb of `lua/*.lua`; all keys are in one slot."""

    verb: str
    keys: Sequence[str]
    args: Sequence[Any] = ()


@cache
def _verbs() -> str:
    folder = files("refold.stores") / "lua"
    return "".join((folder / f"{name}.lua").read_text() for name in ("conversation", "index"))


@cache
def library_name() -> str:
    """Names the function library by its text, so that versions do not replace each other."""
    return f"refold_{sha1(_verbs().encode()).hexdigest()[:12]}"


def library() -> str:
    register = "redis.register_function{function_name = '%s', callback = run%s}\n"
    gentle = register % (f"{library_name()}_gentle", ", flags = {'allow-oom'}")
    return f"#!lua name={library_name()}\n{_verbs()}{register % (library_name(), '')}{gentle}"


@cache
def script(gentle: bool) -> bytes:
    flags = " flags=allow-oom" if gentle else ""
    return f"#!lua{flags}\n{_verbs()}return run(KEYS, ARGV)\n".encode()


@cache
def script_sha(gentle: bool) -> str:
    return sha1(script(gentle)).hexdigest()
