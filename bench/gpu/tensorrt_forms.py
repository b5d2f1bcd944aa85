"""Every model x format x dtype given to the real builder of TensorRT-RTX, which needs no GPU.

    make trt
    python -m bench.gpu.tensorrt_forms --only bert --quant int4,fp8 --dtype bfloat16

A cell is *built*, or *refused* by a sentence of `infer` itself (a format that the backend does not take); whatever the
parser or the builder refuses is *failed*, and the run ends with 1; a builder that ends its process fails one cell.
Bytes are those of the engine: a format that stays packed is smaller than the float one. Results:
bench/results/tensorrt-DATE-CPU.json and .md, written after each row.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import msgspec
import torch

from backends import trt
from backends.trt import builder, libraries, lowering
from bench.gpu.tensorrt_models import MODELS
from bench.shared.repository import ROOT
from bench.shared.results import machine_header, result_path
from infer.errors import InferError, NotUsableError
from infer.graph.program import Graph
from infer.plan import Plan
from infer.reporter import Reporter
from infer.run import stages

QUANTS = ("none", "int8", "int8:static", "int8:weight", "int4", "nf4", "fp8")
RESOLVED = {"int8": "int8:static"}  # as `infer optimize --backend trt` does
SM = "89"  # the first with float8; sizes are alike on all
GROUPS = tuple(" ".join(group) for group in libraries.RTX_GROUPS)
DTYPES = ("float32", "float16", "bfloat16")


class Cell(msgspec.Struct, kw_only=True):
    """One model in one format. `forms` counts the quantized layers by what they became."""

    model: str
    quant: str
    dtype: str
    outcome: str = "failed"  # "built" | "refused" | "failed"
    why: str = ""
    forms: dict[str, int] = {}
    sm: str = SM
    engine_bytes: int | None = None
    weight_bytes: int | None = None  # of the engine, as the builder says
    scratch_bytes: int | None = None
    onnx_bytes: int | None = None
    compress_seconds: float | None = None
    build_seconds: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.model, self.quant, self.dtype, self.sm


class Results(msgspec.Struct):
    cells: list[Cell]


def wanted(model: str, quants: list[str], dtypes: list[str]) -> list[Cell]:
    """List the cells of one model: every format in the last dtype; digits in every dtype without quantization.

    The digits model is built for every group of GPUs, and for the oldest in float16, which has no bfloat16.
    """
    return [
        Cell(model=model, quant=quant, dtype=dtype, sm=sm)
        for sm in (GROUPS if model == "digits" else (SM,))
        for quant in quants
        for dtype in (
            dtypes if quant == "none" and model == "digits" else dtypes[-2:-1] if sm == "75" else dtypes[-1:]
        )
    ]


def fill(model: str, cells: list[Cell]) -> Iterator[Cell]:
    """Build the cells of one model in turn; it is loaded and captured once."""
    with tempfile.TemporaryDirectory() as work:
        torch.manual_seed(0)
        plan = MODELS[model](Path(work) / "source").with_(device="cpu", dtype="float32", backend="eager")
        loaded, run = stages.load(stages.resolve(plan))
        loaded = replace(loaded, calibration=loaded.calibration or loaded.samples)  # nothing is judged here
        plan = run.plan.with_(backend="trt")
        original = stages.capture_original(plan, loaded, Reporter())
        made: dict[tuple[str, str, str], Cell] = {}
        for cell in cells:
            asked = plan.with_(quant=RESOLVED.get(cell.quant, cell.quant), dtype=cell.dtype)
            if same := made.get((asked.quant, cell.dtype, cell.sm)):
                yield msgspec.structs.replace(same, quant=cell.quant)
                continue
            start = time.perf_counter()
            try:
                if reason := libraries.lacking(cell.sm.split(), cell.quant, cell.dtype):
                    raise NotUsableError(reason)
                small = stages.compress_model(asked, original)
                graph = small.graph if small.windows is None else small.windows()
                if reason := trt.refuses(graph, asked.with_(device="cuda")):
                    raise NotUsableError(reason)
                cell.compress_seconds = round(time.perf_counter() - start, 1)
                _build(cell, graph, asked, Path(work) / "model.onnx")
            except InferError as error:
                cell.why = str(error)
                if not isinstance(error, builder.BuilderError):
                    cell.outcome = "refused"
            made[asked.quant, cell.dtype, cell.sm] = cell
            yield cell


def _build(cell: Cell, graph: Graph, plan: Plan, path: Path) -> None:
    options = builder.BuildOptions(libraries.RTX, None, tuple(cell.sm.split()), plan.dtype == "tf32")
    start = time.perf_counter()
    built = lowering.build(graph, plan.with_(device="cuda"), path, options)
    cell.build_seconds = round(time.perf_counter() - start, 1)
    cell.forms = dict(built.rewritten.forms)
    cell.engine_bytes, cell.weight_bytes = len(built.engine.blob), built.engine.weight_bytes
    cell.scratch_bytes = built.engine.scratch_bytes
    cell.onnx_bytes = sum(f.stat().st_size for f in path.parent.glob(f"{path.name}*"))
    cell.outcome, cell.why = "built", built.unpacked and f"decoded, because packed: {built.unpacked}"


@contextlib.contextmanager
def stdout_for_results() -> Iterator[TextIO]:
    """Yield the standard output; what Python or a native library prints meanwhile goes to the standard error.

    TensorRT's builder writes warnings to file descriptor 1, past `sys.stdout`.
    """
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as results, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        try:
            yield results
        finally:
            os.dup2(results.fileno(), 1)


def in_child(model: str, cells: list[Cell]) -> Iterator[Cell]:
    """Fill the cells in a child process, and in another one from the cell after that which ended it."""
    rest = list(cells)
    while rest:
        command = [sys.executable, "-m", "bench.gpu.tensorrt_forms", "--child", model]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(msgspec.json.encode(rest).decode())
            child.stdin.close()
            for line in child.stdout:
                rest.pop(0)
                yield msgspec.json.decode(line, type=Cell)
        if rest and child.returncode == 0:
            raise RuntimeError(f"the process that fills {model} left out {len(rest)} cells")
        if rest:
            lost = rest.pop(0)
            lost.why = f"the process that built it ended with {child.returncode}"
            yield lost


def cells_of_today(asked: list[Cell], resume: bool) -> list[Cell]:
    """Return the cells of today that are not asked for; with `resume` also those of them that did not fail."""
    path = result_path("tensorrt")
    found = msgspec.json.decode(path.read_bytes(), type=Results).cells if path.exists() else []
    keys = {cell.key for cell in asked}
    return [cell for cell in found if cell.key not in keys or (resume and cell.outcome != "failed")]


def write(cells: list[Cell]) -> Path:
    """Write both result files of today; return the Markdown one."""
    path = result_path("tensorrt")
    library = f"TensorRT-RTX {libraries.library_version(libraries.RTX)}"
    head = machine_header(builder=library)
    order = {model: index for index, model in enumerate(MODELS)}
    cells = sorted(
        cells, key=lambda cell: (order[cell.model], GROUPS.index(cell.sm) if cell.sm in GROUPS else 0)
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode({**head, "cells": cells}), indent=1))
    page = path.with_suffix(".md")
    page.write_text(page_text(cells, library, str(head["date"])))
    return page


def page_text(cells: list[Cell], library: str, date: str) -> str:
    """Render the table: sizes in KB, weights and scratch memory as the builder states them."""
    whole = sum(len(wanted(model, list(QUANTS), list(DTYPES))) for model in MODELS)
    rows = [
        f"# Engines of {library}, {date}\n\n{len(cells)} of {whole} cells (`--resume` fills the "
        "others). Built on a machine without a GPU, TF32 off. Nothing was run: that needs a "
        "card. The models are those of `bench/gpu/tensorrt_models.py`: digits, MiniLM and the language model are whole "
        "and trained; BERT (2 layers of 256), ResNet (4 bottleneck blocks) and ViT (2 layers of 192) are random and "
        "smaller than the published ones.\n\n"
        "| model | quant | dtype | SM | outcome | engine KB | its weights KB | scratch KB | ONNX KB | seconds | "
        "layers, or reason |\n|---|---|---|---|---|--:|--:|--:|--:|--:|---|\n"
    ]
    for cell in cells:
        forms = "; ".join(f"{count} {form}" for form, count in sorted(cell.forms.items()))
        counts = (cell.engine_bytes, cell.weight_bytes, cell.scratch_bytes, cell.onnx_bytes)
        sizes = " | ".join("" if n is None else f"{n / 1e3:.0f}" for n in counts)
        took = "" if cell.build_seconds is None else f"{cell.build_seconds:g}"
        said = " ".join(filter(None, (forms, cell.why))).replace("|", "/")
        rows.append(
            f"| {cell.model} | {cell.quant} | {cell.dtype} | {cell.sm} | {cell.outcome} | {sizes} | {took} | {said} |\n"
        )
    return "".join(rows)


def main() -> int:
    """Build the wanted cells; return 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(MODELS), help="models, joined by commas")
    parser.add_argument("--quant", default=",".join(QUANTS))
    parser.add_argument("--dtype", default=",".join(DTYPES), help="of formats other than none, the last")
    parser.add_argument(
        "--resume", action="store_true", help="keep the cells that were built or refused today"
    )
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(ROOT / "models"))
    if reason := libraries.missing(libraries.RTX):
        print(reason, file=sys.stderr)
        return 5
    if given.child:
        with stdout_for_results() as results:
            for cell in fill(given.child, msgspec.json.decode(sys.stdin.read(), type=list[Cell])):
                print(msgspec.json.encode(cell).decode(), file=results, flush=True)
        return 0
    asked = {
        model: wanted(model, given.quant.split(","), given.dtype.split(","))
        for model in given.only.split(",")
    }
    cells = cells_of_today([cell for group in asked.values() for cell in group], given.resume)
    done = {cell.key for cell in cells}
    for model, group in asked.items():
        for cell in in_child(model, [cell for cell in group if cell.key not in done]):
            cells.append(cell)
            write(cells)
            print(f"{' '.join(cell.key)}  {cell.outcome}  {cell.why}"[:300], flush=True)
    failed = [cell for cell in cells if cell.outcome == "failed"]
    print(f"{len(cells)} cells, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
