"""What does an adapter add to a call of the model, beyond `fit` itself and what it stores?

python -m refold.bench.adapters tests/adapters/test_langchain.py [--steps 200] [--rounds 3]

The file has a function `rig` that makes a `refold.testing.adapters.Rig` in a folder. The framework's agent
runs the same tool loop without refold and with it, in turns, in a window in which everything fits. The
difference, less what `fit` and storing took, is the adapter's. `scripts/adapters.py --bench` does it
for all of them.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from refold.session import Session
from refold.testing.adapters import MODEL, TASK, Reader, Rig

CONFIG: dict[str, Any] = {"models": {MODEL: {"window": 1_000_000, "max_output": 500}}}


class Inside:
    """Seconds that are spent in `fit` and in storing."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        names = ("fit", "say")
        before = {name: getattr(Session, name) for name in names}
        for name, method in before.items():
            setattr(Session, name, self._timed(method))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(Session, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed


def rig_of(tests: Path, folder: Path) -> Rig:
    sys.path.insert(0, str(tests.parent))
    spec = spec_from_file_location(tests.stem, tests)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[tests.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Rig = module.rig(folder)
    return made


def seconds(rig: Rig, thread: str, steps: int, *, with_refold: bool) -> float:
    begun = time.perf_counter()
    said = rig.run(thread, TASK, Reader(steps), with_refold=with_refold, config=CONFIG)
    assert said.startswith("The seal"), said
    return time.perf_counter() - begun


def main(
    tests: Annotated[Path, typer.Argument(help="The tests of an adapter.")],
    steps: Annotated[int, typer.Option(help="Calls of the model in a run.")] = 200,
    rounds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
) -> None:
    """What an adapter adds to a call of the model."""
    added = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        rig = rig_of(tests.resolve(), Path(folder))
        for n in range(rounds):
            without, inside = seconds(rig, f"bare{n}", steps, with_refold=False), Inside()
            with inside.measured():
                whole = seconds(rig, f"fitted{n}", steps, with_refold=True)
            added.append((whole - without - inside.seconds) / (steps + 1) * 1_000)
    typer.echo(f"adds {median(added):.2f} ms a call ({', '.join(f'{one:.2f}' for one in added)})")


if __name__ == "__main__":
    typer.run(main)
