"""Speed and error bars of the kernels in one table: our layers and whole models against every rival installed.

    python -m bench.kernels.suite [--only 'lut4*M=1,MiniLM*'] [--prepare | --render]

Each piece of work is one interleaved run in which every engine multiplies by equal weights; a product that is wrong
keeps its row from being timed. Merges into bench/results/kernels-DATE-CPU.json and .md; exits 1 when a bar is missed
or a rival is absent.

On a CPU with AMX, first see that its tiles are in use and right, then take the table:

    infer doctor | grep -E "AMX|native kernels"
    python -m pytest tests/kernels -k native
    python -m bench.kernels.suite && python -m bench.llm.suite
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Callable, Iterator

import torch

from bench.kernels import call_overhead, linear, nf4_error, whole_models
from bench.shared import bars
from bench.shared.bars import Bar
from bench.shared.repository import ROOT
from bench.shared.results import machine_header

THREADS = 2


def works() -> Iterator[tuple[str, Callable[[], list[Bar]]]]:
    """Yield every piece of work by name, in the order of the table."""
    for case in linear.cases():
        yield case.name, lambda case=case: linear.measure(case)
    yield call_overhead.NAME, call_overhead.measure
    for whole in whole_models.cases():
        yield whole.name, lambda whole=whole: whole_models.measure(whole)
    yield nf4_error.NAME, nf4_error.measure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="names of work, with wildcards, separated by commas")
    parser.add_argument("--render", action="store_true", help="measure nothing, print today's table")
    parser.add_argument(
        "--prepare", action="store_true", help="only make the whole models, which takes minutes"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    patterns = arguments.only.split(",")
    chosen = [(n, call) for n, call in works() if any(fnmatch.fnmatch(n, p) for p in patterns)]
    if not chosen:
        parser.error(f"nothing is named {arguments.only!r}. Known: " + ", ".join(name for name, _ in works()))
    head = machine_header(threads=THREADS)
    if arguments.prepare:
        for case in whole_models.cases():
            if any(case.name == name for name, _ in chosen):
                print(case.name, whole_models.prepare(case), flush=True)
        return 0
    path, kept = bars.keep([], head)
    for name, call in [] if arguments.render else chosen:
        print(name, file=sys.stderr, flush=True)
        path, kept = bars.keep(call(), head)
    shown = [bar for bar in kept if any(f"{bar.work},".startswith(f"{name},") for name, _ in chosen)]
    print(bars.table(shown))
    print(f"written: {path.relative_to(ROOT)}")
    return 0 if all(bar.is_met for bar in shown) and shown else 1


if __name__ == "__main__":
    sys.exit(main())
