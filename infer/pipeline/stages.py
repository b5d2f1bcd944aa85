"""optimize(): from a source to a published artifact.

    load ─▶ capture ─▶ compress ─▶ candidates ─▶ select ─▶ fidelity ─▶ publish

Each stage takes typed values and returns typed values; what people read goes to the reporter. The float original
travels beside the compressed model, and a gate that fails raises: then nothing is published.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from .. import carried_state, paths, rows
from .. import load as sources
from ..artifact import store
from ..compress import assign
from ..errors import NotUsableError
from ..graph import storage
from ..graph.agreement import require_comparable
from ..graph.program import Graph
from ..kernels import cpu
from ..llm.step.full_sequence_runner import full_sequence_outputs
from ..llm.step.schedules.schedule_consistency import require_float_step
from ..llm.step.step_shape import StepShape
from ..llm.text import chat_template
from ..onnx.ort.ort_session import limited_calls
from ..plan import OURS, Plan
from ..report.measurements import roofline
from ..report.rendering import formatting
from ..reporter import Reporter
from ..spec import BATCH, Finding, TensorSpec
from . import half_precision, onnx_form
from .compressed_graph import Compressed, LastModel, compress_model, make_assignment
from .float_graph import Original, capture_original, float_graph
from .float_reference import FloatReferences, takes
from .llm_mode import refuse_backend
from .publish import Outcome, publish
from .resolve_plan import Resolved, keep_codes, resolve, resolve_cache
from .run_trial import batches_of
from .select import Selected, choose, enforce
from .try_backends import try_backends

SLOW_ROW = 0.2  # seconds of the original, from which on only the smallest batch is timed by default

__all__ = [
    "LastModel",
    "Original",
    "Outcome",
    "Reporter",
    "capture_original",
    "compress_model",
    "float_graph",
    "make_assignment",
    "optimize",
    "resolve",
]


def optimize(plan: Plan, output: Path, *, reporter: Reporter | None = None, replace: bool = False) -> Outcome:
    """Optimize the model of `plan.source`, check it against the original and publish the artifact `output`.

    `reporter` receives progress and findings; `replace` overwrites an artifact.
    Nothing is published when this raises:

    - `UsageError`: an option is wrong, or options exclude each other.
    - `SourceError`, `UnsafeSourceError`: the model file is damaged, or holds code and `plan.trust_code` is not set.
    - `GateError`: less faithful than the limits of the precision class, slower than the fastest float form, or of no
      gain: neither faster nor smaller than what the user has.
    - `NotUsableError`: this machine or this model can't run with the backend, format or device asked for.
    - `BusyError`: the output exists, or another process writes it.
    - `ResourceError`: out of memory or disk.
    """
    reporter = reporter or Reporter()
    paths.require_writable()
    run = resolve(plan, reporter)
    refuse_backend(run.plan)
    prepare_kernels(run.plan, reporter)
    with store.stage(output, replace=replace) as folder, limited_calls():
        made = in_best_form(run, folder, reporter)
        best = made.selected.trial
        enforce(made.run.plan, made.selected, made.original, made.small, made.stuck, made.floats)
        ceiling = roofline.probe(made.original.graph, best.reads, made.run.plan, shape=best.shape)
        reporter.found([*ceiling.findings(), *(step.finding() for step in best.steps)])
        return publish(made.run, made.original, made.small, made.selected, ceiling, folder, output, reporter)


@dataclass(frozen=True)
class Made:
    """Result of a run on one form of its source, before the gates; `stuck`: see `search`."""

    run: Resolved
    original: Original
    small: Compressed
    selected: Selected
    stuck: str
    floats: FloatReferences


def in_best_form(run: Resolved, folder: Path, reporter: Reporter) -> Made:
    """Make the form of the source that is tried first; where a gate will refuse it, an ONNX file's other one."""
    form: onnx_form.Form | None = None
    while True:
        attempt = reporter.attempt()
        loaded, resolved = load(run, attempt, form=form)
        try:
            made = make(resolved, loaded, folder, attempt)
        except NotUsableError:
            form = onnx_form.other(resolved.plan, loaded, unfaithful=True)
            if form is None:
                raise
        else:
            best, plan = made.selected.trial, made.run.plan
            form = None
            if best.failure(plan) is not None:
                form = onnx_form.other(plan, loaded, unfaithful=best.unfaithful(plan) is not None)
            if form is None:
                reporter.keep(attempt)
                return made
            for trial in (best, *made.selected.others):
                trial.close()
        for place in folder.iterdir():
            shutil.rmtree(place) if place.is_dir() else place.unlink()


