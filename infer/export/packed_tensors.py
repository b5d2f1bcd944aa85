"""Packed tensors of one weight in an artifact: decoded, or as codes with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import plugins
from ..kernels.ops.bitpack import LEVELS
from ..kernels.ops.groupwise_codes import SUPER
from ..load.weights import StoredCodes, WeightReader

_SCALES = ("weight_scale", "scale")


@dataclass(frozen=True)
class PackedTensors:
    """Packed tensors of one weight by part, and the names that they have in the file."""

    reader: WeightReader
    names: Mapping[str, str]
    format: str  # what stands after --quant

    def shape_of(self, part: str) -> tuple[int, ...]:
        return tuple(self.reader.shape(self.names[part]))

    def read(self, part: str) -> Tensor:
        return self.reader.read(self.names[part])

    def rows(self, part: str, start: int, stop: int) -> Tensor:
        return self.reader.rows(self.names[part], start, stop)

    def decoded(self) -> Tensor:
        """Return the float32 weight [N, K]."""
        quantizer = plugins.get("infer.compress.formats", self.format.partition(":")[0])
        found: Tensor = quantizer.dequantize({part: self.read(part) for part in self.names})
        return found

    def codes(self) -> StoredCodes:
        """Return the codes with scales as `kernels.ops.groupwise_codes` has them; or the reason why there are none."""
        count = self.shape_of("codes")[0]
        if "x_multiplier" in self.names:
            return StoredCodes.without(
                self.format, "its columns are scaled by the balance with the activations"
            )
        if self.reader.dtype(self.names["codes"]) not in (torch.int8, torch.uint8):
            return StoredCodes.without(self.format, "its codes are float8")
        if "row_scale" in self.names:
            if self.shape_of("table") != (1, 16):
                return StoredCodes.without(self.format, "its tables are not one of 16 values")
            return self._described(self._by_table, 2 * self.shape_of("codes")[1])
        if "table" not in self.names and "super_scale" not in self.names and len(self.shape_of("codes")) == 2:
            scale = next(part for part in _SCALES if part in self.names)
            if self.shape_of(scale) == (count,):
                return self._described(self._by_rows, self.shape_of("codes")[1])
        bits = 8 if "table" not in self.names else self.shape_of("table")[1].bit_length() - 1
        columns = self.shape_of("codes")[1] * 8 // bits
        order = self.read("order") if "order" in self.names else None
        return StoredCodes(self.format, (count, columns), self._as_stored, order=order)

    def _described(self, rows: Any, columns: int) -> StoredCodes:
        return StoredCodes(self.format, (self.shape_of("codes")[0], columns), rows)

    def _as_stored(self, start: int, stop: int) -> dict[str, Tensor]:
        return {
            part: self.read(part) if part == "table" else self.rows(part, start, stop)
            for part in self.names
            if part != "order"
        }

    def _by_rows(self, start: int, stop: int) -> dict[str, Tensor]:
        scale = next(part for part in _SCALES if part in self.names)
        return {"codes": self.rows("codes", start, stop), "scale": self.rows(scale, start, stop)[:, None]}

    def _by_table(self, start: int, stop: int) -> dict[str, Tensor]:
        found = {part: self.rows(part, start, stop) for part in ("codes", "scale")}
        step = self.rows("row_scale", start, stop).float() / LEVELS
        columns = 2 * found["codes"].shape[1]
        supers = step[:, None].expand(-1, -(-columns // SUPER)).contiguous()
        return {**found, "table": self.read("table"), "super_scale": supers}
