"""Guard of measured dispatch: formats that it keeps take at most 1.2 × float32; cost of torch's slow paths.

    python -m bench.kernels.dispatch_guard [--shapes 576x576,4096x4096] [--rows 1,8,64]

Each quantized Linear is timed against float32 on the eager backend, as dispatch does, interleaved. Dispatch keeps a
format when it does not lose; a second measurement of what it kept must then be within 1.2×. The traps of torch on CPUs
are timed beside, to see whether they still are ones. Writes bench/results/traps-DATE-CPU.json; exits 1 when something
that dispatch keeps is slower than 1.2×.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.shared.repository import ROOT
from bench.shared.results import machine_header, result_path
from infer import latency
from infer.compress import Candidates, PackingCache
from infer.compress.assign import layer_timing
from infer.plan import Plan

BOUND = 1.2
FORMATS = ("nf4", "cluster:3", "cluster:6", "int8", "int8:weight")


class SingleLinear(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def guarded(shape: tuple[int, int], rows: int, clock: layer_timing.LayerTimer) -> list[dict[str, Any]]:
    """Measure every format of one shape: time, dispatch's decision, and a second time where it keeps the format."""
    model = SingleLinear(*shape).eval()
    candidates = Candidates(model, clock.plan, FORMATS, {}, PackingCache())
    (weight,) = candidates.weights
    found = []
    for format in candidates.accepted(weight):
        x = (rows, shape[1])
        timed = clock.timed(candidates, weight, format, x)
        row = {
            "shape": list(shape),
            "rows": rows,
            "format": format,
            "ratio": timed.ratio,
            "kept": not timed.loses,
        }
        if row["kept"]:
            row["again"] = clock.measured(candidates, weight, format, x).ratio
        found.append(row)
    return found


def traps(rows: int, shape: tuple[int, int]) -> dict[str, float]:
    """Return the time of each slow path over float32; one that raises here is left out."""
    n, k = shape
    x, w = torch.randn(rows, k), torch.randn(n, k)
    q, codes = (
        torch.randint(-127, 127, (rows, k), dtype=torch.int8),
        torch.randint(-127, 127, (n, k), dtype=torch.int8),
    )
    scale = torch.rand(n)
    calls: dict[str, Callable[[], object]] = {
        "_int_mm": lambda: torch._int_mm(q, codes.t()),
        "_weight_int8pack_mm": lambda: torch._weight_int8pack_mm(x, codes, scale),
    }
    taken = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            print(f"{name} does not run here: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        taken[name] = latency.paired(call, lambda: F.linear(x, w), min_pairs=3, max_seconds=1.0).ratio
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="576x576,1536x576,2048x2048,4096x4096")
    parser.add_argument("--rows", default="1,8,64")
    arguments = parser.parse_args()
    shapes = [tuple(int(size) for size in part.split("x")) for part in arguments.shapes.split(",")]
    sizes = [int(part) for part in arguments.rows.split(",")]
    plan = Plan(source="", quant="nf4", backend="eager", device="cpu", dtype="float32")
    with tempfile.TemporaryDirectory() as work:
        clock = layer_timing.LayerTimer(plan, folder=Path(work))
        table = [row for shape in shapes for rows in sizes for row in guarded(shape, rows, clock)]
        clock.close()
    for row in table:
        again = f"again {row['again']:.2f}" if "again" in row else "stays float"
        shape = "x".join(map(str, row["shape"]))
        print(f"{shape:>10} {row['rows']:>4} rows  {row['format']:<12} {row['ratio']:6.2f}  {again}")
    cost = {f"{n}x{k} {rows}": traps(rows, (n, k)) for n, k in shapes[:2] for rows in (1, 64)}
    head = machine_header(threads=torch.get_num_threads())
    path = result_path("traps")
    path.write_text(json.dumps({**head, "dispatch": table, "traps": cost}, indent=1) + "\n")
    broken = [row for row in table if row.get("again", 0.0) > BOUND]
    for row in broken:
        print(f"kept, but slower than {BOUND}x: {row}", file=sys.stderr)
    print(f"written: {path.relative_to(ROOT)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
