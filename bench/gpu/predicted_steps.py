"""Predict decode steps of language models on an H200 from bytes and from instructions, before a card is there.

    python -m bench.gpu.predicted_steps [--write]

A product takes the longer of two times: reading its packed weight at the bandwidth that a copy reaches, and issuing the
instructions of its kernel (counted in machine code, `kernel_table`). Attention likewise, over its keys. Each kernel of
a recorded step adds its start and its tail. `--write` puts the table into docs/gpu.md, where a test compares it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench.gpu import kernel_table
from bench.shared.command_line import parser_of
from bench.shared.repository import RESULTS, ROOT

PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- predicted steps -->", "<!-- end of predicted steps -->"
TABLE = RESULTS / "gpu-kernels-triton-3.9.json"
PEAK = 4.8e12  # bytes a second, as NVIDIA gives it
COPY = 4.3e12  # what a copy reaches
ISSUE = 132 * 4 * 32 * 1.755e9 * 0.8  # lane instructions a second: four a clock of a multiprocessor, at 80 %
TENSOR = 989e12 * 0.6  # bfloat16 operations a second of the library
START = 2.0e-6  # of one kernel in a recorded step: its launch and the tail of the one before
CONTEXT = 2048
BATCHES = (1, 8, 64)
FORMATS = {
    "bfloat16": 2.0,
    "int8:weight": 1.0,
    "int4": 0.5 + 1 / 64,
    "nf4": 0.5 + 1 / 64,
}  # bytes of one weight
FRAGMENTS = {"int4": "int4 fragments", "nf4": "lut4 fragments"}  # kernels of the formats that merge layers


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder of the Llama family."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    vocabulary: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Return [out, in] of each linear layer of one block: query, key, value, output, gate, up, down."""
        keys = self.kv_heads * self.width
        own = self.heads * self.width
        return [
            *((own, self.hidden), (keys, self.hidden), (keys, self.hidden), (self.hidden, own)),
            *((self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)),
        ]

    @property
    def merged(self) -> list[tuple[int, int]]:
        """Return the linear layers of one block where those of one input are one: q/k/v, output, gate/up, down."""
        query, key, _, output, gate, _, down = self.linears
        return [(query[0] + 2 * key[0], self.hidden), output, (2 * gate[0], self.hidden), down]


SHAPES = {
    "1B": Shape(16, 2048, 8192, 32, 8, 64, 128256),
    "8B": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "70B": Shape(80, 8192, 28672, 64, 8, 128, 128256),
}
OTHERS = 4  # kernels of a block beside its linear layers: two norms, rotation with cache write, attention
ONCE = 2  # kernels of a step: cosines and sines, which all layers share


@dataclass(frozen=True)
class Step:
    """A predicted step: bytes that must be read, lane instructions, seconds."""

    num_bytes: float
    instructions: float
    seconds: float

    @property
    def share(self) -> float:
        """Return the bytes over the time, of the peak bandwidth."""
        return self.num_bytes / self.seconds / PEAK


def instructions_of(table: dict[str, kernel_table.Count], kind: str, rows: int) -> float:
    """Return lane instructions for one weight and `rows` rows of x; 0 where the library multiplies."""
    if kind == "bfloat16":
        return 0.0
    if kind == "int8:weight":
        case = (
            "int8 weight rows, 1"
            if rows == 1
            else "int8 weight rows, 2"
            if rows == 2
            else "int8 weight tiles, 16"
        )
        return table[case].each or 0.0
    tile = 1 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64
    case = f"{FRAGMENTS[kind]}, {tile}"
    return table[case].each or 0.0


def predict(shape: Shape, kind: str, batch: int, table: dict[str, kernel_table.Count]) -> Step:
    """Predict one decode step of `batch` sequences of `CONTEXT` tokens each."""
    each = instructions_of(table, kind, batch)
    linears = [*((shape.merged if kind in FRAGMENTS else shape.linears) * shape.layers)]
    linears.append((shape.vocabulary, shape.hidden))
    num_bytes = instructions = seconds = 0.0
    for out, columns in linears:
        read, issued = out * columns * FORMATS[kind], out * columns * each
        num_bytes, instructions = num_bytes + read, instructions + issued
        seconds += max(read / COPY, issued / ISSUE, 2 * batch * out * columns / TENSOR) + START
    keys = batch * CONTEXT * shape.kv_heads * shape.layers
    read = keys * shape.width * 2 * 2
    issued = keys / 64 * (table["attention bfloat16, decode"].loop * 128) * shape.width / 128
    seconds += max(read / COPY, issued / ISSUE) + (OTHERS * shape.layers + ONCE) * START
    return Step(num_bytes + read, instructions + issued, seconds)


def render() -> str:
    """Return the table of all shapes, formats and batches."""
    table = {c.kernel: c for c in kernel_table.read(TABLE) if c.capability == 90}
    lines = [
        "| model | weights | sequences | GB read | lane instructions | ms a step | share of 4.8 TB/s | tokens/s |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, shape in SHAPES.items():
        for kind in FORMATS:
            for batch in BATCHES:
                step = predict(shape, kind, batch, table)
                lines.append(
                    f"| {name} | {kind} | {batch} | {step.num_bytes / 1e9:.2f} | {step.instructions:.2g} "
                    f"| {step.seconds * 1e3:.2f} | {step.share:.0%} | {batch / step.seconds:,.0f} |"
                )
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the text of the page with the table between its marks made anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{render()}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Print the table, or write it into the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/gpu.md")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
