"""Metrics in the text format of Prometheus."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TypeAlias

Labels: TypeAlias = tuple[tuple[str, str], ...]

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
HELP = {
    "requests": "Requests that were answered.",
    "request_seconds": "Time from a request's headers to the end of its response; streams are left out.",
    "refusals": "Requests that the service refused or failed to answer.",
    "tokens_before": "Tokens of the requests as clients sent them.",
    "tokens_sent": "Tokens of the requests as they went upstream.",
    "tokens_saved": "Tokens that did not go upstream.",
    "bypasses": "Requests that went upstream unchanged because refold's part failed.",
    "compactions": "Compaction events, by kind.",
    "upstream_errors": "Error responses of upstreams, and responses that were cut off.",
    "open_streams": "Responses that are being streamed now.",
    "sessions_kept": "Sessions that are open now.",
}


class Metrics:
    """Counters, histograms and gauges; safe to use from any thread.

    Names are given without `refold_` and `_total`.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, list[float]]] = {}
        """Counts per bucket, then the sum of all values."""
        self._gauges: dict[str, Callable[[], float]] = {"open_streams": lambda: self.streams}
        self.streams = 0

    def count(self, name: str, by: float = 1, **labels: object) -> None:
        with self._lock:
            values = self._counters.setdefault(name, {})
            key = _key(labels)
            values[key] = values.get(key, 0) + by

    def observe(self, name: str, value: float, **labels: object) -> None:
        """Adds a value to a histogram."""
        with self._lock:
            rows = self._histograms.setdefault(name, {})
            row = rows.setdefault(_key(labels), [0.0] * (len(BUCKETS_S) + 2))
            row[bisect_left(BUCKETS_S, value)] += 1
            row[-1] += value

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """`read` is called for every scrape."""
        self._gauges[name] = read

    def text(self) -> str:
        with self._lock:
            lines = list(self._lines())
        for name, read in self._gauges.items():
            lines += [*_head(f"refold_{name}", name, "gauge"), f"refold_{name} {read():g}"]
        return "".join(f"{line}\n" for line in lines)

    def _lines(self) -> Iterator[str]:
        for name, values in sorted(self._counters.items()):
            full = f"refold_{name}_total"
            yield from _head(full, name, "counter")
            for labels, value in sorted(values.items()):
                yield f"{full}{_braced(labels)} {value}"
        for name, rows in sorted(self._histograms.items()):
            full = f"refold_{name}"
            yield from _head(full, name, "histogram")
            for labels, row in sorted(rows.items()):
                total = 0.0
                for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), row[:-1], strict=True):
                    total += count
                    yield f"{full}_bucket{_braced((*labels, ('le', bound)))} {total:g}"
                yield f"{full}_sum{_braced(labels)} {row[-1]}"
                yield f"{full}_count{_braced(labels)} {total:g}"


def _key(labels: dict[str, object]) -> Labels:
    return tuple(sorted((name, str(value)) for name, value in labels.items()))


def _head(full: str, name: str, kind: str) -> list[str]:
    return [f"# HELP {full} {HELP.get(name, name)}", f"# TYPE {full} {kind}"]


def _braced(labels: Labels) -> str:
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inner}}}" if inner else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