def make(run: Resolved, loaded: sources.LoadedModel, folder: Path, reporter: Reporter) -> Made:
    """Capture the original, compress it, and lower, compare, time and choose its trials."""
    original = capture_original(run.plan, loaded, reporter)
    run = within_sizes(run, original.graph)
    assignment = make_assignment(run.plan, original, reporter)
    assign.decide(assignment)
    floats = float_forms(original, folder / "trials" / "float")
    run = within_seconds(run, floats, reporter)
    float32_only = half_precision.why_not(run, original)
    half = float32_only is None
    small, selected, stuck = search(run.plan, original, assignment, folder, reporter, floats, half=half)
    run = half_precision.chosen_dtype(run, selected, float32_only)
    return Made(run, original, small, selected, stuck, floats)


def prepare_kernels(plan: Plan, reporter: Reporter) -> None:
    """Compile the native kernels if they are not cached, and report it as a step."""
    if plan.quant != "none" and plan.device == "cpu" and not cpu.built():
        reporter.step("prepare", "compiling the native kernels, once for this machine")
        cpu.why_not(reporter.progress)


def load(
    run: Resolved,
    reporter: Reporter | None = None,
    *,
    calibrates: bool | None = None,
    form: onnx_form.Form | None = None,
) -> tuple[sources.LoadedModel, Resolved]:
    """Open the source, load its weights, and resolve the options that depend on the task.

    `calibrates`: whether rows of the samples are split off for calibration; None: where the plan quantizes. `form`: of
    an ONNX file, the first of `onnx_form.forms` by default.
    """
    reporter = reporter or Reporter()
    reporter.step("load", run.plan.source)
    loaded = sources.load(run.plan, calibrates=calibrates, tried=takes)
    run = resolve_cache(keep_codes(run, loaded.stored_as), loaded.task)
    if loaded.ours:
        run = replace(run, plan=run.plan.with_(data=OURS))
    prepare_kernels(run.plan, reporter)
    if loaded.task == "text-generation":
        loaded.files, found = chat_template.carry(run.plan.chat_template, loaded.files)
        reporter.found(found)
    origin = [Finding("load", "kind", loaded.kind), Finding("load", "inputs from", loaded.samples_from)]
    reporter.found([*loaded.findings, *origin])
    onnx_form.choose(run.plan, loaded, reporter, form)
    if loaded.module is not None:
        reporter.found(sources.fill(loaded))
    return loaded, run


