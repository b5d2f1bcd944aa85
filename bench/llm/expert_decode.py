"""Decoding through one layer of experts: bandwidth reached of the bytes that the experts asked for hold.

    python -m bench.llm.expert_decode [--formats nf4,int8:weight] [--sequences 1,8] [--seconds 4]

A layer of 16 experts with two for each token (hidden 4096, intermediate 6400, as Phi-3.5-MoE): packed gate and up
projection, SiLU, packed down projection, weighted sum. Every call asks for other experts, so that weights come from
memory. Beside it a plain sum over as many bytes is timed in turns: that is the ceiling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shared.results import machine_header, result_path
from infer.kernels import cpu
from infer.kernels.ops import bitpack

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 16, 2, 4096, 6400
NEED = 0.85  # of the bandwidth of a plain sum
ROUTINGS = 24  # drawings of experts, one after the other
CLOSE = 0.02  # relative, of the packed layer against its slow twin
OPS = torch.ops.infer


@dataclass(frozen=True)
class Measured:
    """One format and number of sequences; bytes are those of the experts asked for.

    Times are the 10th percentile of single calls on either side: on a shared machine the others' turns are in the rest.
    """

    format: str
    sequences: int
    experts_read: float
    megabytes: float
    milliseconds: float
    gigabytes_per_second: float
    read_gigabytes_per_second: float
    share: float
    relative_error: float


class Matrix:
    """One projection of all experts, packed, with the portable tensors that its twin computes with."""

    def __init__(self, format: str, features: int, columns: int) -> None:
        self.format, self.features, self.columns = format, features, columns
        rows = EXPERTS * features
        row_scale = torch.rand(rows) * 0.01 + 0.01
        if format == "nf4":
            from infer.compress.formats.nf4 import TABLE

            codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
            scale = torch.randint(64, 128, (rows, columns // bitpack.GROUP), dtype=torch.int8)
            self.portable: tuple[Tensor, ...] = (codes, torch.tensor([TABLE]), scale, row_scale)
            self.packed: tuple[Tensor, ...] = cpu.pack_lut4(*self.portable)
        else:
            codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
            self.portable = (codes, row_scale / 64)
            self.packed = cpu.pack_int8(*self.portable)[:2]

    @property
    def expert_bytes(self) -> float:
        return sum(part.nbytes for part in self.packed) / EXPERTS

    def __call__(self, x: Tensor, expert: Tensor, top_k: int) -> Tensor:
        if self.format == "nf4":
            return OPS.linear_experts_lut4_packed(x, expert, *self.packed, self.features, top_k)
        return OPS.linear_experts_int8_weight_packed(
            x, expert, *self.packed, self.features, self.columns, top_k
        )

    def twin(self, x: Tensor, expert: Tensor, top_k: int) -> Tensor:
        name = "lut" if self.format == "nf4" else "int8_weight"
        return getattr(OPS, f"linear_experts_{name}")(x, expert, *self.portable, self.features, top_k)


def layer(up: Callable[..., Tensor], down: Callable[..., Tensor], x: Tensor, expert: Tensor) -> Tensor:
    """Compute the sum of the experts of each row: [R, HIDDEN]."""
    gate, value = up(x, expert, TOP_K).chunk(2, -1)
    return down(F.silu(gate) * value, expert, 1).reshape(-1, TOP_K, HIDDEN).sum(1)


def measure(format: str, sequences: int, seconds: float) -> Measured:
    """Time the layer and a plain sum over as many bytes in turns; raise `RuntimeError` when it computes wrongly."""
    torch.manual_seed(0)
    up, down = Matrix(format, 2 * INTERMEDIATE, HIDDEN), Matrix(format, HIDDEN, INTERMEDIATE)
    x = torch.randn(sequences, HIDDEN)
    drawn = [torch.rand(sequences, EXPERTS).topk(TOP_K).indices.reshape(-1) for _ in range(ROUTINGS)]
    expected = layer(up.twin, down.twin, x, drawn[0])
    error = float((layer(up, down, x, drawn[0]) - expected).norm() / expected.norm())
    if error > CLOSE:
        raise RuntimeError(f"{format}: the packed layer is {error:.2g} off its twin; no time is given")
    hits = statistics.mean(len(expert.unique()) for expert in drawn)
    size = hits * (up.expert_bytes + down.expert_bytes)
    blocks = list(torch.ones((ROUTINGS, int(size) // 8), dtype=torch.int64).unbind()) if size < 2e8 else []
    blocks = blocks or list(torch.ones((4, int(size) // 8), dtype=torch.int64).unbind())
    ours, plain = list[float](), list[float]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ours) < 3 * ROUTINGS:
        for i, expert in enumerate(drawn):
            ours.append(_time(lambda e=expert: layer(up, down, x, e)))  # type: ignore[misc]
            plain.append(_time(blocks[i % len(blocks)].sum))
    took, read = (statistics.quantiles(times, n=10)[0] for times in (ours, plain))
    return Measured(
        format,
        sequences,
        hits,
        size / 1e6,
        took * 1e3,
        size / took / 1e9,
        size / read / 1e9,
        read / took,
        error,
    )


def _time(call: Callable[[], object]) -> float:
    """Return the seconds of a call; with one thread those that it had a core."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    call()
    return clock() - begin


def main() -> None:
    """Measure both formats, print one line each, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--formats", default="nf4,int8:weight")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--note", default="", help="said in the result file, such as who shares the machine")
    given = parser.parse_args()
    shape = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    head = machine_header(threads=torch.get_num_threads(), note=given.note, shape=shape, need=NEED)
    path, rows = result_path("experts"), list[Measured]()
    for format in given.formats.split(","):
        for sequences in map(int, given.sequences.split(",")):
            row = measure(format, sequences, given.seconds)
            rows.append(row)
            verdict = "meets" if row.share >= NEED else "misses"
            print(
                f"{format:12} {sequences} sequences: {row.milliseconds:.2f} ms for {row.experts_read:.1f} experts, "
                f"{row.megabytes:.0f} MB, {row.gigabytes_per_second:.1f} of {row.read_gigabytes_per_second:.1f} GB/s: "
                f"{row.share:.0%}, {verdict} {NEED:.0%}; error {row.relative_error:.1e}",
                flush=True,
            )
            path.write_text(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
