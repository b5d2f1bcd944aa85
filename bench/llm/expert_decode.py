"""Decoding through one layer of experts: bandwidth reached of the bytes that the experts asked for hold.

    python -m bench.llm.expert_decode [--shapes phi,gpt_oss] [--formats nf4,int8:weight] [--sequences 1,8]

A layer of experts as published models have it, from 16 large ones with two for each token to 128 small ones with eight:
packed gate and up projection, SiLU, packed down projection, weighted sum. Every call asks for other experts, so that
weights come from memory. Beside it a plain sum over as many bytes is timed in turns: that is the ceiling. Rows of 4
bits have llama.cpp beside them, the same layer and routings in q4_0; its bar is for 8 sequences.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.llm import expert_ggml
from bench.shared import child_process
from bench.shared.child_process import EngineCrashed
from bench.shared.results import machine_header, result_path
from infer.kernels import cpu
from infer.kernels.ops import bitpack

NEED = 0.85  # of the bandwidth of a plain sum
FASTER = 2.0  # times llama.cpp's speed with 8 sequences
RIVAL_FORMAT, RIVAL_CLOSE = "nf4", 0.03  # the format as large as q4_0; relative error of llama.cpp's layer
SILENCE, BURST = 0.03, 5  # seconds before a turn, in which the rival's threads still poll; calls of a turn
ROUTINGS = 24  # drawings of experts, one after the other
CLOSE = 0.02  # relative, of the packed layer against its slow twin
OPS = torch.ops.infer


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer of experts, of which every token asks for `top_k`."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


SHAPES = {
    "phi": Shape(16, 2, 4096, 6400),  # Phi-3.5-MoE
    "gpt_oss": Shape(32, 4, 2880, 2880),  # gpt-oss-20b
    "qwen3": Shape(128, 8, 2048, 768),  # Qwen3-30B-A3B
    "deepseek": Shape(64, 6, 2048, 1408),  # DeepSeek-V2-Lite
}


@dataclass(frozen=True)
class Measured:
    """One shape, format and number of sequences; bytes are those of the experts asked for.

    Times are the 10th percentile of single calls on either side: on a shared machine the others' turns are in the rest.
    `products_milliseconds` is of the two packed projections alone, without what is between them.
    """

    shape: str
    format: str
    sequences: int
    experts_read: float
    megabytes: float
    milliseconds: float
    products_milliseconds: float
    gigabytes_per_second: float
    read_gigabytes_per_second: float
    share: float
    relative_error: float
    rival_milliseconds: float | None = None  # llama.cpp's, q4_0


@dataclass(frozen=True)
class Crashed:
    """One shape, format and number of sequences whose process ended: `crashed: signal 11`."""

    shape: str
    format: str
    sequences: int
    crashed: str


class Matrix:
    """One projection of all experts, packed, with the portable tensors that its twin computes with."""

    def __init__(self, format: str, experts: int, features: int, columns: int) -> None:
        self.format, self.features, self.columns = format, features, columns
        self.experts, rows = experts, experts * features
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
        return sum(part.nbytes for part in self.packed) / self.experts

    def __call__(self, x: Tensor, expert: Tensor, top_k: int) -> Tensor:
        if self.format == "nf4":
            return OPS.linear_experts_lut4_packed(x, expert, *self.packed, self.features, top_k)
        return OPS.linear_experts_int8_weight_packed(
            x, expert, *self.packed, self.features, self.columns, top_k
        )

    def twin(self, x: Tensor, expert: Tensor, top_k: int) -> Tensor:
        name = "lut" if self.format == "nf4" else "int8_weight"
        return getattr(OPS, f"linear_experts_{name}")(x, expert, *self.portable, self.features, top_k)


def layer(
    up: Callable[..., Tensor], down: Callable[..., Tensor], x: Tensor, expert: Tensor, top_k: int
) -> Tensor:
    """Compute the sum of the experts of each row: [R, hidden]."""
    gate, value = up(x, expert, top_k).chunk(2, -1)
    return down(F.silu(gate) * value, expert, 1).unflatten(0, (-1, top_k)).sum(1)


def measure(name: str, format: str, sequences: int, seconds: float) -> Measured:
    """Time the layer and a plain sum over as many bytes in turns; raise `RuntimeError` when it computes wrongly."""
    torch.manual_seed(0)
    shape = SHAPES[name]
    experts, top_k, hidden, inner = shape.experts, shape.top_k, shape.hidden, shape.intermediate
    up, down = Matrix(format, experts, 2 * inner, hidden), Matrix(format, experts, hidden, inner)
    x, middle = torch.randn(sequences, hidden), torch.randn(sequences * top_k, inner)
    drawn = [torch.rand(sequences, experts).topk(top_k).indices.reshape(-1) for _ in range(ROUTINGS)]
    expected = layer(up.twin, down.twin, x, drawn[0], top_k)
    error = float((layer(up, down, x, drawn[0], top_k) - expected).norm() / expected.norm())
    if error > CLOSE:
        raise RuntimeError(
            f"{name}, {format}: the packed layer is {error:.2g} off its twin; no time is given"
        )
    hits = statistics.mean(len(expert.unique()) for expert in drawn)
    size = hits * (up.expert_bytes + down.expert_bytes)
    blocks = list(torch.ones((ROUTINGS, int(size) // 8), dtype=torch.int64).unbind()) if size < 2e8 else []
    blocks = blocks or list(torch.ones((4, int(size) // 8), dtype=torch.int64).unbind())
    ours, products, plain = list[float](), list[float](), list[float]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ours) < 3 * ROUTINGS:
        for i, expert in enumerate(drawn):
            ours.append(_time(lambda e=expert: layer(up, down, x, e, top_k)))  # type: ignore[misc]
            plain.append(_time(blocks[i % len(blocks)].sum))
            expert = drawn[i - ROUTINGS // 2]
            products.append(_time(lambda e=expert: (up(x, e, top_k), down(middle, e, 1))))  # type: ignore[misc]
            plain.append(_time(blocks[(i + 1) % len(blocks)].sum))
    took, alone, read = (statistics.quantiles(times, n=10)[0] for times in (ours, products, plain))
    rival = None
    if format == RIVAL_FORMAT and expert_ggml.missing() is None:
        rival = _rival_seconds(shape, x, drawn, lambda e: layer(up, down, x, e, top_k), seconds)
    return Measured(
        name,
        format,
        sequences,
        hits,
        size / 1e6,
        took * 1e3,
        alone * 1e3,
        size / took / 1e9,
        size / read / 1e9,
        read / took,
        error,
        None if rival is None else rival * took * 1e3,
    )


def _rival_seconds(
    shape: Shape, x: Tensor, drawn: list[Tensor], ours: Callable[[Tensor], Tensor], seconds: float
) -> float:
    """Return llama.cpp's time over ours, the median of turns; raises `RuntimeError` if it computes wrongly."""
    rival = expert_ggml.GgmlExperts(shape.experts, shape.top_k, shape.hidden, shape.intermediate, len(x))
    if (error := rival.error(x)) > RIVAL_CLOSE:
        raise RuntimeError(
            f"llama.cpp's layer is {error:.2g} off the products of its codes; no time is given"
        )
    routings, ratios = [expert.int() for expert in drawn], list[float]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ratios) < ROUTINGS:
        first = BURST * len(ratios)
        theirs = _burst(lambda i: rival.run(routings[i % ROUTINGS]), first)
        ratios.append(theirs / _burst(lambda i: ours(drawn[i % ROUTINGS]), first + BURST))
    return statistics.median(ratios)


