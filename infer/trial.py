"""One backend tried on one graph: lowered, compared with the float original, timed against its own unquantized form."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import capture, fidelity, golden, plugins
from .generate import cuda_graphs
from .generate.consistency import judged_windows, schedule_findings, spared_tokens
from .generate.step import StepShape
from .generate.windows import Windows
from .report import anatomy, latency, roofline
from .spec import Finding, Plan, limits, precision

MAX_ROWS = 256  # of the samples are compared; more buy no certainty worth their time


@dataclass
class Timing:
    """One batch size: ours against the baseline, in one interleaved run."""

    batch: int
    pair: latency.Paired


@dataclass
class Trial:
    """What was learned; `folder` holds the compiled form until it is published."""

    backend: str
    folder: Path
    fidelity: list[Finding]
    golden: dict[str, dict[str, Tensor]]
    size: int  # bytes that the artifact would hold of it
    reads: int  # bytes of weights that one call reads
    changed: bool  # quantized or in another dtype: then being slower than the baseline counts
    latency: list[Timing] = field(default_factory=list)
    baseline: str = ""
    findings: list[Finding] = field(default_factory=list)
    runner: Any = None
    task: str = "tensors"
    shape: StepShape | None = None  # of a language model lowered as a step, which can generate

    @property
    def seconds(self) -> float:
        """Sum of the median latencies over the batch sizes of the plan: what trials are ranked by."""
        return sum(t.pair.a.p50 for t in self.latency) if self.latency else math.inf

    @property
    def slower(self) -> bool:
        """Slower than its own unquantized form at a batch size of the plan."""
        return self.changed and any(t.pair.verdict == "slower" for t in self.latency)

    @property
    def verdict(self) -> str:
        """`2.1x faster than inductor float32 at batch 1, same at batch 8`."""
        if not self.latency:
            return "not timed"
        parts = [f"{_speed(t.pair)} at batch {t.batch}" for t in self.latency]
        what = "" if self.shape is None else "decoding "
        return f"{what}{', '.join(parts)} against {self.baseline}"

    def unfaithful(self, plan: Plan) -> str | None:
        return fidelity.judge(self.fidelity, limits(plan, self.task), plan.max_error)

    def failure(self, plan: Plan) -> str | None:
        return self.unfaithful(plan) or (self.verdict if self.slower and not plan.allow_slower else None)

    def verdicts(self, plan: Plan) -> list[str]:
        """The lines that people read first."""
        allowed = (
            f"--max-drop {plan.max_drop:g}"
            if plan.max_drop is not None
            else f"the limits of {precision(plan)}"
        )
        lines = [self.verdict, f"fidelity within {allowed}"]
        return [*lines, "kept although slower (--allow-slower)"] if self.slower else lines

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
    original: capture.Graph,
    small: capture.Graph,
    folder: Path,
    work: Path,
    step: Callable[[str, str], None],
    floats: FloatForms | None = None,
    shape: StepShape | None = None,
) -> Trial:
    """Lower `small` into `work/small`, compare it with `original` on its samples, time it at `plan.batches`.

    With `shape`, `small` is the step of a language model: whole windows are compared, decode steps timed.

    What it is timed against: the same backend on the float graph; for a float graph itself, plain torch.
    `floats` keeps those forms for the next trial of the same original.
    """
    floats = floats or FloatForms(original, work)
    backend = plugins.get("backends", plan.backend)
    ours = workplace(folder, work / "small")
    findings = backend.lower(small, plan, ours)
    runner = opened(backend.open(ours, plan.device), shape, plan.device)
    step("compare", plan.backend)
    reference = floats.reference(plan)
    compared, kept = _compare(plan, reference, runner, original)
    if isinstance(runner, Windows):
        compared += _in_schedules(reference, runner, original, spared_tokens(small))
    size = published_size(backend, folder, ours)
    trial = Trial(
        backend=plan.backend,
        folder=ours,
        fidelity=compared,
        golden=kept,
        size=size,
        reads=size if small.program is None else roofline.bytes_read(small.program),
        changed=plan.quant != "none" or plan.dtype != "float32",
        findings=[*findings, *compared],
        runner=runner,
        task=original.task,
        shape=shape,
    )
    if plan.batches and trial.unfaithful(plan) is None:  # what is refused anyway need not be timed
        baseline, trial.baseline = floats.baseline(plan, step, shape)
        step("time", f"{plan.backend} against {trial.baseline}")
        trial.latency = [_time(runner, baseline, original, b, plan.device) for b in plan.batches]
        for batch in plan.batches if isinstance(runner, Windows) else ():
            trial.findings += anatomy.decode_step(runner.decoding(batch), batch)
    gc.collect()
    return trial


def _in_schedules(reference: Any, runner: Windows, original: capture.Graph, spared: int) -> list[Finding]:
    longest = min(runner.shape.max_positions, original.sizes.get("seq", (1, 1 << 20))[1])
    windows = judged_windows(original.samples["input_ids"], runner.shape.vocab_size, longest)

    def logits(ids: Tensor) -> Tensor:
        return reference.run({"input_ids": ids[None]})["logits"][0]  # type: ignore[no-any-return]

    return schedule_findings(runner, windows, logits, spared=spared)


def opened(runner: Any, shape: StepShape | None, device: str) -> Any:
    """The runner, of a step as one of whole windows."""
    return runner if shape is None else Windows(cuda_graphs.wrap(runner, device), shape, device)


def published_size(backend: Any, folder: Path, ours: Path) -> int:
    """Bytes of the compiled form, plus graph and weights unless the compiled form stands for itself."""
    parts = (
        [ours / "compiled"]
        if backend.PORTABLE
        else [ours / "compiled", folder / "weights", folder / capture.PROGRAM]
    )
    files = [f for part in parts for f in (part.rglob("*") if part.is_dir() else [part])]
    return sum(f.stat().st_size for f in files if f.is_file())


def workplace(source: Path, place: Path) -> Path:
    """A folder to lower in that shares the graph and the weights of `source` by links."""
    place.mkdir(parents=True)
    for name in (capture.SIGNATURE, capture.PROGRAM, "weights"):
        if (source / name).exists():
            (place / name).symlink_to((source / name).resolve())
    return place


class FloatForms:
    """The float original in plain torch and lowered by each backend: trials are compared with and timed against it.

    `step` captures the original as a step, for a language model.
    """

    def __init__(
        self, original: capture.Graph, work: Path, step: Callable[[], capture.Graph] | None = None
    ) -> None:
        self._original, self._work, self._step = original, work, step
        self._runners: dict[str, Any] = {}

    def reference(self, plan: Plan) -> Any:
        return self.runner(plan) if self._original.onnx is not None else _Eager(self._original)

    def baseline(
        self, plan: Plan, step: Callable[[str, str], None], shape: StepShape | None = None
    ) -> tuple[Any, str]:
        """What a trial is timed against, and its name."""
        if self._original.onnx is not None:
            return self.runner(plan), "ONNX Runtime float32"
        if self._original.module is not None:
            return self.reference(plan), "torch eager, weights streamed"
        if plan.quant == "none" and plan.dtype == "float32":
            if shape is not None:
                return self.runner(plan.with_(backend="eager"), shape), "torch eager"
            return self.reference(plan), "torch eager"
        if plan.backend not in self._runners:
            step("lower", f"{plan.backend}, the float form to time against")
        return self.runner(plan, shape), f"{plan.backend} float32"

    def runner(self, plan: Plan, shape: StepShape | None = None) -> Any:
        """The unquantized graph on the plan's backend, lowered once."""
        if plan.backend not in self._runners:
            backend = plugins.get("backends", plan.backend)
            place = self._work / f"float-{plan.backend}"
            place.mkdir(parents=True)
            graph = self._original if shape is None or self._step is None else self._step()
            capture.save(graph, place)
            backend.lower(graph, plan.with_(quant="none", dtype="float32"), place)
            self._runners[plan.backend] = opened(backend.open(place, plan.device), shape, plan.device)
        return self._runners[plan.backend]


