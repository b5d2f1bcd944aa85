"""One backend tried on one graph: lowered, compared with the float original; what its times say."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import fidelity, latency, library_errors, plugins
from ..artifact import golden
from ..fidelity import batch_sizes
from ..fidelity.thresholds import limits, precision
from ..graph import storage
from ..graph.program import Graph
from ..latency import WORKLOAD, Paired
from ..llm.step.full_sequence import FullSequenceRunner
from ..llm.step.schedule_consistency import compare_schedules, judged_windows, spared_tokens
from ..llm.step.step_shape import StepShape
from ..plan import Plan
from ..report import formatting, roofline
from ..report.step_breakdown import StepBreakdown
from ..results import Metric, ScoresOnly
from ..spec import Finding
from .float_reference import FloatForms, opened

MAX_ROWS = 256  # of the samples are compared; more buy no certainty worth their time


@dataclass
class Timing:
    """One batch size: ours against the fastest float form, in one interleaved run."""

    batch: int
    pair: latency.Paired
    rival: str = ""  # name of that form


@dataclass
class Trial:
    """Result of a trial; `folder` holds the compiled form until it is published."""

    backend: str
    folder: Path
    fidelity: list[Metric]
    golden: dict[str, dict[str, Tensor]]
    size: int  # bytes that the artifact would hold of it
    reads: int  # bytes of weights that one call reads
    changed: bool  # quantized or in another dtype: then being slower than the baseline counts
    latency: list[Timing] = field(default_factory=list)
    baseline: str = ""
    prompt: Paired | None = None  # of a language model: one step of the workload's prompt
    forms: dict[str, dict[int, float]] = field(default_factory=dict)  # float form → batch size → seconds
    findings: list[Finding] = field(default_factory=list)
    steps: list[StepBreakdown] = field(default_factory=list)  # of a language model, by batch size
    quantized: str = ""  # see `Lowered`
    runner: Any = None
    task: str = "tensors"
    shape: StepShape | None = None  # of a language model lowered as a step, which can generate
    scores_only: ScoresOnly | None = None  # of one that can't

    @property
    def seconds(self) -> float:
        """Sum of the latencies over the batch sizes of the plan."""
        return sum(self.typical.values()) if self.latency else math.inf

    @property
    def typical(self) -> dict[int, float]:
        """Seconds at each batch size, comparable among trials that were timed one after the other: the ratio to a float
        form times the seconds of that form, which are the same for all trials.
        """
        return {
            t.batch: t.pair.ratio * self.forms[t.rival][t.batch] if t.rival in self.forms else t.pair.a.p50
            for t in self.latency
        }

    def loses_to(self, form: str) -> bool:
        """Slower than this float form at a batch size, changed or not."""
        return any(t.rival == form and t.pair.verdict == "slower" for t in self.latency)

    @property
    def slower(self) -> bool:
        """Slower than the fastest float form that was tried, at a batch size of the plan; of a language model decoding,
        or the prompts and answers of the declared workload together.
        """
        return self.changed and any(
            t.pair.verdict == "slower" or self._request_slower(t) for t in self.latency
        )

    def _request_slower(self, timing: Timing) -> bool:
        """Return True when whole requests of the declared workload, prompts and answers, take longer."""
        if self.prompt is None:
            return False
        steps = WORKLOAD.steps(timing.batch)
        decoding = steps.pop(timing.batch, 0)
        parts: list[tuple[float, Paired]] = [(decoding, timing.pair)]
        parts += [(count * tokens / WORKLOAD.chunk, self.prompt) for tokens, count in steps.items()]
        floats = sum(count * pair.b.p50 for count, pair in parts)
        return sum(count * pair.b.p50 * pair.low for count, pair in parts) > latency.SLOWER * floats

    @property
    def verdict(self) -> str:
        """`2.1x faster at batch 1, same at batch 8 against the fastest float form (inductor float32)`."""
        if not self.latency:
            return "not timed"
        parts = [f"{_speed(t.pair)} at batch {t.batch}" for t in self.latency]
        what = "" if self.shape is None else "decoding "
        if self.prompt is not None:
            parts.append(f"reading a prompt {_speed(self.prompt)}")
        return f"{what}{', '.join(parts)} against {self.baseline}"

    def unfaithful(self, plan: Plan) -> str | None:
        return fidelity.judge(self.fidelity, limits(plan, self.task), plan.max_error)

    def failure(self, plan: Plan) -> str | None:
        return self.unfaithful(plan) or (self.verdict if self.slower and not plan.allow_slower else None)

    def verdicts(self, plan: Plan, captured: Sequence[str] = ()) -> list[str]:
        """Return the headline findings; `captured`: limitations that come from the capture of the model."""
        allowed = (
            f"--max-drop {plan.max_drop:g}"
            if plan.max_drop is not None
            else f"the limits of {precision(plan)}"
        )
        forms = [self.verdict, *self._forms_tried()]
        return [*self.limitations(), *captured, *forms, f"fidelity within {allowed}"]

    def limitations(self) -> list[str]:
        """List what the artifact can't do, or does worse than the original."""
        lines = [] if self.scores_only is None else [f"scores text only: {self.scores_only.reason}"]
        return [*lines, "kept although slower (--allow-slower)"] if self.slower else lines

    def _forms_tried(self) -> list[str]:
        """Return the float forms with their times, where there were several."""
        if len(self.forms) < 2:
            return []
        each = [
            f"{name} {', '.join(formatting.seconds(s) for s in seconds.values())}"
            for name, seconds in self.forms.items()
        ]
        sizes = ", ".join(str(t.batch) for t in self.latency)
        return [f"float forms tried, at batch {sizes}: {'; '.join(each)}"]

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
            self.runner = None


