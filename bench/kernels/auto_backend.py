"""Speed of `infer optimize --backend auto` on untuned models against torch eager and torch.compile.

    python -m bench.kernels.auto_backend [--only unet,int8;lstm,*] [--rounds 15] [--artifacts FOLDER]
    python -m bench.kernels.auto_backend --only 'digits,*;minilm,*;bert-base,*;resnet50,*;unet,*;pydoc_lm,*'

Each model of auto_backend_models.py is optimized by the command line, unquantized and as int8. What is published is
called through `Predictor.predict`, its rivals (the float module in plain torch, and compiled for each batch size alone,
both in inference mode) as they are, all with torch's threads, in turns whose order rotates, each after a pause. The
ratio is that of one turn against the rival whose median is least; its interval and verdict are those of
`infer.latency`. Of the models of SOURCES only the choice is recorded. Each cell keeps what every backend that was tried
took, the sum over the batch sizes, or why it refused. Cells are merged one by one into
bench/results/auto-DATE-CPU.json and .md. The exit code is 1
when something published is slower than a rival, or `infer optimize` ends in another way than published or refused.
"""

from __future__ import annotations

import fnmatch
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from bench.kernels.auto_backend_models import MODELS, SOURCES, Model
from bench.shared.command_line import parser_of
from bench.shared.repository import child_environment
from bench.shared.results import TodaysRows
from bench.shared.rivals import Rivals
from bench.shared.timing import Side
from infer import Predictor, latency

QUANTS, BATCHES = ("none", "int8"), (1, 8)
FACTORIES = Path(__file__).with_name("auto_backend_models.py")
INFER, EAGER, COMPILED = "infer", "torch eager", "torch.compile"


class Row(msgspec.Struct):
    """One batch size: median seconds of each side, and infer over the fastest rival with its 95 % interval."""

    batch: int
    seconds: dict[str, float]
    rival: str
    ratio: float
    low: float
    high: float
    verdict: str


class TableCell(msgspec.Struct):
    model: str
    quant: str
    exit_code: int
    said: str  # the verdict of the command, or its refusal
    wall: float  # seconds of `infer optimize`
    backend: str = ""
    error: float | None = None  # relative, against the float module
    rows: list[Row] = []
    tried: list[dict[str, Any]] = []  # name, outcome, seconds and why of each backend
    crashed: dict[str, str] = {}  # a rival and batch size → how its process ended

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.quant

    @property
    def misses(self) -> bool:
        return (
            self.exit_code not in (0, 4)
            or bool(self.crashed)
            or any(row.verdict == "slower" for row in self.rows)
        )


def optimize(name: str, quant: str, folder: Path) -> tuple[Path, TableCell]:
    """Run the command on a source, or on the state dict and the rows of a model."""
    given = SOURCES[name](folder) if name in SOURCES else _state_dict(name, MODELS[name], folder)
    output = folder / f"{name}-{quant.replace(':', '-')}.infer"
    command = [sys.executable, "-m", "infer", "optimize", *given, "--output", str(output), "--force"]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--backend", "auto", "--quant", quant],
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(),
    )
    wall = time.perf_counter() - began
    output.with_suffix(".log").write_text(done.stdout + done.stderr)
    if done.returncode:
        said = " ".join(done.stderr.rpartition("infer: ")[2].split())
        return output, TableCell(name, quant, done.returncode, said, wall)
    report = _report(output)
    said = "; ".join(report["verdict"])
    return output, TableCell(name, quant, 0, said, wall, backend=report["backend"], tried=report["tried"])


def _state_dict(name: str, model: Model, folder: Path) -> list[str]:
    source, data = folder / f"{name}.pt", folder / f"{name}.npz"
    torch.save(model.build().state_dict(), source)
    np.savez(data, **{model.input_name: model.rows().numpy()})
    return [str(source), "--model", f"{FACTORIES}:{name}", "--input", model.input, "--data", str(data)]


def _report(artifact: Path) -> dict[str, Any]:
    return json.loads((artifact / "report.json").read_text())  # type: ignore[no-any-return]


def measure(cell: TableCell, artifact: Path, rounds: int) -> None:
    """Fill the rows of a published cell; each rival is in a process of its own, and one that crashes is named."""
    model = MODELS[cell.model]
    with Predictor.load(artifact) as predictor, torch.inference_mode():
        for batch in BATCHES:
            ours = _infer(predictor, model.input_name, model.rows()[:batch])
            with Rivals() as rivals:
                for rival in (EAGER, COMPILED):
                    rivals.start(rival, rival_sides, cell.model, rival, batch)
                if (exact := rivals.outputs().get(EAGER)) is not None:
                    found = float((ours.output() - exact).norm() / exact.norm())
                    cell.error = max(cell.error or 0.0, found)
                times = rivals.turns([ours], rounds)
            cell.crashed |= {f"{rival}, batch {batch}": how for rival, how in rivals.crashed.items()}
            if len(times) > 1:
                cell.rows.append(compare(batch, times))


