"""Captured graph: the program with its named, typed, symbolically sized inputs and outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export._tree_utils import reorder_kwargs
from torch.fx import Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from ..errors import NotUsableError
from ..spec import TensorSpec

ENCODER = "encoder"  # part of an encoder-decoder whose graph is the decoder's step


class Signature(msgspec.Struct, frozen=True):
    """Inputs and outputs of a graph, as stored in graph.json beside every compiled form."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sizes: dict[str, tuple[int, int]]
    task: str
    multiples: dict[str, int] = {}


@dataclass(frozen=True)
class Graph(ABC):
    """A captured model: what its kinds (`TorchGraph`, `ModuleGraph`, `OnnxGraph`, `OpenvinoGraph`) share."""

    instead: ClassVar[str] = ""  # what to do where a torch program is needed and there is none
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    samples: Mapping[str, Tensor]  # real inputs, batch first; at least one row
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # symbolic size → (smallest, largest)
    task: str = "tensors"
    multiples: Mapping[str, int] = field(default_factory=dict)  # symbolic size → what divides it, where not 1
    parts: Mapping[str, Graph] = field(default_factory=dict)  # more graphs of one artifact, by their folder

    @property
    def file(self) -> Path | None:
        """The user's file, which its own runtime runs as the reference; None for a torch source."""
        return None

    @property
    def exported(self) -> ExportedProgram:
        """Program of a torch graph; raises `NotUsableError` for the other kinds, which have none."""
        raise NotUsableError(self.no_program, hint=self.instead)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Operators, inputs and outputs of a torch graph's program, in order; none of the other kinds."""
        return ()

    @property
    def weights(self) -> int:
        """Count the float model's weights."""
        return sum(tensor.numel() for tensor in self.exported.state_dict.values())

    @property
    @abstractmethod
    def no_program(self) -> str:
        """Reason why there is no torch program; empty for a torch graph."""

    @abstractmethod
    def callable(self) -> Callable[..., list[Tensor]]:
        """Return a function of keyword tensors that returns the outputs in order; build once, call often."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the graph in plain torch: the reference of every backend."""
        return dict(zip((o.name for o in self.outputs), self.callable()(**inputs), strict=True))


@dataclass(frozen=True, kw_only=True)
class TorchGraph(Graph):
    """A captured torch program.

    `imported`: the ONNX file that it was imported from, which judges it. `asserts`: as of `capture`, with which its
    other forms have to be captured too. `fixed`: a sentence for people on the sizes that had to be fixed or narrowed.
    """

    program: ExportedProgram
    imported: Path | None = None
    asserts: bool = False
    fixed: str = ""

    @property
    def file(self) -> Path | None:
        return self.imported

    @property
    def exported(self) -> ExportedProgram:
        return self.program

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.program.graph.nodes)

    @property
    def no_program(self) -> str:
        return ""

    def callable(self) -> Callable[..., list[Tensor]]:
        module: Any = self.program.module()
        keywords = {spec.name: spec.keyword for spec in self.inputs}
        return lambda **inputs: flatten(module(**{keywords[name]: value for name, value in inputs.items()}))


@dataclass(frozen=True, kw_only=True)
class FileGraph(Graph):
    """A file of a runtime that runs as it is: an ONNX file, an OpenVINO IR."""

    path: Path

    @property
    def file(self) -> Path | None:
        return self.path

    def callable(self) -> Callable[..., list[Tensor]]:
        raise NotUsableError(self.no_program, hint=self.instead)


@dataclass(frozen=True, kw_only=True)
class OnnxGraph(FileGraph):
    """An ONNX file that runs as it is.

    `unimported`: why it is no torch program. `calibration`: rows for its activation ranges; they judge nothing.
    """

    instead = "Use --backend ort"

    unimported: str = ""
    calibration: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def no_program(self) -> str:
        why = f": {self.unimported}" if self.unimported else ""
        return f"the source is an ONNX graph, which has no torch program{why}"


@dataclass(frozen=True, kw_only=True)
class OpenvinoGraph(FileGraph):
    """An OpenVINO IR that runs as it is: no other engine reads one."""

    instead = "Use --backend openvino"

    @property
    def no_program(self) -> str:
        return "the source is an OpenVINO IR, which OpenVINO alone runs"


@dataclass(frozen=True, kw_only=True)
class ModuleGraph(Graph):
    """A float original that its own module runs: of a language model that is captured as a step, the whole is not."""

    module: nn.Module

    @property
    def no_program(self) -> str:
        return "the model is captured as a step"

    @property
    def weights(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def callable(self) -> Callable[..., list[Tensor]]:
        module: Any = self.module
        return lambda **inputs: flatten(module(**inputs))


@dataclass(frozen=True, kw_only=True)
class StreamedGraph(ModuleGraph):
    """A float original whose weights are streamed from disk: its module runs layer by layer, too large to capture."""

    instead = "Use --load meta"

    @property
    def no_program(self) -> str:
        return "the weights of the float model are streamed from disk, so that it has no captured program"


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
