"""GPTQ and AWQ: codes in int32 words of the transposed weight, zero points and scales for groups of inputs.

Layouts of AutoGPTQ and GPTQModel (`qweight` [in * bits / 32, out], packed along the inputs; act-order by `g_idx`) and
of AutoAWQ's GEMM form (`qweight` [in, out * 4 / 32], packed along the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7).
Values are rounded once to the dtype of the scales, as those libraries do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import SourceError
from ...weights import Checkpoint
from .group_codes import GroupedIntegers
from .packed_weight import (
    PackedWeight,
    Settings,
    bits_of,
    modules,
    require_shape,
    shape_of,
    unpack,
)

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight codes lies in a word


def find_gptq(checkpoint: Checkpoint, settings: Settings) -> dict[str, PackedWeight]:
    """Return the packed weights of a GPTQ checkpoint of 2, 3, 4 or 8 bits."""
    bits, form = bits_of(settings, "bits", (2, 3, 4, 8)), settings.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise SourceError(
            f"GPTQ codes in the form {repr(form)[:80]}, which infer does not read; known: gptq, gptq_v2"
        )
    if settings.get("pack_dtype", "int32") != "int32":
        raise SourceError(
            f"GPTQ codes packed in {str(settings['pack_dtype'])[:80]}, which infer does not read; known: int32"
        )
    offset = 1 if form == "gptq" else 0  # zero points are stored less one
    return {
        f"{name}.weight": _gptq(checkpoint, name, bits, offset) for name in modules(checkpoint, ".qweight")
    }


def find_awq(checkpoint: Checkpoint, settings: Settings) -> dict[str, PackedWeight]:
    """Return the packed weights of an AWQ checkpoint in the GEMM form."""
    bits_of(settings, "bits", (4,))
    form = str(settings.get("version", "gemm")).lower()
    if form != "gemm":
        raise SourceError(f"AWQ codes in the form {repr(form)[:80]}, which infer does not read; known: gemm")
    return {f"{name}.weight": _awq(checkpoint, name) for name in modules(checkpoint, ".qweight")}


def _gptq(checkpoint: Checkpoint, name: str, bits: int, offset: int) -> PackedWeight:
    words, outputs = shape_of(checkpoint, f"{name}.qweight", 2)
    groups, inputs = shape_of(checkpoint, f"{name}.scales", 2)[0], words * 32 // bits
    if bits == 3 and (words % 3 or outputs % 32):
        raise SourceError(
            f"expected multiples of 32 rows and columns in {name!r} of 3 bits, got {outputs} and {words * 32 / 3:g}"
        )
    require_shape(checkpoint, f"{name}.qweight", (words, outputs), torch.int32)
    require_shape(checkpoint, f"{name}.scales", (groups, outputs))
    require_shape(checkpoint, f"{name}.qzeros", (groups, -(-outputs * bits // 32)), torch.int32)
    parts = [f"{name}.{part}" for part in ("qweight", "qzeros", "scales")]
    group = torch.arange(inputs) // -(-inputs // groups)
    if f"{name}.g_idx" in checkpoint:
        parts.append(f"{name}.g_idx")
        require_shape(checkpoint, parts[-1], (inputs,))
        group = checkpoint[parts[-1]].read().long()
        if int(group.min()) < 0 or int(group.max()) >= groups:
            raise SourceError(f"{parts[-1]!r} names groups beyond the {groups} of the scales")

    dtype = checkpoint[f"{name}.scales"].dtype

    def codes_of(start: int, stop: int) -> Tensor:
        return unpack(checkpoint[f"{name}.qweight"].read()[:, start:stop].t(), bits)

    def zeros_of(start: int, stop: int) -> Tensor:
        return unpack(checkpoint[f"{name}.qzeros"].read(), bits)[:, start:stop] + offset

    def scales_of(start: int, stop: int) -> Tensor:
        return checkpoint[f"{name}.scales"].read()[:, start:stop]

    integers = GroupedIntegers(
        *(f"gptq {bits} bits", bits, (outputs, inputs), dtype),
        codes=codes_of,
        zeros=lambda *at: zeros_of(*at).t(),
        scales=lambda *at: scales_of(*at).t(),
        group=group,
    )
    return PackedWeight(integers.weight(), tuple(parts))


def _awq(checkpoint: Checkpoint, name: str) -> PackedWeight:
    inputs, words = shape_of(checkpoint, f"{name}.qweight", 2)
    groups, outputs = shape_of(checkpoint, f"{name}.scales", 2)[0], words * 8
    require_shape(checkpoint, f"{name}.qweight", (inputs, words), torch.int32)
    require_shape(checkpoint, f"{name}.scales", (groups, outputs))
    require_shape(checkpoint, f"{name}.qzeros", (groups, words), torch.int32)
    if inputs % groups:
        raise SourceError(f"{name!r} has {inputs} inputs in {groups} groups, which do not divide them")
    order = torch.tensor(_AWQ_ORDER)

    def columns(words: Tensor, start: int, stop: int) -> Tensor:
        codes = unpack(words[:, start // 8 : -(-stop // 8)], 4)
        codes = codes.reshape(len(words), -1, 8)[..., order].flatten(1)
        return codes[:, start % 8 :][:, : stop - start]

    dtype = checkpoint[f"{name}.scales"].dtype

    def of(part: str, start: int, stop: int) -> Tensor:
        return columns(checkpoint[f"{name}.{part}"].read(), start, stop)

    integers = GroupedIntegers(
        *("awq 4 bits", 4, (outputs, inputs), dtype),
        codes=lambda *at: of("qweight", *at).t(),
        zeros=lambda *at: of("qzeros", *at).t(),
        scales=lambda start, stop: checkpoint[f"{name}.scales"].read()[:, start:stop].t(),
        group=torch.arange(inputs) // (inputs // groups),
    )
    return PackedWeight(
        integers.weight(), tuple(f"{name}.{part}" for part in ("qweight", "qzeros", "scales"))
    )
