"""Quality against bits as one SVG file, drawn here: points of uniform formats, the line of mixed ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 78, 72, 56, 52
FAR = 1.04  # times the worst mixed value, where the float one is a reference
RADIUS, ROW, CHARACTER = 4.5, 14, 7.5  # of dots and labels, pixels
STEPS = (0, -1, 1, -2, 2, -3, 3, -4, 4)  # rows that a label may lie off its point
MIXED, UNIFORM, INK, SOFT, LINE = "#1f6feb", "#b35900", "#16191d", "#57606a", "#d9dee4"


@dataclass(frozen=True)
class Point:
    bits: float
    value: float
    name: str
    kind: str  # "mixed" or "uniform"


class Axes:
    """Axes of the plot: bits linear, quality logarithmic above `reference` when there is one."""

    def __init__(self, points: Sequence[Point]) -> None:
        bits, values = [p.bits for p in points], [math.log10(p.value) for p in points]
        self.low, self.high = math.floor(min(bits) - 0.2), math.ceil(max(bits))
        room = max(max(values) - min(values), 0.02) * 0.08
        self.bottom, self.top = min(values) - room, max(values) + room

    def x(self, bits: float) -> float:
        return LEFT + (bits - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.bottom) / (self.top - self.bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        """Return round values: 1, 2, 5 times powers of ten, or only the powers; evenly spread where few are round."""
        powers = range(math.floor(self.bottom), math.ceil(self.top) + 1)
        for digits in ((1, 2, 5), (1,), (1.0, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)):
            found = [
                d * 10.0**p for p in powers for d in digits if self.bottom <= math.log10(d) + p <= self.top
            ]
            if 3 <= len(found) <= 9:
                return found
        steps = (self.bottom + (self.top - self.bottom) * i / 5 for i in range(6))
        return list(dict.fromkeys(float(f"{10**step:.3g}") for step in steps))


def front_svg(points: Sequence[Point], *, title: str, label: str, reference: float | None = None) -> str:
    """Return the whole SVG file.

    Values are above zero; one of zero or less (nothing lost) is left out. Of formats that lose far
    more than any mixed assignment only the figure is given: they would press all others together.
    """
    shown = [p for p in points if p.value > 0 and math.isfinite(p.value)]
    ceiling = max((p.value for p in shown if p.kind == "mixed"), default=math.inf) * (
        FAR if reference else 1e9
    )
    above = [p for p in shown if p.value > ceiling]
    shown = [p for p in shown if p.value <= ceiling]
    axes = Axes(shown)
    mixed = sorted((p for p in shown if p.kind == "mixed"), key=lambda p: p.bits)
    parts = [*_frame(axes, title, label), *_reference(axes, reference)]
    if mixed:
        path = " ".join(f"{axes.x(p.bits):.1f},{axes.y(p.value):.1f}" for p in mixed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{MIXED}" stroke-width="2"/>')
    parts += [_dot(axes, p, MIXED, RADIUS) for p in mixed]
    uniform = [p for p in shown if p.kind == "uniform"]
    parts += [_dot(axes, p, UNIFORM, RADIUS) for p in uniform]
    parts += _labels(axes, uniform, mixed)
    body = "\n".join([*parts, *_above(above), *_legend()])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _frame(axes: Axes, title: str, label: str) -> list[str]:
    parts = [f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}</text>']
    for value in axes.ticks():
        y = axes.y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{SOFT}">{value:g}</text>')
    for bits in range(axes.low, axes.high + 1):
        x = axes.x(bits)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="{SOFT}">{bits}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle" fill="{SOFT}">'
        "bits per weight, tables and scales included</text>"
    )
    parts.append(f'<text x="{LEFT}" y="{TOP - 12}" fill="{SOFT}">{escape(label)} (logarithmic)</text>')
    return parts


def _reference(axes: Axes, value: float | None) -> list[str]:
    if value is None or value <= 0 or not axes.bottom <= math.log10(value) <= axes.top:
        return []
    y = axes.y(value)
    return [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{SOFT}" stroke-dasharray="4 4"/>',
        f'<text x="{LEFT + 6}" y="{y - 5:.1f}" fill="{SOFT}">float {value:.4g}</text>',
    ]


def _dot(axes: Axes, point: Point, colour: str, radius: float) -> str:
    words = escape(f"{point.name}: {point.bits:.2f} bits, {point.value:.5g}")
    x, y = axes.x(point.bits), axes.y(point.value)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{words}</title></circle>'


def _labels(axes: Axes, points: Sequence[Point], mixed: Sequence[Point]) -> list[str]:
    """Place a label beside each point, right or left, clear of other labels, dots and the front.

    A line leads to labels that lie further off.
    """
    dots = [(axes.x(p.bits), axes.y(p.value)) for p in [*points, *mixed]]
    taken = [_box(x - RADIUS, y, 2 * RADIUS, 2 * RADIUS) for x, y in dots]
    for (x, y), (right, end) in pairwise(dots[len(points) :]):
        taken += [_box(x + (right - x) * i / 16, y + (end - y) * i / 16, 1, 1) for i in range(16)]
    parts = []
    for point in sorted(points, key=lambda p: (-axes.y(p.value), p.bits)):
        x, y, width = axes.x(point.bits), axes.y(point.value), len(point.name) * CHARACTER
        places = [(left, y + ROW * step) for step in STEPS for left in (x + 9, x - 9 - width)]
        free = (at for at in places if not any(_overlap(_box(*at, width, ROW), other) for other in taken))
        left, middle = next(free, places[0])
        taken.append(_box(left, middle, width, ROW))
        if middle != y:
            end = left if left > x else left + width
            parts.append(
                f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{middle:.1f}" stroke="{UNIFORM}" opacity="0.5"/>'
            )
        parts.append(
            f'<text x="{left:.1f}" y="{middle + 4:.1f}" fill="{UNIFORM}">{escape(point.name)}</text>'
        )
    return parts


def _box(left: float, middle: float, width: float, height: float) -> tuple[float, float, float, float]:
    return left, middle - height / 2, left + width, middle + height / 2


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _above(points: Sequence[Point]) -> list[str]:
    if not points:
        return []
    words = ", ".join(f"{p.name} {p.value:.4g} at {p.bits:.2f} bits" for p in points)
    return [f'<text x="{LEFT + 250}" y="{TOP - 12}" fill="{UNIFORM}">above: {escape(words)}</text>']


def _legend() -> list[str]:
    x = WIDTH - 24 - 190
    return [
        f'<circle cx="{x}" cy="20" r="4.5" fill="{MIXED}"/><text x="{x + 10}" y="24">mixed</text>',
        f'<circle cx="{x + 72}" cy="20" r="4.5" fill="{UNIFORM}"/><text x="{x + 82}" y="24">one format</text>',
    ]
