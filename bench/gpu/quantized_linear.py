"""Quantized linear layers on a GPU: correctness on odd shapes, then share of the bandwidth against bfloat16.

    python -m bench.gpu.quantized_linear [--minutes 7] [--only 'lut4*,int8*']

Layers are those of Llama 1B, 8B and 70B. One measurement is a CUDA graph of calls that rotate over equal weights, more
bytes than the L2 cache holds; the share is the bytes of the packed weight over the time, against the bytes that a copy
on the device moves (read and written). Writes bench/results/gpu-DATE.json and .md after each measurement; exits 1 when
a result is wrong or a bar is missed, 2 without a GPU. Also measures the crossovers that the operators go by, and keeps
them for this user.
"""

from __future__ import annotations

import datetime
import fnmatch
import json
import sys
import time

import torch
from torch.nn import functional as F

from bench.shared.command_line import parser_of
from bench.shared.repository import RESULTS
from infer.kernels import gpu

if reason := gpu.why_not():  # before the imports that need Triton
    print(f"The GPU kernels can't run here: {reason}.", file=sys.stderr)
    sys.exit(2)

import triton

from bench.gpu import packed_weights
from bench.gpu.copy_bandwidth import copy_bandwidth
from bench.gpu.packed_weights import LAYERS, Weight
from infer.kernels.gpu.kernel_thresholds import graph_seconds

BARRED = ("lut4_fragments", "int4_fragments")  # what 4-bit layers of opened artifacts run
BAR_SHARE = 0.6  # of the copy bandwidth: one row, packed weights of BAR_BYTES and more
BAR_BYTES = 16e6
BAR_SLOWER = 1.0  # time against bfloat16: no quantized layer of LARGE bytes (in bfloat16) may take longer
LARGE = 4e6
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROTATED = 256 << 20  # bytes of weights in one graph: several times the largest L2


def check() -> list[str]:
    """Compare each operator with float64 on odd shapes; return a sentence for each wrong result."""
    wrong, count = [], 0
    shapes = [
        (m, n, k)
        for m in (1, 2, 3, 7, 16, 17, 33, 130)
        for n, k in ((1, 64), (33, 192), (70, 1088), (4097, 4160))
    ]
    for kind, (tolerance, make) in packed_weights.KINDS.items():
        for m, n, k in shapes if kind in (*BARRED, "int8") else shapes[2::4]:
            dtype = (torch.bfloat16, torch.float16, torch.float32)[count % 3]
            weight = make(n, k)
            x, bias = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, device="cuda")
            got = weight.run(x, bias).double()
            want = weight.exact(x.double()) + bias.double()
            rounding = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
            error = float((got - want).norm() / want.norm())
            if not error <= max(tolerance, rounding):
                wrong.append(f"{kind} {m} x {n} x {k} {dtype}: relative error {error:.2e}")
            count += 1
    print(f"{count} products checked, {len(wrong)} wrong", flush=True)
    return wrong


