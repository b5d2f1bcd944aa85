"""Every model x format x dtype given to the real builder of TensorRT-RTX, which needs no GPU.

    make trt
    python -m bench.gpu.tensorrt_forms --only bert --quant int4,fp8 --dtype bfloat16

A cell is *built*, or *refused* by a sentence of `infer` itself (a format that the backend does not take); whatever the
parser or the builder refuses is *failed*, and the run ends with 1. Bytes are those of the engine: a format that stays
packed is smaller than the float one. Results: bench/results/tensorrt-DATE-CPU.json and .md, written after each row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from bench.gpu.tensorrt_models import MODELS
from bench.shared.repository import ROOT
from bench.shared.results import machine_header, result_path
from infer.errors import InferError
from infer.graph.program import Graph
from infer.onnx import trt_build, trt_engine, trt_library
from infer.pipeline import stages
from infer.plan import Plan
from infer.reporter import Reporter

QUANTS = ("none", "int8", "int8:static", "int8:weight", "int4", "nf4", "fp8")
RESOLVED = {"int8": "int8:static"}  # as `infer optimize --backend trt` does
ALL = trt_library.RTX_GROUPS[1] + trt_library.RTX_GROUPS[2]
DTYPES = ("float32", "float16", "bfloat16")


class Cell(msgspec.Struct, kw_only=True):
    """One model in one format. `forms` counts the quantized layers by what they became."""

    model: str
    quant: str
    dtype: str
    outcome: str = "failed"  # "built" | "refused" | "failed"
    why: str = ""
    forms: dict[str, int] = {}
    engine_bytes: int | None = None
    onnx_bytes: int | None = None
    build_seconds: float | None = None


class _Results(msgspec.Struct):
    cells: list[Cell]


def wanted(model: str, quants: list[str], dtypes: list[str]) -> list[Cell]:
    """List the cells of one model: every dtype without quantization, every format in the last dtype."""
    return [
        Cell(model=model, quant=quant, dtype=dtype)
        for quant in quants
        for dtype in (dtypes if quant == "none" else dtypes[-1:])
    ]


def fill(model: str, cells: list[Cell], sms: tuple[str, ...]) -> Iterator[Cell]:
    """Build the cells of one model in turn; it is loaded and captured once."""
    with tempfile.TemporaryDirectory() as work:
        torch.manual_seed(0)
        plan = MODELS[model](Path(work) / "source").with_(device="cpu", dtype="float32", backend="eager")
        loaded, run = stages.load(stages.resolve(plan))
        loaded.calibration = loaded.calibration or loaded.samples  # nothing is judged here
        plan = run.plan.with_(backend="trt")
        original = stages.capture_original(plan, loaded, Reporter())
        for cell in cells:
            asked = plan.with_(quant=RESOLVED.get(cell.quant, cell.quant), dtype=cell.dtype)
            try:
                graph = stages.compress_model(asked, original).graph
                _build(cell, graph, asked, Path(work) / "model.onnx", sms)
            except InferError as error:
                cell.why = str(error)
                if not isinstance(error, trt_engine.BuilderError):
                    cell.outcome = "refused"
            yield cell


def _build(cell: Cell, graph: Graph, plan: Plan, path: Path, sms: tuple[str, ...]) -> None:
    if plan.quant == "fp8":  # whose units came with 8.9
        sms = tuple(sm for sm in sms if sm in trt_library.RTX_GROUPS[-1])
    options = trt_engine.BuildOptions(trt_library.RTX, None, sms, plan.dtype == "tf32")
    start = time.perf_counter()
    built = trt_build.build(graph, plan.with_(device="cuda"), path, options)
    cell.build_seconds = round(time.perf_counter() - start, 1)
    cell.forms = dict(built.rewritten.forms)
    cell.engine_bytes = len(built.blob)
    cell.onnx_bytes = sum(f.stat().st_size for f in path.parent.glob(f"{path.name}*"))
    cell.outcome, cell.why = "built", built.unpacked and f"decoded, because packed: {built.unpacked}"


def write(cells: list[Cell], sms: tuple[str, ...]) -> Path:
    """Write both result files of today; return the Markdown one."""
    path = result_path("tensorrt")
    library = f"TensorRT-RTX {trt_library.library_version(trt_library.RTX)}"
    head = machine_header(builder=library, capabilities=list(sms))
    path.write_bytes(msgspec.json.format(msgspec.json.encode({**head, "cells": cells}), indent=1))
    rows = [
        f"# Engines of {library}, {head['date']}\n\nBuilt on a machine without a GPU, for SM "
        f"{', '.join(sms)} (fp8: from 89). TF32 off. Nothing was run: that needs a card.\n\n"
        "| model | quant | dtype | outcome | engine KB | ONNX KB | seconds | layers, or reason |\n"
        "|---|---|---|---|--:|--:|--:|---|\n"
    ]
    for cell in cells:
        forms = "; ".join(f"{count} {form}" for form, count in sorted(cell.forms.items()))
        sizes = " | ".join(
            "" if n is None else f"{n / 1e3:.0f}" for n in (cell.engine_bytes, cell.onnx_bytes)
        )
        took = "" if cell.build_seconds is None else f"{cell.build_seconds:g}"
        said = " ".join(filter(None, (forms, cell.why))).replace("|", "/")
        rows.append(
            f"| {cell.model} | {cell.quant} | {cell.dtype} | {cell.outcome} | {sizes} | {took} | {said} |\n"
        )
    page = path.with_suffix(".md")
    page.write_text("".join(rows))
    return page


def main() -> int:
    """Build the wanted cells; return 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(MODELS), help="models, joined by commas")
    parser.add_argument("--quant", default=",".join(QUANTS))
    parser.add_argument("--dtype", default=",".join(DTYPES), help="of formats other than none, the last")
    parser.add_argument("--sm", default=",".join(ALL), help="compute capabilities: 80,86,…")
    parser.add_argument("--resume", action="store_true", help="keep the cells that were built today")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(ROOT / "models"))
    if reason := trt_library.missing(trt_library.RTX):
        print(reason, file=sys.stderr)
        return 5
    sms, path = tuple(given.sm.split(",")), result_path("tensorrt")
    cells: list[Cell] = []
    if given.resume and path.exists():
        kept = msgspec.json.decode(path.read_bytes(), type=_Results).cells
        cells = [cell for cell in kept if cell.outcome == "built"]
    done = {(cell.model, cell.quant, cell.dtype) for cell in cells}
    for model in given.only.split(","):
        open_cells = wanted(model, given.quant.split(","), given.dtype.split(","))
        open_cells = [cell for cell in open_cells if (cell.model, cell.quant, cell.dtype) not in done]
        for cell in fill(model, open_cells, sms) if open_cells else ():
            cells.append(cell)
            write(cells, sms)
            print(f"{cell.model}  {cell.quant}  {cell.dtype}  {cell.outcome}  {cell.why}"[:300], flush=True)
    failed = [cell for cell in cells if cell.outcome == "failed"]
    print(f"{len(cells)} cells, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
