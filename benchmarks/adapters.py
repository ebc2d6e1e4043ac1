"""What does an adapter add to a call of the model, beyond `fit` itself and storing?

python -m benchmarks.adapters tests/adapters/test_langchain.py [--steps 200]

The file names a `RIG`, which makes a `tests.adapters.contract.Rig` in a folder. The framework's agent runs a
tool loop in a small window. Measured is the CPU time of each thread inside the adapter's own methods, less
that of `Session.fit` and `Session.say` within them: all that is done from one call of the model to the next.
`scripts/adapters.py --bench` does it for all of them.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from inspect import iscoroutinefunction, isfunction
from pathlib import Path
from statistics import median, quantiles
from types import coroutine
from typing import Annotated, Any, TypeAlias

import typer
from tests.adapters.contract import TASK, LedgerReader, Rig, Script, ScriptedReply, SentRequest

from refold.adapters.conversation import AdapterConversation
from refold.session.session import Session

Method: TypeAlias = Callable[..., Any]
MOST_MS = 2.0
"""What an adapter may add to a call."""
OURS = ("fit", "say")
"""Of a session: what these take is not the adapter's."""


class Stopwatch:
    """CPU time inside some methods, in each thread by itself: what they hand on to is not theirs."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        """Seconds, for each call of the model."""
        self._spent = 0.0
        self._lock, self._here = threading.Lock(), threading.local()

    def watch(self, kinds: Sequence[type[Any]]) -> None:
        for kind in kinds:
            for name, method in list(vars(kind).items()):
                if isfunction(method) and name != "__init__":
                    setattr(kind, name, self._timed(method))
        for name in OURS:
            setattr(Session, name, self._timed(getattr(Session, name), runs=False))

    def asked(self, script: Script) -> Script:
        """The same model; each call of it ends what was done for it."""

        def ask(request: SentRequest) -> ScriptedReply:
            with self._lock:
                self.calls.append(self._spent)
                self._spent = 0.0
            return script(request)

        return ask

    def _timed(self, method: Method, *, runs: bool = True) -> Method:
        """Inside it the watch runs, or does not."""

        @wraps(method)
        def timed(*args: Any, **rest: Any) -> Any:
            ran = self._switch(runs)
            try:
                return method(*map(self._handed, args), **rest)
            finally:
                self._switch(ran)

        @wraps(method)
        async def awaited(*args: Any, **rest: Any) -> Any:
            return await self._stepped(method(*map(self._handed, args), **rest), runs)

        return awaited if iscoroutinefunction(method) else timed

    @coroutine
    def _stepped(self, work: Any, runs: bool) -> Generator[Any, Any, Any]:
        """Step by step: what others do while it waits is not its own."""
        go_on, given = work.send, None
        while True:
            ran = self._switch(runs)
            try:
                waited = go_on(given)
            except StopIteration as end:
                return end.value
            finally:
                self._switch(ran)
            try:
                go_on, given = work.send, (yield waited)
            except BaseException as error:
                go_on, given = work.throw, error

    def _handed(self, given: Any) -> Any:
        """What a method is given to go on with, such as LangChain's handler, takes its own time."""
        return self._timed(given, runs=False) if isfunction(given) else given

    def _switch(self, runs: bool) -> bool:
        """Whether it ran before, in this thread."""
        now, begun = time.thread_time(), getattr(self._here, "begun", None)
        if begun is not None:
            with self._lock:
                self._spent += now - begun
        self._here.begun = now if runs else None
        return begun is not None


def rig_of(tests: Path, folder: Path) -> Rig:
    sys.path.insert(0, str(tests.parent))
    spec = spec_from_file_location(tests.stem, tests)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[tests.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Rig = module.RIG(folder)
    return made


def told(seconds: Sequence[float]) -> str:
    """One line."""
    middle, high = median(seconds) * 1_000, quantiles(seconds, n=20)[-1] * 1_000
    above = "median" if middle > MOST_MS else "p95" if high > MOST_MS else ""
    note = f": {above} ABOVE {MOST_MS:g} ms" if above else ""
    return f"adds {middle:.2f} ms a call, p95 {high:.2f}{note}"


def main(
    tests: Annotated[Path, typer.Argument(help="The tests of an adapter.")],
    steps: Annotated[int, typer.Option(help="Calls of the model.")] = 200,
) -> None:
    """What an adapter adds to a call of the model."""
    with tempfile.TemporaryDirectory() as folder:
        rig, watch = rig_of(tests.resolve(), Path(folder)), Stopwatch()
        watch.watch([AdapterConversation, *rig.hooks])
        rig.run("warm", TASK, watch.asked(LedgerReader(2, wanted=None)))
        watch.calls.clear()
        said = rig.run("timed", TASK, watch.asked(LedgerReader(steps, wanted=None)))
    if said != "I have read them." or len(watch.calls) <= steps:
        raise SystemExit(f"not measured: {len(watch.calls)} calls, and at last {said!r}")
    typer.echo(told(watch.calls))


if __name__ == "__main__":
    typer.run(main)
