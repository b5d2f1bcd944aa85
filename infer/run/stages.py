"""A run: from a source to a published artifact.

    load ─▶ capture ─▶ formats ─▶ (compress ─▶ lower, compare, time ─▶ choose) ─▶ gates ─▶ publish
                                  └──── again with finer layers while unfaithful ────┘

`optimize` is a run alone, a search makes one for each candidate of a source that it opened once (`budget_search`). Each
stage takes typed values and returns typed values; what people read goes to the reporter. The float original travels
beside the compressed model, and a gate that fails raises: then nothing is published.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import carried_state, paths, rows
from .. import load as sources
from ..artifact import store
from ..compress import assign
from ..errors import NotUsableError
from ..graph import storage
from ..graph.agreement import require_comparable
from ..graph.program import Graph, StreamedGraph
from ..kernels import cpu
from ..llm.step.full_sequence_runner import full_sequence_outputs
from ..llm.step.step_shape import StepShape
from ..onnx.ort_session import limited_calls
from ..plan import OURS, Plan
from ..report.measurements import roofline
from ..report.measurements.forked_memory import ForkingProbe
from ..report.rendering import formatting
from ..reporter import Reporter
from ..spec import BATCH, Finding, TensorSpec
from . import half_precision
from .compressed_graph import Compressed, LastModel, compress_model, make_assignment
from .float_graph import Original, capture_original, float_graph
from .float_reference import FloatReferences, takes
from .publish import Outcome, publish
from .resolve_plan import Resolved, keep_codes, refuse_backend, resolve, resolve_cache
from .run_trial import batches_of, joining
from .select import Selected, choose, enforce
from .trial import Trial
from .trial_timing import TimingRules
from .try_backends import try_backends

if TYPE_CHECKING:
    from .onnx_form import Form

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


def optimize(
    plan: Plan,
    output: Path,
    *,
    reporter: Reporter | None = None,
    replace: bool = False,
    in_memory: sources.LoadedModel | None = None,
) -> Outcome:
    """Optimize the model of `plan.source`, check it against the original and publish the artifact `output`.

    `reporter` receives progress and findings; `replace` overwrites an artifact. `in_memory`: a module of the user's
    program, which is the source then; its plan's `source` is only a name.
    Nothing is published when this raises; `infer.optimize` lists the errors.
    """
    reporter = reporter or Reporter()
    paths.require_writable()
    resolved = resolve_here(plan, reporter)
    with store.stage(output, replace=replace) as folder, limited_calls(), closing(ForkingProbe()) as memory:
        run = Run(folder, reporter, memory, in_memory=in_memory)
        made = run.in_best_form(resolved)
        enforce(made.plan, made.selected, made.opened.original, made.small, made.stuck, made.opened.floats)
        return run.publish(made, output)


@dataclass(frozen=True)
class Opened:
    """A source that was loaded and captured: the plan resolved for it, the float original, and its float forms."""

    resolved: Resolved
    original: Original
    floats: FloatReferences


@dataclass(frozen=True)
class Made:
    """Result of a run before the gates: the smaller model, its trials and the one that was chosen.

    `stuck`: why no layer of a model that is not faithful enough can rise to a finer format; "" of a faithful one.
    """

    opened: Opened
    small: Compressed
    selected: Selected
    stuck: str

    @property
    def plan(self) -> Plan:
        return self.opened.resolved.plan

    @property
    def best(self) -> Trial:
        """The chosen trial."""
        return self.selected.trial


@dataclass(frozen=True)
class Run:
    """Stages of a run in the folder where its artifact grows; `memory` measures it, `rules` say how it is timed.

    `in_memory`: the source, where it is a module of the user's program.
    """

    folder: Path
    reporter: Reporter
    memory: ForkingProbe
    rules: TimingRules = field(default_factory=TimingRules)
    in_memory: sources.LoadedModel | None = None

    def in_best_form(self, resolved: Resolved) -> Made:
        """Make the form of the source that is tried first; where a gate will refuse it, an ONNX file's other one."""
        form: Form | None = None
        while True:
            attempt = self.reporter.attempt()
            loaded, for_task = load(resolved, attempt, form=form, in_memory=self.in_memory)
            try:
                reported = replace(self, reporter=attempt)
                made = reported.make(reported.open(loaded, for_task))
            except NotUsableError:
                form = _other_form(for_task.plan, loaded, unfaithful=True)
                if form is None:
                    raise
            else:
                form = None
                if made.best.failure(made.plan) is not None:
                    unfaithful = made.best.unfaithful(made.plan) is not None
                    form = _other_form(made.plan, made.opened.original.loaded, unfaithful=unfaithful)
                if form is None:
                    self.reporter.keep(attempt)
                    return made
                for trial in (made.best, *made.selected.others):
                    trial.close()
            for place in self.folder.iterdir():
                shutil.rmtree(place) if place.is_dir() else place.unlink()

    def open(self, loaded: sources.LoadedModel, resolved: Resolved) -> Opened:
        """Capture a loaded source, and leave out the batch sizes that it does not take or that take too long."""
        original = capture_original(resolved.plan, loaded, self.reporter)
        self.memory.start(resolved.plan.device)  # it imports while this process compares
        resolved = within_sizes(resolved, original.graph)
        floats = float_forms(original, self.folder / "trials" / "float")
        return Opened(within_seconds(resolved, floats, self.reporter), original, floats)

    def make(
        self, opened: Opened, assignment: assign.Assignment | None = None, last: LastModel | None = None
    ) -> Made:
        """Decide formats, compress, lower, compare, time and choose; raise the formats of sensitive layers while the
        fidelity gate fails.

        `assignment` and `last`: what a search has of its other trials, the calibrated model and the one quantized last.
        """
        plan, original, floats = opened.resolved.plan, opened.original, opened.floats
        assignment = assignment or make_assignment(plan, original, self.reporter)
        assign.decide(assignment)
        half = half_precision.choice(opened.resolved, original)
        backend = plan.backend
        while True:
            attempt = self.reporter.attempt()
            attempt.step("compress", plan.quant)
            small = compress_model(plan, original, assignment, attempt, last)
            if small.shape is not None and small.shape not in floats.judged_steps:
                judge_float_step(original, small.shape, floats, self.reporter)
                floats.judged_steps.add(small.shape)
            if isinstance(original.graph, StreamedGraph):
                original = replace(original, graph=floats.named(_outputs(small)))
            storage.save(small.graph, self.folder)
            tried = try_backends(
                plan, original.graph, small, self.folder, floats, attempt, only=backend, rules=self.rules
            )
            if half.is_tried:
                compress = partial(compress_model, original=original, assignment=assignment, reporter=attempt)
                half_precision.try_half(tried, compress)
            selected = choose(tried)
            best, stuck = selected.trial, ""
            if best.unfaithful(plan) is not None:
                stuck = assign.raise_formats(assignment, best.fidelity)
            if stuck or best.unfaithful(plan) is None:
                self.reporter.keep(attempt)
                resolved = half_precision.chosen_dtype(opened.resolved, selected, half)
                return Made(Opened(resolved, original, floats), small, selected, stuck)
            backend = best.backend
            tried.close()
            shutil.rmtree(self.folder / "weights")  # mapped files are unlinked, never written over
            shutil.rmtree(self.folder / storage.ENCODER, ignore_errors=True)

    def publish(self, made: Made, output: Path) -> Outcome:
        """Publish the chosen trial at `output`."""
        original, best = made.opened.original, made.best
        chosen = made.plan.with_(dtype=best.dtype or made.plan.dtype)
        best.joining = joining(chosen, made.opened.floats, best.runner, original.graph)
        ceiling = roofline.probe(original.graph, best.reads, made.plan, shape=best.shape)
        self.reporter.found([*ceiling.findings(), *(step.finding() for step in best.steps)])
        return publish(
            made.opened.resolved,
            original,
            made.small,
            made.selected,
            ceiling,
            self.folder,
            output,
            self.reporter,
            self.memory.probe,
        )


