"""How fast unseen messages are counted, and what `import refold` costs.

python -m benchmarks.start
"""

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

from splintr import Tokenizer

from refold.cli.bench.generate import conversation
from refold.cli.bench.speed import seconds
from refold.core.message import Message
from refold.dialects import openai_chat
from refold.models.count import counter, encoder

COUNTED = 5_000
"""Messages that are counted for the first time."""
TRIES = 5


def count_ratio() -> float:
    """How fast unseen messages are counted, as a share of the tokenizer's own speed."""
    messages = [openai_chat.parse(message) for message in conversation(COUNTED, seed=1)]
    texts = [text for message in messages for text in _texts(message)]
    floor: list[float] = []
    ours: list[float] = []
    for _ in range(TRIES):
        encode = Tokenizer.from_pretrained("o200k_base").encode_flat
        encoder.cache_clear()  # a new tokenizer has no texts cached
        count = counter("gpt-5")
        count.text("loads the vocabulary")
        floor.append(seconds(partial(_each, encode, texts)))
        ours.append(seconds(partial(_each, count.message, messages)))
    return min(floor) / min(ours)


def _each(function: Callable[..., object], values: Sequence[object]) -> None:
    for value in values:
        function(value)


def _texts(message: Message) -> Iterator[str]:
    for call in message.calls:
        yield from (call.tool, call.input)
    yield message.name or ""
    yield message.text


def import_cpu_ms() -> float:
    """CPU of `import refold` in a new interpreter, beyond that of an empty program."""
    return (_cpu_s("import refold") - _cpu_s("pass")) * 1e3


def _cpu_s(program: str) -> float:
    times: list[float] = []
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(times)


if __name__ == "__main__":
    print(f"First count: {count_ratio():.2f} of the tokenizer's own speed.")
    print(f"Import refold: {import_cpu_ms():.0f} ms of CPU.")