def _burst(call: Callable[[int], object], first: int) -> float:
    """Return the median seconds of `BURST` calls after silence; one more before them wakes the threads."""
    time.sleep(SILENCE)
    call(first)
    return statistics.median(_time(lambda i=i: call(first + i)) for i in range(1, BURST + 1))  # type: ignore[misc]


def measure_apart(name: str, format: str, sequences: int, seconds: float) -> Measured | Crashed:
    """Measure in a process of its own with as many threads as here; both sides of the turns are in it."""
    given = torch.get_num_threads(), name, format, sequences, seconds
    try:
        return child_process.apart(_measure_with, *given)
    except EngineCrashed as error:
        return Crashed(name, format, sequences, str(error))


def _measure_with(threads: int, name: str, format: str, sequences: int, seconds: float) -> Measured:
    torch.set_num_threads(threads)
    return measure(name, format, sequences, seconds)


def _time(call: Callable[[], object]) -> float:
    """Return the seconds of a call; with one thread those that it had a core."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    call()
    return clock() - begin


def row_text(row: Measured | Crashed) -> str:
    """Return the line of one row."""
    start = f"{row.shape:8} {row.format:12} {row.sequences} sequences"
    if isinstance(row, Crashed):
        return f"{start}: {row.crashed}"
    verdict = "meets" if row.share >= NEED else "misses"
    rival = ""
    if row.rival_milliseconds is not None:
        ratio = row.rival_milliseconds / row.milliseconds
        bar = f", {'meets' if ratio >= FASTER else 'misses'} {FASTER:g} ×" if row.sequences == 8 else ""  # noqa: PLR2004
        rival = f"; {ratio:.2f} × llama.cpp q4_0{bar}"
    return (
        f"{start}: {row.milliseconds:.2f} ms, products alone {row.products_milliseconds:.2f}, "
        f"for {row.experts_read:.1f} experts, {row.megabytes:.0f} MB, "
        f"{row.gigabytes_per_second:.1f} of {row.read_gigabytes_per_second:.1f} GB/s: "
        f"{row.share:.0%}, {verdict} {NEED:.0%}; error {row.relative_error:.1e}{rival}"
    )


def main() -> None:
    """Measure both formats, print one line each, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="phi,gpt_oss,qwen3,deepseek", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--formats", default="nf4,int8:weight")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--note", default="", help="said in the result file, such as who shares the machine")
    given = parser.parse_args()
    names = given.shapes.split(",")
    shapes = {name: asdict(SHAPES[name]) for name in names}
    head = machine_header(threads=torch.get_num_threads(), note=given.note, shapes=shapes, need=NEED)
    path, rows = result_path("experts"), list[Measured | Crashed]()
    asked = itertools.product(names, given.formats.split(","), map(int, given.sequences.split(",")))
    for name, format, sequences in asked:
        rows.append(measure_apart(name, format, sequences, given.seconds))
        print(row_text(rows[-1]), flush=True)
        path.write_text(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
