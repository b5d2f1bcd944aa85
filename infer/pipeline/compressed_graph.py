"""Compressed model: formats for its layers, packed weights, the plan's dtype, and the graph that is captured of it."""

from __future__ import annotations

from dataclasses import replace

from .. import compress, plugins
from .. import load as sources
from ..compress import assign
from ..errors import NotUsableError
from ..graph import capture
from ..graph.program import Graph
from ..llm.step.attention.latent_attention import keep_latents
from ..llm.step.encoder_decoder.capture_encoder_decoder import capture_language_model
from ..plan import Plan
from ..reporter import Reporter
from ..spec import DTYPES
from .float_graph import Original, captured, decoder_of, module_of
from .llm_mode import no_step
from .recover_quality import recover_quality
from .try_backends import Compressed


def make_assignment(plan: Plan, original: Original, reporter: Reporter | None = None) -> assign.Assignment:
    """Prepare the assignment of formats: the float model, its calibration rows, a call of it."""
    loaded = original.loaded
    decoder = decoder_of(loaded) if original.is_in_memory else None
    steps = plan.backend == "auto" or plugins.get("backends", plan.backend).STEPS
    real = assign.CalibrationSet(
        loaded.module if original.is_in_memory else None,
        loaded.inputs,
        tuple(spec.name for spec in original.graph.outputs),
        loaded.task,
        loaded.samples,
        loaded.calibration,
        steps=decoder is not None and original.mode.shape is not None and steps,
        head=None if decoder is None else decoder.get_output_embeddings(),  # type: ignore[operator]
        training=loaded.training,
    )
    return assign.Assignment(plan, real, reporter or Reporter())


def compress_model(
    plan: Plan,
    original: Original,
    assignment: assign.Assignment | None = None,
    reporter: Reporter | None = None,
) -> Compressed:
    """Quantize a copy of the model, lower its dtype and capture it like the original; a language model
    as a step.
    """
    reporter, graph = reporter or Reporter(), original.graph
    if graph.onnx is not None:
        return Compressed(graph, None)
    unchanged = plan.quant == "none" and plan.dtype in ("float32", "tf32")
    if unchanged and graph.module is None:
        return _form(plan, original, original.loaded, reporter)
    copy = sources.unfilled_copy(original.loaded)
    if (decoder := decoder_of(copy)) is not None and original.mode.keeps_latents:
        keep_latents(decoder)
    if plan.quant == "none":
        sources.fill(copy, strategy="meta" if copy.load == "offload" else None)
        return _form(plan, original, copy, reporter)
    assignment, module = assignment or make_assignment(plan, original, reporter), module_of(copy)
    if graph.program is not None:
        reporter.found(compress.fold_batch_norms(original.module, graph.program, into=module))
        reporter.found(compress.fold_weight_norms(original.module, into=module))
    split = compress.split_recurrent(module)
    copy.renames = {**copy.renames, **{new: copy.renames.get(old, old) for new, old in split.items()}}
    pins = compress.resolve_pins(plan.layers, compress.layer_names(module))
    done = compress.quantize_model(
        module,
        plan,
        reader=copy.reader,
        renames=copy.renames,
        stats=assignment.stats,
        progress=reporter.progress,
        formats=pins | assignment.formats,
        packing_cache=assignment.packing_cache,
    )
    covered = compress.cover(module, assignment.reasons(done), assignment.requested_float(pins))
    reporter.found([*done.findings(), *covered.findings()])
    compress.enforce(covered, plan)
    layers = assignment.choices(module, done)
    sources.fill(copy, strategy="meta" if copy.load == "offload" else None)
    if plan.recover:
        reporter.found(recover_quality(plan, module, assignment.calibration_set, reporter))
    small = _form(plan, original, copy, reporter)
    return replace(small, layers=layers, quantized=covered.verdict())


def _form(plan: Plan, original: Original, loaded: sources.LoadedModel, reporter: Reporter) -> Compressed:
    """Capture a model in the plan's dtype: the step of a language model where it can be one, else the whole."""
    module, shape = module_of(loaded), original.mode.shape
    is_original = loaded is original.loaded
    low = DTYPES[plan.dtype] if plan.dtype in ("float16", "bfloat16") and not is_original else None

    def whole() -> Graph:
        if is_original and original.graph.program is not None:
            return original.graph
        return captured(loaded, capture.in_dtype(module, loaded.inputs, low) if low else module)

    decoder, scores_only = decoder_of(loaded), original.mode.scores_only
    if shape is not None and decoder is not None:
        try:
            lowered = decoder.to(low) if low else decoder
            step = original.step if is_original else capture_language_model(lowered, shape)
        except NotUsableError as error:
            scores_only = no_step(plan, str(error), reporter)
        else:
            return Compressed(step, module, shape, whole)
    return Compressed(whole(), module, scores_only=scores_only)
