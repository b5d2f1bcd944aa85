"""Recovery of pydoc_lm and MiniLM at low bits: error on rows that neither train nor calibrate, before and after.

    python -m bench.tune.recovery [--only 'pydoc_lm*'] [--recover 8min] [--threads 2]

Each row opens and quantizes a model as `infer optimize` does, then again with `--recover`, which calibrates with
training rows and trains, and compares both with the float original on the rows that the fidelity gate judges;
perplexity is over samples.txt. Writes
bench/results/recovery-DATE-CPU.json and .md, row by row, so that an interrupted run keeps what it has; exits 1 when a
bar is missed.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.shared.bars import Bar, todays_bars
from bench.shared.command_line import parser_of
from bench.shared.repository import MODELS, ROOT
from infer import compress, fidelity
from infer.compress import assign
from infer.fidelity.thresholds import LIMITS
from infer.graph.program import flatten
from infer.plan import Plan
from infer.reporter import Reporter
from infer.results import Metric
from infer.run import stages
from infer.run.recover_quality import recover_quality
from infer.spec import Finding

NAME = "recovery"
TEXTS = ROOT / "bench/tune/recovery_texts.py"
MODEL_ROWS = 8  # of a comparison's batch


@dataclass(frozen=True)
class Work:
    """A model at a format, and its bars: the metric's share of before, or its value."""

    model: str
    quant: str
    metric: str
    share: float | None = None
    value: float | None = None
    gate: str = ""  # precision class that it has to pass

    @property
    def name(self) -> str:
        return f"{self.model} {self.quant}"


WORKS = (
    Work("pydoc_lm", "nf4", "kl", share=1 / 3),
    Work("pydoc_lm", "cluster:3", "kl", share=1 / 3),
    Work("pydoc_lm", "cluster:2", "kl", share=1 / 5),
    Work("MiniLM", "nf4", "relative_error", value=0.06),
    Work("MiniLM", "cluster:3", "relative_error", gate="4bit"),
)


def plan_of(work: Work, budget: str) -> Plan:
    """Return the plan of `infer optimize` for a row."""
    if work.model == "pydoc_lm":
        source, texts = str(MODELS / "pydoc_lm"), "documents"
    else:
        import minilm

        source, texts = str(minilm.checkpoint_folder()), "sentences"
    return Plan(
        source=source,
        data=f"{TEXTS}:{texts}",
        quant=work.quant,
        recover=budget,
        backend="eager",
        device="cpu",
        dtype="float32",
    )


@torch.no_grad()
def compared(module: nn.Module, known: assign.CalibrationSet) -> list[Metric]:
    """Compare with the float model on the rows that judge."""
    comparison, count = fidelity.Comparison(known.task), len(next(iter(known.samples.values())))
    assert known.model is not None
    for start in range(0, count, MODEL_ROWS):
        batch = {name: value[start : start + MODEL_ROWS] for name, value in known.samples.items()}
        want, got = (
            dict(zip(known.outputs, flatten(model(**batch)), strict=True)) for model in (known.model, module)
        )
        comparison.add(want, got, batch)
    return comparison.metrics()


def number_of(metrics: list[Metric], name: str) -> float:
    """Return the largest value of a metric over the outputs."""
    return max(float(m.number) for m in metrics if m.name == name and m.number is not None)


def measure(work: Work, budget: str) -> dict[str, Any]:
    """Quantize, recover and compare one row."""
    begin, cpu = time.perf_counter(), time.process_time()
    loaded, run = stages.load(stages.resolve(plan_of(work, budget)))
    original = stages.capture_original(run.plan, loaded, Reporter())
    module, known = _quantized(run.plan.with_(recover=""), original)
    before, perplexity = compared(module, known), _perplexity(work, module)
    since = time.process_time()
    module, known = _quantized(run.plan, original)
    calibrated, quantized = compared(module, known), time.process_time() - since
    found = recover_quality(run.plan, module, known, _Progress())
    after = compared(module, known)
    return {
        "recover": budget,
        "before": number_of(before, work.metric),
        "calibrated": number_of(calibrated, work.metric),
        "after": number_of(after, work.metric),
        "gate": fidelity.judge(after, LIMITS[work.gate], None) if work.gate else None,
        "perplexity": [_perplexity(work, known.model), perplexity, _perplexity(work, module)],
        "findings": {finding.what: f"{finding.value} {finding.why}" for finding in found},
        "rows": len(next(iter(known.samples.values()))),
        "cpu seconds of calibrating with training rows": quantized,
        "cpu seconds": time.process_time() - cpu,
        "seconds": time.perf_counter() - begin,
    }