def _infer(predictor: Predictor, name: str, rows: Tensor) -> Side:
    def run() -> Tensor:
        return next(iter(predictor.predict({name: rows}).values()))

    return Side(INFER, run, run)


def rival_sides(name: str, rival: str, batch: int) -> list[Side]:
    """Return a rival's side in this process: the float module of MODELS, compiled for this batch size or not."""
    module, rows = MODELS[name].build(), MODELS[name].rows()[:batch]
    call = torch.compile(module, dynamic=False) if rival == COMPILED else module

    def run() -> Tensor:
        with torch.inference_mode():
            return call(rows)

    run()
    return [Side(rival, run, run)]


def compare(batch: int, times: dict[str, list[float]]) -> Row:
    medians = {name: statistics.median(values) for name, values in times.items()}
    rival = min(medians.keys() - {INFER}, key=medians.__getitem__)
    ratios = [ours / theirs for ours, theirs in zip(times[INFER], times[rival], strict=True)]
    ratio, low, high, verdict = latency.decide(ratios)
    return Row(batch, medians, rival, ratio, low, high, verdict)


def markdown(cells: Sequence[TableCell]) -> str:
    lines = [
        "| model | quant | backend | batch | infer, torch eager, torch.compile, ms | ÷ fastest rival | verdict |"
    ]
    lines.append("|" + "---|" * 7)
    for cell in cells:
        if cell.exit_code:
            lines.append(f"| {cell.model} | {cell.quant} | exit {cell.exit_code} |  | {cell.said} |  |  |")
        for rival, how in cell.crashed.items():
            lines.append(f"| {cell.model} | {cell.quant} | {cell.backend} | | {rival} {how} |  |  |")
        for row in cell.rows:
            each = ", ".join(f"{1e3 * seconds:.2f}" for seconds in row.seconds.values())
            ratio = f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})"
            head = f"| {cell.model} | {cell.quant} | {cell.backend} | {row.batch}"
            lines.append(f"{head} | {each} | {ratio} | {row.verdict} |")
    if any(cell.tried for cell in cells):
        lines += ["", "| model | quant | chosen | what each backend took |", "|" + "---|" * 4]
        lines += [
            f"| {c.model} | {c.quant} | {c.backend} | {'; '.join(map(_attempt, c.tried))} |"
            for c in cells
            if c.tried
        ]
    missed = ", ".join(f"{c.model} {c.quant}" for c in cells if c.misses) or "nothing"
    return "\n".join([*lines, "", f"Slower than a rival, or broken: {missed}."]) + "\n"


def _attempt(tried: dict[str, Any]) -> str:
    """Format one backend: `ort 12.30 ms, 1.31x faster …`, `trt refused: no CUDA device`."""
    if tried["seconds"] is None:
        return f"{tried['name']} {tried['outcome']}: {tried['why']}"
    return f"{tried['name']} {1e3 * tried['seconds']:.2f} ms, {tried['why']}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="*,*", help="MODEL,QUANT with wildcards, several joined by ;")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--artifacts", type=Path, help="keep artifacts and logs here")
    arguments = parser.parse_args()
    patterns = [part.split(",") for part in arguments.only.split(";")]
    every = [(model, quant) for model in (*MODELS, *SOURCES) for quant in QUANTS]
    wanted = [key for key in every if any(all(map(fnmatch.fnmatch, key, p)) for p in patterns)]
    if not wanted:
        parser.error(f"nothing fits {arguments.only!r}; models are {', '.join((*MODELS, *SOURCES))}")
    cells = TodaysRows(
        "auto", TableCell, markdown, order=lambda cell: every.index(cell.key), field="cells",
        threads=torch.get_num_threads(),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.artifacts or Path(temporary)
        for name, quant in wanted:
            artifact, cell = optimize(name, quant, folder)
            if cell.exit_code == 0 and name in MODELS:
                measure(cell, artifact, arguments.rounds)
            print(markdown([cell]).splitlines()[2:], cell.said, f"{cell.wall:.0f} s", flush=True)
            cells.keep([cell])
    print(cells.path.with_suffix(".md").read_text())
    return 1 if any(cell.misses for cell in cells.read()) else 0


if __name__ == "__main__":
    sys.exit(main())
