"""Compressed model: formats for its layers, packed weights, the plan's dtype, and the graph that is captured of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from .. import compress, plugins
from .. import load as sources
from ..compress import assign
from ..coverage import enforce
from ..errors import NotUsableError
from ..graph import capture
from ..graph.program import FileGraph, Graph, StreamedGraph
from ..plan import Plan
from ..reporter import Reporter
from ..spec import DTYPES, Finding
from .float_graph import Original, captured, decoder_of, fold_norms, module_of
from .try_backends import Compressed


def make_assignment(
    plan: Plan,
    original: Original,
    reporter: Reporter | None = None,
    stats: Mapping[str, compress.Stats] | None = None,
) -> assign.Assignment:
    """Prepare the assignment of formats: the float model, its calibration rows, a call of it, and the statistics of its
    layers, which are collected unless `stats` are those of another assignment.
    """
    loaded, reporter = original.loaded, reporter or Reporter()
    decoder = decoder_of(loaded) if original.is_in_memory else None
    steps = plan.backend == "auto" or plugins.get("backends", plan.backend).STEPS
    real = assign.CalibrationSet(
        loaded.module if original.is_in_memory else None,
        original.graph.inputs,
        tuple(spec.name for spec in original.graph.outputs),
        loaded.task,
        original.graph.samples,
        loaded.calibration,
        steps=decoder is not None and original.mode.shape is not None and steps,
        head=None if decoder is None else decoder.get_output_embeddings(),  # type: ignore[operator]
        training=loaded.training,
    )
    if stats is None and not isinstance(original.graph, FileGraph):
        stats = assign.collect_statistics(plan, real, reporter)
    return assign.Assignment(plan, real, reporter, stats)


def compress_model(
    plan: Plan,
    original: Original,
    assignment: assign.Assignment | None = None,
    reporter: Reporter | None = None,
    last: LastModel | None = None,
) -> Compressed:
    """Quantize a copy of the model, lower its dtype and capture it like the original; a language model
    as a step. The model of `last` is taken over where it has the same formats.
    """
    reporter, graph = reporter or Reporter(), original.graph
    if isinstance(graph, FileGraph):
        return Compressed(graph, None)
    unchanged = plan.quant == "none" and plan.dtype in ("float32", "tf32")
    if unchanged and not isinstance(graph, StreamedGraph):
        return _form(plan, original, original.loaded, reporter)
    copy = sources.unfilled_copy(original.loaded)
    if (decoder := decoder_of(copy)) is not None and original.mode.keeps_latents:
        from ..llm.step.attention.latent_attention import keep_latents

        keep_latents(decoder)
    if plan.quant == "none":
        sources.fill(copy, strategy="meta" if copy.load == "offload" else None)
        return _form(plan, original, copy, reporter)
    assignment = assignment or make_assignment(plan, original, reporter)
    formats = dict(assignment.formats)
    make = partial(_quantized, plan, original, copy, assignment, reporter)
    model = (last or LastModel()).take(plan, formats, make)
    reporter.findings += model.findings
    copy = model.loaded
    covered = compress.cover(
        model.module, assignment.reasons(model.done), assignment.requested_float(model.pins)
    )
    reporter.found([*model.done.findings(), *covered.findings()])
    enforce(covered, plan)
    layers = assignment.choices(model.module, model.done)
    if model.form is None:
        sources.fill(copy, strategy="meta" if copy.load == "offload" else None)
        if plan.recover:
            from .recover_quality import recover_quality

            reporter.found(recover_quality(plan, model.module, assignment.calibration_set, reporter))
        model.form = _form(plan, original, copy, reporter)
    return replace(model.form, layers=layers, quantized=covered.verdict())


@dataclass
class QuantizedModel:
    """A quantized copy of the model, the result of its packing, and what was captured of it."""

    loaded: sources.LoadedModel
    pins: dict[str, str]  # layer → format, of the plan
    done: compress.QuantizationResult
    findings: list[Finding]  # while it was made
    form: Compressed | None = None

    @property
    def module(self) -> nn.Module:
        return module_of(self.loaded)


@dataclass
class LastModel:
    """The quantized model of the last trial: the next one with the same formats, on another backend, takes it over.

    One that is trained (`--recover`) is never taken over. Another model is forgotten before the next is made.
    """

    model: QuantizedModel | None = None
    _key: tuple[Plan, dict[str, str]] | None = None

    def take(self, plan: Plan, formats: dict[str, str], make: Callable[[], QuantizedModel]) -> QuantizedModel:
        """Return the model of a plan and the formats decided for its layers."""
        key = plan.with_(backend="auto", backend_options={}), formats
        if self.model is None or self.model.form is None or key != self._key or plan.recover:
            self.model = self._key = None
            self.model, self._key = make(), key
        return self.model


def _quantized(
    plan: Plan,
    original: Original,
    copy: sources.LoadedModel,
    assignment: assign.Assignment,
    reporter: Reporter,
) -> QuantizedModel:
    """Fold norms into the module of `copy` and quantize it, its other weights still unfilled."""
    module, attempt = module_of(copy), reporter.attempt()
    attempt.found(fold_norms(original, into=module))
    split = compress.split_recurrent(module)
    renames = {**copy.renames, **{new: copy.renames.get(old, old) for new, old in split.items()}}
    pins = compress.resolve_pins(plan.layers, compress.layer_names(module))
    done = compress.quantize_model(
        module,
        plan,
        checkpoint=copy.checkpoint,
        renames=renames,
        stats=assignment.stats,
        progress=attempt.progress,
        formats=pins | assignment.formats,
        packing_cache=assignment.packing_cache,
    )
    return QuantizedModel(replace(copy, renames=renames), pins, done, attempt.findings)


def _form(plan: Plan, original: Original, loaded: sources.LoadedModel, reporter: Reporter) -> Compressed:
    """Capture a model in the plan's dtype: the step of a language model where it can be one, else the whole."""
    module, shape = module_of(loaded), original.mode.shape
    is_original = loaded is original.loaded
    low = DTYPES[plan.dtype] if plan.dtype in ("float16", "bfloat16") and not is_original else None

    def whole() -> Graph:
        if is_original and original.is_in_memory:
            return original.whole
        return captured(
            original, loaded, capture.in_dtype(module, original.graph.inputs, low) if low else module
        )

    decoder, scores_only = decoder_of(loaded), original.mode.scores_only
    if shape is not None and decoder is not None:
        from ..llm.step.encoder_decoder.capture_encoder_decoder import capture_language_model
        from .find_llm_mode import no_step

        try:
            lowered = decoder.to(low) if low else decoder
            step = original.step if is_original else None
            step = step or capture_language_model(lowered, shape)
        except NotUsableError as error:
            scores_only = no_step(plan, str(error), reporter)
        else:
            return Compressed(step, module, shape, whole)
    return Compressed(whole(), module, scores_only=scores_only)
