"""compressed-tensors, the format of llm-compressor: packed int4 and int8, int8 and float8 as they are, NVFP4, MXFP4.

pack-quantized   `weight_packed` int32 [out, in * bits / 32], codes offset to be unsigned; `weight_scale` [out, groups];
                 `weight_zero_point` packed along the outputs; act-order by `weight_g_idx`
int-, float-quantized, naive-quantized   `weight` in its 8-bit dtype, `weight_scale` of the tensor, rows, or groups
nvfp4-pack-quantized   `weight_packed` uint8, `weight_scale` float8 for 16 weights, `weight_global_scale`
mxfp4-pack-quantized   `weight_packed` uint8, `weight_scale` uint8, exponents for 32 weights
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import SourceError
from ...weights import Checkpoint, StoredCodes, Weight
from .group_codes import GroupedIntegers, table_codes
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
    shape_of,
    unpack,
)

_STORED = ("int-quantized", "float-quantized", "naive-quantized")
_FLOAT4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_PACKED = "pack-quantized"


def find(checkpoint: Checkpoint, settings: Settings) -> dict[str, PackedWeight]:
    """Return the packed weights; raise `SourceError` for forms and transforms that infer does not read."""
    groups = _groups(settings)
    sparsity = settings.get("sparsity_config") or {}
    dense = isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
    if settings.get("transform_config") or not dense:
        raise SourceError("weights that are sparse, or rotated by a transform, which infer does not read")
    forms = {str(group.get("format") or settings.get("format")) for group in groups}
    if unknown := forms - {*_STORED, *_FLOAT4, _PACKED}:
        raise SourceError(f"compressed-tensors in the form {min(unknown)[:80]!r}, which infer does not read")
    if len(forms) > 1 and forms & {*_FLOAT4}:
        raise SourceError(f"compressed-tensors in several forms at once ({', '.join(sorted(forms))})")
    bits = {one for group in groups if isinstance(one := group["weights"].get("num_bits"), int)}
    block = next(
        (_block(sizes) for group in groups if (sizes := group["weights"].get("block_structure"))), ()
    )
    found: dict[str, PackedWeight] = {}
    for name in modules(checkpoint, ".weight_packed"):
        if forms & {*_FLOAT4}:
            found[f"{name}.weight"] = _float4(checkpoint, name, nvidia="nvfp4-pack-quantized" in forms)
        else:
            found[f"{name}.weight"] = _integers(checkpoint, name, bits)
    for name in modules(checkpoint, ".weight_scale"):
        if f"{name}.weight" not in found:
            found[f"{name}.weight"] = _stored(checkpoint, name, block)
    return found


def _groups(settings: Settings) -> list[dict[str, Any]]:
    """Return the groups of layers whose weights are quantized."""
    found = settings.get("config_groups")
    groups = list(found.values()) if isinstance(found, dict) else []
    if not groups or not all(
        isinstance(one, dict) and isinstance(one.get("weights"), dict | None) for one in groups
    ):
        raise SourceError("expected config_groups with weights in quantization_config of compressed-tensors")
    return [one for one in groups if one.get("weights")]


def _block(sizes: Any) -> tuple[int, ...]:
    """Return the rows and columns of a block; raise `SourceError` for anything but two sizes."""
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(map(is_size, sizes)):
        raise SourceError(f"expected two sizes in block_structure, got {str(sizes)[:80]}")
    return tuple(sizes)


def _parts(checkpoint: Checkpoint, name: str, *parts: str) -> tuple[str, ...]:
    activations = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
    return tuple(one for part in (*parts, *activations) if (one := f"{name}.{part}") in checkpoint)


def _integers(checkpoint: Checkpoint, name: str, bits: set[int]) -> PackedWeight:
    require_shape(checkpoint, f"{name}.weight_shape", (2,))
    outputs, inputs = (int(size) for size in checkpoint[f"{name}.weight_shape"].read())
    words = shape_of(checkpoint, f"{name}.weight_packed", 2)[1]
    width = next(
        (one for one in sorted(b for b in bits if b in (4, 8)) if words == -(-inputs * one // 32)), None
    )
    if width is None:
        raise SourceError(
            f"{name!r} is packed in {words} words for {inputs} inputs; infer reads 4 and 8 bits"
        )
    require_shape(checkpoint, f"{name}.weight_packed", (outputs, words), torch.int32)
    scale, zero, order = (f"{name}.weight_{part}" for part in ("scale", "zero_point", "g_idx"))
    groups = shape_of(checkpoint, scale, 2)[1]
    require_shape(checkpoint, scale, (outputs, groups))
    if zero in checkpoint:
        require_shape(checkpoint, zero, (-(-outputs * width // 32), groups), torch.int32)
    group = torch.arange(inputs) // -(-inputs // groups)
    if order in checkpoint and int((found := checkpoint[order].read().long()).min()) >= 0:
        if len(found) != inputs or int(found.max()) >= groups:
            raise SourceError(f"{order!r} names groups beyond the {groups} of the scales")
        group = found

    def zeros_of(start: int, stop: int) -> Tensor:
        if zero not in checkpoint:
            return torch.full((stop - start, groups), 1 << width - 1, dtype=torch.int32)
        return unpack(checkpoint[zero].read().t(), width).t()[start:stop]

    integers = GroupedIntegers(
        *(f"compressed-tensors {width} bits", width, (outputs, inputs), checkpoint[scale].dtype),
        codes=lambda *at: unpack(checkpoint[f"{name}.weight_packed"].rows(*at), width)[:, :inputs],
        zeros=zeros_of,
        scales=lambda *at: checkpoint[scale].rows(*at),
        group=group,
    )
    stored = (f"weight_{one}" for one in ("packed", "shape", "scale", "zero_point", "g_idx"))
    return PackedWeight(integers.weight(), _parts(checkpoint, name, *stored))


def _stored(checkpoint: Checkpoint, name: str, block: tuple[int, ...]) -> PackedWeight:
    """Return a weight stored in its 8-bit dtype."""
    scale, zero = f"{name}.weight_scale", f"{name}.weight_zero_point"
    if zero in checkpoint and bool(checkpoint[zero].read().any()):
        raise SourceError(f"{zero!r} holds zero points other than 0, which infer does not read unpacked")
    parts = _parts(checkpoint, name, "weight", "weight_scale", "weight_zero_point")
    return scaled_bytes(
        "compressed-tensors", checkpoint, f"{name}.weight", scale, block, checkpoint[scale].dtype, parts
    )


def _plain(divisor: Tensor) -> bool:
    """Tell if a positive divisor and its inverse are numbers of full precision."""
    return 2.0**-100 < float(divisor) < 2.0**100


def _float4(checkpoint: Checkpoint, name: str, *, nvidia: bool) -> PackedWeight:
    packed, scale, whole = (f"{name}.weight_{part}" for part in ("packed", "scale", "global_scale"))
    outputs, half = shape_of(checkpoint, packed, 2)
    group = 16 if nvidia else 32
    if 2 * half % group:
        raise SourceError(f"{packed!r} has rows of {2 * half} weights, expected whole groups of {group}")
    require_shape(checkpoint, packed, (outputs, half), torch.uint8)
    require_shape(
        checkpoint, scale, (outputs, 2 * half // group), torch.float8_e4m3fn if nvidia else torch.uint8
    )
    steps: Callable[[Tensor], Tensor] = exponents
    divisor = torch.ones(())
    if nvidia:
        if whole not in checkpoint or torch.Size(checkpoint[whole].shape).numel() != 1:
            raise SourceError(f"expected one value in {whole!r}")
        divisor = checkpoint[whole].read().float().reshape(())
        steps = lambda stored: stored.float() / divisor  # noqa: E731

    def rows(start: int, stop: int) -> Tensor:
        values = torch.tensor(E2M1)[nibbles(checkpoint[packed].rows(start, stop))]
        return (values * steps(checkpoint[scale].rows(start, stop)).repeat_interleave(group, 1)).to(
            torch.bfloat16
        )

    def codes() -> StoredCodes:
        described = partial(
            table_codes,
            shape=(outputs, 2 * half),
            dtype=torch.bfloat16,
            table=torch.tensor(E2M1),
            codes=lambda *at: nibbles(checkpoint[packed].rows(*at)),
        )
        if not nvidia:
            return described(
                "mxfp4", scales=lambda *at: steps(checkpoint[scale].rows(*at)).to(torch.bfloat16)
            )
        if _plain(divisor) and not bool(checkpoint[scale].read().float().isnan().any()):
            return described("nvfp4", scales=lambda *at: checkpoint[scale].rows(*at), divisor=divisor)
        return described("nvfp4, scales in float32", scales=lambda *at: steps(checkpoint[scale].rows(*at)))

    parts = _parts(checkpoint, name, "weight_packed", "weight_scale", "weight_global_scale")
    return PackedWeight(Weight(torch.bfloat16, (outputs, 2 * half), rows, codes=codes), parts)
