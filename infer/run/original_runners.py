"""The original as its user has it: a module, an ONNX file or the captured graph in plain torch, each as a runner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotUsableError
from ..graph.program import Graph, TorchGraph, flatten, plain_call
from ..onnx import packages
from ..spec import TensorSpec


class Eager:
    """A graph in plain torch."""

    def __init__(self, graph: Graph) -> None:
        self.inputs, self.outputs = graph.inputs, graph.outputs
        self._names = [o.name for o in graph.outputs]
        if isinstance(graph, TorchGraph):
            self._call = plain_call(graph.program, graph.inputs)
        else:
            self._call = _by_keyword(graph.callable())

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(self._names, self._call(inputs), strict=True))

    def close(self) -> None:
        """Nothing to release."""


def _by_keyword(call: Callable[..., list[Tensor]]) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
    return lambda inputs: call(**inputs)


class UserModuleRunner:
    """The user's own module, called as its users call it: nothing is checked or renamed."""

    def __init__(self, module: nn.Module, graph: Graph) -> None:
        self._module, self._inputs, self._outputs = module.eval(), graph.inputs, graph.outputs

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            outputs = flatten(self._module(**inputs))
        named = zip(self._outputs, outputs, strict=True)
        return {spec.name: _unsqueezed(value, spec, self._inputs, inputs) for spec, value in named}

    def close(self) -> None:
        """Nothing to release."""


class UserFileRunner:
    """The user's ONNX file as the reference of a program that was imported from it."""

    def __init__(self, runner: Any, graph: Graph) -> None:
        self._runner, self.inputs, self.outputs = runner, graph.inputs, graph.outputs

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = self._runner.run(inputs)
        return {s.name: _unsqueezed(found[s.name], s, self.inputs, inputs) for s in self.outputs}

    def close(self) -> None:
        self._runner.close()


def onnx_runtime(original: Graph, device: str, *, as_written: bool = False) -> Any:
    """Open the user's ONNX file in ONNX Runtime as users do, or `as_written`: without graph optimizations."""
    if original.file is None:
        raise ValueError("expected the graph of an ONNX source")
    if reason := packages.missing("ort", "onnxruntime"):
        raise NotUsableError(f"ONNX Runtime, which an ONNX file is compared with, is absent: {reason}")
    from ..onnx.ort_session import AS_USERS, EXACT, OrtRunner

    settings = EXACT if as_written else AS_USERS
    return OrtRunner(
        original.file, original.inputs, original.outputs, device, settings=settings, as_users=True
    )


def _unsqueezed(
    value: Tensor, spec: TensorSpec, taken: Sequence[TensorSpec], inputs: Mapping[str, Tensor]
) -> Tensor:
    """Return an output with the axes that a squeeze takes from it where a batch has one row."""
    if value.dim() >= len(spec.shape):
        return value
    sizes = {
        size: count
        for spec_taken in taken
        for size, count in zip(spec_taken.shape, inputs[spec_taken.name].shape, strict=True)
    }
    shape = [sizes.get(size, 0) if isinstance(size, str) else size for size in spec.shape]
    return value.reshape(shape) if math.prod(shape) == value.numel() else value
