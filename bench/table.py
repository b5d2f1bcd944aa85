"""The backend × quant table: error, speed against float, size, on digits, MiniLM and pydoc_lm.

    python bench/table.py [--models digits,minilm,pydoc_lm] [--backends …] [--quants …]

Every cell goes down the street of `infer optimize --allow-slower` and is judged by the same gate. The float form of
each backend is lowered once and timed, interleaved, against each quantized form. Writes bench/results/table-DATE.json,
.md, and the table of README.md; exits 1 when a cell neither passes nor refuses with a reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "models")]

from infer import capture, pipeline, plugins  # noqa: E402
from infer import device as hardware  # noqa: E402
from infer.errors import InferError  # noqa: E402
from infer.pipeline import Street, Watch  # noqa: E402
from infer.spec import Finding, Plan  # noqa: E402
from infer.trial import FloatForms, Trial, run_trial  # noqa: E402

QUANTS = (
    "none",
    "int8",
    "int8:weight",
    "int8:static",
    "nf4",
    "cluster:4",
    "cluster:3",
    "cluster:2",
    "cluster:6",
)
RESULTS = ROOT / "bench" / "results"
MARKS = ("<!-- table:begin -->", "<!-- table:end -->")


class Cell(msgspec.Struct, kw_only=True):
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


def plans() -> dict[str, tuple[Plan, str]]:
    """Model → its plan and the finding that says best what was lost."""
    import minilm

    digits = Plan(
        source=str(ROOT / "models/digits.pt"), model=f"{ROOT / 'models/digits.py'}:build", batches=(8,)
    )
    encoder = Plan(
        source=str(minilm.checkpoint_folder()), data=f"{ROOT / 'models/minilm.py'}:sentences", batches=(8,)
    )
    language = Plan(source=str(ROOT / "models/pydoc_lm"), batches=(4,), max_batch=16)
    return {
        "digits": (digits, "logits.top1"),
        "minilm": (encoder, "embedding.cosine"),
        "pydoc_lm": (language, "logits.perplexity_change"),
    }


def measure(
    model: str, plan: Plan, metric: str, backends: list[str], quants: list[str], say: Callable[[str], None]
) -> list[Cell]:
    cells = []
    with tempfile.TemporaryDirectory() as work:
        street = Street(plan.with_(allow_slower=True), Watch())
        pipeline.resolve(street)
        loaded = pipeline.load(street)
        original = pipeline.float_graph(loaded, street.plan)
        floats = FloatForms(original, Path(work))
        for quant in quants:
            small, problem = _shrunk(street, plan, quant, loaded, original)
            for backend in backends:
                say(f"{model}  {backend}  {quant}")
                chosen = street.plan.with_(backend=backend, quant=quant)
                place = Path(work) / f"{backend}-{quant.replace(':', '-')}"
                cells.append(_cell(model, chosen, metric, original, small, problem, place, floats))
    return cells


def _shrunk(
    street: Street, plan: Plan, quant: str, loaded: Any, original: capture.Graph
) -> tuple[capture.Graph | None, str]:
    street.plan = street.plan.with_(quant=quant)
    try:
        return pipeline.shrink(street, loaded, original)[0], ""
    except InferError as error:
        return None, str(error)


def _cell(
    model: str,
    plan: Plan,
    metric: str,
    original: capture.Graph,
    small: capture.Graph | None,
    problem: str,
    place: Path,
    floats: FloatForms,
) -> Cell:
    cell = Cell(model=model, backend=plan.backend, quant=plan.quant, outcome="refused", metric=metric)
    backend = plugins.get("backends", plan.backend)
    problem = problem or backend.missing() or (backend.refuses(small, plan) if small else "") or ""
    if problem or small is None:
        return msgspec.structs.replace(cell, why=problem)
    try:
        source = place / "graph"
        source.mkdir(parents=True)
        capture.save(small, source)
        trial = run_trial(plan, original, small, source, place, lambda name, detail: None, floats)
    except InferError as error:
        return msgspec.structs.replace(cell, why=str(error))
    except Exception as error:  # noqa: BLE001  a broken cell is the finding, the others go on
        traceback.print_exc()
        return msgspec.structs.replace(cell, outcome="broken", why=f"{type(error).__name__}: {error}")
    return _judged(cell, trial, plan)


def _judged(cell: Cell, trial: Trial, plan: Plan) -> Cell:
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


def _value(findings: list[Finding], what: str) -> float | None:
    return next((float(f.value) for f in findings if f.what == what and f.value is not None), None)


def markdown(cells: list[Cell]) -> str:
    """A row per cell; a backend that this machine can't run at all takes one row a model."""
    head = "| model | quant | backend | result | quality | relative error | time ÷ float (batch) | MB |"
    lines = [head, "|" + "---|" * 8]
    seen: set[tuple[str, str]] = set()
    for cell in cells:
        unusable = cell.why and cell.why == plugins.why_not("backends", cell.backend)
        if unusable and (cell.model, cell.backend) in seen:
            continue
        seen.add((cell.model, cell.backend))
        lines.append(_line(cell, "every" if unusable else cell.quant))
    return "\n".join(lines) + "\n"


def _line(cell: Cell, quant: str) -> str:
    ratio = ", ".join(f"{r:.2f} ({b})" for b, r in cell.ratio.items())
    quality = (
        "" if cell.value is None else f"{cell.metric.partition('.')[2].replace('_', ' ')} {cell.value:.4f}"
    )
    error = "" if cell.error is None else f"{cell.error:.4f}"
    size = "" if cell.bytes is None else f"{cell.bytes / 1e6:.1f}"
    result = cell.outcome if cell.outcome == "passes" else f"{cell.outcome}: {cell.why.split('. ')[0]}"
    return f"| {cell.model} | {quant} | {cell.backend} | {result} | {quality} | {error} | {ratio} | {size} |"


def write(cells: list[Cell], readme: bool) -> Path:
    machine = hardware.fingerprint("cpu")
    head = {
        "date": str(datetime.date.today()),
        "machine": machine,
        "versions": hardware.versions(),
        "threads": torch.get_num_threads(),
    }
    path = RESULTS / f"table-{datetime.date.today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "cells": msgspec.to_builtins(cells)}, indent=1) + "\n")
    text = markdown(cells)
    note = f"{machine['cpu']}, {head['threads']} threads, torch {torch.__version__}, {head['date']}\n\n"
    path.with_suffix(".md").write_text(note + text)
    page = ROOT / "README.md"
    before, found, rest = page.read_text().partition(MARKS[0])
    if readme and found:
        page.write_text(f"{before}{MARKS[0]}\n{note}{text}{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    return path


def main() -> int:
    known = plans()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(known))
    parser.add_argument("--backends", default=",".join(plugins.names("backends")))
    parser.add_argument("--quants", default=",".join(QUANTS))
    arguments = parser.parse_args()
    asked = [arguments.models.split(","), arguments.backends.split(","), arguments.quants.split(",")]
    cells: list[Cell] = []
    for model in asked[0]:
        plan, metric = known[model]
        cells += measure(
            model, plan, metric, asked[1], asked[2], lambda text: print(text, file=sys.stderr, flush=True)
        )
        path = write(cells, readme=asked == [list(known), plugins.names("backends"), list(QUANTS)])
    print(markdown(cells))
    print(f"written: {path.relative_to(ROOT)}")
    broken = [c for c in cells if c.outcome == "broken" or (c.outcome == "refused" and not c.why)]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
