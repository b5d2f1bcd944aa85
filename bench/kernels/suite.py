"""Speed bars of the kernels in one table: our layers and whole models against every rival installed.

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

import sys
from collections.abc import Iterator, Sequence

from bench.kernels import call_overhead, linear, whole_models
from bench.shared import suite
from bench.shared.bars import todays_bars
from bench.shared.suite import THREADS, Measure

KINDS = ("lut4", "int8", "call", "MiniLM", "BERT", "ResNet")


def works() -> Iterator[tuple[str, Measure]]:
    """Yield every piece of work by name, in the order of the table."""
    for case in linear.cases():
        yield case.name, lambda _, case=case: linear.measure(case)
    yield call_overhead.NAME, lambda _: call_overhead.measure()
    for whole in whole_models.cases():
        yield whole.name, lambda _, whole=whole: whole_models.measure(whole)


def prepare(names: Sequence[str]) -> None:
    """Make the whole models."""
    for case in whole_models.cases():
        if case.name in names:
            print(case.name, whole_models.prepare(case), flush=True)


def main() -> int:
    return suite.run(__doc__, works(), todays_bars("kernels", KINDS, threads=THREADS), prepare)


if __name__ == "__main__":
    sys.exit(main())
