"""Why a layer stays float, in one sentence with figures; the rules that several formats share."""

from __future__ import annotations

from torch import Tensor, nn

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
    """Options of an embedding that change rows as they are read."""
    if layer.max_norm is not None:
        return f"max_norm={layer.max_norm} rescales its rows at each use"
    if layer.sparse:
        return "its gradients are sparse: it is made for training"
    return None


def refuses_table_format(layer: nn.Module, name: str, group: int) -> str | None:
    """The rules of nf4 and cluster: Linear and Embedding, rows of whole groups."""
    if not isinstance(layer, nn.Linear | nn.Embedding):
        return f"{name} shrinks Linear and Embedding layers, not {type(layer).__name__}"
    if isinstance(layer, nn.Embedding) and (reason := refuses_embedding(layer)):
        return reason
    columns = layer.weight.shape[1]
    if columns % group:
        return f"weight has {columns} columns; {name} blocks are {group} wide"
    return too_small(layer)
