"""Float8 weights with scales of blocks, rows or the tensor (DeepSeek, Qwen, FBGEMM), and MXFP4 experts (GPT-OSS)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import SourceError
from ...weights import Checkpoint, StoredCodes, Weight
from .group_codes import table_codes
from .packed_weight import (
    E2M1,
    PackedWeight,
    Settings,
    exponents,
    is_size,
    modules,
    nibbles,
    require_shape,
    scaled_bytes,
)

_MX_GROUP = 32
_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub")


def find_fp8(checkpoint: Checkpoint, settings: Settings) -> dict[str, PackedWeight]:
    """Return the float8 weights: `weight_scale_inv` of blocks [out / b, in / b], or `weight_scale` of rows."""
    block = settings.get("weight_block_size")
    if block is not None and (
        not isinstance(block, list | tuple) or len(block) != 2 or not all(map(is_size, block))
    ):
        raise SourceError(f"expected two sizes in weight_block_size, got {str(block)[:80]}")
    method, found = str(settings.get("quant_method", "fp8")), dict[str, PackedWeight]()
    for ending in (".weight_scale_inv", ".weight_scale"):
        for name in modules(checkpoint, ending):
            weight, scale = f"{name}.weight", name + ending
            extra = (one for part in _ACTIVATIONS if (one := f"{name}.{part}") in checkpoint)
            found[weight] = scaled_bytes(
                *(method, checkpoint, weight, scale, tuple(block or ()), torch.bfloat16),
                parts=(weight, scale, *extra),
            )
    return found


def find_mxfp4(checkpoint: Checkpoint, settings: Settings) -> dict[str, PackedWeight]:
    """Return GPT-OSS's experts: `_blocks` uint8 [E, out, in / 32, 16] and `_scales` uint8 [E, out, in / 32].

    transformers holds them transposed: [E, in, out].
    """
    return {name: _mxfp4(checkpoint, name) for name in modules(checkpoint, "_blocks")}


def _mxfp4(checkpoint: Checkpoint, name: str) -> PackedWeight:
    shape = checkpoint[f"{name}_blocks"].shape
    if len(shape) != 4 or shape[3] != _MX_GROUP // 2:
        raise SourceError(
            f"expected blocks [experts, out, groups, 16] in {name + '_blocks'!r}, got {list(shape)}"
        )
    experts, outputs, groups, _ = shape
    require_shape(checkpoint, f"{name}_blocks", shape, torch.uint8)
    require_shape(checkpoint, f"{name}_scales", (experts, outputs, groups), torch.uint8)

    def rows(start: int, stop: int) -> Tensor:
        values = torch.tensor(E2M1)[nibbles(checkpoint[f"{name}_blocks"].rows(start, stop))]
        steps = exponents(checkpoint[f"{name}_scales"].rows(start, stop))[..., None]
        return (values * steps).flatten(2).transpose(1, 2).to(torch.bfloat16).contiguous()

    def rows_of(part: str, start: int, stop: int) -> Tensor:
        first = start // outputs
        held = checkpoint[name + part].rows(first, -(-stop // outputs)).flatten(0, 1)
        return held[start - first * outputs : stop - first * outputs]

    def codes() -> StoredCodes:
        return table_codes(
            *("mxfp4", (experts * outputs, groups * _MX_GROUP), torch.bfloat16),
            table=torch.tensor(E2M1),
            codes=lambda *at: nibbles(rows_of("_blocks", *at)).flatten(1),
            scales=lambda *at: exponents(rows_of("_scales", *at)).to(torch.bfloat16),
            experts=True,
        )

    shape, parts = (experts, groups * _MX_GROUP, outputs), (f"{name}_blocks", f"{name}_scales")
    return PackedWeight(Weight(torch.bfloat16, shape, rows, codes=codes), parts)
