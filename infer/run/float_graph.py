"""The float original: the model as its source gave it, captured as a graph; everything is compared with it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from .. import carried_state, compress, load
from ..errors import NotUsableError, SourceError, UsageError
from ..graph import capture, fixed_sizes
from ..graph.program import Graph, ModuleGraph, OnnxGraph, OpenvinoGraph, StreamedGraph, TorchGraph
from ..llm.step.step_shape import StepShape
from ..load import module_copies
from ..options.values import HIDDEN_STATES
from ..plan import Plan
from ..reporter import Reporter
from ..results import ScoresOnly
from ..spec import Finding


@dataclass(frozen=True)
class LlmMode:
    """Mode of a model: a step of that `shape` which generates, or the whole, of a language model with the reason."""

    shape: StepShape | None = None
    scores_only: ScoresOnly | None = None
    keeps_latents: bool = False  # in the cache, in place of keys and values


@dataclass(frozen=True)
class Original:
    """The float model, its graph, and how it runs.

    What the graph says of inputs, samples and sizes holds where `loaded` says otherwise: some had to be fixed.
    """

    loaded: load.LoadedModel
    graph: Graph
    mode: LlmMode
    limitations: tuple[str, ...] = ()  # sentences on what its graph can't do
    folded: bool = False  # layers of the module are changed for formats: norms folded, recurrent layers split
    users_module: nn.Module | None = (
        None  # as the user calls it, no layer changed; None where there is none in memory
    )
    step: Graph | None = None  # the float model as a step over a paged KV cache, of a `ModuleGraph`

    @property
    def module(self) -> nn.Module:
        """The float module; raises `NotUsableError` for a file that runs as it is."""
        return module_of(self.loaded)

    @property
    def is_in_memory(self) -> bool:
        """True for a torch model whose weights are not streamed from disk."""
        return self.loaded.module is not None and self.loaded.load != "offload"

    @cached_property
    def whole(self) -> Graph:
        """The float model as a graph of whole inputs, for backends that run no steps; captured when it is asked for."""
        return float_graph(self.loaded) if self.step is not None else self.graph

    def lowered_as(self, shape: StepShape | None) -> Graph:
        """Return the float model's graph as a step of `shape`, or of whole inputs."""
        return self.whole if shape is None or self.step is None else self.step


def capture_original(plan: Plan, loaded: load.LoadedModel, reporter: Reporter) -> Original:
    """Decide how the model runs and capture it. None of its numbers changes: batch norms that a format is to see folded
    are folded after the capture.
    """
    mode = _mode(plan, loaded, reporter)
    reporter.step("capture", "the float original")
    if mode.shape is not None and loaded.load != "offload":
        try:
            original = _as_step(loaded, mode, mode.shape)
        except NotUsableError as error:
            from .find_llm_mode import no_step

            mode = LlmMode(None, no_step(plan, str(error), reporter), mode.keeps_latents)
        else:
            return _with_folded_norms(plan, original)
    try:
        graph = float_graph(loaded, reporter)
    except (NotUsableError, SourceError) as error:
        if loaded.file is None or loaded.module is None:
            raise
        loaded = as_file(loaded, str(error), reporter)
        graph = float_graph(loaded, reporter)
    fixed = [graph.fixed] if isinstance(graph, TorchGraph) and graph.fixed else []
    pairs = carried_state.states(graph.inputs, graph.outputs)
    original = Original(loaded, graph, mode, (*loaded.limitations, *fixed, *carried_state.sentence(pairs)))
    return _with_folded_norms(plan, original) if isinstance(graph, TorchGraph) else original


def _as_step(loaded: load.LoadedModel, mode: LlmMode, shape: StepShape) -> Original:
    """Capture a language model as a step; raises `NotUsableError` where it can't be."""
    from ..llm.step.encoder_decoder.capture_encoder_decoder import capture_language_model
    from ..llm.step.full_sequence_runner import full_sequence_outputs

    module = module_of(loaded).eval()
    facts = (loaded.inputs, loaded.samples, loaded.sizes, loaded.task)
    fixed_sizes.require_comparable_calls(loaded.called or module, *facts)
    step = capture_language_model(module.model, shape)  # type: ignore[arg-type]
    outputs, samples = full_sequence_outputs(shape), loaded.samples
    graph = ModuleGraph(
        loaded.inputs, outputs, samples, loaded.sizes, loaded.task, loaded.multiples, module=module
    )
    return Original(loaded, graph, mode, loaded.limitations, step=step)


def _with_folded_norms(plan: Plan, original: Original) -> Original:
    """Set the module as the user calls it; for formats, fold norms of the other one and split its recurrent layers."""
    module, loaded = original.module, original.loaded
    if plan.quant == "none":
        return replace(original, users_module=loaded.called or module)
    users_module = loaded.called or module_copies.copy_structure(module)
    folded = bool(fold_norms(original)) | bool(compress.split_recurrent(module))
    return replace(original, users_module=users_module, folded=folded)


