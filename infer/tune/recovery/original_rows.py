"""Float weights that the packed ones of a quantized model were made of, from the float original."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...compress.layer_kinds import is_layer, rows_of
from ...compress.packed_weight import Packed, PackedLayer
from .trainable_layers import is_table

LARGEST_ERROR = 0.5  # squared, as a share of the weight's; cluster:2 has 0.15, another weight 1 and more


@torch.no_grad()
def original_rows(student: nn.Module, teacher: nn.Module) -> dict[Packed, Tensor]:
    """Return float weights [N, K] by packed weight in a table format, without copies where they are float32.

    A layer that the teacher does not have by this name (recurrent layers are split), or with another weight (a batch
    norm was folded into the student's) has none: its codes can't be trained.
    """
    found: dict[Packed, Tensor] = {}
    for name, layer in student.named_modules():
        if not isinstance(layer, PackedLayer) or not is_table(layer) or layer.packed in found:
            continue
        try:
            own = teacher.get_submodule(name)
        except AttributeError:
            continue
        if not is_layer(own):
            continue
        rows = rows_of(own).detach()
        rows = rows.reshape(len(rows), -1).float()
        decoded = layer.packed.decode(layer.packed.tensors()).float()
        decoded = decoded.reshape(len(decoded), -1)
        if rows.shape == decoded.shape and _is_near(decoded, rows):
            found[layer.packed] = rows
    return found


def _is_near(decoded: Tensor, rows: Tensor) -> bool:
    error, size = (decoded - rows).square().sum(), rows.square().sum()
    return bool(error <= LARGEST_ERROR * size)
