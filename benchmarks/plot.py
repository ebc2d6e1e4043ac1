"""Draws what `refold bench retention --json` printed as SVG: tokens saved and values lost.

refold bench retention DATA --json | python -m benchmarks.plot > docs/retention.svg

The picture has no background, and colors for light and dark pages.
"""

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 168, 44, 52
COLORS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#06b6d4", "#ec4899")
GRAY = "#7d8590"
TICKS = 5


class Point(NamedTuple):
    """`x` and `y` are shares from 0 to 1. Points of a group have one color and are joined."""

    group: str
    label: str
    x: float
    y: float


def scatter(title: str, x: str, y: str, points: Sequence[Point]) -> str:
    """An SVG document; `x` and `y` name the axes."""
    most = max((point.y for point in points), default=0.0)
    top = next(step for step in (0.05, 0.1, 0.2, 0.5, 1.0, ceil(most)) if step >= most)
    font = 'font-family="system-ui, sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font} role="img">',
        f"<title>{escape(title)}</title>",
        _text(LEFT, 22, title, size=15),
        *_axes(x, y, top),
    ]
    by_group = groupby(sorted(points, key=lambda point: point.group), key=lambda point: point.group)
    for n, (group, some) in enumerate(by_group):
        color = COLORS[n % len(COLORS)]
        lines += _group(sorted(some, key=lambda point: point.x), color, top)
        row = TOP + 8 + 20 * n
        lines.append(f'<circle cx="{WIDTH - RIGHT + 28}" cy="{row}" r="5" fill="{color}"/>')
        lines.append(_text(WIDTH - RIGHT + 40, row + 4, group))
    return "\n".join([*lines, "</svg>", ""])


def _group(points: Sequence[Point], color: str, top: float) -> list[str]:
    places = [(_across(point.x), _up(point.y, top)) for point in points]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    lines = [f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-opacity="0.5"/>']
    for point, (x, y) in zip(points, places, strict=True):
        title = escape(f"{point.group} {point.label}: {point.x:.1%}, {point.y:.1%}")
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"><title>{title}</title></circle>'
        )
        lines.append(_text(x, y - 10, point.label, anchor="middle", size=11))
    return lines


def _axes(x: str, y: str, top: float) -> list[str]:
    lines = []
    for n in range(TICKS + 1):
        share = n / TICKS
        across, up = _across(share), _up(share * top, top)
        grid = f'stroke="{GRAY}" stroke-opacity="{0.8 if n == 0 else 0.25}"'
        lines.append(f'<line x1="{LEFT}" y1="{up:.1f}" x2="{WIDTH - RIGHT}" y2="{up:.1f}" {grid}/>')
        lines.append(f'<line x1="{across:.1f}" y1="{TOP}" x2="{across:.1f}" y2="{HEIGHT - BOTTOM}" {grid}/>')
        lines.append(_text(LEFT - 8, up + 4, f"{share * top:.0%}", anchor="end"))
        lines.append(_text(across, HEIGHT - BOTTOM + 18, f"{share:.0%}", anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(_text(middle, HEIGHT - 12, x, anchor="middle"))
    lines.append(_text(LEFT, TOP - 6, y))
    return lines


def _across(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, share))


def _up(share: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share / top


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{GRAY}">{escape(text)}</text>'


def retention(rows: Sequence[dict[str, Any]]) -> str:
    """The totals of each arm that hides something and keeps something."""
    points: list[Point] = []
    for row in rows:
        arm = row["arm"]
        if row["source"] == "total" and arm["name"] not in ("nothing", "least"):
            label = f"{arm['percent']} %" if arm["percent"] else ""
            points.append(Point(arm["name"], label, row["saved"], row["lost"]))
    return scatter("Saved and lost", "tokens saved", "needed values lost from view", points)


if __name__ == "__main__":
    print(retention(json.load(sys.stdin)), end="")
