"""Parts that our HTML pages share: their style, and texts whose words stay whole and whose figures keep their units.

The style is light and dark, from 400 px up, with a contrast of 4.5 : 1 or more. Paths and other long words may break.
"""

from __future__ import annotations

import re
from html import escape

from .text_layout import Column

LONG = 24  # letters; a column is at least as wide as its longest word of no more
_AFTER = re.compile(r"(?<=[/\\._:,=&?+-])(?=[^/\\._:,=&?+-])")


def words_html(text: str) -> str:
    """Escape a text; a long word may break after its separators and, without room, anywhere; an option never."""
    return "".join(map(_word, re.split(r"(\s+)", text)))


def cell_html(text: str, *, right: bool = False) -> str:
    """Escape the text of a cell; a figure breaks only before a bracket. An empty cell stays empty."""
    if not right or not text:
        return words_html(text)
    return " ".join(f'<span class="whole">{escape(part)}</span>' for part in re.split(r" (?=[(\[])", text))


def number_class(column: Column) -> str:
    """Return the attribute of the cells of a column of figures."""
    return ' class="num"' if column.right else ""


def swatch(kind: str) -> str:
    """Draw a small square in the color of a class, for a legend."""
    return (
        f'<svg width="12" height="12" aria-hidden="true"><rect class="{kind}" width="12" height="12"/></svg>'
    )


def _word(word: str) -> str:
    if word.startswith("--") and len(word) <= LONG:
        return f'<span class="whole">{escape(word)}</span>'
    if len(word) <= LONG:
        return escape(word)
    return f'<span class="long">{"<wbr>".join(map(escape, _AFTER.split(word)))}</span>'


CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #16191d; --soft: #57606a; --line:
  #d9dee4;
  --ours: #1f6feb; --base: #9aa5b1; --good: #1a7f37; --bad: #c62828; --floor: #b35900; --whisker: #16191d;
  --part0: #9aa5b1; --part1: #1f6feb; --part2: #d97706; --part3: #7c3aed; }
@media (prefers-color-scheme: dark) { :root { --page: #0e1116; --card: #171b21; --ink: #e6e9ed; --soft:
  #9da7b3;
  --line: #2d343d; --ours: #4c8dff; --base: #6b7683; --good: #4cb562; --bad: #ff7b72; --floor: #f0a04b;
  --whisker: #e6e9ed; --part0: #6b7683; --part1: #4c8dff; --part2: #f0a04b; --part3: #b392f0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { margin: 0; font-size: 1.05rem; font-weight: 600; }
h2 { margin: 0 0 .6rem; font-size: 1.05rem; }
p { margin: .3rem 0; }
section, header { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem
  1.2rem;
  margin-bottom: 1rem; }
header { border-left: 6px solid var(--good); }
header.failed { border-left-color: var(--bad); }
.headline { margin: .3rem 0 .5rem; font-size: 1.45rem; font-weight: 650; line-height: 1.3; }
.soft, caption, figcaption, th, dt { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dd { margin: 0; }
figure { margin: 0 0 1rem; }
figcaption { margin-bottom: .2rem; font-size: .9rem; }
.bar { display: grid; grid-template-columns: 13rem 1fr 5rem; gap: .6rem; align-items: center; }
.bar > span { line-height: 1.2; }
.bar b, td.num { text-align: right; font-variant-numeric: tabular-nums; }
.bar b { font-weight: 500; }
svg { display: block; width: 100%; }
.stack { border-radius: 5px; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: .5rem 0 0; padding: 0; list-style:
  none; }
.legend li { display: flex; gap: .4rem; align-items: center; }
.legend svg { width: 12px; }
.ours { fill: var(--ours); } .base { fill: var(--base); } .good { fill: var(--good); } .bad { fill:
  var(--bad); }
.part0 { fill: var(--part0); } .part1 { fill: var(--part1); } .part2 { fill: var(--part2); }
.part3 { fill: var(--part3); }
.whisker { stroke: var(--whisker); stroke-width: 1.5; } .floor { stroke: var(--floor); stroke-width: 2.5; }
.limit { stroke: var(--ink); stroke-width: 2; }
table { width: 100%; border-collapse: collapse; margin-top: .4rem; }
caption { text-align: left; font-size: .9rem; padding-bottom: .2rem; }
th { text-align: left; font-weight: 500; font-size: .85rem; }
th.num { text-align: right; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
tr:last-child td { border-bottom: 0; }
table + table { margin-top: 1.1rem; }
.long { overflow-wrap: anywhere; } .whole { white-space: nowrap; }
td.ok { color: var(--good); font-weight: 600; } td.over { color: var(--bad); font-weight: 600; }
pre { margin: 0; padding: .7rem .9rem; background: var(--page); border: 1px solid var(--line);
  border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: .88rem/1.5 ui-monospace, monospace; }
@media (max-width: 42rem) {
  main { padding: .6rem .5rem 2rem; } section, header { padding: .8rem .9rem; } .headline { font-size:
    1.2rem; }
  .bar { grid-template-columns: 1fr auto; gap: .1rem .6rem; margin-bottom: .5rem; }
  .bar svg { grid-row: 2; grid-column: 1 / 3; }
  table, tbody, caption { display: block; } thead { position: absolute; clip-path: inset(50%); width: 1px;
    height: 1px;
    overflow: hidden; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); } tr:last-child {
    border-bottom: 0; }
  td, td.num { display: block; position: relative; border: 0; padding: .05rem 0; text-align: left; }
  td[data-head] { padding-left: 7rem; }
  td::before { content: attr(data-head); position: absolute; left: 0; color: var(--soft); font-weight: 400; }
  td:empty { display: none; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; }
}
@media print { body { background: #fff; } section, header { break-inside: avoid; } }
"""
