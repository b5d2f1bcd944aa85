"""Rules that several formats share, with the reason why a layer stays float."""

from __future__ import annotations

from torch import Tensor, nn

from ..kernels.expert_layers import ExpertLinear
from ..kernels.ops.bitpack import TABLE_ROWS
from .layer_kinds import CONVOLUTIONS, TRANSPOSED, is_looked_up, is_product, name_of, rows_of

SMALLEST = 64 * 64


def too_small(layer: nn.Module) -> str | None:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    count = weight.numel()
    return (
        f"weight has {count} values; below {SMALLEST} there is too little to gain"
        if count < SMALLEST
        else None
    )


def refuses_embedding(layer: nn.Embedding) -> str | None:
    """Refuse options of an embedding that change rows as they are read."""
    if layer.max_norm is not None:
        return f"max_norm={layer.max_norm} rescales its rows at each use"
    if layer.sparse:
        return "its gradients are sparse: it is made for training"
    return None


def refuses_padding(layer: nn.Conv1d | nn.Conv2d, name: str) -> str | None:
    """Refuse padding other than an equal number of zeros on both sides."""
    if layer.padding_mode != "zeros":
        return f"padding_mode={layer.padding_mode!r}; {name} pads with zeros"
    if layer.padding == "same" and any(
        d * (k - 1) % 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)
    ):
        return f"padding='same' of an even kernel {layer.kernel_size} is not symmetric"
    return None


def refuses_transposed(layer: nn.ConvTranspose1d | nn.ConvTranspose2d) -> str | None:
    """Refuse transposed convolutions that are no single product over a pixel's channels."""
    if layer.groups > 1:
        return f"groups={layer.groups}; a quantized {type(layer).__name__} has one group"
    if any(p >= s for p, s in zip(layer.output_padding, layer.stride, strict=True)):
        return f"output_padding={layer.output_padding} is not smaller than stride={layer.stride}"
    return None


def refuses_table_format(layer: nn.Module, name: str, group: int) -> str | None:
    """Refuse rows of partial groups; of convolutions, all formats but cluster."""
    if isinstance(layer, CONVOLUTIONS) and name == "cluster":
        columns = layer.weight[0].numel()
        if reason := refuses_padding(layer, name):
            return reason
        return too_small(layer) if columns % group == 0 else _not_whole(columns, name, group)
    if isinstance(layer, ExpertLinear) and name == "cluster" and layer.out_features % TABLE_ROWS:
        return f"experts have {layer.out_features} rows; {TABLE_ROWS} rows of one share a table of cluster"
    if not isinstance(layer, ExpertLinear) and not is_product(layer) and not is_looked_up(layer):
        return f"{name} shrinks Linear and Embedding layers, not {name_of(layer)}"
    if isinstance(layer, nn.Embedding) and (reason := refuses_embedding(layer)):
        return reason
    if isinstance(layer, TRANSPOSED) and (reason := refuses_transposed(layer)):
        return reason
    columns = rows_of(layer).shape[1]
    return too_small(layer) if columns % group == 0 else _not_whole(columns, name, group)


def _not_whole(columns: int, name: str, group: int) -> str:
    wide = f"takes them in blocks of {group}" if ":" in name else f"blocks are {group} wide"
    return f"weight has {columns} columns; {name} {wide}"
