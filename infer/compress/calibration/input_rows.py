"""Inputs of layers as the rows of their matrix products."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..layer_kinds import CONVOLUTIONS, pair, product_input


def input_rows(layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """Reshape an input to one column per input feature, or per input channel of a convolution."""
    if isinstance(layer, CONVOLUTIONS):
        channels = -2 if isinstance(layer, nn.Conv1d) else -3
        return x.movedim(channels, -1).reshape(-1, x.shape[channels])
    x = product_input(layer, x)
    rows = x.reshape(-1, x.shape[-1])
    if mask is None or x.shape[:-1].numel() != mask.numel() or x.shape[0] not in (len(mask), mask.numel()):
        return rows
    return rows[mask.reshape(-1).bool()]


def input_patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Unfold the input of a convolution to the rows of its product: [outputs, I * kh * kw]."""
    if isinstance(layer, nn.Conv1d):
        x = x.unsqueeze(-2)
    batch = x if x.dim() == 4 else x[None]
    if isinstance(layer.padding, str):
        batch = F.pad(batch, layer._reversed_padding_repeated_twice)
    padding = (0, 0) if isinstance(layer.padding, str) else pair(layer.padding, 0)
    size, dilation, stride = pair(layer.kernel_size, 1), pair(layer.dilation, 1), pair(layer.stride, 1)
    columns = F.unfold(batch, size, dilation, padding, stride)
    return columns.transpose(1, 2).reshape(-1, columns.shape[1])