def resolve_here(plan: Plan, reporter: Reporter) -> Resolved:
    """Resolve a plan, refuse a backend that can't do what it asks for, and compile the native kernels it needs."""
    resolved = resolve(plan, reporter)
    refuse_backend(resolved.plan)
    prepare_kernels(resolved.plan, reporter)
    return resolved


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
    form: Form | None = None,
    in_memory: sources.LoadedModel | None = None,
) -> tuple[sources.LoadedModel, Resolved]:
    """Open the source, load its weights, and resolve the options that depend on the task.

    `calibrates`: whether rows of the samples are split off for calibration; None: where the plan quantizes. `form`: of
    an ONNX file, the first of `onnx_form.forms` by default. `in_memory`: see `optimize`.
    """
    reporter = reporter or Reporter()
    reporter.step("load", run.plan.source)
    loaded = sources.load(
        run.plan, calibrates=calibrates, tried=takes, in_memory=in_memory, reporter=reporter
    )
    run = resolve_cache(keep_codes(run, loaded.stored_as), loaded.task)
    if loaded.ours:
        run = replace(run, plan=run.plan.with_(data=OURS))
    prepare_kernels(run.plan, reporter)
    if loaded.task == "text-generation":
        from ..llm.text import chat_template

        files, template = chat_template.carry(run.plan.chat_template, loaded.files)
        loaded = replace(loaded, files=files)
        reporter.found(template)
    origin = [Finding("load", "kind", loaded.kind), Finding("load", "inputs from", loaded.samples_from)]
    reporter.found([*loaded.findings, *origin])
    if loaded.kind == "onnx":
        from . import onnx_form

        loaded = onnx_form.choose(run.plan, loaded, reporter, form)
    if loaded.module is not None:
        reporter.found(sources.fill(loaded))
    return loaded, run


