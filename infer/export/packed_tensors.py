"""Packed tensors of one weight in an artifact: decoded, or as codes with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import plugins
from ..kernels.ops.coded_weight import SUPER
from ..weights import Checkpoint, StoredCodes

_SCALES = ("weight_scale", "scale")
_FLOATS = {torch.float8_e4m3fn: "float8", torch.float16: "float16"}
_OTHERS = {
    "codes",
    "table",
    "order",
    "x_scale",
    "x_multiplier",
    "y_scale",
}  # not a row of each for a row of codes


@dataclass(frozen=True)
class PackedTensors:
    """Packed tensors of one weight, by part."""

    parts: Checkpoint
    format: str  # what stands after --quant

    def shape_of(self, part: str) -> tuple[int, ...]:
        return self.parts[part].shape

    def wrong(self, rows: int, columns: int) -> str:
        """Return the reason why the parts are not those of a weight [rows, columns], empty where they are."""
        if "codes" not in self.parts or not any(part in self.parts for part in _SCALES):
            return "it has no codes or no scale"
        bits = 8
        if "table" in self.parts:
            width = (*self.shape_of("table"), 0, 0)[1]
            bits = width.bit_length() - 1
            if width not in (4, 8, 16, 32, 64):
                return f"its table has rows of {width} values"
        if self.shape_of("codes") != (rows, columns * bits // 8):
            return f"its codes are {list(self.shape_of('codes'))}"
        for part in self.parts.keys() - _OTHERS:
            shape = self.shape_of(part)
            groups = (*shape, 1)[1]
            if len(shape) not in (1, 2) or shape[0] != rows or groups < 1:
                return f"its {part} is {list(shape)}"
            wanted = self._supers(columns) if part.startswith("super_") and len(shape) == 2 else 0
            if groups != wanted if wanted else columns % groups:
                return f"its {part} is {list(shape)}"
        two_levels = bool(self.parts.keys() & {"super_scale", "super_minimum"})
        if two_levels and columns // (*self.shape_of("scale"), 1)[1] not in (16, 32, 64, 128, 256):
            return f"its scale is {list(self.shape_of('scale'))}"
        return ""

    def _supers(self, columns: int) -> int:
        """Return how many super-scales a row has: one divisor of its float8 scales, or one for each 256 columns."""
        float8 = "scale" in self.parts and self.parts["scale"].dtype == torch.float8_e4m3fn
        return 1 if float8 else -(-columns // SUPER)

    def decoded(self) -> Tensor:
        """Return the float32 weight [N, K]; raise `ValueError` where the parts do not fit each other."""
        quantizer = plugins.get("infer.compress.formats", self.format.partition(":")[0])
        try:
            found: Tensor = quantizer.dequantize({part: self.parts[part].read() for part in self.parts})
        except (RuntimeError, KeyError, IndexError) as error:
            raise ValueError(str(error)) from error
        return found

    def codes(self) -> StoredCodes:
        """Return the tensors of a `CodedWeight` with one table; or the reason why there are none."""
        count = self.shape_of("codes")[0]
        if "x_multiplier" in self.parts:
            return StoredCodes.without(
                self.format, "its columns are scaled by the balance with the activations"
            )
        codes = self.parts["codes"].dtype
        if codes not in (torch.int8, torch.uint8):
            return StoredCodes.without(self.format, f"its codes are {_FLOATS.get(codes, codes)}")
        of_rows = "super_scale" in self.parts and len(self.shape_of("super_scale")) == 1
        if of_rows and ("table" not in self.parts or self.shape_of("table") != (1, 16)):
            return StoredCodes.without(self.format, "its tables are not one of 16 values")
        if "table" not in self.parts and "super_scale" not in self.parts and len(self.shape_of("codes")) == 2:
            scale = next(part for part in _SCALES if part in self.parts)
            if self.shape_of(scale) == (count,):
                return StoredCodes(self.format, (count, self.shape_of("codes")[1]), self._by_rows)
        bits = 8 if "table" not in self.parts else self.shape_of("table")[1].bit_length() - 1
        columns = self.shape_of("codes")[1] * 8 // bits
        order = self.parts["order"].read() if "order" in self.parts else None
        return StoredCodes(self.format, (count, columns), self._as_stored, order=order)

    def _as_stored(self, start: int, stop: int) -> dict[str, Tensor]:
        return {
            part: self.parts[part].read() if part == "table" else self.parts[part].rows(start, stop)
            for part in self.parts
            if part != "order"
        }

    def _by_rows(self, start: int, stop: int) -> dict[str, Tensor]:
        scale = next(part for part in _SCALES if part in self.parts)
        return {
            "codes": self.parts["codes"].rows(start, stop),
            "scale": self.parts[scale].rows(start, stop)[:, None],
        }
