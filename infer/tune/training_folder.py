"""Folder that a training run writes, and the report in it: options, learning curve and findings as JSON and HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import msgspec
from torch import Tensor

from ..errors import BusyError
from ..options import command_line
from ..report.rendering import formatting
from ..report.rendering.page import CSS, words_html
from ..report.rendering.progress import sentence
from ..reporter import Reporter
from ..sanitize import sanitize_text
from ..spec import Finding
from .checkpoints import publish_folder, remove_checkpoints, whole
from .memory.memory_plan import plan_run
from .objective import Objective, Rows
from .settings import TrainSettings
from .training_environment import first_process
from .training_loop import train
from .training_state import CurvePoint, TrainResult, stop_phrase

JSON_FILE, HTML_FILE = "report.json", "report.html"
WIDTH, HEIGHT = 640.0, 240.0
PLOT = (
    ".curve{width:100%;height:auto}.curve polyline{fill:none;stroke-width:1.5}.curve .loss{stroke:#8a8f98}"
    ".curve .held{stroke:#2b6cb0;stroke-width:2}.curve circle{fill:#2b6cb0}"
    ".curve text{font-size:11px;fill:currentColor}"
)


class TrainingReport(TrainResult, frozen=True, kw_only=True):
    """Outcome of a training run: losses are means over terms, sizes bytes, times seconds; what is unknown is null."""

    format: int = 1
    command: str
    findings: tuple[Finding, ...] = ()

    def facts(self) -> dict[str, str]:
        """Return what is read first, by name, for display."""
        found = {
            "stopped": stop_phrase(self.stopped, self.steps),
            "time": formatting.seconds(self.seconds),
            "trained on": f"{self.rows} rows, {self.terms} terms",
            "peak memory": formatting.size(self.peak_memory),
        }
        if self.curve:
            found["loss"] = f"{self.curve[0].loss:.4g} → {self.curve[-1].loss:.4g}"
        if self.first_held_out is not None and self.best_held_out is not None:
            best = f"{self.first_held_out:.4g} → {self.best_held_out:.4g}, the best, at step {self.best_step}"
            found["held-out loss"] = best
        return found


def require_free(output: Path, mark: str, *, replace: bool) -> None:
    """Raise `BusyError` where the folder exists, unless it is to be replaced and holds the file `mark` of its kind."""
    if not output.exists():
        return
    if not replace:
        raise BusyError(f"{output} exists", hint="Choose another --output, or replace it with --force")
    if not (output / mark).is_file():
        raise BusyError(
            f"{output} exists and has no {mark}, so it is not replaced", hint="Choose another --output"
        )


def train_to_folder(
    command: str,
    task: msgspec.Struct,
    settings: TrainSettings,
    data: tuple[Objective, Rows, Rows | None],
    trained: Callable[[], Mapping[str, Tensor]],
    save: Callable[[Mapping[str, Tensor], Path], None],
    output: Path,
    reporter: Reporter,
) -> TrainingReport:
    """Plan, train and publish what `infer COMMAND` trains; return the report in the folder.

    `data` are an objective, its rows and those held out. `trained` gives the tensors that `save` writes to a folder;
    they are asked for after training. Checkpoints are in `OUTPUT.checkpoints` until the folder is published.
    """
    objective, rows, held_out = data
    checkpoints = output.with_name(f"{output.name}.checkpoints")
    chosen, plan = plan_run(objective, rows, settings, checkpoints, reporter)
    result = train(objective, rows, held_out, chosen, checkpoints, reporter, plan)
    words = ["infer", command, *command_line(task), *command_line(settings)]
    report = TrainingReport(
        command=" ".join(words), findings=tuple(reporter.findings), **msgspec.structs.asdict(result)
    )
    tensors = {name: whole(each) for name, each in trained().items()}
    if first_process():
        with publish_folder(output) as folder:
            save(tensors, folder)
            write_report(report, folder)
        remove_checkpoints(checkpoints)
    return report


def write_report(report: TrainingReport, folder: Path) -> None:
    """Write report.json and report.html."""
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / JSON_FILE).write_bytes(encoded)
    (folder / HTML_FILE).write_text(render_html(report), encoding="utf-8")


def render_html(report: TrainingReport) -> str:
    """Render one page without script or reference, every string escaped."""
    facts = "".join(
        f"<tr><th>{escape(name)}</th><td>{words_html(text)}</td></tr>"
        for name, text in report.facts().items()
    )
    found = "".join(
        f"<li>{escape(sanitize_text(sentence(finding), 4096))}</li>" for finding in report.findings
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Training</title>\n'
        f"<style>{CSS}{PLOT}</style>\n</head>\n<body>\n<main>\n<h1>Training</h1>\n<table>{facts}</table>\n"
        f"<h2>Learning curve</h2>\n{plot(report.curve)}\n<h2>Findings</h2>\n<ul>{found}</ul>\n"
        f"<h2>Again</h2>\n<pre>{escape(sanitize_text(report.command, 1 << 16))}</pre>\n</main>\n</body>\n</html>\n"
    )


def plot(curve: Sequence[CurvePoint]) -> str:
    """Draw the loss of every step and the held-out measure over steps as inline SVG."""
    held = [(point.step, point.held_out) for point in curve if point.held_out is not None]
    losses = [(point.step, point.loss) for point in curve]
    values = [value for _, value in (*losses, *held)]
    if not values:
        return "<p>No step was done.</p>"
    low, high, last = min(values), max(values), max(point.step for point in curve)
    spread = (high - low) or 1.0

    def place(step: int, value: float) -> tuple[float, float]:
        return round(WIDTH * step / last, 1), round(HEIGHT * (high - value) / spread, 1)

    def line(kind: str, points: Sequence[tuple[int, float]]) -> str:
        joined = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        return f'<polyline class="{kind}" points="{joined}"/>'

    dots = "".join(f'<circle cx="{x}" cy="{y}" r="3"/>' for x, y in (place(*point) for point in held))
    words = f"loss from {losses[0][1]:.4g} to {losses[-1][1]:.4g} in {last} steps"
    return (
        f'<svg class="curve" role="img" aria-label="{escape(words)}" viewBox="-10 -20 {WIDTH + 20} {HEIGHT + 40}">'
        f'{line("loss", losses)}{line("held", held)}{dots}<text x="0" y="-6">{high:.4g}</text>'
        f'<text x="0" y="{HEIGHT + 16}">{low:.4g}; grey: loss of a step, blue: held out; {last} steps</text></svg>'
    )