def _speed(pair: latency.Paired) -> str:
    if pair.verdict == "faster":
        return f"{pair.speedup:.2f}x faster"
    if pair.verdict == "slower":
        return f"{pair.ratio:.2f}x slower"
    return pair.verdict


def run_trial(
    plan: Plan,
    original: Graph,
    small: Graph,
    folder: Path,
    work: Path,
    step: Callable[[str, str], None],
    floats: FloatForms | None = None,
    shape: StepShape | None = None,
) -> Trial:
    """Lower `small` into `work/small` and compare it with `original` on its samples; `trial_timing` times it.

    With `shape`, `small` is the step of a language model: whole windows are compared.
    `floats` keeps the float forms for the next trial of the same original.
    """
    floats = floats or FloatForms(original, work)
    backend = plugins.get("backends", plan.backend)
    ours = workplace(folder, work / "small")
    lowered = backend.lower(small, plan, ours)
    runner = opened(backend.open(ours, plan.device), shape, plan.device)
    step("compare", plan.backend)
    reference = floats.reference(plan)
    compared, kept = _compare(plan, reference, runner, original)
    if isinstance(runner, FullSequenceRunner):
        compared += _judge_schedules(reference, runner, original, spared_tokens(small))
    size = published_size(backend, folder, ours)
    trial = Trial(
        backend=plan.backend,
        folder=ours,
        fidelity=compared,
        golden=kept,
        size=size,
        reads=size if small.program is None else roofline.bytes_read(small.program),
        changed=plan.quant != "none" or plan.dtype != "float32",
        findings=lowered.findings,
        quantized=lowered.quantized,
        runner=runner,
        task=original.task,
        shape=shape,
    )
    gc.collect()
    return trial


def _judge_schedules(
    reference: Any, runner: FullSequenceRunner, original: Graph, spared: int
) -> list[Metric]:
    longest = min(runner.shape.max_positions, original.sizes.get("seq", (1, 1 << 20))[1])
    windows = judged_windows(original.samples["input_ids"], runner.shape.vocab_size, longest)

    def logits(ids: Tensor) -> Tensor:
        return reference.run({"input_ids": ids[None]})["logits"][0]  # type: ignore[no-any-return]

    return compare_schedules(runner, windows, logits, spared=spared)


