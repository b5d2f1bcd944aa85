"""Backend × format table: error, speed against float and size of digits, MiniLM and pydoc_lm.

    python -m bench.quality.backend_table [--only 'minilm,*,int8*;digits,ort,*'] [--resume | --render]

Every cell is made by the stages of `infer optimize --allow-slower` and is judged by the same gate. The float form of
each backend is lowered once and timed, interleaved, against each quantized form. All samples judge; other real text,
or what the model brings, calibrates. Cells are merged one by one into
bench/results/table-DATE-CPU.json and .md: `--only MODEL,BACKEND,QUANT` measures some again, `--resume` those that
are not there yet, `--render` none. docs/results.md is written again from the files. Exits 1 when a
cell neither passes nor refuses with a reason.
"""

from __future__ import annotations

import fnmatch
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from bench.shared import example_models, results_page
from bench.shared.command_line import parser_of
from bench.shared.repository import ROOT
from bench.shared.results import TodaysRows
from infer import load, plugins
from infer.errors import InferError
from infer.graph import storage
from infer.graph.program import Graph
from infer.load.samples import sample_split
from infer.plan import Plan
from infer.reporter import Reporter
from infer.results import Metric
from infer.run import stages
from infer.run.float_reference import FloatReferences
from infer.run.trial import Trial
from infer.run.try_backends import Compressed, try_backends

QUANTS = (
    "none",
    "int8",
    "int8:weight",
    "int8:static",
    "int4",
    "fp4",
    "nf4",
    "cluster:4",
    "cluster:3",
    "cluster:2",
    "cluster:6",
)
CALIBRATION = {name: f"{ROOT / 'models' / name}.py:calibration" for name in ("minilm", "pydoc_lm")}


Key = tuple[str, str, str]  # model, backend, quant


class TableCell(msgspec.Struct, kw_only=True):
    """One backend × quant of one model. `ratio` is time over the float form's time: below 1 is faster."""

    model: str
    backend: str
    quant: str
    outcome: str  # "passes" | "refused" | "broken"
    why: str = ""
    metric: str = ""
    value: float | None = None
    error: float | None = None
    ratio: dict[str, float] = {}
    verdict: str = ""
    bytes: int | None = None

    @property
    def key(self) -> Key:
        return self.model, self.backend, self.quant


def plans() -> dict[str, tuple[Plan, str]]:
    """Return for each model its plan and the metric that says best what was lost."""
    return {
        "digits": (example_models.plan("digits", batches=(8,)), "logits.top1"),
        "minilm": (example_models.plan("minilm", batches=(8,)), "embedding.cosine"),
        "pydoc_lm": (
            example_models.plan("pydoc_lm", batches=(4,), max_batch=16),
            "logits.perplexity_change",
        ),
    }


def measure(model: str, plan: Plan, metric: str, wanted: list[Key]) -> Iterator[TableCell]:
    """Yield the wanted cells of one model, format by format: a quantized model is made once for all backends."""
    with tempfile.TemporaryDirectory() as work:
        loaded, run = stages.load(stages.resolve(plan.with_(allow_slower=True)))
        if model in CALIBRATION:
            rows, _, _ = load.read_data(CALIBRATION[model], loaded)
            loaded = replace(loaded, calibration=sample_split.exclude_rows(rows, loaded.samples))
        original = stages.capture_original(run.plan, loaded, Reporter())
        floats = FloatReferences(original.graph, Path(work) / "float", original.lowered_as)
        for quant in dict.fromkeys(quant for _, _, quant in wanted):
            folder = Path(work) / quant.replace(":", "-")
            folder.mkdir()
            small, problem = None, ""
            try:
                small = stages.compress_model(run.plan.with_(quant=quant, backend="auto"), original)
                storage.save(small.graph, folder)
            except InferError as error:
                problem = str(error)
            for backend in [b for _, b, q in wanted if q == quant]:
                print(f"{model}  {backend}  {quant}", file=sys.stderr, flush=True)
                cell = TableCell(model=model, backend=backend, quant=quant, outcome="refused", metric=metric)
                why = plugins.why_not("backends", backend) or problem
                asked = run.plan.with_(quant=quant, backend=backend)
                yield (
                    msgspec.structs.replace(cell, why=why)
                    if why or small is None
                    else _tried(cell, asked, original.graph, small, folder, floats)
                )
            shutil.rmtree(folder)


