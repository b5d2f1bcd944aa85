"""Layers of torch for nodes whose weights are constant: Linear, convolutions, norms, Embedding, LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import convolution, quantized, recurrent
from .operators import MICROSOFT, Node

FEWEST = 256  # values of a table below which a lookup stays an operator
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass
class Layer:
    """A module that does the work of a node, and of the next one where it adds the bias."""

    module: nn.Module
    weight: str  # name of the weight in the file
    takes_next: bool = False


Make = Callable[[Node, Node | None, Mapping[str, Tensor]], Layer | None]


class LayerKind(NamedTuple):
    """Layer that a node with constant weights becomes.

    `held`: inputs that are the layer's own; `make(node, following, constants)`: the layer, None where the node stays an
    operator; `call(layer, node, inputs)`: runs it, on inputs of which those that it holds are None.
    """

    held: tuple[int, ...]
    make: Make
    call: Callable[[nn.Module, Node, list[Any]], Any] = lambda layer, node, inputs: layer(inputs[0])


def layer_of(node: Node, following: Node | None, constants: Mapping[str, Tensor]) -> Layer | None:
    """Return the layer of a node with constant weights, or None where it stays an operator."""
    kind = KINDS.get((node.domain, node.op))
    return None if kind is None else kind.make(node, following, constants)


def _torch_layer(module_of: Callable[[Node], nn.Module | None]) -> Make:
    def make(node: Node, *_: Any) -> Layer | None:
        module = module_of(node)
        return None if module is None else Layer(module, node.inputs[1])

    return make


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Build a Linear of a weight [outputs, inputs], which is not copied where it lies in memory so."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta", weight.dtype)
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
    return layer


def _matmul(node: Node, following: Node | None, constants: Mapping[str, Tensor]) -> Layer | None:
    weight = node.constants.get(1)
    if weight is None or weight.dim() != 2 or weight.dtype not in _FLOATS:
        return None
    bias = None
    if following is not None and following.op == "Add" and not following.domain:
        other = next((name for name in following.inputs if name != node.outputs[0]), "")
        found = constants.get(other)
        if found is not None and found.dtype == weight.dtype and tuple(found.shape) == (weight.shape[1],):
            bias = found
    return Layer(_linear(weight.t(), bias), node.inputs[1], bias is not None)


def _gemm(node: Node, *_: Any) -> Layer | None:
    weight, bias = node.constants.get(1), node.constants.get(2)
    if weight is None or weight.dim() != 2 or weight.dtype not in _FLOATS or node.get("alpha", 1.0) != 1.0:
        return None
    weight = weight if node.get("transB", 0) else weight.t()
    if len(node.inputs) > 2 and node.inputs[2]:
        if bias is None or bias.dim() > 1 and bias.shape[0] != 1 or node.get("beta", 1.0) != 1.0:
            return None
        bias = bias.reshape(-1).expand(weight.shape[0])
    return Layer(_linear(weight, bias), node.inputs[1])


def _nbits(node: Node, *_: Any) -> Layer | None:
    """Return the layer of codes of 4 or 8 bits: its weight is what they stand for."""
    given = [i for i, name in enumerate(node.inputs) if name and i]
    if any(i not in node.constants for i in given):
        return None
    codes, scales, zeros, groups, bias = (node.constants.get(i) for i in range(1, 6))
    if codes is None or scales is None:
        return None
    weight = quantized.nbits_weight(node, codes, scales, zeros, groups).to(scales.dtype)
    return Layer(_linear(weight, bias), node.inputs[1])


def _embedding(node: Node, *_: Any) -> Layer | None:
    table = node.constants.get(0)
    if table is None or table.dim() != 2 or table.numel() < FEWEST or node.get("axis", 0) != 0:
        return None
    if table.dtype not in _FLOATS or 1 in node.constants:
        return None
    layer = nn.Embedding(table.shape[0], table.shape[1], device="meta", dtype=table.dtype)
    layer.weight = nn.Parameter(table, requires_grad=False)
    return Layer(layer, node.inputs[0])


def _call_gemm(layer: nn.Module, node: Node, inputs: list[Any]) -> Any:
    return layer(inputs[0].t() if node.get("transA", 0) else inputs[0])


def _look_up(layer: nn.Module, node: Node, inputs: list[Any]) -> Any:
    ids = inputs[1]
    return layer(torch.where(ids < 0, ids + layer.num_embeddings, ids))


_CONVOLUTION = LayerKind(
    (1, 2),
    _torch_layer(convolution.module_of),
    lambda layer, node, inputs: convolution.call(layer, node, inputs[0]),
)
_RECURRENT = LayerKind((1, 2, 3), _torch_layer(recurrent.module_of), recurrent.call)
KINDS = {
    ("", "MatMul"): LayerKind((1,), _matmul),
    ("", "Gemm"): LayerKind((1, 2), _gemm, _call_gemm),
    ("", "Gather"): LayerKind((0,), _embedding, _look_up),
    **{("", name): _CONVOLUTION for name in ("Conv", "ConvTranspose")},
    **{("", name): _RECURRENT for name in ("LSTM", "GRU", "RNN")},
    (MICROSOFT, "MatMulNBits"): LayerKind((1, 2, 3, 4, 5), _nbits),
}
