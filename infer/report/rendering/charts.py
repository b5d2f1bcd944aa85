"""Bars as inline SVG: widths in percent, so that they stretch with the page and the text around does not."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...latency import Latency
from ..document import FidelityRow, LatencyRow
from . import formatting
from .page import words_html


def latency_bars(row: LatencyRow, baseline: str) -> str:
    """Two bars at p50 with whiskers from the fastest call to p90; a tick where the ceiling is."""
    longest = max(row.ours.p90, row.baseline.p90, row.floor or 0.0) or 1.0
    bars = [
        _bar("this artifact", row.ours, longest, "ours", row.floor),
        _bar(baseline, row.baseline, longest, "base", None),
    ]
    title = f"batch {row.batch}: {formatting.speed(row.pair)}"
    return f'<figure><figcaption>{escape(title)}</figcaption><div class="bars">{"".join(bars)}</div></figure>'


def _bar(label: str, taken: Latency, longest: float, kind: str, floor: float | None) -> str:
    p50, low, high = (_percent(value / longest) for value in (taken.p50, taken.min, taken.p90))
    words = f"{label}: median {formatting.seconds(taken.p50)}, 90 % below {formatting.seconds(taken.p90)}"
    shapes = [
        f'<rect class="{kind}" x="0" y="3" width="{p50}" height="12" rx="2"/>',
        f'<line class="whisker" x1="{low}" x2="{high}" y1="9" y2="9"/>',
        *(f'<line class="whisker" x1="{x}" x2="{x}" y1="5" y2="13"/>' for x in (low, high)),
    ]
    if floor is not None:
        x = _percent(floor / longest)
        shapes.append(f'<line class="floor" x1="{x}" x2="{x}" y1="0" y2="18"/>')
    return _row(label, words, shapes, formatting.seconds(taken.p50))


def fidelity_bar(row: FidelityRow) -> str:
    """Draw the share of the limit that is used; the tick is the limit, at four fifths of the width."""
    used = row.used or 0.0
    kind = "good" if row.ok else "bad"
    words = f"{row.what}: {formatting.share(used)} of what the limit allows"
    shapes = [
        f'<rect class="{kind}" x="0" y="3" width="{_percent(0.8 * used)}" height="12" rx="2"/>',
        '<line class="limit" x1="80%" x2="80%" y1="0" y2="18"/>',
    ]
    return _row(row.what, words, shapes, f"{100 * used:,.0f} %")


def _row(label: str, words: str, shapes: Sequence[str], value: str) -> str:
    svg = f'<svg role="img" aria-label="{escape(words)}" height="18">{"".join(shapes)}</svg>'
    return f'<div class="bar"><span>{words_html(label)}</span>{svg}<b>{escape(value)}</b></div>'


def stacked(parts: Sequence[tuple[str, float]]) -> str:
    """One bar of several parts and a legend with their sizes; parts are (name, bytes)."""
    whole = sum(value for _, value in parts) or 1.0
    shapes, legend, at = [], [], 0.0
    for index, (name, value) in enumerate(parts):
        x, width = _percent(at / whole), _percent(value / whole)
        shapes.append(f'<rect class="part{index}" x="{x}" y="0" width="{width}" height="26"/>')
        square = f'<rect class="part{index}" width="12" height="12"/>'
        swatch = f'<svg width="12" height="12" aria-hidden="true">{square}</svg>'
        legend.append(f"<li>{swatch} {escape(name)} <b>{formatting.size(value)}</b></li>")
        at += value
    words = ", ".join(f"{name} {formatting.size(value)}" for name, value in parts)
    svg = f'<svg class="stack" role="img" aria-label="{escape(words)}" height="26">{"".join(shapes)}</svg>'
    return f'<figure>{svg}<ul class="legend">{"".join(legend)}</ul></figure>'


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"