def published_size(backend: Any, folder: Path, ours: Path) -> int:
    """Bytes of the compiled form, plus graph and weights unless the compiled form stands for itself."""
    parts = (
        [ours / "compiled"]
        if backend.PORTABLE
        else [ours / "compiled", folder / "weights", folder / storage.PROGRAM]
    )
    files = [f for part in parts for f in (part.rglob("*") if part.is_dir() else [part])]
    return sum(f.stat().st_size for f in files if f.is_file())


def workplace(source: Path, place: Path) -> Path:
    """Make a folder to lower in that shares the graph and the weights of `source` by links."""
    place.mkdir(parents=True)
    for name in (storage.SIGNATURE, storage.PROGRAM, "weights"):
        if (source / name).exists():
            (place / name).symlink_to((source / name).resolve())
    return place


def batches_of(graph: Graph, size: int) -> Iterator[dict[str, Tensor]]:
    """Return the samples, at most `MAX_ROWS` of them, in batches of at most `size` rows."""
    batched = all(s.batched for s in graph.inputs)
    rows = min(len(next(iter(graph.samples.values()))), MAX_ROWS) if batched else 1
    for start in range(0, rows, size):
        yield {
            s.name: graph.samples[s.name][start : start + size] if batched else graph.samples[s.name]
            for s in graph.inputs
        }


def _compare(
    plan: Plan, reference: Any, runner: Any, graph: Graph
) -> tuple[list[Metric], dict[str, dict[str, Tensor]]]:
    """Both runners over the samples; the first rows become the golden inputs and outputs."""
    comparison = fidelity.Comparison(graph.task)
    kept: dict[str, dict[str, Tensor]] = {}
    usual: dict[str, float] = {}
    for inputs in batches_of(graph, min(8, graph.sizes.get("batch", (1, 8))[1])):
        with library_errors.float_model_errors():
            expected = reference.run(inputs)
        got = runner.run(inputs)
        expected = {name: value.cpu() for name, value in expected.items()}
        got = {name: value.cpu() for name, value in got.items()}
        comparison.add(expected, got, inputs)
        if not kept:
            kept = _golden_rows(plan, reference, runner, graph, inputs)
            usual = batch_sizes.root_mean_squares(expected)
    return [*comparison.metrics(), *_at_sizes(reference, runner, graph, usual)], kept


def _at_sizes(reference: Any, runner: Any, graph: Graph, usual: Mapping[str, float]) -> list[Metric]:
    """Compare at batches of one and three; the steps of a language model have schedules instead."""
    if isinstance(runner, FullSequenceRunner) or not all(s.batched for s in graph.inputs):
        return []
    low, high = graph.sizes.get("batch", (1, 1))
    rows = 1 if graph.module is not None or graph.task == "text-generation" else batch_sizes.ROWS
    found: list[Metric] = []
    for size in batch_sizes.SIZES:
        if low <= size <= high:
            batches = itertools.islice(batches_of(graph, size), -(-rows // size))
            whole = ({s.name: s.with_rows(given[s.name], size) for s in graph.inputs} for given in batches)
            found += batch_sizes.compare_size(size, whole, reference.run, runner.run, graph.task, usual)
    return found


def _golden_rows(
    plan: Plan, reference: Any, runner: Any, graph: Graph, inputs: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Two rows to keep, with their outputs; synthetic ones where the plan allows no real ones."""
    width = graph.outputs[0].shape[-1] if graph.task == "text-generation" and graph.outputs else 2
    return golden.record(
        reference,
        runner,
        graph.inputs,
        inputs,
        task=graph.task,
        synthetic=not plan.golden,
        vocabulary=width if isinstance(width, int) else 2,
        seed=plan.seed,
    )
