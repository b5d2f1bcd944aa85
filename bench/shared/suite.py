"""Command line of a suite: pieces of work by name, each of which gives bars of one table."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

from bench.shared import bars
from bench.shared.bars import Bar
from bench.shared.command_line import parser_of
from bench.shared.repository import ROOT
from bench.shared.results import TodaysRows, progress

THREADS = 2
Measure = Callable[
    [float], list[Bar]
]  # by the seconds of timing, where a piece of work takes as long as it is given


def run(
    description: str | None,
    works: Iterable[tuple[str, Measure]],
    rows: TodaysRows[Bar],
    prepare: Callable[[Sequence[str]], None],
    more: Callable[[list[Bar]], str] = lambda bars: "",
) -> int:
    """Measure what the command line asks for; 1 when a bar is missed or was not measured.

    `prepare`: makes what takes minutes and is kept, for works of these names; `more`: what stands under the table.
    """
    parser = parser_of(description)
    parser.add_argument("--only", default="*", help="names of work, with wildcards, separated by commas")
    parser.add_argument("--seconds", type=float, default=30.0, help="of timing for each long piece of work")
    parser.add_argument("--render", action="store_true", help="measure nothing, print today's table")
    parser.add_argument("--prepare", action="store_true", help="only make what takes minutes and is kept")
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    known = dict(works)
    chosen = [n for n in known if any(fnmatch.fnmatch(n, part) for part in asked.only.split(","))]
    if not chosen:
        parser.error(f"nothing is named {asked.only!r}. Known: {', '.join(known)}")
    if asked.prepare:
        prepare(chosen)
        return 0
    kept = rows.keep([])
    for name in [] if asked.render else chosen:
        progress(name)
        kept = rows.keep(known[name](asked.seconds))
    shown = [bar for bar in kept if any(f"{bar.work},".startswith(f"{name},") for name in chosen)]
    print(bars.table(shown) + more(shown))
    print(f"written: {rows.path.relative_to(ROOT)}")
    absent = [n for n in chosen if not any(f"{bar.work},".startswith(f"{n},") for bar in shown)]
    for name in absent:
        print(f"not measured: {name}", file=sys.stderr)
    return 0 if all(bar.is_met for bar in shown) and not absent else 1