def measure(kind: str, name: str, n: int, k: int, rows: int, copy: float) -> dict[str, object]:
    """Return one row of the table: time and bandwidth share of a quantized layer and of the same in bfloat16."""
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    first: Weight = packed_weights.KINDS[kind][1](n, k)
    copies = min(max(ROTATED // first.num_bytes, 1), 64)
    weights = [first] + [first.copy() for _ in range(copies - 1)]
    ours = graph_seconds([lambda w=w: w.run(x, None) for w in weights])
    dense = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    floats = [dense] + [dense.clone() for _ in range(min(max(ROTATED // dense.nbytes, 1), 64) - 1)]
    theirs = graph_seconds([lambda w=w: F.linear(x, w) for w in floats])
    return {
        "kind": kind, "layer": name, "rows": rows, "n": n, "k": k, "bytes": first.num_bytes,
        "us": ours * 1e6, "share": first.num_bytes / ours / copy,
        "bf16_us": theirs * 1e6, "bf16_share": dense.nbytes / theirs / copy, "speedup": theirs / ours,
    }  # fmt: skip


def missed(row: dict) -> str | None:
    """Return the bar that a row misses, or None."""
    slow = row["us"] / row["bf16_us"]
    barred = row["kind"] in BARRED
    if barred and row["rows"] == 1 and row["bytes"] >= BAR_BYTES and row["share"] < BAR_SHARE:
        return f"{row['share']:.0%} of the copy bandwidth, not {BAR_SHARE:.0%}"
    if barred and 2 * row["n"] * row["k"] >= LARGE and slow > BAR_SLOWER:
        return f"{slow:.2f} x the time of bfloat16"
    return None


def overhead() -> float:
    """Return the microseconds of Python and launch for one small call without a graph."""
    weight = packed_weights.KINDS["lut4"][1](64, 64)
    x = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        weight.run(x, None)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        weight.run(x, None)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 500 * 1e6


def table(head: dict, rows: list[dict], limits: dict[str, list[int]], wrong: list[str]) -> str:
    lines = [
        f"# Quantized layers on {head['gpu']}, {head['date']}",
        "",
        f"torch {head['torch']}, triton {head['triton']}. Copy on the device: {head['copy'] / 1e12:.2f} TB/s. "
        f"One call outside a CUDA graph: {head['call_us']:.0f} µs.",
        *(["", "**Wrong:**", *wrong] if wrong else []),
        "",
        "| layer | kind | rows | µs | share of copy | bfloat16 µs | share | speed-up | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['layer']} {row['n']} x {row['k']} | {row['kind']} | {row['rows']} | {row['us']:.1f} "
            f"| {row['share']:.0%} | {row['bf16_us']:.1f} | {row['bf16_share']:.0%} | {row['speedup']:.2f} "
            f"| {missed(row) or ''} |"
        )
    lines += ["", "| kind | tiles from rows | library from rows |", "|---|---|---|"]
    lines += [f"| {kind} | {tiles} | {library} |" for kind, (tiles, library) in limits.items()]
    return "\n".join(lines) + "\n"


def write(head: dict, rows: list[dict], limits: dict[str, list[int]], wrong: list[str]) -> str:
    """Write what is measured so far to both files; return the Markdown."""
    out = RESULTS / f"gpu-{head['date']}"
    document = {**head, "wrong": wrong, "limits": limits, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(document, indent=1))
    out.with_suffix(".md").write_text(text := table(head, rows, limits, wrong))
    return text


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=7, help="stop measuring after this time")
    parser.add_argument("--only", default="*", help="kinds, with wildcards, separated by commas")
    arguments = parser.parse_args()
    started, torch.backends.cuda.matmul.allow_tf32 = time.monotonic(), False
    torch.manual_seed(0)
    wrong, copy = check(), copy_bandwidth()
    limits = {kind: list(packed_weights.crossover_of(kind)) for kind in ("lut4", "int8")}
    head = {
        "date": str(datetime.date.today()), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "copy": copy, "call_us": overhead(),
    }  # fmt: skip
    print(head, limits, flush=True)
    chosen = [
        k for k in packed_weights.KINDS if any(fnmatch.fnmatch(k, p) for p in arguments.only.split(","))
    ]
    work = [(kind, layer, 1) for kind in chosen if kind in packed_weights.USUAL for layer in LAYERS]
    work += [(kind, "8B up", rows) for kind in chosen for rows in ROWS[kind in packed_weights.USUAL :]]
    rows: list[dict] = []
    for kind, layer, count in work:
        if time.monotonic() - started > arguments.minutes * 60:
            print(f"stopped after {len(rows)} of {len(work)} measurements: time is up", flush=True)
            break
        rows.append(measure(kind, layer, *LAYERS[layer], count, copy))
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
        write(head, rows, limits, wrong)
    print(write(head, rows, limits, wrong))
    return 1 if wrong or not rows or any(missed(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
