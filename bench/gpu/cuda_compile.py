"""AOTInductor packages for an NVIDIA GPU, made and looked into on a machine without one.

    make cuda-compile
    .cuda/bin/python -m bench.gpu.cuda_compile --only step --quant none,nf4

Lowers the demo's classifier, MiniLM and the step of a language model through `backends.inductor` for the GPU that
`described_device` describes, and reads the packages: their device, machine code for its architecture, kernels, what is
left of the CPU. Results: bench/results/cuda-compile-DATE-CPU.json and .md, written after each row, with the others of
the day; ends with 1 when a
package can't be made or has a finding, with 2 where this torch has no CUDA.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from backends import inductor
from bench.gpu import described_device, tensorrt_models
from bench.shared.command_line import parser_of
from bench.shared.repository import ROOT
from bench.shared.results import TodaysRows
from infer.graph.program import Graph
from infer.plan import Plan
from infer.reporter import Reporter
from infer.run import stages

MODELS = {name: tensorrt_models.MODELS[name] for name in ("digits", "minilm")}
MODELS["step"] = tensorrt_models.language_window  # whose step is what inductor runs
QUANTS = {"digits": ("none", "int8"), "minilm": ("none", "int8"), "step": ("none", "int8:weight", "nf4")}
# Signs of work on the CPU in the C++ of a program that is meant for a GPU.
CPU_WORK = {
    "a kernel of the CPU": r"\bcpp_fused_\w+\(",
    "an operator of the CPU": r"\baoti_torch_cpu_\w+\(",
    "a tensor on the CPU": r"aoti_torch_empty_strided\([^;]*cached_torch_device_type_cpu",
    "a constant on the CPU": r"constants_info_\[\d+\]\.device_type = cached_torch_device_type_cpu",
}


class Row(msgspec.Struct, kw_only=True):
    """One model in one format; `cubins` counts kernels by architecture, `operators` the calls that stayed whole."""

    model: str
    quant: str
    dtype: str = "bfloat16"
    outcome: str = "failed"  # "built" | "failed"
    findings: list[str] = []
    device: str | None = None
    cubins: dict[str, int] = {}
    kernels: list[str] = []
    operators: list[str] = []
    library_bytes: int | None = None
    seconds: float | None = None


def captured(model: str, quant: str, folder: Path) -> tuple[Graph, Plan]:
    """Load, compress and capture a model on the CPU; return its graph and the plan for a GPU."""
    torch.manual_seed(0)
    plan = MODELS[model](folder / "source").with_(device="cpu", dtype="float32", backend="eager")
    loaded, run = stages.load(stages.resolve(plan))
    loaded = replace(loaded, calibration=loaded.calibration or loaded.samples)  # nothing is judged here
    plan = run.plan.with_(backend="inductor")
    original = stages.capture_original(plan, loaded, Reporter())
    asked = plan.with_(quant=quant, dtype="bfloat16", allow_partial=True)
    return stages.compress_model(asked, original).graph, asked.with_(device="cuda")


def compile_package(graph: Graph, plan: Plan, folder: Path) -> Path:
    """Lower a graph through the backend for the described GPU; return the package."""
    faked = described_device.with_fake_weights(graph)
    with described_device.described():
        inductor.lower(faked, plan, folder)
    return folder / inductor.PACKAGE


def examine(package: Path, row: Row) -> None:
    """Fill a row from a package: what it is for, what it calls, what should not be there."""
    with zipfile.ZipFile(package) as files:
        names = files.namelist()
        found = [
            json.loads(files.read(n)).get("AOTI_DEVICE_KEY") for n in names if n.endswith("metadata.json")
        ]
        row.device = next((device for device in found if device), None)
        sources = [files.read(n).decode() for n in names if n.endswith(".wrapper.cpp")]
        called = "".join(files.read(n).decode() for n in names if n.endswith(".json"))
        cubins = [files.read(n) for n in names if n.endswith(".cubin")]
        row.library_bytes = sum(files.getinfo(n).file_size for n in names if n.endswith(".so"))
    text = "\n".join(sources)
    row.kernels = sorted(set(re.findall(r"\bcall_(\w+?)_?\d*\(", text)))
    row.operators = sorted(set(re.findall(r"\binfer::\w+|aoti_torch_cuda_\w+", text + called)))
    for cubin in cubins:
        arch = f"sm_{_architecture(cubin)}"
        row.cubins[arch] = row.cubins.get(arch, 0) + 1
    if row.device != "cuda":
        row.findings.append(f"the package is for {row.device}")
    if not row.library_bytes:
        row.findings.append("the package has no shared library")
    wanted = f"sm_{described_device.CAPABILITY[0]}{described_device.CAPABILITY[1]}"
    if set(row.cubins) != {wanted}:
        row.findings.append(f"machine code for {sorted(row.cubins) or 'nothing'}, not {wanted}")
    for what, pattern in CPU_WORK.items():
        if found_at := re.search(pattern, text):
            row.findings.append(f"{what}: {found_at.group(0)[:80]}")
    row.outcome = "failed" if row.findings else "built"


def _architecture(cubin: bytes) -> int:
    """Return 90 for 9.0 from the flags of an ELF header: the second byte of today's form, the first of the older."""
    first, second = cubin[48:50]
    return second if first < 50 else first


def fill(row: Row) -> None:
    """Compile one row and look into its package; a refusal or an error becomes its finding."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        try:
            graph, plan = captured(row.model, row.quant, Path(work))
            examine(compile_package(graph, plan, Path(work)), row)
        except Exception as error:  # noqa: BLE001 - the next row must be compiled
            first = (str(error).strip().splitlines() or [""])[0][:300]
            row.findings.append(f"{type(error).__name__}: {first}")
    row.seconds = round(time.perf_counter() - began, 1)


def page(rows: list[Row]) -> str:
    """Return the table of the packages."""
    lines = [
        f"AOTInductor packages for {described_device.PROPERTIES.name}, made on a machine without a GPU: compiled, "
        "linked and read, never run.\n\n"
        "| model | quant | dtype | outcome | device | machine code | kernels | library KB | seconds | findings |\n"
        "|---|---|---|---|---|---|--:|--:|--:|---|\n"
    ]
    for row in rows:
        code = ", ".join(f"{count} {arch}" for arch, count in row.cubins.items())
        size = "" if row.library_bytes is None else f"{row.library_bytes / 1e3:.0f}"
        said = "; ".join(row.findings).replace("|", "/")
        lines.append(
            f"| {row.model} | {row.quant} | {row.dtype} | {row.outcome} | {row.device or ''} | {code} "
            f"| {len(row.kernels)} | {size} | {row.seconds} | {said} |\n"
        )
    return "".join(lines)


def main() -> int:
    """Compile the wanted rows; return 1 when one has a finding, 2 where nothing can be compiled."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default=",".join(MODELS), help="models, joined by commas")
    parser.add_argument("--quant", help="formats, joined by commas; default: those of the table")
    given = parser.parse_args()
    if reason := described_device.missing():
        print(f"Nothing can be compiled for a described GPU: {reason}.", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(ROOT / "models"))
    wanted = [
        (model, quant)
        for model in given.only.split(",")
        for quant in (given.quant.split(",") if given.quant else QUANTS[model])
    ]
    table = TodaysRows("cuda-compile", Row, page, key=lambda row: (row.model, row.quant))
    for model, quant in wanted:
        row = Row(model=model, quant=quant)
        fill(row)
        print(msgspec.json.encode(row).decode(), flush=True)
        rows = table.keep([row])
    print(page(rows))
    return 1 if any(row.findings for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
