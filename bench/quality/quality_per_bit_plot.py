"""Quality per bit as one SVG file: a panel for each model and scope, a line and a marker for each contender.

Colours follow the viewer's light or dark scheme; contenders differ by the shape of their markers too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.quality.quality_per_bit_rows import METRICS, OURS, SCOPE_TEXTS, QualityRow

WIDTH, HEIGHT = 470, 360  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 46, 44
HEADER, MARGIN = 64, 8
LEAST = 800  # width of the heading with its legend
LOW, HIGH = 2.0, 8.0  # bits
RADIUS = 4.0
UNIFORM = "infer, one format"
# Class of the style sheet, and shape of the marker.
SERIES = {
    OURS: ("ours", "circle"),
    UNIFORM: ("uniform", "ring"),
    "llama.cpp": ("llama", "square"),
    "auto-round": ("round", "triangle"),
    "GPTQModel": ("gptq", "diamond"),
}
LABELS = {OURS: "infer, mixed formats", "llama.cpp": "llama.cpp, importance matrix"}
STYLE = """
:root{--back:#fff;--ink:#16191d;--soft:#57606a;--line:#d9dee4;--ours:#0b5fd0;--uniform:#0b5fd0;--llama:#b04a00;
--round:#7a3fb0;--gptq:#0a7a52}
@media(prefers-color-scheme:dark){:root{--back:#14171c;--ink:#e8ecf1;--soft:#a5b0bd;--line:#343b45;--ours:#6cb0ff;
--uniform:#6cb0ff;--llama:#ffa860;--round:#d0a3ff;--gptq:#5fd6a5}}
text{fill:var(--ink);font:12px system-ui,sans-serif}.soft{fill:var(--soft)}.head{font-size:15px;font-weight:600}
.name{font-weight:600}.grid{stroke:var(--line)}polyline{fill:none;stroke-width:2}.ring{fill:var(--back)!important}
"""


class Scale:
    """Places of one panel: bits linear, loss logarithmic."""

    def __init__(self, rows: Sequence[QualityRow], left: float, top: float) -> None:
        values = [math.log10(row.loss) for row in rows]
        room = max(max(values) - min(values), 0.1) * 0.05
        self.bottom, self.top = min(values) - room, max(values) + room
        self.left, self.upper = left, top

    def x(self, bits: float) -> float:
        return self.left + LEFT + (bits - LOW) / (HIGH - LOW) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.bottom) / (self.top - self.bottom)
        return self.upper + HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        """Return 1, 2 and 5 times powers of ten."""
        powers = range(math.floor(self.bottom), math.ceil(self.top) + 1)
        every = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
        return [value for value in every if self.bottom <= math.log10(value) <= self.top]


def series_of(row: QualityRow) -> str:
    return UNIFORM if row.contender == OURS and row.kind == "uniform" else row.contender


def shown(rows: Sequence[QualityRow]) -> list[QualityRow]:
    """Return the rows that have a place in the plot."""
    return [
        row for row in rows
        if row.bits is not None and LOW <= row.bits <= HIGH and math.isfinite(row.loss) and row.loss > 0
    ]  # fmt: skip


def plot(rows: Sequence[QualityRow]) -> str:
    """Return the whole SVG file: models down, scopes across."""
    placed = shown(rows)
    models = list(dict.fromkeys(row.model for row in placed))
    scopes = [scope for scope in SCOPE_TEXTS if any(row.scope == scope for row in placed)]
    width, height = max(WIDTH * len(scopes) + MARGIN, LEAST), HEADER + HEIGHT * max(len(models), 1) + MARGIN
    body = [f'<text x="16" y="26" class="head">{TITLE}</text>', *_legend(placed)]
    for down, model in enumerate(models):
        for across, scope in enumerate(scopes):
            own = [row for row in placed if (row.model, row.scope) == (model, scope)]
            if own:
                body += _panel(own, Scale(own, across * WIDTH, HEADER + down * HEIGHT))
    text = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="t d">\n<title id="t">{TITLE}</title>\n<desc id="d">{escape(_summary(placed))}'
        f'</desc>\n<style>{STYLE}</style>\n<rect width="{width}" height="{height}" style="fill:var(--back)"/>\n'
        f"{text}\n</svg>\n"
    )


TITLE = "Loss against bits per weight, calibrated, without recovery (lower is better)"


def _summary(rows: Sequence[QualityRow]) -> str:
    """Describe the plot for those who do not see it: the losses nearest to 3, 4 and 5 bits."""
    said = []
    for model, scope in dict.fromkeys(row.key[:2] for row in rows):
        for bits in (3, 4, 5):
            own = [
                row for row in rows if row.key[:2] == (model, scope) and abs((row.bits or 0) - bits) < 0.35
            ]
            if not own:
                continue
            least = min(own, key=lambda row: row.loss)
            said.append(
                f"{model}, {SCOPE_TEXTS[scope]}, about {bits} bits: least loss {least.loss:.3g}, "
                f"{least.contender} {least.name} at {least.bits:.2f}"
            )
    return ". ".join(said)


def _panel(rows: Sequence[QualityRow], scale: Scale) -> list[str]:
    parts = _axes(rows[0], scale)
    for name, (style, shape) in SERIES.items():
        own = sorted((row for row in rows if series_of(row) == name), key=lambda row: (row.bits, row.loss))
        if name != UNIFORM and len(own) > 1:
            line = " ".join(f"{scale.x(row.bits or 0):.1f},{scale.y(row.loss):.1f}" for row in own)
            parts.append(f'<polyline points="{line}" style="stroke:var(--{style})"/>')
        parts += [_marker(shape, style, scale.x(row.bits or 0), scale.y(row.loss), _tip(row)) for row in own]
    return parts


def _tip(row: QualityRow) -> str:
    return f"{row.contender} {row.name}: {row.bits:.3f} bits, {METRICS[row.metric]} {row.loss:.4g}"


def _axes(row: QualityRow, scale: Scale) -> list[str]:
    left, right = scale.x(LOW), scale.x(HIGH)
    top, bottom = scale.upper + TOP, scale.upper + HEIGHT - BOTTOM
    parts = [
        f'<text x="{left}" y="{top - 26:.0f}" class="name">{escape(row.model)}, {SCOPE_TEXTS[row.scope]}</text>',
        f'<text x="{left}" y="{top - 9:.0f}" class="soft">{METRICS[row.metric]}, logarithmic</text>',
        f'<text x="{(left + right) / 2:.0f}" y="{bottom + 36:.0f}" text-anchor="middle" class="soft">'
        "bits per weight, scales and tables included</text>",
    ]
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(
            f'<text x="{left - 7:.1f}" y="{y + 4:.1f}" text-anchor="end" class="soft">{value:g}</text>'
        )
    for bits in range(math.ceil(LOW), math.floor(HIGH) + 1):
        x = scale.x(bits)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" class="grid"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18:.0f}" text-anchor="middle" class="soft">{bits}</text>'
        )
    return parts


def _marker(shape: str, style: str, x: float, y: float, tip: str = "") -> str:
    colour = f'style="fill:var(--{style});stroke:var(--{style})"'
    title = f"<title>{escape(tip)}</title>" if tip else ""
    r = RADIUS
    if shape in ("circle", "ring"):
        ring = ' class="ring" stroke-width="1.6"' if shape == "ring" else ""
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}"{ring} {colour}>{title}</circle>'
    corners = {
        "square": ((-r, -r), (r, -r), (r, r), (-r, r)),
        "triangle": ((0, -r - 1), (r + 1, r), (-r - 1, r)),
        "diamond": ((0, -r - 1.5), (r + 1.5, 0), (0, r + 1.5), (-r - 1.5, 0)),
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" {colour}>{title}</polygon>'


def _legend(rows: Sequence[QualityRow]) -> list[str]:
    parts, x = [], 22.0
    for name, (style, shape) in SERIES.items():
        if any(series_of(row) == name for row in rows):
            label = LABELS.get(name, name)
            parts += [_marker(shape, style, x, 46), f'<text x="{x + 10}" y="50">{escape(label)}</text>']
            x += 36 + 6.6 * len(label)
    return parts
