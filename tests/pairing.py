"""Are the calls and results of lines paired? By id, whatever stands between them."""

from collections.abc import Iterable

from refold.core.event import Line


def faults(lines: Iterable[Line]) -> list[tuple[str, str]]:
    """Which general rules are broken, by which id: G5 a result has its call before it, G6 a call its result.

    An id may be used again once its call was answered.
    """
    waiting: set[str] = set()
    broken: list[tuple[str, str]] = []
    for line in lines:
        if line.answers is not None and line.answers not in waiting:
            broken.append(("G5", line.answers))
        waiting.discard(line.answers or "")
        broken += [("G6", call) for call in dict.fromkeys(line.calls) if call in waiting]
        waiting |= {*line.calls}
    return [*broken, *(("G6", call) for call in sorted(waiting))]


def check(lines: Iterable[Line]) -> list[str]:
    return [rule for rule, _ in faults(lines)]
