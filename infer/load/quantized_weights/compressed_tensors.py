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
from ..weights.stored_codes import StoredCodes
from .group_codes import integer_codes, sorted_group, table_codes
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
    shape_of,
    unpack,
)

_STORED = ("int-quantized", "float-quantized", "naive-quantized")
_FLOAT4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_PACKED = "pack-quantized"


def find(reader: IndexedReader, settings: Settings) -> dict[str, PackedWeight]:
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
    for name in modules(reader, ".weight_packed"):
        if forms & {*_FLOAT4}:
            found[f"{name}.weight"] = _float4(reader, name, nvidia="nvfp4-pack-quantized" in forms)
        else:
            found[f"{name}.weight"] = _integers(reader, name, bits)
    for name in modules(reader, ".weight_scale"):
        if f"{name}.weight" not in found:
            found[f"{name}.weight"] = _stored(reader, name, block)
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


def _parts(reader: IndexedReader, name: str, *parts: str) -> tuple[str, ...]:
    activations = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
    return tuple(one for part in (*parts, *activations) if (one := f"{name}.{part}") in reader)


def _integers(reader: IndexedReader, name: str, bits: set[int]) -> PackedWeight:
    require_shape(reader, f"{name}.weight_shape", (2,))
    outputs, inputs = (int(size) for size in reader.read(f"{name}.weight_shape"))
    words = shape_of(reader, f"{name}.weight_packed", 2)[1]
    width = next(
        (one for one in sorted(b for b in bits if b in (4, 8)) if words == -(-inputs * one // 32)), None
    )
    if width is None:
        raise SourceError(
            f"{name!r} is packed in {words} words for {inputs} inputs; infer reads 4 and 8 bits"
        )
    require_shape(reader, f"{name}.weight_packed", (outputs, words), torch.int32)
    scale, zero, order = (f"{name}.weight_{part}" for part in ("scale", "zero_point", "g_idx"))
    groups = shape_of(reader, scale, 2)[1]
    require_shape(reader, scale, (outputs, groups))
    if zero in reader:
        require_shape(reader, zero, (-(-outputs * width // 32), groups), torch.int32)
    group = torch.arange(inputs) // -(-inputs // groups)
    if order in reader and int((found := reader.read(order).long()).min()) >= 0:
        if len(found) != inputs or int(found.max()) >= groups:
            raise SourceError(f"{order!r} names groups beyond the {groups} of the scales")
        group = found
    middle = 1 << width - 1

    def rows(start: int, stop: int) -> Tensor:
        codes = unpack(reader.rows(f"{name}.weight_packed", start, stop), width)[:, :inputs] - middle
        scales = reader.rows(scale, start, stop)
        if zero in reader:
            zeros = unpack(reader.read(zero).t(), width).t()[start:stop] - middle
            codes = codes - zeros[:, group]
        return (codes.float() * scales.float()[:, group]).to(scales.dtype)

    def zeros_of(start: int, stop: int) -> Tensor:
        if zero not in reader:
            return torch.full((stop - start, groups), middle, dtype=torch.int32)
        return unpack(reader.read(zero).t(), width).t()[start:stop]

    def codes() -> StoredCodes:
        return integer_codes(
            *(f"compressed-tensors {width} bits", width, (outputs, inputs), reader.dtype(scale)),
            codes=lambda *at: unpack(reader.rows(f"{name}.weight_packed", *at), width)[:, :inputs],
            zeros=zeros_of,
            scales=lambda *at: reader.rows(scale, *at),
            group=sorted_group(group, inputs // groups),
        )

    parts = _parts(
        reader, name, *(f"weight_{one}" for one in ("packed", "shape", "scale", "zero_point", "g_idx"))
    )
    return PackedWeight((outputs, inputs), reader.dtype(scale), rows, parts, codes)


def _stored(reader: IndexedReader, name: str, block: tuple[int, ...]) -> PackedWeight:
    """Return a weight stored in its 8-bit dtype."""
    scale, zero = f"{name}.weight_scale", f"{name}.weight_zero_point"
    if zero in reader and bool(reader.read(zero).any()):
        raise SourceError(f"{zero!r} holds zero points other than 0, which infer does not read unpacked")
    parts = _parts(reader, name, "weight", "weight_scale", "weight_zero_point")
    return scaled_bytes(reader, f"{name}.weight", scale, block, reader.dtype(scale), parts)


def _plain(divisor: Tensor) -> bool:
    """Tell if a positive divisor and its inverse are numbers of full precision."""
    return 2.0**-100 < float(divisor) < 2.0**100


def _float4(reader: IndexedReader, name: str, *, nvidia: bool) -> PackedWeight:
    packed, scale, whole = (f"{name}.weight_{part}" for part in ("packed", "scale", "global_scale"))
    outputs, half = shape_of(reader, packed, 2)
    group = 16 if nvidia else 32
    if 2 * half % group:
        raise SourceError(f"{packed!r} has rows of {2 * half} weights, expected whole groups of {group}")
    require_shape(reader, packed, (outputs, half), torch.uint8)
    require_shape(reader, scale, (outputs, 2 * half // group), torch.float8_e4m3fn if nvidia else torch.uint8)
    steps: Callable[[Tensor], Tensor] = exponents
    divisor = torch.ones(())
    if nvidia:
        if whole not in reader or torch.Size(reader.shape(whole)).numel() != 1:
            raise SourceError(f"expected one value in {whole!r}")
        divisor = reader.read(whole).float().reshape(())
        steps = lambda stored: stored.float() / divisor  # noqa: E731

    def rows(start: int, stop: int) -> Tensor:
        values = torch.tensor(E2M1)[nibbles(reader.rows(packed, start, stop))]
        return (values * steps(reader.rows(scale, start, stop)).repeat_interleave(group, 1)).to(
            torch.bfloat16
        )

    def codes() -> StoredCodes:
        described = partial(
            table_codes,
            shape=(outputs, 2 * half),
            dtype=torch.bfloat16,
            table=torch.tensor(E2M1),
            codes=lambda *at: nibbles(reader.rows(packed, *at)),
        )
        if not nvidia:
            return described("mxfp4", scales=lambda *at: steps(reader.rows(scale, *at)).to(torch.bfloat16))
        if _plain(divisor) and not bool(reader.read(scale).float().isnan().any()):
            return described("nvfp4", scales=lambda *at: reader.rows(scale, *at), divisor=divisor)
        return described("nvfp4, scales in float32", scales=lambda *at: steps(reader.rows(scale, *at)))

    parts = _parts(reader, name, "weight_packed", "weight_scale", "weight_global_scale")
    return PackedWeight((outputs, 2 * half), torch.bfloat16, rows, parts, codes)