def fold_norms(original: Original, into: nn.Module | None = None) -> list[Finding]:
    """Fold the norms of the float module, as formats see it, in place; `into`: another copy that gets the same."""
    if isinstance(original.graph, StreamedGraph):
        return []
    found: list[Finding] = []
    if isinstance(original.graph, TorchGraph):
        found += compress.fold_batch_norms(original.module, original.graph.program, into=into)
    return [*found, *compress.fold_weight_norms(original.module, into=into)]


def _mode(plan: Plan, loaded: load.LoadedModel, reporter: Reporter) -> LlmMode:
    if loaded.task == "text-generation":
        from .find_llm_mode import find_mode

        return LlmMode(*find_mode(plan, loaded, reporter))
    if plan.task == HIDDEN_STATES and loaded.kind != "huggingface":
        raise UsageError("--task features is for folders of transformers", where=plan.source)
    if plan.task not in ("auto", HIDDEN_STATES):
        raise UsageError(f"--task {plan.task} is for language models, the task of this one is {loaded.task}")
    return LlmMode()


def float_graph(loaded: load.LoadedModel, reporter: Reporter | None = None) -> Graph:
    """Capture the float model; a finding says which sizes had to be fixed."""
    if loaded.file is not None and loaded.module is None:
        outputs = tuple(loaded.meta.get("outputs", ()))
        common = (loaded.inputs, outputs, loaded.samples, loaded.sizes, loaded.task, loaded.multiples)
        if loaded.kind == "openvino":
            return OpenvinoGraph(*common, path=loaded.file)
        return OnnxGraph(
            *common,
            path=loaded.file,
            unimported=loaded.meta.get("unimported", ""),
            calibration=loaded.calibration,
        )
    if loaded.load == "offload":
        module = module_of(loaded).eval()
        return StreamedGraph(loaded.inputs, (), loaded.samples, loaded.sizes, loaded.task, module=module)
    with _at_any_length(loaded):
        graph = fixed_sizes.capture_at_any_sizes(
            module_of(loaded).eval(),
            loaded.inputs,
            loaded.samples,
            sizes=loaded.sizes,
            outputs=loaded.outputs,
            task=loaded.task,
            called=loaded.called,
            multiples=loaded.multiples,
        )
    if graph.fixed:
        stepped = graph.multiples != loaded.multiples
        how = "narrower" if graph.asserts else "multiples" if stepped else "fixed"
        (reporter or Reporter()).found([Finding("capture", "sizes", how, why=graph.fixed)])
    return graph if loaded.file is None else replace(graph, imported=loaded.file)


def as_file(loaded: load.LoadedModel, why: str, reporter: Reporter) -> load.LoadedModel:
    """Return an ONNX source that runs as the file it is; a finding gives the reason."""
    reporter.found([Finding("load", "form", "ONNX", why=why)])
    return replace(loaded, module=None, rebuild=None, meta={**loaded.meta, "unimported": why})


def _at_any_length(loaded: load.LoadedModel) -> AbstractContextManager[None]:
    """Capture a language model, replacing layers whose own code would fix the length at capture."""
    decoder = decoder_of(loaded)
    if decoder is None:
        return nullcontext()
    from ..llm.step.length_free_layers import use_whole_sequences

    return use_whole_sequences(decoder)


def module_of(loaded: load.LoadedModel) -> nn.Module:
    if loaded.module is None:
        graph = OpenvinoGraph if loaded.kind == "openvino" else OnnxGraph
        raise NotUsableError("a file that runs as it is has no torch module", hint=graph.instead)
    return loaded.module


def captured(original: Original, loaded: load.LoadedModel, module: nn.Module) -> TorchGraph:
    """Capture a copy of the float model with the inputs, samples and sizes of its graph."""
    like = original.graph
    with _at_any_length(loaded):
        graph = capture.capture(
            module.eval(),
            like.inputs,
            like.samples,
            sizes=like.sizes,
            outputs=loaded.outputs,
            task=loaded.task,
            multiples=like.multiples,
            asserts=isinstance(like, TorchGraph) and like.asserts,
        )
    return graph if loaded.load == "offload" else fixed_sizes.with_named_rows(graph)


def decoder_of(loaded: load.LoadedModel) -> nn.Module | None:
    """Return the language model of transformers, or None."""
    if loaded.task != "text-generation":
        return None
    from ..load.heads.text import Decoder, EncoderDecoder

    return loaded.module.model if isinstance(loaded.module, Decoder | EncoderDecoder) else None