def _tried(
    cell: TableCell, plan: Plan, original: Graph, small: Compressed, folder: Path, floats: FloatReferences
) -> TableCell:
    try:
        (trial,) = try_backends(plan, original, small, folder, floats).trials
    except InferError as error:
        return msgspec.structs.replace(cell, why=str(error))
    except Exception as error:  # noqa: BLE001  a broken cell is the finding, the others go on
        traceback.print_exc()
        return msgspec.structs.replace(cell, outcome="broken", why=f"{type(error).__name__}: {error}")
    return _judged(cell, trial, plan)


def _judged(cell: TableCell, trial: Trial, plan: Plan) -> TableCell:
    reason = trial.unfaithful(plan)
    trial.close()
    return msgspec.structs.replace(
        cell,
        outcome="refused" if reason else "passes",
        why=reason or "",
        value=_value(trial.fidelity, cell.metric),
        error=_value(trial.fidelity, f"{cell.metric.partition('.')[0]}.relative_error"),
        ratio={str(t.batch): t.pair.ratio for t in trial.latency},
        verdict=trial.verdict,
        bytes=trial.size,
    )


def _value(metrics: list[Metric], label: str) -> float | None:
    return next((float(m.number) for m in metrics if m.label == label and m.number is not None), None)


def markdown(cells: list[TableCell]) -> str:
    """Return a row per cell; a backend that this machine cannot run at all takes one row a model."""
    head = "| model | quant | backend | result | quality | relative error | time ÷ float (batch) | MB |"
    lines = ["Formats are calibrated on rows that judge nothing.", "", head, "|" + "---|" * 8]
    seen: set[tuple[str, str]] = set()
    for cell in cells:
        unusable = cell.why and cell.why == plugins.why_not("backends", cell.backend)
        if unusable and (cell.model, cell.backend) in seen:
            continue
        seen.add((cell.model, cell.backend))
        lines.append(_line(cell, "every" if unusable else cell.quant))
    return "\n".join(lines) + "\n"


def _line(cell: TableCell, quant: str) -> str:
    ratio = ", ".join(f"{r:.2f} ({b})" for b, r in cell.ratio.items())
    quality = (
        "" if cell.value is None else f"{cell.metric.partition('.')[2].replace('_', ' ')} {cell.value:.4f}"
    )
    error = "" if cell.error is None else f"{cell.error:.4f}"
    size = "" if cell.bytes is None else f"{cell.bytes / 1e6:.1f}"
    result = cell.outcome if cell.outcome == "passes" else f"{cell.outcome}: {cell.why.split('. ')[0]}"
    return f"| {cell.model} | {quant} | {cell.backend} | {result} | {quality} | {error} | {ratio} | {size} |"


def matches(key: Key, only: str) -> bool:
    """Return True if one of the patterns `MODEL,BACKEND,QUANT;…` fits; what is left out fits everything."""
    patterns = [[*part.split(","), "*", "*"][:3] for part in only.split(";")]
    return any(all(map(fnmatch.fnmatch, key, pattern)) for pattern in patterns)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="*", help="MODEL,BACKEND,QUANT with wildcards, several joined by ;")
    parser.add_argument("--resume", action="store_true", help="only cells that today's file lacks")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the tables again")
    arguments = parser.parse_args()
    known = plans()
    every = [(m, b, q) for m in known for q in QUANTS for b in plugins.names("backends")]
    cells = TodaysRows(
        "table", TableCell, markdown, order=lambda cell: every.index(cell.key), field="cells",
        threads=torch.get_num_threads(),
    )  # fmt: skip
    done = cells.keep([])
    wanted = [key for key in every if matches(key, arguments.only) and not arguments.render]
    wanted = [key for key in wanted if not (arguments.resume and key in {cell.key for cell in done})]
    if not wanted and not arguments.render:
        parser.error(f"no cell is left to measure of {arguments.only!r}; models are {', '.join(known)}")
    for model, (plan, metric) in known.items():
        own = [key for key in wanted if key[0] == model]
        for cell in measure(model, plan, metric, own) if own else ():
            done = cells.keep([cell])
    results_page.write()
    print(markdown(done))
    print(f"written: {cells.path.relative_to(ROOT)}, {len(done)} of {len(every)} cells")
    broken = [c for c in done if c.outcome == "broken" or (c.outcome == "refused" and not c.why)]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
