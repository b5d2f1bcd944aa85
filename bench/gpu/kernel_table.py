"""Machine code of the Triton kernels, counted without a GPU: instructions, registers, shared memory, spills.

    python -m bench.gpu.kernel_table [--capability 80,90,120] [--only 'lut4*']

Each kernel is compiled at the shapes of Llama 3.1 8B by the installed triton, and read with the tools in its wheel.
`loop` counts the instructions of the longest innermost loop, `each` those for one weight of a product. Writes
bench/results/gpu-kernels-TRITON.json and .md after each kernel; a test compares a new compilation with them.
"""

from __future__ import annotations

import datetime
import fnmatch
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import triton

from bench.gpu.kernel_cases import CASES, WEIGHTS, K, N, launch_of
from bench.shared.command_line import parser_of
from bench.shared.repository import RESULTS
from tests.support.triton_compile import compiled

CAPABILITIES = (80, 90, 120)
GROWTH = 0.10  # of instructions or registers, beyond which a kernel has become worse


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
    parser = parser_of(__doc__)
    parser.add_argument("--capability", default=",".join(map(str, CAPABILITIES)))
    parser.add_argument("--only", default="*", help="kernels, with wildcards, separated by commas")
    given = parser.parse_args()
    chosen = [case for case in CASES if any(fnmatch.fnmatch(case, p) for p in given.only.split(","))]
    path = result_path()
    kept = {(c.kernel, c.capability): c for c in (read(path) if path.exists() else [])}
    grown: list[str] = []
    for case in chosen:
        for sm in map(int, given.capability.split(",")):
            now = count(case, sm)
            if (case, sm) in kept:
                grown += worse(kept[case, sm], now)
            kept[case, sm] = now
        page = write([kept[key] for case in CASES for sm in CAPABILITIES if (key := (case, sm)) in kept])
        print(case, flush=True)
    print(page.read_text() if chosen else "no kernel of this name", *grown, sep="\n")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
