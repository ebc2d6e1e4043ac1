"""Conversations to replay: recorded ones with probes, your own, or those that anybody can make again.

DATA is one of these:
  a folder with traces/*.jsonl and probes/*.jsonl, one conversation or probe a line
  a file that `refold export` wrote, a JSON or JSONL file of histories, or a folder of such files
  a SQLite file, or the URL of a store
  nothing: a set that is made by chance, the same for the same seed
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from refold.cli.bench import made, own
from refold.cli.bench.own import Which
from refold.cli.bench.probes import extracted, with_key
from refold.cli.bench.trace import Json, Probe, Trace, counted, text_of

SMALLEST = 8_000
"""In tokens; smaller conversations would fit any real window."""
DIALECTS = {"openai": "openai-chat", "anthropic": "anthropic"}


def load(
    data: Path | str | None,
    source: str | None = None,
    least: int = SMALLEST,
    copies: bool = False,
    *,
    which: Which | None = None,
    seed: int = 0,
) -> list[Trace]:
    """Conversations of so many tokens, the longest first; `copies` are in other dialects."""
    return large(each(data, source, copies, which=which, seed=seed), least)


def large(traces: Iterable[Trace], least: int = SMALLEST) -> list[Trace]:
    """Those of so many tokens, the longest first."""
    return sorted(
        (trace for trace in traces if sum(trace.counts) >= least), key=lambda trace: -len(trace.messages)
    )


def each(
    data: Path | str | None,
    source: str | None = None,
    copies: bool = False,
    *,
    which: Which | None = None,
    seed: int = 0,
) -> Iterator[Trace]:
    """One conversation after the other, of any size, with its probes and their keys."""
    which = which or Which()
    if data is None:
        found = made.traces(seed)
    elif "://" not in str(data) and (Path(data) / "traces").is_dir():
        found = _folder(Path(data), source, copies)
    else:
        found = own.traces(str(data), which)
    named = (trace for trace in found if not which.ids or trace.id in which.ids)
    return (_known(trace) for trace in named if source in (None, trace.source))


def _folder(data: Path, source: str | None, copies: bool) -> Iterator[Trace]:
    probes = defaultdict[str, list[Probe]](list)
    for line in _lines(data / "probes"):
        probes[line["conversation"]].append(msgspec.convert(line, Probe))
    for line in _lines(data / "traces"):
        if (copies or line["format"] == "openai") and source in (None, line["source"]):
            dialect = DIALECTS[line["format"]]
            messages = [{k: v for k, v in m.items() if not k.startswith("x_")} for m in line["messages"]]
            needed = probes[line["id"]] if probes else extracted(messages, line["id"])
            counts = counted(messages, dialect)
            yield Trace(line["source"], dialect, messages, counts, needed, id=line["id"])


def _lines(folder: Path) -> Iterator[Json]:
    for file in sorted(folder.glob("*.jsonl")):
        yield from map(json.loads, file.read_bytes().splitlines())


def _known(trace: Trace) -> Trace:
    """The same with the probes that can be found in it before they are used."""
    texts = list(map(text_of, trace.messages)) if trace.probes else []
    known = [p for p in trace.probes if any(p.value in text for text in texts[: p.use_at])]
    keyed = [with_key(probe, trace.messages) for probe in known]
    rest = (trace.source, trace.dialect, trace.messages, trace.counts)
    return Trace(*rest, keyed, len(trace.probes) - len(known), trace.id)
