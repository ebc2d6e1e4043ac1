"""What is counted, in the words of Prometheus."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TypeAlias

Labels: TypeAlias = tuple[tuple[str, str], ...]

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds; the upper ends of what is counted together."""
HELP = {
    "requests": "Requests that were answered.",
    "request_seconds": "From the headers of a request to the end of its answer, unless that is a stream.",
    "refusals": "Requests that came to nothing here.",
    "tokens_before": "Tokens of the requests as clients sent them.",
    "tokens_sent": "Tokens of the requests as they went upstream.",
    "tokens_saved": "Tokens that did not go upstream.",
    "bypasses": "Requests that went upstream as they came, because our part failed.",
    "compactions": "Views that were made smaller, or should have been, by what was told of them.",
    "upstream_errors": "Answers of upstreams that were errors, or none.",
    "open_streams": "Answers that are being streamed now.",
    "sessions_kept": "Sessions that are open now.",
}


class Metrics:
    """Any thread may count. Names are without `refold_` and `_total`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[str, dict[Labels, float]] = {}
        self._seen: dict[str, dict[Labels, list[float]]] = {}
        self._gauges: dict[str, Callable[[], float]] = {"open_streams": lambda: self.streams}
        self.streams = 0
        """Answers that are being streamed now."""

    def count(self, name: str, by: float = 1, **labels: object) -> None:
        with self._lock:
            found = self._counts.setdefault(name, {})
            key = _key(labels)
            found[key] = found.get(key, 0) + by

    def observe(self, name: str, value: float, **labels: object) -> None:
        """One more value of which the distribution is wanted."""
        with self._lock:
            found = self._seen.setdefault(name, {})
            row = found.setdefault(_key(labels), [0.0] * (len(BOUNDS) + 2))
            row[bisect_left(BOUNDS, value)] += 1
            row[-1] += value

    def gauge(self, name: str, now: Callable[[], float]) -> None:
        """Asked for whenever somebody looks."""
        self._gauges[name] = now

    def text(self) -> str:
        with self._lock:
            lines = [*self._told_counts(), *self._told_seen()]
        for name, now in self._gauges.items():
            lines += [*_head(f"refold_{name}", name, "gauge"), f"refold_{name} {now():g}"]
        return "".join(f"{line}\n" for line in lines)

    def _told_counts(self) -> Iterator[str]:
        for name, rows in sorted(self._counts.items()):
            full = f"refold_{name}_total"
            yield from _head(full, name, "counter")
            yield from (f"{full}{_braced(labels)} {value}" for labels, value in sorted(rows.items()))

    def _told_seen(self) -> Iterator[str]:
        for name, rows in sorted(self._seen.items()):
            full = f"refold_{name}"
            yield from _head(full, name, "histogram")
            for labels, row in sorted(rows.items()):
                below = 0.0
                for bound, many in zip((*map(str, BOUNDS), "+Inf"), row[:-1], strict=True):
                    below += many
                    yield f"{full}_bucket{_braced((*labels, ('le', bound)))} {below:g}"
                yield f"{full}_sum{_braced(labels)} {row[-1]}"
                yield f"{full}_count{_braced(labels)} {below:g}"


def _key(labels: dict[str, object]) -> Labels:
    return tuple(sorted((name, str(value)) for name, value in labels.items()))


def _head(full: str, name: str, kind: str) -> list[str]:
    return [f"# HELP {full} {HELP.get(name, name)}", f"# TYPE {full} {kind}"]


def _braced(labels: Labels) -> str:
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inner}}}" if inner else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
