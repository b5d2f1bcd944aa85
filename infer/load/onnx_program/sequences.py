"""Sequences, optionals and losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .operators import Node, operator
from .values import Sizes, Unsupported, as_tensor


@operator("SequenceConstruct")
def construct(node: Node, *parts: Tensor) -> list[Tensor]:
    return list(parts)


@operator("SequenceEmpty")
def empty(node: Node) -> list[Tensor]:
    return []


@operator("SequenceAt", sizes=(1,))
def at(node: Node, sequence: list[Tensor], place: list[int]) -> Tensor:
    return sequence[place[0]]


@operator("SequenceInsert", sizes=(2,))
def insert(node: Node, sequence: list[Tensor], value: Tensor, place: list[int] | None = None) -> list[Tensor]:
    where = len(sequence) if place is None else place[0]
    where = where + len(sequence) if where < 0 else where
    return [*sequence[:where], value, *sequence[where:]]


@operator("SequenceErase", sizes=(1,))
def erase(node: Node, sequence: list[Tensor], place: list[int] | None = None) -> list[Tensor]:
    where = (len(sequence) - 1 if place is None else place[0]) % len(sequence)
    return [*sequence[:where], *sequence[where + 1 :]]


@operator("SequenceLength")
def length(node: Node, sequence: list[Tensor]) -> Sizes:
    return Sizes.of(len(sequence))


@operator("SplitToSequence")
def split_to_sequence(node: Node, x: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
    axis = node.get("axis", 0)
    if sizes is None:
        parts = list(torch.split(x, 1, axis))
        return parts if node.get("keepdims", 1) else [part.squeeze(axis) for part in parts]
    wanted: Any = int(sizes) if sizes.dim() == 0 else sizes.tolist()
    return list(torch.split(x, wanted, axis))


@operator("ConcatFromSequence")
def concat_from_sequence(node: Node, sequence: list[Tensor]) -> Tensor:
    axis = node.get("axis")
    return torch.stack(sequence, axis) if node.get("new_axis", 0) else torch.cat(sequence, axis)


@operator("SequenceMap")
def sequence_map(
    node: Node, blocks: Mapping[str, Any], values: Mapping[str, Any], *inputs: Any
) -> tuple[Any, ...]:
    body, rows = blocks["body"], []
    for i in range(len(inputs[0])):
        given = [value[i] if isinstance(value, list) else value for value in inputs]
        rows.append([as_tensor(v) for v in body.run(dict(zip(body.inputs, given, strict=True)), values)])
    return tuple([row[i] for row in rows] for i in range(len(body.outputs)))


@operator("Optional")
def optional(node: Node, value: Any = None) -> Any:
    return value


@operator("OptionalGetElement")
def get_element(node: Node, value: Any) -> Any:
    return value


@operator("OptionalHasElement")
def has_element(node: Node, value: Any = None) -> Sizes:
    return Sizes.of(value is not None, torch.bool)


@operator("NegativeLogLikelihoodLoss")
def nll_loss(node: Node, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    ignored = node.get("ignore_index", -100)
    return F.nll_loss(
        x, target.to(torch.int64), weight, ignore_index=ignored, reduction=node.get("reduction", "mean")
    )


@operator("SoftmaxCrossEntropyLoss")
def softmax_loss(node: Node, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Any:
    scores = torch.log_softmax(x, 1)
    loss = nll_loss(node, scores, target, weight)
    return (loss, scores) if node.wants(1) else loss


@operator("Adagrad", "Adam", "Momentum", "Gradient", domain="ai.onnx.preview.training")
def training(node: Node, *inputs: Any) -> Tensor:
    raise Unsupported("training")
