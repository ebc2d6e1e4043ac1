"""Who holds a lease: a process that can be told from others, and known to be gone."""

import os
from contextlib import suppress
from pathlib import Path
from platform import node
from uuid import uuid4

_PROCESS = uuid4().hex[:12]
"""Tells this process from an earlier one with the same number."""


def new_holder() -> str:
    """A new holder of leases in this process: where it is, its number, and what nobody else has."""
    return f"{_here()} {os.getpid()} {_PROCESS} {uuid4().hex[:12]}"


def is_dead(holder: str) -> bool:
    """Whether it is known for sure that its process is gone."""
    where, pid, process, *_ = (*holder.split(" "), "", "", "")
    if where != _here() or not pid.isdecimal() or os.name != "posix":
        return False
    return process != _PROCESS if int(pid) == os.getpid() else not _is_running(int(pid))


def _here() -> str:
    """Where a process has its number: the machine since it was started, and what it calls its processes."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{_host()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    return _host()


def _host() -> str:
    return node().replace(" ", "-").replace("/", "-") or "?"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # asks only
    except ProcessLookupError:
        return False
    except OSError:
        return True
    with suppress(OSError):  # it may be dead and not buried
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in ("Z", "X")
    return True
