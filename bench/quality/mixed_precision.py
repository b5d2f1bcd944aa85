"""Mixed precision on the reference models: the effect of every format of every layer, and quality against bits.

    python -m bench.quality.mixed_precision [--models pydoc_lm,minilm,digits] [--bits 3.6,4,4.5,5,6,7,8] [--seconds 900]

Effects are measured once on calibration rows; each budget is solved on them and judged, like each uniform format, on
held-out rows: perplexity, KL and top-1 of pydoc_lm, cosine and retrieval order of MiniLM, accuracy of digits. Writes
bench/results/mixed-DATE-CPU.json, .md and -MODEL.svg, where other models of the same day stay; exits 1 when a budget is
overrun or when more bits than a uniform format's cost more KL than it does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from bench.quality.mixed_precision_plot import Point, front_svg
from bench.shared.repository import ROOT
from bench.shared.results import result_path
from infer import compress, fidelity, plugins
from infer import device as hardware
from infer.compress.assign import budget, format_order, sensitivity
from infer.graph.program import flatten
from infer.plan import Plan
from infer.reporter import Reporter
from infer.run import stages

KL = ("logits.kl", "KL, nats")
SHOWN = {
    "pydoc_lm": [("logits.perplexity", "perplexity"), KL],
    "minilm": [("embedding.relative_error", "relative error")],
    "digits": [KL],
}
Say = Callable[[str], None]


class Row(msgspec.Struct, kw_only=True):
    """One assignment, judged on held-out rows. `formats` counts layers by format."""

    model: str
    name: str
    kind: str  # "float", "uniform" or "mixed"
    bits: float
    predicted: float | None  # the sum of effects, where all were measured
    metrics: dict[str, float]
    formats: dict[str, int]


class LayerRow(msgspec.Struct, kw_only=True):
    model: str
    layer: str
    weights: int
    bits: dict[str, float]
    effect: dict[str, float]
    weight_error: dict[str, float]


def plans() -> dict[str, Plan]:
    import minilm

    digits = Plan(source=str(ROOT / "models/digits.pt"), model=f"{ROOT / 'models/digits.py'}:build")
    encoder = Plan(source=str(minilm.checkpoint_folder()), data=f"{ROOT / 'models/minilm.py'}:sentences")
    language = Plan(source=str(ROOT / "models/pydoc_lm"), max_batch=16)
    common = {
        "quant": "cluster:2",
        "backend": "eager",
        "allow_slower": True,
        "device": "cpu",
        "dtype": "float32",
    }
    return {
        n: p.with_(**common) for n, p in (("pydoc_lm", language), ("minilm", encoder), ("digits", digits))
    }


class Bench:
    """One model: measured effects of its layers, and the quality of assignments on held-out rows."""

    def __init__(self, name: str, plan: Plan, seconds: float, say: Say) -> None:
        self.name, self.say = name, say
        loaded, run = stages.load(stages.resolve(plan))
        original = stages.capture_original(run.plan, loaded, Reporter())
        self.assignment = stages.make_assignment(run.plan, original)
        self.formats = uniform_formats(run.plan)
        self.assignment.candidates = self._candidates()
        rungs = format_order.larger_formats(run.plan)
        accepted = {
            w.name: self.assignment.candidates.accepted(w) for w in self.assignment.candidates.weights
        }
        wanted = {layer: [f for f in formats if f in rungs] for layer, formats in accepted.items()}
        wanted = {layer: formats for layer, formats in wanted.items() if formats}
        say(f"{name}: {sum(map(len, wanted.values()))} effects of {len(wanted)} weights")
        self.measured = sensitivity.measure(
            self.assignment.model, self.assignment.candidates, wanted, self.assignment.calibration_set.calibration,
            names=self.assignment.calibration_set.outputs, task=self.assignment.calibration_set.task,
            seconds=seconds, progress=self._progress(),
        )  # fmt: skip
        say(self.measured.summary())
        self.layers = self.measured.layers

    def _candidates(self) -> compress.Candidates:
        assignment = self.assignment
        return compress.Candidates(
            assignment.model, assignment.plan, self.formats, assignment.stats or {}, assignment.packing_cache
        )

    def _progress(self) -> Callable[[int, int, str], None]:
        said = [time.monotonic()]

        def progress(done: int, total: int, what: str) -> None:
            if time.monotonic() - said[0] > 30:
                said[0] = time.monotonic()
                self.say(f"  {done}/{total} {what}")

        return progress

    @torch.no_grad()
    def judge(self, made: budget.BudgetSolution, name: str, kind: str) -> Row:
        real, comparison = (
            self.assignment.calibration_set,
            fidelity.Comparison(self.assignment.calibration_set.task),
        )
        count = len(next(iter(real.samples.values())))
        for start in range(0, count, 8):
            batch = {n: v[start : start + 8] for n, v in real.samples.items()}
            want = dict(zip(real.outputs, flatten(self.assignment.model(**batch)), strict=True))
            with self.assignment.candidates.in_place(made.formats):
                got = dict(zip(real.outputs, flatten(self.assignment.model(**batch)), strict=True))
            comparison.add(want, got, batch)
        metrics = {m.label: float(m.number) for m in comparison.metrics() if m.number is not None}
        if self.name == "digits":
            metrics["accuracy"] = self._accuracy(made)
        used = [made.formats[layer.name] for layer in self.layers]
        counts = {f: used.count(f) for f in dict.fromkeys([*self.formats, "float"]) if f in used}
        self.say(f"  {kind:7} {name:10} {made.bits:6.3f} bits  {brief(metrics)}")
        predicted = made.predicted if math.isfinite(made.predicted) else None
        own = {"name": name, "kind": kind, "bits": made.bits, "predicted": predicted}
        return Row(model=self.name, metrics=metrics, formats=counts, **own)

    def _accuracy(self, made: budget.BudgetSolution) -> float:
        import digits

        with self.assignment.candidates.in_place(made.formats):
            return digits.evaluate(digits.predictor(self.assignment.model))["accuracy"]

    def uniform(self, format: str) -> budget.BudgetSolution:
        """Assign one format to every layer that accepts it, float to the others; sum the known effects."""
        weights = {weight.name: weight for weight in self.assignment.candidates.weights}
        names, size, cost = {}, 0, 0.0
        for layer in self.layers:
            accepts = format in self.assignment.candidates.accepted(weights[layer.name])
            taken = names[layer.name] = format if accepts else "float"
            known = layer.size.get(taken)
            size += known or self.assignment.candidates.packing(weights[layer.name], taken).num_bytes
            cost += layer.effect.get(taken, math.nan)
        count = sum(layer.num_weights for layer in self.layers)
        return budget.BudgetSolution(names, size, size * 8 / count, cost)


def uniform_formats(plan: Plan) -> list[str]:
    own = [f for f in ("int4", "fp4") if f in plugins.names("infer.compress.formats")]
    return [*format_order.larger_formats(plan), "cluster:4", *own]


def brief(metrics: dict[str, float]) -> str:
    keys = ("perplexity", "kl", "top1", "cosine", "nearest", "recall", "relative_error", "accuracy")
    found = {key: v for what, v in metrics.items() for key in keys if what.rpartition(".")[2] == key}
    return "  ".join(f"{key} {found[key]:.5g}" for key in keys if key in found)


def run(bench: Bench, budgets: list[float]) -> list[Row]:
    rows = [bench.judge(bench.uniform("float"), "float", "float")]
    rows += [bench.judge(bench.uniform(format), format, "uniform") for format in bench.formats]
    layers = bench.layers
    least = budget.front(layers).smallest * 8 / sum(layer.num_weights for layer in layers)
    for bits in (b for b in budgets if b >= least):
        rows.append(bench.judge(budget.for_bits(layers, bits), f"{bits:g} bits", "mixed"))
    return rows


def missed(rows: list[Row]) -> list[str]:
    """Return the promises of the front that are not kept."""
    found = []
    for row in (r for r in rows if r.kind == "mixed"):
        if row.bits > float(row.name.split()[0]):
            found.append(f"{row.model} {row.name}: took {row.bits:.3f}")
        for other in (r for r in rows if r.kind == "uniform" and r.model == row.model and r.bits <= row.bits):
            if None not in (row.predicted, other.predicted) and row.predicted > other.predicted * (1 + 1e-9):
                found.append(
                    f"{row.model} {row.name}: {other.name} with fewer bits has less predicted effect"
                )
    return found


def effects_table(layers: list[LayerRow], model: str, keep: int = 16) -> str:
    own = [row for row in layers if row.model == model]
    formats = list(dict.fromkeys(f for row in own for f in row.effect if f != "float"))
    worst = sorted(own, key=lambda row: -max(row.effect.values()))[:keep]
    lines = [f"| layer | weights | {' | '.join(formats)} |", "|" + "---|" * (len(formats) + 2)]
    for row in worst:
        cells = (f"{row.effect[f]:.3g}" if f in row.effect else "" for f in formats)
        lines.append(f"| {row.layer} | {row.weights:,} | {' | '.join(cells)} |")
    return (
        "\n".join(lines)
        + f"\n\nThe {len(worst)} most sensitive of {len(own)} weights; all in the JSON file.\n"
    )


def rows_table(rows: list[Row]) -> str:
    lines = ["| kind | name | bits per weight | quality on held-out rows | layers |", "|---|---|---|---|---|"]
    for row in rows:
        counts = ", ".join(f"{count} {format}" for format, count in row.formats.items())
        lines.append(f"| {row.kind} | {row.name} | {row.bits:.3f} | {brief(row.metrics)} | {counts} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], model: str, metric: str, label: str) -> str:
    points = [Point(row.bits, row.metrics[metric], row.name, row.kind) for row in rows if row.kind != "float"]
    reference = next(row.metrics.get(metric) for row in rows if row.kind == "float")
    return front_svg(
        points, title=f"{model}: {label} against bits per weight", label=label, reference=reference
    )


def write(rows: list[Row], layers: list[LayerRow], notes: dict[str, str]) -> Path:
    machine, today = hardware.fingerprint("cpu"), datetime.date.today()
    head = {"date": str(today), "machine": machine, "versions": hardware.versions(), "measured": notes}
    path = result_path("mixed")
    data = {**head, "rows": msgspec.to_builtins(rows), "effects": msgspec.to_builtins(layers)}
    path.write_text(json.dumps(data, indent=1) + "\n")
    parts = [f"{machine['cpu']}, torch {torch.__version__}, {today}\n"]
    for model in notes:
        own = [row for row in rows if row.model == model]
        parts += [f"## {model}\n\n{notes[model]}.\n", rows_table(own)]
        for metric, label in SHOWN[model]:
            svg = path.with_name(f"{path.stem}-{model}-{metric.rpartition('.')[2].replace('_', '-')}.svg")
            svg.write_text(plot(own, model, metric, label))
            parts.append(f"![{label} against bits]({svg.name})\n")
        parts.append(effects_table(layers, model))
    path.with_suffix(".md").write_text("\n".join(parts))
    return path


def held(models: list[str]) -> tuple[list[Row], list[LayerRow], dict[str, str]]:
    """Return the rows that today's file has of models other than these."""
    path = result_path("mixed")
    if not path.exists():
        return [], [], {}
    data = json.loads(path.read_text())
    rows = [row for row in msgspec.convert(data["rows"], list[Row]) if row.model not in models]
    layers = [row for row in msgspec.convert(data["effects"], list[LayerRow]) if row.model not in models]
    return rows, layers, {name: said for name, said in data["measured"].items() if name not in models}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="pydoc_lm,minilm,digits")
    parser.add_argument("--bits", default="3,3.6,4,4.5,5,6,7,8")
    parser.add_argument("--seconds", type=float, default=900.0)
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    rows, layers, notes = held(models)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for model in models:
        bench = Bench(model, plans()[model], arguments.seconds, say)
        notes[model] = f"Effects in {bench.measured.unit}; {bench.measured.summary()}"
        layers += [
            LayerRow(
                model=model, layer=layer.name, weights=layer.num_weights, effect=layer.effect,
                bits={f: layer.bits(f) for f in layer.size}, weight_error=layer.weight_error,
            )
            for layer in bench.layers
        ]  # fmt: skip
        rows += run(bench, [float(part) for part in arguments.bits.split(",")])
        path = write(rows, layers, notes)
    print(rows_table(rows))
    print(f"written: {path.relative_to(ROOT)}")
    for line in (found := missed(rows)):
        print(f"missed: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
