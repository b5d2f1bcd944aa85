"""Layers of torch for nodes whose weights are constant: Linear, convolutions, norms, Embedding, LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import convolution, quantized, recurrent
from .operators import MICROSOFT, Node

FEWEST = 256  # values of a table below which a lookup stays an operator
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


# Inputs that are the layer's own: weights and biases.
HELD = {"MatMul": (1,), "Gemm": (1, 2), "Gather": (0,), "Conv": (1, 2), "ConvTranspose": (1, 2)}
HELD["MatMulNBits"] = (1, 2, 3, 4, 5)
HELD |= dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2, 3))


@dataclass
class Layer:
    """A module that does the work of a node, and of the next one where it adds the bias."""

    module: nn.Module
    weight: str  # name of the weight in the file
    takes_next: bool = False


def layer_of(node: Node, following: Node | None, constants: Mapping[str, Tensor]) -> Layer | None:
    """Return the layer of a node with constant weights, or None where it stays an operator."""
    if node.domain == MICROSOFT and node.op == "MatMulNBits":
        return _nbits(node)
    if node.domain or 1 not in node.constants and 0 not in node.constants:
        return None
    if node.op == "MatMul":
        return _matmul(node, following, constants)
    if node.op == "Gemm":
        return _gemm(node)
    if node.op == "Gather":
        return _embedding(node)
    if node.op in ("Conv", "ConvTranspose"):
        return _made(convolution.module_of(node), node)
    if node.op in ("LSTM", "GRU", "RNN"):
        return _made(recurrent.module_of(node), node)
    return None


def call(layer: nn.Module, node: Node, inputs: list[Any]) -> Any:
    """Run a layer on the inputs of its node; those that it holds are None."""
    if node.op in ("MatMul", "MatMulNBits"):
        return layer(inputs[0])
    if node.op == "Gemm":
        return layer(inputs[0].t() if node.get("transA", 0) else inputs[0])
    if node.op == "Gather":
        ids = inputs[1]
        return layer(torch.where(ids < 0, ids + layer.num_embeddings, ids))
    if node.op in ("Conv", "ConvTranspose"):
        return convolution.call(layer, node, inputs[0])
    return recurrent.call(layer, node, inputs)


def _made(module: nn.Module | None, node: Node) -> Layer | None:
    return None if module is None else Layer(module, node.inputs[1])


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


def _gemm(node: Node) -> Layer | None:
    weight, bias = node.constants.get(1), node.constants.get(2)
    if weight is None or weight.dim() != 2 or weight.dtype not in _FLOATS or node.get("alpha", 1.0) != 1.0:
        return None
    weight = weight if node.get("transB", 0) else weight.t()
    if len(node.inputs) > 2 and node.inputs[2]:
        if bias is None or bias.dim() > 1 and bias.shape[0] != 1 or node.get("beta", 1.0) != 1.0:
            return None
        bias = bias.reshape(-1).expand(weight.shape[0])
    return Layer(_linear(weight, bias), node.inputs[1])


def _nbits(node: Node) -> Layer | None:
    """Return the layer of codes of 4 or 8 bits: its weight is what they stand for."""
    given = [i for i, name in enumerate(node.inputs) if name and i]
    if any(i not in node.constants for i in given):
        return None
    codes, scales, zeros, groups, bias = (node.constants.get(i) for i in range(1, 6))
    if codes is None or scales is None:
        return None
    weight = quantized.nbits_weight(node, codes, scales, zeros, groups).to(scales.dtype)
    return Layer(_linear(weight, bias), node.inputs[1])


def _embedding(node: Node) -> Layer | None:
    table = node.constants.get(0)
    if table is None or table.dim() != 2 or table.numel() < FEWEST or node.get("axis", 0) != 0:
        return None
    if table.dtype not in _FLOATS or 1 in node.constants:
        return None
    layer = nn.Embedding(table.shape[0], table.shape[1], device="meta", dtype=table.dtype)
    layer.weight = nn.Parameter(table, requires_grad=False)
    return Layer(layer, node.inputs[0])
