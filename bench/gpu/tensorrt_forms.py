"""Every model x format x dtype given to the real builder of TensorRT-RTX, which needs no GPU.

    make trt
    python -m bench.gpu.tensorrt_forms --only bert --quant int4,fp8 --dtype bfloat16

A cell is *built*, or *refused* by a sentence of `infer` itself (a format that the backend does not take); whatever the
parser or the builder refuses is *failed*, and the run ends with 1; a builder that ends its process fails one cell.
Bytes are those of the engine: a format that stays packed is smaller than the float one. Results:
bench/results/tensorrt-DATE-CPU.json and .md, written after each row.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from backends import trt
from backends.trt import builder, libraries, lowering
from bench.gpu.tensorrt_models import MODELS
from bench.shared.child_process import ChildProcess, EngineCrashed
from bench.shared.command_line import parser_of
from bench.shared.repository import ROOT
from bench.shared.results import TodaysRows
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


class Builder:
    """One model, loaded and captured once, for a process of its own: the library may end it."""

    def __init__(self, model: str) -> None:
        warnings.filterwarnings("ignore")
        sys.path.insert(0, str(ROOT / "models"))
        torch.manual_seed(0)
        self._work = tempfile.TemporaryDirectory()
        self._folder = Path(self._work.name)
        plan = MODELS[model](self._folder / "source").with_(device="cpu", dtype="float32", backend="eager")
        loaded, run = stages.load(stages.resolve(plan))
        loaded = replace(loaded, calibration=loaded.calibration or loaded.samples)  # nothing is judged here
        self._plan = run.plan.with_(backend="trt")
        self._original = stages.capture_original(self._plan, loaded, Reporter())
        self._made: dict[tuple[str, str, str], Cell] = {}

    def fill(self, cell: Cell) -> Cell:
        """Build a cell, or say why not."""
        asked = self._plan.with_(quant=RESOLVED.get(cell.quant, cell.quant), dtype=cell.dtype)
        if same := self._made.get((asked.quant, cell.dtype, cell.sm)):
            return msgspec.structs.replace(same, quant=cell.quant)
        start = time.perf_counter()
        try:
            if reason := libraries.lacking(cell.sm.split(), cell.quant, cell.dtype):
                raise NotUsableError(reason)
            small = stages.compress_model(asked, self._original)
            graph = small.graph if small.windows is None else small.windows()
            if reason := trt.refuses(graph, asked.with_(device="cuda")):
                raise NotUsableError(reason)
            cell.compress_seconds = round(time.perf_counter() - start, 1)
            _build(cell, graph, asked, self._folder / "model.onnx")
        except InferError as error:
            cell.why = str(error)
            if not isinstance(error, builder.BuilderError):
                cell.outcome = "refused"
        self._made[asked.quant, cell.dtype, cell.sm] = cell
        return cell


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


def filled(model: str, cells: list[Cell]) -> Iterator[Cell]:
    """Fill the cells of one model in a process of its own, and in another from the cell after that which ended it."""
    child: ChildProcess | None = None
    for cell in cells:
        child = child or ChildProcess(Builder, model)
        try:
            yield child.call("fill", cell)
        except EngineCrashed as error:
            yield msgspec.structs.replace(cell, why=f"the process that built it {error}")
            child.close()
            child = None
    if child:
        child.close()


def todays_cells() -> TodaysRows[Cell]:
    """Return the cells of today, sorted by model and group of GPUs."""
    library = f"TensorRT-RTX {libraries.library_version(libraries.RTX)}"
    models = list(MODELS)

    def order(cell: Cell) -> tuple[int, int]:
        return models.index(cell.model), GROUPS.index(cell.sm) if cell.sm in GROUPS else 0

    return TodaysRows("tensorrt", Cell, page_text, order=order, field="cells", builder=library)


def page_text(cells: list[Cell]) -> str:
    """Render the table: sizes in KB, weights and scratch memory as the builder states them."""
    whole = sum(len(wanted(model, list(QUANTS), list(DTYPES))) for model in MODELS)
    rows = [
        f"{len(cells)} of {whole} cells (`--resume` fills the "
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
    parser = parser_of(__doc__)
    parser.add_argument("--only", default=",".join(MODELS), help="models, joined by commas")
    parser.add_argument("--quant", default=",".join(QUANTS))
    parser.add_argument("--dtype", default=",".join(DTYPES), help="of formats other than none, the last")
    parser.add_argument(
        "--resume", action="store_true", help="keep the cells that were built or refused today"
    )
    given = parser.parse_args()
    if reason := libraries.missing(libraries.RTX):
        print(reason, file=sys.stderr)
        return 5
    asked = {
        model: wanted(model, given.quant.split(","), given.dtype.split(","))
        for model in given.only.split(",")
    }
    table = todays_cells()
    done = {cell.key for cell in table.read() if given.resume and cell.outcome != "failed"}
    for model, group in asked.items():
        for cell in filled(model, [cell for cell in group if cell.key not in done]):
            table.keep([cell])
            print(f"{' '.join(cell.key)}  {cell.outcome}  {cell.why}"[:300], flush=True)
    cells = table.read()
    failed = [cell for cell in cells if cell.outcome == "failed"]
    print(f"{len(cells)} cells, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