def _other_form(plan: Plan, loaded: sources.LoadedModel, *, unfaithful: bool) -> Form | None:
    """Return the form to try after that of `loaded`; None of a source that has one form."""
    if loaded.kind != "onnx":
        return None
    from . import onnx_form

    return onnx_form.other(plan, loaded, unfaithful=unfaithful)


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

    Raises `SourceError` for a file that nothing can be compared with, as the capture does for a torch model.
    """
    floats = FloatReferences(
        original.graph,
        work,
        original.lowered_as,
        original.users_module,
        original.loaded.weight_bytes,
    )
    if original.graph.file is not None:
        few = max(2, original.graph.sizes.get(BATCH, (1, 1))[0])
        few = min(few, original.graph.sizes.get(BATCH, (1, few))[1])
        require_comparable(floats.reference().form.run, next(batches_of(original.graph, few)))
    return floats


def judge_float_step(
    original: Original, shape: StepShape, floats: FloatReferences, reporter: Reporter
) -> None:
    """Refuse a language model whose logits change when its tokens are run in several steps, before lowering it."""
    if isinstance(original.graph, StreamedGraph):
        why = "its weights are streamed: only the lowered form is judged"
        reporter.found([Finding("capture", "float step", None, why=why)])
        return
    reporter.step("compare", "the float model in steps")
    samples = original.graph.samples
    ids = samples[original.graph.inputs[-1].name]
    source_inputs = None if shape.source is None else samples
    model: torch.nn.Module = original.module.model  # type: ignore[assignment]
    from ..llm.step.schedules.schedule_consistency import require_float_step

    known = floats.window_logits if original.users_module is not None else None
    reporter.found(require_float_step(model, shape, ids, source_inputs, known))


def _outputs(small: Compressed) -> tuple[TensorSpec, ...]:
    return small.graph.outputs if small.shape is None else full_sequence_outputs(small.shape)