class _Eager:
    """The float original in plain torch: what everything is compared with."""

    def __init__(self, graph: capture.Graph) -> None:
        self._names, self._call = [o.name for o in graph.outputs], graph.callable()

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(self._names, self._call(**inputs), strict=True))


def _batches(graph: capture.Graph, size: int) -> Iterator[dict[str, Tensor]]:
    batched = all(s.batched for s in graph.inputs)
    rows = min(len(next(iter(graph.samples.values()))), MAX_ROWS) if batched else 1
    for start in range(0, rows, size):
        yield {
            s.name: graph.samples[s.name][start : start + size] if batched else graph.samples[s.name]
            for s in graph.inputs
        }


def _compare(
    plan: Plan, reference: Any, runner: Any, graph: capture.Graph
) -> tuple[list[Finding], dict[str, dict[str, Tensor]]]:
    """Both runners over the samples; the first rows become the golden inputs and outputs."""
    comparison = fidelity.Comparison(graph.task)
    kept: dict[str, dict[str, Tensor]] = {}
    for inputs in _batches(graph, min(8, graph.sizes.get("batch", (1, 8))[1])):
        expected, got = reference.run(inputs), runner.run(inputs)
        expected = {name: value.cpu() for name, value in expected.items()}
        got = {name: value.cpu() for name, value in got.items()}
        comparison.add(expected, got, inputs)
        if not kept:
            kept = _golden(plan, reference, runner, graph, inputs)
    return comparison.findings(), kept


def _golden(
    plan: Plan, reference: Any, runner: Any, graph: capture.Graph, inputs: Mapping[str, Tensor]
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


def _time(runner: Any, baseline: Any, graph: capture.Graph, batch: int, device: str) -> Timing:
    """A batch of the samples; of two language models one decode step."""
    if isinstance(runner, Windows) and isinstance(baseline, Windows):
        ours, theirs = runner.decoding(batch), baseline.decoding(batch)
        return Timing(batch, latency.paired(ours, theirs, device=device))
    inputs = next(_batches(graph, batch))
    inputs = {s.name: s.with_rows(inputs[s.name], batch) for s in graph.inputs}
    return Timing(
        batch, latency.paired(lambda: runner.run(inputs), lambda: baseline.run(inputs), device=device)
    )
