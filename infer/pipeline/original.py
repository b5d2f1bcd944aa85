"""The float original: the model as its source gave it, captured as a graph; everything is compared with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from .. import compress, llm, load
from ..errors import NotUsableError
from ..graph import capture
from ..graph.program import Graph
from ..load.hf_wrappers import Decoder
from ..plan import Plan
from ..reporter import Reporter
from .llm_mode import LlmMode, find_mode


@dataclass
class Original:
    """The float model, its graph, and how it runs. `graph.outputs` of streamed weights are named later."""

    loaded: load.LoadedModel
    graph: Graph
    mode: LlmMode

    @property
    def module(self) -> nn.Module:
        """Raises `NotUsableError` for an ONNX source."""
        return module_of(self.loaded)

    @property
    def is_in_memory(self) -> bool:
        """True for a torch model whose weights are not streamed from disk."""
        return self.loaded.module is not None and self.loaded.load != "offload"

    @cached_property
    def step(self) -> Graph:
        """The float model as a step over a paged KV cache; `NotUsableError` when it can't be captured as one."""
        if self.mode.shape is None:
            raise NotUsableError("the model does not run as a step")
        return llm.capture_step(self.module.model, self.mode.shape)  # type: ignore[arg-type]


def capture_original(plan: Plan, loaded: load.LoadedModel, reporter: Reporter) -> Original:
    """Decide how the model runs and capture it. None of its numbers changes: batch norms that a format is to see folded
    are folded after the capture.
    """
    mode = find_mode(plan, loaded, reporter)
    reporter.step("capture", "the float original")
    original = Original(loaded, float_graph(loaded), mode)
    if original.graph.program is not None and plan.quant != "none":
        compress.fold_batch_norms(original.module, original.graph.program)
        compress.fold_weight_norms(original.module)
        compress.split_recurrent(original.module)
    return original


def float_graph(loaded: load.LoadedModel) -> Graph:
    """Capture the float model."""
    if loaded.onnx is not None:
        outputs = tuple(loaded.meta.get("outputs", ()))
        return Graph(loaded.inputs, outputs, loaded.samples, loaded.sizes, onnx=loaded.onnx, task=loaded.task)
    if loaded.load == "offload":
        module = module_of(loaded).eval()
        return Graph(loaded.inputs, (), loaded.samples, loaded.sizes, module=module, task=loaded.task)
    return captured(loaded, module_of(loaded))


def module_of(loaded: load.LoadedModel) -> nn.Module:
    if loaded.module is None:
        raise NotUsableError("an ONNX source has no torch module", hint="Use --backend ort")
    return loaded.module


def captured(loaded: load.LoadedModel, module: nn.Module) -> Graph:
    """Capture a module with the inputs, samples and sizes of the source."""
    return capture.capture(
        module.eval(),
        loaded.inputs,
        loaded.samples,
        sizes=loaded.sizes,
        outputs=loaded.outputs,
        task=loaded.task,
    )


def decoder_of(loaded: load.LoadedModel) -> nn.Module | None:
    """Return the language model of transformers, or None."""
    return loaded.module.model if isinstance(loaded.module, Decoder) else None