def _quantized(plan: Plan, original: Any) -> tuple[nn.Module, assign.CalibrationSet]:
    """Return the model as `infer optimize` quantizes it, calibrated, and the rows and float model for it."""
    assignment = stages.make_assignment(plan, original)
    known = assignment.calibration_set
    module = copy.deepcopy(assignment.model)
    compress.quantize_model(module, plan, stats=assignment.stats)
    return module, known


class _Progress(Reporter):
    """Prints findings, and progress every 20 seconds, to stderr."""

    last = 0.0

    def progress(self, done: int, total: int, text: str = "") -> None:
        if time.monotonic() - self.last > 20:
            self.last = time.monotonic()
            print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def found(self, findings: Any) -> None:
        for finding in findings if isinstance(findings, list | tuple) else [findings]:
            if isinstance(finding, Finding):
                print(f"  {finding.what}: {finding.value} {finding.why}", file=sys.stderr, flush=True)


def _perplexity(work: Work, module: nn.Module | None) -> float | None:
    if work.model != "pydoc_lm" or module is None:
        return None
    import pydoc_lm

    with torch.no_grad():
        figures = pydoc_lm.evaluate(lambda ids: flatten(module(input_ids=ids))[0])
    return figures["perplexity"]


def bars_of(work: Work, row: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of a row; ours and theirs are the error after and before."""
    name = {"kl": "KL", "relative_error": "relative error"}[work.metric]
    sides = {"ours": row["after"], "theirs": row["before"], "below": True, "details": dict(row)}
    found = []
    if work.share is not None:
        share = row["after"] / row["before"]
        found.append(("un-recovered", work.share, share, f"of the {name} (error) before"))
    if work.value is not None:
        found.append(("float original", work.value, row["after"], f"{name} (error)"))
    bars = [
        Bar(work=work.name, rival=rival, need=need, got=got, unit=unit, **sides)
        for rival, need, got, unit in found
    ]
    if work.gate:
        why = row["gate"] or ""
        limit = LIMITS[work.gate].relative_error or 0.0
        got = None if why else row["after"]
        bars.append(
            Bar(
                work=work.name,
                rival=f"{work.gate} gate",
                need=limit,
                got=got,
                why=why,
                unit=f"{name} (error)",
                **sides,
            )
        )
    if row["perplexity"][0] is not None and work.quant == "nf4":
        floating, _, after = row["perplexity"]
        bars.append(
            Bar(
                work=work.name,
                rival="float original",
                need=1.01,
                got=after / floating,
                unit="of its perplexity",
                below=True,
                ours=after,
                theirs=floating,
            )
        )
    return bars


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="*", help="rows, by a pattern of their names")
    parser.add_argument("--recover", default="8min", metavar="TIME|TOKENS", help="budget of each row")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sys.path.insert(0, str(MODELS))
    rows, missed = todays_bars(NAME, ("pydoc_lm", "MiniLM"), threads=given.threads), False
    for work in (work for work in WORKS if fnmatch.fnmatch(work.name, given.only)):
        print(f"{work.name}, {given.recover}", file=sys.stderr, flush=True)
        row = measure(work, given.recover)
        print(json.dumps(row), file=sys.stderr, flush=True)
        bars = bars_of(work, row)
        missed |= not all(bar.is_met for bar in bars)
        rows.keep(bars)
        print(rows.path.with_suffix(".md").read_text(), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
