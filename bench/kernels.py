"""The bars of the kernels, one table: our layers and whole models against every rival on this machine.

    python bench/kernels.py [--only 'lut4*M=1,MiniLM*'] [--prepare | --render]

Each piece of work is one interleaved run in which every engine multiplies by equal weights; a product that is wrong
keeps its row from being timed. Merges into bench/results/kernels-DATE-CPU.json and .md; exits 1 when a bar is missed
or a rival is absent.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "models")]

import kernels_bars  # noqa: E402
import kernels_call  # noqa: E402
import kernels_linear  # noqa: E402
import kernels_models  # noqa: E402
import kernels_quality  # noqa: E402
from kernels_bars import Bar  # noqa: E402

from infer import device as hardware  # noqa: E402

THREADS = 2


def works() -> Iterator[tuple[str, Callable[[], list[Bar]]]]:
    """Every piece of work by name, in the order of the table."""
    for case in kernels_linear.cases():
        yield case.name, lambda case=case: kernels_linear.measure(case)
    yield kernels_call.NAME, kernels_call.measure
    for whole in kernels_models.cases():
        yield whole.name, lambda whole=whole: kernels_models.measure(whole)
    yield kernels_quality.NAME, kernels_quality.measure


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
    head = {
        "date": str(datetime.date.today()),
        "machine": hardware.fingerprint("cpu"),
        "versions": hardware.versions(),
        "threads": THREADS,
    }
    if arguments.prepare:
        for case in kernels_models.cases():
            if any(case.name == name for name, _ in chosen):
                print(case.name, kernels_models.prepare(case), flush=True)
        return 0
    path, kept = kernels_bars.keep([], head)
    for name, call in [] if arguments.render else chosen:
        print(name, file=sys.stderr, flush=True)
        path, kept = kernels_bars.keep(call(), head)
    shown = [bar for bar in kept if any(f"{bar.work},".startswith(f"{name},") for name, _ in chosen)]
    print(kernels_bars.table(shown))
    print(f"written: {path.relative_to(ROOT)}")
    return 0 if all(bar.is_met for bar in shown) and shown else 1


if __name__ == "__main__":
    sys.exit(main())
