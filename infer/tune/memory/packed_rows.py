"""Rows of a packed weight, decoded tile by tile, so that no weight is ever whole in float, or multiplied as packed.

Weights in the layout `lut` are decoded through a table of the values that one byte stands for (two codes of 4 bits,
four of 2 bits), or one pair of 3-bit codes: bit-equal to `CodedWeight.decode` and about 30 times faster than it. All
other formats are decoded by their own `dequantize`.

`inference_linear` computes as inference does, activations to int8 included. On a CPU with native kernels each tile of
rows is packed for them and dropped after the product: packing takes 5 % of the time of a product with 512 tokens, and a
second copy of the weights would double their memory. Elsewhere the portable operators compute, which are those of GPU
kernels where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ... import plugins
from ...compress.packed_weight import Packed
from ...compress.quantizer import Quantizer
from ...kernels import cpu
from ...kernels.cpu.weight_layout import BALANCED, CODES, INT8, WEIGHT, pack_layer, packed_from, sizes
from ...kernels.ops.bitpack import bits_of, unpack
from ...kernels.ops.coded_weight import LUT, CodedWeight, layout_of, row_blocks, rows_of

TILE = 1 << 21  # weights of one decoded tile: 8 MiB of float32
PACKED_TILE = 1 << 24  # weights of one tile that is packed for the kernels of inference
# The unit that one look-up decodes: its bits, and a dtype as wide as its values in float32.
_UNITS = {
    2: (8, torch.complex128),
    3: (6, torch.int64),
    4: (8, torch.int64),
    6: (6, torch.float32),
}


@dataclass(frozen=True)
class PackedRows:
    """A packed weight [num_rows, num_columns] that gives tiles of rows.

    `tensors` are those of the format; `shared` names the ones that all rows have in common. Nothing is copied.
    """

    tensors: Mapping[str, Tensor]
    decode: Callable[[Mapping[str, Tensor]], Tensor] = field(repr=False)
    shared: frozenset[str] = frozenset()

    @classmethod
    def of(cls, packed: Packed) -> PackedRows:
        """Return the rows of a layer's packed tensors."""
        return cls(packed.tensors(), packed.decode, quantizer_of(packed).SHARED)

    @property
    def num_rows(self) -> int:
        return int(self.tensors["codes"].shape[0])

    @property
    def num_columns(self) -> int:
        codes = self.tensors["codes"]
        if codes.dtype == torch.uint8:
            return int(codes.shape[1]) * 8 // bits_of(self.tensors["table"])
        return int(codes.shape[1:].numel())

    @property
    def device(self) -> torch.device:
        return self.tensors["codes"].device

    def tiles(self, size: int | None = None) -> list[tuple[int, int]]:
        """Return row ranges of at most `size` (`TILE`) weights, cut where a table ends."""
        return row_blocks(self.num_rows, self.num_columns, size or TILE)

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the tensors of rows `start` to `stop`; `start` is a multiple of `TABLE_ROWS`."""
        whole = {name for name, tensor in self.tensors.items() if name in self.shared or tensor.dim() == 0}
        rows = rows_of({n: t for n, t in self.tensors.items() if n not in whole}, start, stop)
        return {name: rows.get(name, tensor) for name, tensor in self.tensors.items()}

    def section(self, start: int, stop: int) -> PackedRows:
        """Return rows `start` to `stop` as a weight of their own."""
        return PackedRows(self.part(start, stop), self.decode, self.shared)

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode rows `start` to `stop` in float32 and round them to `dtype`: [stop - start, num_columns]."""
        part = self.part(start, stop)
        is_lut = layout_of(part) == LUT
        weight = decode_lut_rows(CodedWeight.of(part)) if is_lut else self.decode(part)
        return weight.reshape(stop - start, -1).to(dtype)


def is_abstract(tensor: Tensor) -> bool:
    """Return true for a tensor without data, of which only the shape is asked."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def note_workspace(like: Tensor, num_bytes: int) -> None:
    """Allocate and drop so many bytes, for those who count allocations of a run without data."""
    like.new_empty(num_bytes, dtype=torch.uint8)


def quantizer_of(packed: Packed) -> Quantizer:
    """Return the format that packed tensors are of."""
    return cast(Quantizer, plugins.get("infer.compress.formats", packed.format.partition(":")[0]))


def decode_lut_rows(weight: CodedWeight) -> Tensor:
    """Decode as `CodedWeight.decode`, bit-equal, a weight in the layout `lut`: float32 [N, K]."""
    codes, table, _, _ = weight.lut_tensors()
    bits = weight.bits
    width, unit = _UNITS[bits]
    per_unit = width // bits
    index = (codes if width == 8 else unpack(codes, width)).to(torch.int32)
    values = _unit_values(table.float(), bits, per_unit)
    if weight.has_tables:
        index = index + (weight.table_of_rows() << width)[:, None]
    picked = values.view(unit).reshape(-1).index_select(0, index.reshape(-1)).view(torch.float32)
    steps, columns = weight.steps(), index.shape[1] * per_unit
    grouped = picked.view(codes.shape[0], steps.shape[1], columns // max(steps.shape[1], 1))
    return grouped.mul_(steps[:, :, None]).view(codes.shape[0], columns)


def _unit_values(table: Tensor, bits: int, per_unit: int) -> Tensor:
    """Return the values of every unit: [T, 2**bits] → [T * 2**(bits * per_unit), per_unit], the lowest code first."""
    every = torch.arange(1 << (bits * per_unit), device=table.device)
    shifts = torch.arange(per_unit, device=table.device) * bits
    code = (every[:, None] >> shifts) & ((1 << bits) - 1)
    return table[:, code].reshape(-1, per_unit).contiguous()


def inference_linear(x: Tensor, weight: PackedRows, bias: Tensor | None, quantizer: Quantizer) -> Tensor:
    """Compute x [M, K] · weight [N, K]ᵀ + bias in x's dtype; on the CPU bit-equal to a lowered graph's layer."""
    kind = native_kind(weight.tensors) if x.device.type == "cpu" and x.dtype != torch.float64 else None
    if kind is None or cpu.why_not() is not None:
        return quantizer.linear(x, weight.tensors, bias)
    y = x.new_empty((x.shape[0], weight.num_rows))
    values, step = _input(x, weight.tensors, kind)
    bias = None if bias is None else bias.float()
    for start, stop in weight.tiles(PACKED_TILE):
        part = None if bias is None else bias[start:stop].contiguous()
        y[:, start:stop] = _native(values, weight.part(start, stop), kind, step, part)
    return y


def native_kind(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the kind of native layer that computes with the tensors of a format; None where there is none."""
    codes = tensors["codes"]
    if codes.dim() != 2 or codes.dtype not in (torch.uint8, torch.int8):
        return None
    if "weight_scale" in tensors:
        return WEIGHT
    if layout_of(tensors) is not None:
        return CODES
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
    step = [None] if found == INT8 and kind == CODES else step
    operands = pack_layer(found, layer, held)
    op = getattr(torch.ops.infer, f"linear_{found}_packed").default
    return op(x, *operands, *step, bias, *sizes(found, layer, layer.rows))
