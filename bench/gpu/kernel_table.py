"""Machine code of the Triton kernels, counted without a GPU: instructions, registers, shared memory, spills.

    python -m bench.gpu.kernel_table [--capability 80,90,120] [--only 'lut4*']

Each kernel is compiled at the shapes of Llama 3.1 8B by the installed triton, and read with the tools in its wheel.
`loop` counts the instructions of the longest innermost loop, `each` those for one weight of a product. Writes
bench/results/gpu-kernels-TRITON.json and .md; a test compares a new compilation with them.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton

from bench.shared.repository import RESULTS
from infer import attention
from infer.attention import AttentionArgs, _triton_attend, _triton_write
from infer.attention import triton as paged
from infer.kernels.gpu import embedding, epilogue, experts
from infer.kernels.gpu.int8 import int8_gemm, int8_gemv, int8_quantize, w8a16_gemv
from infer.kernels.gpu.lut import fragment_gemm, lut4_int8_gemv, lut_decode, lut_gemm, lut_gemv
from infer.kernels.ops import linear_lut4_fragments
from tests.support.triton_compile import compiled

CAPABILITIES = (80, 90, 120)
GROWTH = 0.10  # of instructions or registers, beyond which a kernel has become worse
N, K, GROUP = 14336, 4096, 64
MODULES: tuple[Any, ...] = (
    embedding, epilogue, experts, int8_quantize, int8_gemv, int8_gemm, w8a16_gemv, lut4_int8_gemv,
    lut_decode, lut_gemv, lut_gemm, fragment_gemm, _triton_attend, _triton_write,
)  # fmt: skip


class Count(msgspec.Struct, kw_only=True):
    """Machine code of one kernel for one architecture; `each`: instructions of its loop for one weight."""

    kernel: str
    capability: int
    instructions: int
    loop: int
    registers: int
    shared: int
    spills: int
    each: float | None = None


def _lut(bits: int) -> tuple[torch.Tensor, ...]:
    codes = torch.empty((N, K * bits // 8), dtype=torch.uint8, device="meta")
    table = torch.empty((1 if bits == 4 else N // 32, 2**bits), device="meta")
    scale = torch.empty((N, K // GROUP), dtype=torch.int8, device="meta")
    return codes, table, scale, torch.empty(N, device="meta")


def _x(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty((rows, K), dtype=dtype, device="meta")


def _int8() -> torch.Tensor:
    return torch.empty((N, K), dtype=torch.int8, device="meta")


def _scales() -> torch.Tensor:
    return torch.empty(N, device="meta")


def _attend(kind: str, batch: int, tokens: int = 1) -> None:
    layout = attention.PageLayout(8, 128, 32, kind)
    blocks = 64
    meta = {"device": "meta"}
    args = AttentionArgs(
        *(torch.empty((batch * tokens, heads, 128), dtype=torch.bfloat16, **meta) for heads in (32, 8, 8)),  # type: ignore[arg-type]
        kv_cache=torch.empty((1, batch * blocks, layout.num_bytes), dtype=torch.uint8, **meta),  # type: ignore[arg-type]
        slot_mapping=torch.empty(batch * tokens, dtype=torch.int64, **meta),  # type: ignore[arg-type]
        block_table=torch.empty((batch, blocks), dtype=torch.int32, **meta),  # type: ignore[arg-type]
        query_start=torch.empty(batch + 1, dtype=torch.int32, **meta),  # type: ignore[arg-type]
        seq_lens=torch.empty(batch, dtype=torch.int32, **meta),  # type: ignore[arg-type]
        sinks=None,
        layer=0,
        page=32,
        dtype=attention.KV_DTYPES.index(kind),
        scale=128**-0.5,
    )
    paged.run(args, paged.tiling(args), 4 if tokens == 1 else 1)


def _lut4_int8(rows: int) -> None:
    codes, table, scale, row_scale = _lut(4)
    lut4_int8_gemv.linear(_x(rows), codes, table.to(torch.int8), scale, row_scale, split=1)


def _fragments(rows: int, uniform: bool) -> None:
    blocks, groups = N // linear_lut4_fragments.BLOCK, K // GROUP
    fragment_gemm.linear(
        _x(rows),
        torch.empty((blocks * 8, groups, 128), dtype=torch.int32, device="meta"),
        torch.empty((blocks * 4, 18), dtype=torch.int32, device="meta"),
        torch.empty((groups // 4, N, 4), dtype=torch.int8, device="meta"),
        torch.empty(N, device="meta"),
        *(None, N, uniform, 1),
    )


# Kernel → (name of its function, a call that launches it).
CASES: dict[str, tuple[str, Callable[[], object]]] = {
    "lut4 rows, 1": ("_rows", lambda: lut_gemv.linear(_x(1), *_lut(4), split=1)),
    "lut4 rows, 4": ("_rows", lambda: lut_gemv.linear(_x(4), *_lut(4), split=1)),
    "lut4_int8 rows, 1": ("_rows", lambda: _lut4_int8(1)),
    "lut4_int8 rows, 8": ("_rows", lambda: _lut4_int8(8)),
    **{f"{kind} fragments, {rows}": ("_gemm", functools.partial(_fragments, rows, kind == "int4"))
       for kind in ("int4", "lut4") for rows in (1, 16, 32, 64)},
    "lut4 tiles, 16": ("_tiles", lambda: lut_gemm.linear(_x(16), *_lut(4), split=1)),
    "lut4 tiles, 64": ("_tiles", lambda: lut_gemm.linear(_x(64), *_lut(4), split=1)),
    "lut3 rows, 1": ("_rows", lambda: lut_gemv.linear(_x(1), *_lut(3), split=1)),
    "lut4 decode": ("_decode", lambda: lut_decode.decode(*_lut(4), torch.bfloat16)),
    "int8 rows, 1": ("_rows", lambda: int8_gemv.linear(_x(1, torch.int8), _int8(), 1)),
    "int8 tiles, 64": ("_tiles", lambda: int8_gemm.products(_x(64, torch.int8), _int8(), 1)),
    "int8 weight rows, 1": ("_rows", lambda: w8a16_gemv.linear(_x(1), _int8(), _scales(), split=1)),
    "int8 weight rows, 2": ("_rows", lambda: w8a16_gemv.linear(_x(2), _int8(), _scales(), split=1)),
    "int8 weight tiles, 16": ("_tiles", lambda: int8_gemm.weight_only(_x(16), _int8(), _scales())),
    "quantize rows": ("_quantize", lambda: int8_quantize.quantize_rows(_x(1), None)),
    "attention bfloat16, decode": ("_attend", lambda: _attend("bfloat16", 1)),
    "attention int8, decode": ("_attend", lambda: _attend("int8", 1)),
    "attention bfloat16, prefill": ("_attend", lambda: _attend("bfloat16", 1, 512)),
    "attention write": ("_write", lambda: _attend("bfloat16", 1)),
    "attention write int8": ("_write", lambda: _attend("int8", 1)),
}  # fmt: skip


# Weights that one lane multiplies in one turn of the loop, from the sizes of the tiles that the launches choose.
WEIGHTS = {
    "lut4 rows, 1": 128, "lut4 rows, 4": 32, "lut4_int8 rows, 1": 128, "lut4_int8 rows, 8": 16,
    **{f"{kind} fragments, {rows}": 256 if rows <= 16 else 128
       for kind in ("int4", "lut4") for rows in (1, 16, 32, 64)},
    "lut4 tiles, 16": 32, "lut4 tiles, 64": 16, "int8 rows, 1": 128,
    "int8 weight rows, 1": 128, "int8 weight rows, 2": 64, "int8 weight tiles, 16": 32,
}  # fmt: skip


def launch_of(case: str) -> tuple[Any, ...]:
    """Return the launch (kernel, arguments, options) of a case; nothing is launched."""
    name, call = CASES[case]
    launches: list[tuple[Any, ...]] = []

    def collect(kernel: Any, _: Any, *args: Any, **options: Any) -> None:
        launches.append((kernel, args, options))

    before = [module.launch for module in MODULES]
    for module in MODULES:
        module.launch = collect
    try:
        call()
    finally:
        for module, launch in zip(MODULES, before, strict=True):
            module.launch = launch
    return next(launch for launch in launches if launch[0].fn.__name__ == name)


def count(case: str, capability: int) -> Count:
    """Compile a case for an architecture (90 for 9.0) and count its machine code."""
    kernel = compiled(launch_of(case), capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", file.name)
    used = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", usage.split("Function")[-1])}
    lines = instructions(code)
    return Count(
        kernel=case,
        capability=capability,
        instructions=sum(kind != "label" for kind, _ in lines),
        loop=(loop := longest_loop(lines)),
        registers=used["REG"],
        shared=kernel.metadata.shared,
        spills=used["STACK"] + used["LOCAL"],
        each=round(loop / WEIGHTS[case], 2) if case in WEIGHTS else None,
    )


def instructions(code: str) -> list[tuple[str, str]]:
    """Return labels and instructions of a disassembly, each as (kind, text), without the padding at its end."""
    lines: list[tuple[str, str]] = []
    for text in code.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", text):
            lines.append(("label", found[1]))
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text):
            lines.append(("instruction", found[1]))
    while lines and (lines[-1][0] == "label" or re.match(r"NOP|BRA", lines[-1][1])):
        lines.pop()
    return lines


def longest_loop(lines: list[tuple[str, str]]) -> int:
    """Return the number of instructions of the longest loop that contains no other."""
    places = {text: at for at, (kind, text) in enumerate(lines) if kind == "label"}
    loops = []
    for at, (kind, text) in enumerate(lines):
        target = re.search(r"BRA.*?(\.L_x_\d+)", text) if kind == "instruction" else None
        if target and places.get(target[1], at) < at:
            loops.append((places[target[1]], at))
    inner = [one for one in loops if not any(o != one and one[0] <= o[0] and o[1] <= one[1] for o in loops)]
    return max((sum(kind != "label" for kind, _ in lines[a : b + 1]) for a, b in inner), default=0)


def _tool(name: str, *words: str) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout


def worse(old: Count, new: Count) -> list[str]:
    """Return a sentence for each figure of a kernel that has grown beyond `GROWTH`, or for new spills."""
    said = []
    for what in ("instructions", "loop", "registers"):
        before, now = getattr(old, what), getattr(new, what)
        if now > before * (1 + GROWTH) and now - before > 2:
            said.append(f"{new.kernel}, sm_{new.capability}: {now} {what}, {before} before")
    if new.spills > old.spills:
        said.append(f"{new.kernel}, sm_{new.capability}: {new.spills} bytes of spills, {old.spills} before")
    return said


def result_path() -> Path:
    """Return the table of the installed triton."""
    return RESULTS / f"gpu-kernels-triton-{'.'.join(triton.__version__.split('.')[:2])}.json"


def read(path: Path) -> list[Count]:
    """Read a table."""
    return msgspec.json.decode(path.read_bytes(), type=_Table).kernels


class _Table(msgspec.Struct):
    kernels: list[Count]


def write(counts: list[Count]) -> Path:
    """Write both files of the table; return the Markdown one."""
    path, date = result_path(), datetime.date.today()
    head = {"date": str(date), "triton": triton.__version__, "kernels": counts}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(head), indent=1))
    lines = [
        f"# Machine code of the Triton kernels, triton {triton.__version__}, {date}\n\n"
        f"Shapes of Llama 3.1 8B ({N} x {K}). Compiled and disassembled on a machine without a GPU.\n\n"
        "| kernel | sm | instructions | inner loop | per weight | registers | shared bytes | spilled bytes |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|\n"
    ]
    for c in counts:
        lines.append(
            f"| {c.kernel} | {c.capability} | {c.instructions} | {c.loop} | {c.each or ''} "
            f"| {c.registers} | {c.shared} | {c.spills} |\n"
        )
    page = path.with_suffix(".md")
    page.write_text("".join(lines))
    return page


def main() -> int:
    """Count the wanted kernels; return 1 when one has grown since the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--capability", default=",".join(map(str, CAPABILITIES)))
    parser.add_argument("--only", default="*", help="kernels, with wildcards, separated by commas")
    given = parser.parse_args()
    chosen = [case for case in CASES if any(fnmatch.fnmatch(case, p) for p in given.only.split(","))]
    counts = [count(case, int(sm)) for case in chosen for sm in given.capability.split(",")]
    path = result_path()
    old = {(c.kernel, c.capability): c for c in (read(path) if path.exists() else [])}
    now = {(c.kernel, c.capability): c for c in counts}
    grown = [said for key, c in now.items() if key in old for said in worse(old[key], c)]
    kept = old | now
    page = write([kept[key] for case in CASES for sm in CAPABILITIES if (key := (case, sm)) in kept])
    print(page.read_text(), *grown, sep="\n")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
