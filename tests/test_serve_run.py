"""The service as a process: how it starts, tells how it is, and stops."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import pytest
import yaml

from refold.config.config import load_config
from refold.config.serving import Limits, ServeSettings, TokenSettings, Upstreams
from refold.config.settings import Setting, all_settings
from refold.config.validate import accepted_types, field_types
from refold.core.codec import Link
from refold.core.errors import SettingError, StoreError
from refold.serve.metrics import BUCKETS_S, Metrics
from refold.serve.run import listening
from refold.serve.service import Health
from refold.serve.tokens import hash_of, new_token
from refold.stores.memory import MemoryStore
from refold.stores.store import open_store
from served import WAIT_S, Served, behind_the_guard, until, whole_service
from servers import Valkey, remove

ROOT = Path(__file__).parents[1]
TOKEN = new_token()
ENTRY = {"hash": hash_of(TOKEN), "owner": "ann", "scopes": ["read"]}


class Process:
    def __init__(self, process: subprocess.Popen[str], url: str, said: list[str]) -> None:
        self.process, self.url, self.said = process, url, said

    def ask(self, path: str, **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(WAIT_S)


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "refold", "serve", "--port", "0", *options]


@contextmanager
def started(folder: Path, *options: str, code: list[str] | None = None) -> Iterator[Process]:
    """The command in a process of its own; what it logs is in `log` in the folder."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            code or command(*options), cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(4)]
            found = re.search(r"http://\S+", said[0])
            assert found, (folder / "log").read_text()
            one = Process(process, found[0], said)
            until(lambda: one.ask("/healthz")[0] == 200)
            yield one
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def logged(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


# Starting


def test_it_says_where_it_listens_and_how_to_use_it(tmp_path):
    with started(tmp_path) as service:
        url = service.url
        assert service.said == [
            f"refold serves {url}\n",
            f"  OPENAI_BASE_URL={url}/openai/v1\n",
            f"  ANTHROPIC_BASE_URL={url}/anthropic\n",
            f"  panel {url}/panel\n",
        ]
        assert service.ask("/healthz") == (200, b'{"status":"ok"}')
        assert service.ask("/panel")[0] == 200
        assert service.ask("/api/conversations")[0] == 200
        assert service.stop() == 0
    assert (tmp_path / "refold.db").exists()


def test_options_beat_the_file(tmp_path):
    (tmp_path / "refold.yaml").write_text(
        f"store: sqlite:///mine.db\nserve: {{port: 1, tokens: [{json.dumps(ENTRY)}]}}"
    )
    with started(tmp_path) as service:
        assert service.ask("/api/conversations")[0] == 401
        assert service.ask("/api/conversations", authorization=f"Bearer {TOKEN}")[0] == 200
        assert service.ask("/metrics")[0] == 401
        assert service.ask("/metrics", **{"x-refold-token": TOKEN})[0] == 200
        assert service.ask("/healthz")[0] == 200
    assert (tmp_path / "mine.db").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--host", "0.0.0.0"], "no token is set"),
        (["--upstream-openai", "http://models.example/v1"], "without encryption"),
        (["--upstream-anthropic", "nothing"], "expected an address"),
        (["--port", "70000"], "70000 is too large"),
        (["--store", "nothing://"], "nothing://"),
        (["--log-level", "loud"], "is not one of"),
        (["--host", "no.such.host.invalid", "--config", "t.yaml"], "cannot listen on"),
    ],
)
def test_what_is_not_allowed_ends_it_with_one_line(tmp_path, options, told):
    (tmp_path / "t.yaml").write_text("serve: {token: a-token}")
    done = subprocess.run(command(*options), cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": WAIT_S}
        done = subprocess.run(command("--port", port), **options)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr


def test_a_port_of_0_is_a_real_one():
    with (
        listening(load_config({"serve": {"port": 0}})) as one,
        listening(load_config({"serve": {"port": 0}})) as two,
    ):
        assert 0 < one.getsockname()[1] != two.getsockname()[1] > 0


def test_without_its_extra_it_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['uvicorn'] = None\nfrom refold.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 2
    assert 'pip install "refold[serve]"' in done.stderr


def test_nobody_else_pays_for_it():
    code = (
        "import sys, refold, refold.cli\n"
        "print({'starlette', 'uvicorn', 'aiohttp', 'refold.serve'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.strip() == "set()"


# Tokens on the command line


def test_the_command_makes_a_token_and_its_entry(tmp_path):
    made = subprocess.run(
        [sys.executable, "-m", "refold", "token", "--owner", "ann: x", "--scope", "read", "--scope", "edit"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    token, _, rest = made.stdout.partition("\n")
    config = load_config(yaml.safe_load(rest))
    assert config.serve.tokens == (TokenSettings(hash_of(token), "ann: x", ("read", "edit")),)
    assert token not in rest


def test_a_token_is_taken_back_in_a_service_that_runs(tmp_path):
    file = tmp_path / "refold.yaml"
    file.write_text(json.dumps({"serve": {"tokens": [ENTRY]}}))
    with started(tmp_path) as service:
        asked = lambda: service.ask("/metrics", **{"x-refold-token": TOKEN})[0]  # noqa: E731
        assert asked() == 200
        file.write_text(json.dumps({"serve": {"tokens": [{**ENTRY, "revoked": True}]}}))
        until(lambda: asked() == 401)
        file.write_text(json.dumps({"serve": {"tokens": [ENTRY]}}))
        until(lambda: asked() == 200)
        assert service.stop() == 0


def test_a_hangup_reads_the_tokens_again_and_ends_nothing(tmp_path):
    (tmp_path / "refold.yaml").write_text(json.dumps({"serve": {"tokens": [ENTRY]}}))
    with started(tmp_path) as service:
        service.process.send_signal(signal.SIGHUP)
        until(lambda: "reloaded the tokens" in (tmp_path / "log").read_text())
        assert service.ask("/metrics", **{"x-refold-token": TOKEN})[0] == 200
        assert service.stop() == 0


def test_the_settings_are_shown_without_secrets(tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps({"serve": {"token": "hunter2", "tokens": [ENTRY]}}))
    for option in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "refold", "config", "c.yaml", *option],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert "ann: read" in done.stdout
        assert "serve.limits.header_s" in done.stdout
        assert not re.search(f"hunter2|{ENTRY['hash']}", done.stdout + done.stderr)


# Stopping

STREAMING = """
import sys; sys.path.insert(0, {tests!r})
from servers import Valkey, remove
from served import routes
from starlette.routing import Router
from refold.config import load_config
from refold.serve import logs
from refold.serve.guard import Guard
from refold.serve.metrics import Metrics
from refold.serve.run import GracefulServer, listening, url_of
from refold.serve.tokens import Tokens
config = load_config({{"serve": {{"port": 0, "limits": {{"grace_s": {grace}}}}}}})
guard = Guard(Router(routes()), config.serve, Tokens(config), Metrics())
with listening(config) as listener:
    logs.configure("info")
    print(url_of(listener), "", "", "", sep="\\n", flush=True)
    GracefulServer(guard, config.serve.limits).run([listener])
print("closed", flush=True)
"""


@contextmanager
def streaming(folder: Path, seconds: float, grace: float) -> Iterator[tuple[Process, socket.socket]]:
    """A service, and a stream of it that goes on for so long."""
    code = STREAMING.format(tests=str(ROOT / "tests"), grace=grace)
    with started(folder, code=[sys.executable, "-c", code]) as service:
        port = int(service.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
            client.sendall(f"GET /api/stream?s={seconds} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            data = b""
            while b"data: 1" not in data:
                data += client.recv(4_096)
            yield service, client


def rest_of(client: socket.socket) -> bytes:
    data = b""
    while more := client.recv(4_096):
        data += more
    return data


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_takes_no_more_and_finishes_its_streams(tmp_path, how):
    with streaming(tmp_path, seconds=1, grace=WAIT_S) as (service, client):
        service.process.send_signal(how)
        until(lambda: is_refused(service.url))
        assert rest_of(client).endswith(b"data: 2\n\n\r\n0\r\n\r\n")
        assert service.process.wait(WAIT_S) == 0
        assert service.process.stdout.read() == "closed\n"


def test_streams_that_do_not_end_are_cut_off_after_the_grace_time(tmp_path):
    with streaming(tmp_path, seconds=1_000, grace=0.5) as (service, client):
        service.process.send_signal(signal.SIGTERM)
        assert not rest_of(client).endswith(b"0\r\n\r\n")  # an error for whoever reads it, no clean end
        assert service.process.wait(WAIT_S) == 0
        assert service.process.stdout.read() == "closed\n"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(tmp_path, how):
    with streaming(tmp_path, seconds=1_000, grace=1_000) as (service, _):
        service.process.send_signal(signal.SIGTERM)
        until(lambda: is_refused(service.url))
        assert service.process.poll() is None
        assert service.stop(how) == -how


def is_refused(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=WAIT_S).close()
    except OSError:
        return True
    return False


def test_who_watches_is_sent_away_and_the_record_is_closed(tmp_path):
    with started(tmp_path) as service:
        stream = urllib.request.urlopen(service.url + "/api/events", timeout=WAIT_S)
        assert service.stop() == 0
        stream.read()
    assert not list(tmp_path.glob("*.db-wal"))


# Its health


class Asked(MemoryStore):
    """A store that does something when it is read."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__()
        self.do = do

    def read(self, *place: object) -> Iterator[Link]:
        self.do()
        return iter(())


def test_a_store_that_fails_is_not_healthy_and_nothing_is_told_of_it():
    def fail() -> None:
        raise StoreError("postgresql://me:hunter2@db.internal is down")

    assert asyncio.run(Health(Asked(fail)).problem()) == "the store is not available"


def test_a_store_that_hangs_is_asked_by_one_thread_only():
    free, asked = threading.Event(), []

    def hang() -> None:
        asked.append(1)
        free.wait(WAIT_S)

    async def probed() -> list[str | None]:
        health = Health(Asked(hang), timeout_s=0.1)
        found = await asyncio.gather(*(health.problem() for _ in range(20)))
        assert len(asked) == 1
        free.set()
        while await health.problem() is not None:
            await asyncio.sleep(0.01)
        return found

    assert set(asyncio.run(probed())) == {"the store does not answer in time"}


def test_a_store_that_answers_is_healthy():
    assert asyncio.run(Health(MemoryStore()).problem()) is None


def test_any_other_failure_of_a_store_is_no_health_either():
    def fail() -> None:
        raise RuntimeError("hunter2")

    assert asyncio.run(Health(Asked(fail)).problem()) == "the store is not available"


def test_a_service_whose_store_is_gone_says_so_until_it_is_back():
    folder = Path(mkdtemp())  # a socket's path must be short
    server = Valkey(folder).start()
    try:
        with whole_service(open_store(server.url)) as service:
            assert service.ask("/healthz").status == 200
            server.stop()
            answer = service.ask("/healthz")
            assert answer.status == 503
            assert json.loads(answer.body)["reason"] in (
                "the store is not available",
                "the store does not answer in time",
            )
            assert str(folder).encode() not in answer.body
            server.start()
            until(lambda: service.ask("/healthz").status == 200)
    finally:
        server.stop()
        remove(folder)


# Metrics

LINE = re.compile(
    r'(# (HELP|TYPE) \w+ .+|\w+(\{\w+="(?:[^"\\\n]|\\["\\n])*"(,\w+="(?:[^"\\\n]|\\["\\n])*")*\})? [\d.e+-]+)'
)


def test_what_was_counted_is_told_in_the_words_of_prometheus():
    metrics = Metrics()
    metrics.requests.labels('/a"\\\n', "GET", 200).inc(2)
    metrics.tokens_sent.inc(2**53)
    for seconds in (0.0005, 0.001, 0.3, 1_000):
        metrics.request_seconds.labels("/a").observe(seconds)
    metrics.sessions_kept.set_function(lambda: 7)
    text = metrics.text().decode()
    assert [line for line in text.splitlines() if not LINE.fullmatch(line)] == []
    assert 'refold_requests_total{method="GET",route="/a\\"\\\\\\n",status="200"} 2.0\n' in text
    assert metrics.registry.get_sample_value("refold_tokens_sent_total") == 2**53
    assert "refold_sessions_kept 7.0\n" in text
    assert "refold_open_streams 0.0\n" in text
    counts = re.findall(r'refold_request_seconds_bucket\{le="(.+?)",route="/a"\} (\d+)', text)
    assert [int(many) for _, many in counts] == [*[2] * 8, *[3] * 7, 4]
    assert [bound for bound, _ in counts] == [*map(str, BUCKETS_S), "+Inf"]
    assert "refold_request_seconds_count" in text


def test_every_request_is_counted_by_its_route():
    with behind_the_guard() as served:
        for _ in range(3):
            served.ask("/api/echo?x=1")
        served.ask("/anything/else")
        served.post("/api/echo", content_type="text/plain")
        told = until(lambda: "415" in (text := served.metrics.text().decode()) and text)
    assert 'refold_requests_total{method="GET",route="/api/echo",status="200"} 3.0\n' in told
    assert 'refold_requests_total{method="GET",route="none",status="404"} 1.0\n' in told
    assert 'refold_refusals_total{status="415"} 1.0\n' in told


def open_streams(served: Served) -> float | None:
    return served.metrics.registry.get_sample_value("refold_open_streams")


def test_open_streams_are_counted_while_they_are_open():
    with behind_the_guard() as served:
        with served.socket() as client:
            client.sendall(b"GET /api/stream?s=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n")
            until(lambda: open_streams(served) == 1)
        until(lambda: open_streams(served) == 0)


# Logs and the page


def test_every_line_of_the_log_is_json_and_has_no_secret(tmp_path):
    (tmp_path / "refold.yaml").write_text(
        json.dumps({"serve": {"token": "hunter2-hunter2", "tokens": [ENTRY]}})
    )
    with started(tmp_path, "--log-level", "debug") as service:
        for token in ("hunter2-hunter2", TOKEN, "sk-wrong-0123456789"):
            service.ask(f"/api/conversations?key={token}", authorization=f"Bearer {token}")
            service.ask(f"/{token}", **{"x-refold-token": token, "cookie": token})
        service.stop()
    lines = logged(tmp_path)
    asked = [line for line in lines if line["from"] == "refold.request" and line["status"] != 200]
    assert {"time", "level", "id", "method", "route", "status", "ms", "owner"} <= set(asked[0])
    assert any(line["from"].startswith("uvicorn") for line in lines)
    assert not re.search(rf"hunter2|{TOKEN}|sk-wrong-0|{ENTRY['hash']}", (tmp_path / "log").read_text())


def test_every_setting_of_the_service_is_on_the_page_with_its_default():
    page = (ROOT / "docs" / "reference" / "settings.md").read_text().partition("\nUnder `serve`")[2]
    for struct, before in ((ServeSettings(), ""), (TokenSettings(), "tokens[].")):
        for row in (Setting(path, value, "") for path, value in all_settings(struct)):
            default = "" if row.value in (None, (), "") else f"`{row.shown}` "
            assert f"\n| `{before}{row.name}` | {default}| " in page, row


def test_every_metric_is_on_the_page():
    page = (ROOT / "docs" / "production.md").read_text()
    for family in Metrics().registry.collect():
        name = family.name.removeprefix("refold_")
        assert name in page or f"…_{name.removeprefix('tokens_')}" in page, name


def test_the_file_on_the_page_is_one_that_works():
    text = (ROOT / "docs" / "production.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    from refold.serve.run import check_safe
    from refold.serve.tokens import Tokens

    config = load_config(yaml.safe_load(block))
    check_safe(config)
    assert Tokens(config).are_needed


@pytest.mark.parametrize("struct", [ServeSettings, Limits])
def test_no_number_of_the_service_may_be_negative(struct):
    for name, hint in field_types(struct).items():
        if not {int, float}.isdisjoint(accepted_types(hint)):
            values = {name: -1}
            with pytest.raises(SettingError, match=f"{name}: -1 is too small"):
                load_config({"serve": values if struct is ServeSettings else {"limits": values}})


def test_settings_of_the_service_are_those_of_the_contract():
    given = {
        "host": "127.0.0.1",
        "port": 8787,
        "upstreams": {"openai": "https://a.example/v1", "anthropic": "https://b.example"},
        "token": "t",
        "tokens": [ENTRY],
        "inject_tools": "auto",
        "max_body_mb": 64,
    }
    serve = load_config({"serve": given}).serve
    assert serve.upstreams == Upstreams("https://a.example/v1", "https://b.example")
    assert serve.tokens == (TokenSettings(ENTRY["hash"], "ann", ("read",)),)
    assert load_config({"serve": {"inject_tools": "off"}}).serve.inject_tools is False
    assert msgspec.structs.replace(serve, token=None, tokens=(), upstreams=Upstreams()) == ServeSettings()
