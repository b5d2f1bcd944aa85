"""Linear layers on packed weights computed as inference computes them, activations to int8 included.

On a CPU with native kernels each tile of rows is packed for them and dropped after the product: packing takes 5 % of
the time of a product with 512 tokens, and a second copy of the weights would double their memory. Elsewhere the
portable operators compute, which are those of GPU kernels where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...compress.quantizer import Quantizer
from ...kernels import cpu
from ...kernels.cpu.weight_layout import BALANCED, GROUPWISE, INT8, LUT, WEIGHT, pack_layer, packed_from
from .packed_rows import PackedRows

TILE = 1 << 24  # weights of one packed tile


def inference_linear(x: Tensor, weight: PackedRows, bias: Tensor | None, quantizer: Quantizer) -> Tensor:
    """Compute x [M, K] · weight [N, K]ᵀ + bias in x's dtype; on the CPU bit-equal to a lowered graph's layer."""
    kind = native_kind(weight.tensors) if x.device.type == "cpu" and x.dtype != torch.float64 else None
    if kind is None or cpu.why_not() is not None:
        return quantizer.linear(x, weight.tensors, bias)
    y = x.new_empty((x.shape[0], weight.num_rows))
    values, step = _input(x, weight.tensors, kind)
    bias = None if bias is None else bias.float()
    for start, stop in weight.tiles(TILE):
        part = None if bias is None else bias[start:stop].contiguous()
        y[:, start:stop] = _native(values, weight.part(start, stop), kind, step, part)
    return y


def native_kind(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the kind of native layer that computes with the tensors of a format; None where there is none."""
    codes = tensors["codes"]
    if codes.dim() != 2 or codes.dtype not in (torch.uint8, torch.int8):
        return None
    if "row_scale" in tensors:
        return LUT
    if "weight_scale" in tensors:
        return WEIGHT
    if tensors["scale"].dim() == 2:
        return GROUPWISE
    return BALANCED if "x_multiplier" in tensors and "x_scale" not in tensors else INT8


def _input(x: Tensor, tensors: Mapping[str, Tensor], kind: str) -> tuple[Tensor, list[Tensor | None]]:
    """Return the float32 input of the native layer, and the operand that says how it is quantized."""
    if "order" in tensors:
        x = x.index_select(-1, tensors["order"])
    if kind == BALANCED:
        if x.dtype == torch.float32:
            return x.contiguous(), [tensors["x_multiplier"].float()]
        return (x * tensors["x_multiplier"]).to(x.dtype).float(), [None]
    if "x_scale" in tensors and "x_multiplier" in tensors:
        x = (x * tensors["x_multiplier"]).to(x.dtype)
    step = [tensors["x_scale"].float().reshape(1) if "x_scale" in tensors else None] if kind == INT8 else []
    return x.float().contiguous(), step


def _native(
    x: Tensor, tensors: Mapping[str, Tensor], kind: str, step: list[Tensor | None], bias: Tensor | None
) -> Tensor:
    held = {**tensors, "scale": tensors["weight_scale"]} if kind == WEIGHT else dict(tensors)
    names = {name: name for name in held if name not in ("weight_scale", "order", "y_scale", "x_multiplier")}
    kind = INT8 if kind == BALANCED and step == [None] else kind
    found, layer = packed_from(kind, names, held)
    step = [None] if found == INT8 and kind == LUT else step
    operands = pack_layer(found, layer, held)
    last = [layer.rows] if found == LUT else [layer.rows, layer.columns]
    last = [layer.layout, layer.rows] if found == GROUPWISE else last
    op = getattr(torch.ops.infer, f"linear_{found}_packed").default
    return op(x, *operands, *step, bias, *last)
