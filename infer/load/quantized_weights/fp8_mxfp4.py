"""Float8 weights with scales of blocks, rows or the tensor (DeepSeek, Qwen, FBGEMM), and MXFP4 experts (GPT-OSS)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import SourceError
from ..weights.stored_codes import StoredCodes
from .group_codes import table_codes
from .packed_weight import (
    E2M1,
    IndexedReader,
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


def find_fp8(reader: IndexedReader, settings: Settings) -> dict[str, PackedWeight]:
    """Return the float8 weights: `weight_scale_inv` of blocks [out / b, in / b], or `weight_scale` of rows."""
    block = settings.get("weight_block_size")
    if block is not None and (
        not isinstance(block, list | tuple) or len(block) != 2 or not all(map(is_size, block))
    ):
        raise SourceError(f"expected two sizes in weight_block_size, got {str(block)[:80]}")
    found: dict[str, PackedWeight] = {}
    for ending in (".weight_scale_inv", ".weight_scale"):
        for name in modules(reader, ending):
            found[f"{name}.weight"] = _fp8(reader, f"{name}.weight", name + ending, tuple(block or ()))
    return found


def _fp8(reader: IndexedReader, weight: str, scale: str, block: tuple[int, ...]) -> PackedWeight:
    stem = weight.removesuffix("weight")
    extra = tuple(one for part in _ACTIVATIONS if (one := stem + part) in reader)
    return scaled_bytes(reader, weight, scale, block, torch.bfloat16, (weight, scale, *extra))


def find_mxfp4(reader: IndexedReader, settings: Settings) -> dict[str, PackedWeight]:
    """Return GPT-OSS's experts: `_blocks` uint8 [E, out, in / 32, 16] and `_scales` uint8 [E, out, in / 32].

    transformers holds them transposed: [E, in, out].
    """
    return {name: _mxfp4(reader, name) for name in modules(reader, "_blocks")}


def _mxfp4(reader: IndexedReader, name: str) -> PackedWeight:
    shape = reader.shape(f"{name}_blocks")
    if len(shape) != 4 or shape[3] != _MX_GROUP // 2:
        raise SourceError(
            f"expected blocks [experts, out, groups, 16] in {name + '_blocks'!r}, got {list(shape)}"
        )
    experts, outputs, groups, _ = shape
    require_shape(reader, f"{name}_blocks", shape, torch.uint8)
    require_shape(reader, f"{name}_scales", (experts, outputs, groups), torch.uint8)

    def rows(start: int, stop: int) -> Tensor:
        values = torch.tensor(E2M1)[nibbles(reader.rows(f"{name}_blocks", start, stop))]
        steps = exponents(reader.rows(f"{name}_scales", start, stop))[..., None]
        return (values * steps).flatten(2).transpose(1, 2).to(torch.bfloat16).contiguous()

    def rows_of(part: str, start: int, stop: int) -> Tensor:
        first = start // outputs
        held = reader.rows(name + part, first, -(-stop // outputs)).flatten(0, 1)
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
    return PackedWeight(shape, torch.bfloat16, rows, parts, codes)