def within_sizes(run: Resolved, graph: Graph) -> Resolved:
    """Leave out the batch sizes to time that the captured graph does not take, or is not called with: a state is of one
    sequence.
    """
    takes_one = not rows.have_rows(graph.inputs) or bool(carried_state.states(graph.inputs, graph.outputs))
    low, high = graph.sizes.get(BATCH, (1, run.plan.max_batch))
    step, largest = graph.multiples.get(BATCH, 1), 1 if takes_one else high
    fitting = (max(min(-(-size // step) * step, largest), low) for size in run.plan.batches)
    batches = tuple(dict.fromkeys(fitting))
    return replace(run, plan=run.plan.with_(batches=batches))


def within_seconds(run: Resolved, floats: FloatReferences, reporter: Reporter) -> Resolved:
    """Leave out all but the smallest of the default batch sizes of a slow model: each pair of calls takes seconds."""
    plan, seconds = run.plan, floats.row_seconds
    if plan.batches != Plan(source="").batches or seconds < SLOW_ROW:
        return run
    smallest, *left = plan.batches
    why = f"not timed: a row of the original takes {formatting.seconds(seconds)}; --batch {left[-1]} times it"
    reporter.found([Finding("time", f"batch {size}", None, why=why) for size in left])
    return replace(run, plan=plan.with_(batches=(smallest,)))


def float_forms(original: Original, work: Path) -> FloatReferences:
    """Return the float forms of the original, lowered below `work` when they are needed.

    Raises `SourceError` for an ONNX file that nothing can be compared with, as the capture does for a torch model.
    """
    floats = FloatReferences(
        original.graph,
        work,
        lambda: original.step,
        original.users_module,
        original.loaded.weight_bytes,
    )
    if original.graph.file is not None:
        few = max(2, original.graph.sizes.get(BATCH, (1, 1))[0])
        few = min(few, original.graph.sizes.get(BATCH, (1, few))[1])
        require_comparable(floats.reference().form.run, next(batches_of(original.graph, few)))
    return floats


def search(
    plan: Plan,
    original: Original,
    assignment: assign.Assignment,
    folder: Path,
    reporter: Reporter,
    floats: FloatReferences,
    *,
    half: bool = False,
    last: LastModel | None = None,
    timing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[Compressed, Selected, str]:
    """Compress, lower, compare, time and choose; raise the formats of sensitive layers while the fidelity gate fails.

    `half` tries bfloat16 as well. Returns also why no layer rises further, "" where the gate passes; `enforce` judges.
    Trials are timed inside `timing()`. `last`: the quantized model of an earlier trial of this original.
    """
    backend = plan.backend
    while True:
        attempt = reporter.attempt()
        attempt.step("compress", plan.quant)
        small = compress_model(plan, original, assignment, attempt, last)
        if small.shape is not None and small.shape not in floats.judged_steps:
            judge_float_step(original, small.shape, floats, reporter)
            floats.judged_steps.add(small.shape)
        if original.graph.module is not None:
            original.graph = replace(original.graph, outputs=_outputs(small))
        storage.save(small.graph, folder)
        tried = try_backends(
            plan, original.graph, small, folder, floats, attempt, only=backend, timing=timing
        )
        if half:
            compress = partial(compress_model, original=original, assignment=assignment, reporter=attempt)
            half_precision.try_half(tried, compress)
        selected = choose(tried)
        best = selected.trial
        stuck = assign.raise_formats(assignment, best.fidelity) if best.unfaithful(plan) else ""
        if stuck is not None:
            reporter.keep(attempt)
            return small, selected, stuck
        backend = best.backend
        tried.close()
        shutil.rmtree(folder / "weights")  # mapped files are unlinked, never written over
        shutil.rmtree(folder / storage.ENCODER, ignore_errors=True)


def judge_float_step(
    original: Original, shape: StepShape, floats: FloatReferences, reporter: Reporter
) -> None:
    """Refuse a language model whose logits change when its tokens are run in several steps, before lowering it."""
    if original.graph.module is not None:
        why = "its weights are streamed: only the lowered form is judged"
        reporter.found([Finding("capture", "float step", None, why=why)])
        return
    reporter.step("compare", "the float model in steps")
    samples = original.graph.samples
    ids = samples[original.graph.inputs[-1].name]
    given = None if shape.source is None else samples
    model: torch.nn.Module = original.module.model  # type: ignore[assignment]
    known = floats.window_logits if original.users_module is not None else None
    reporter.found(require_float_step(model, shape, ids, given, known))


def _outputs(small: Compressed) -> tuple[TensorSpec, ...]:
    return small.graph.outputs if small.shape is None else full_sequence_outputs(small.shape)
