"""Captured graph: the program with its named, typed, symbolically sized inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export._tree_utils import reorder_kwargs
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from ..errors import NotUsableError
from ..spec import TensorSpec


class Signature(msgspec.Struct, frozen=True):
    """Inputs and outputs of a graph, as stored in graph.json beside every compiled form."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sizes: dict[str, tuple[int, int]]
    task: str
    multiples: dict[str, int] = {}


@dataclass(frozen=True)
class Graph:
    """The captured program. Exactly one of `program`, `onnx` and `module` is set.

    An ONNX source stays ONNX, or was imported: then `imported` is the file, which judges the program. `module` is a
    float original whose weights are streamed from disk, too large to capture.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    samples: Mapping[str, Tensor]  # real inputs, batch first; at least one row
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # symbolic size → (smallest, largest)
    program: ExportedProgram | None = None
    onnx: Path | None = None
    imported: Path | None = None
    unimported: str = ""  # why an ONNX source that stays ONNX has no program
    module: nn.Module | None = None
    task: str = "tensors"
    calibration: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # rows of an ONNX source; they judge nothing
    multiples: Mapping[str, int] = field(default_factory=dict)  # symbolic size → what divides it, where not 1
    encoder: Graph | None = None  # of the step of an encoder-decoder: see `llm.step.encoder_decoder`

    @property
    def file(self) -> Path | None:
        """The user's ONNX file, which ONNX Runtime runs as the reference; None for a torch source."""
        return self.onnx or self.imported

    @property
    def no_program(self) -> str:
        """Say why there is no torch program."""
        return "the source is an ONNX graph, which has no torch program" + (
            f": {self.unimported}" if self.unimported else ""
        )

    @property
    def exported(self) -> ExportedProgram:
        """Exported program; raises `NotUsableError` for an ONNX source, which has none."""
        if self.program is None:
            raise NotUsableError(self.no_program, hint="Use --backend ort")
        return self.program

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the program in plain torch: the reference of every backend."""
        return dict(zip((o.name for o in self.outputs), self.callable()(**inputs), strict=True))

    @property
    def weights(self) -> int:
        """Count the float model's weights."""
        tensors = self.exported.state_dict.values() if self.module is None else self.module.parameters()
        return sum(tensor.numel() for tensor in tensors)

    def callable(self) -> Callable[..., list[Tensor]]:
        """Return a function of keyword tensors that returns the outputs in order; build once, call often."""
        if self.module is not None:
            whole: Any = self.module
            return lambda **inputs: flatten(whole(**inputs))
        module: Any = self.exported.module()
        keywords = {spec.name: spec.keyword for spec in self.inputs}
        return lambda **inputs: flatten(module(**{keywords[name]: value for name, value in inputs.items()}))


def plain_call(
    program: ExportedProgram, inputs: tuple[TensorSpec, ...]
) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
    """Return a function of named tensors that runs only the program's operators; outputs in order.

    Calling the module of a program also flattens trees and checks sizes, which takes longer than a small model.
    """
    module: Any = program.module()
    names = list(
        reorder_kwargs({spec.keyword: spec.name for spec in inputs}, program.call_spec.in_spec).values()
    )
    for node in [n for n in module.graph.nodes if n.op == "call_module" and n.target == "_guards_fn"]:
        module.graph.erase_node(node)
    module.graph.set_codegen(CodeGen())
    module.recompile()
    forward = module.forward
    return lambda inputs: [x for x in forward(*[inputs[name] for name in names]) if isinstance(x, Tensor)]


def flatten(outputs: Any) -> list[Tensor]:
    """List the tensors of a model's output (tensor, tuple, dict, ModelOutput), in order."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
