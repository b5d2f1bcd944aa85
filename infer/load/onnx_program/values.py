"""Values of an ONNX graph in torch: tensors, sizes that stay symbolic, and the dtypes of both.

`Shape` and what is computed from it are numbers that `torch.export` has to know by name, not by value. They are carried
as Python numbers (`int` or `SymInt`) in a small array of objects, and become tensors only where a tensor reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import onnx

MOST = 64  # values that are carried as numbers; longer ones are data

# TensorProto.DataType → dtype. Integers of 2 and 4 bits are held in 8.
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64, 14: torch.complex64,
    15: torch.complex128, 16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz, 21: torch.uint8, 22: torch.int8, 25: torch.uint8, 26: torch.int8,
}  # fmt: skip
NAMES = {0: "undefined", 8: "string", 23: "float4e2m1", 24: "float8e8m0"}
NARROW = {21: (0, 15), 22: (-8, 7), 25: (0, 3), 26: (-2, 1)}  # integers of 4 and 2 bits: their ranges


class Unsupported(Exception):
    """A form of a node that is not implemented; the importer adds the node's name."""


def torch_dtype(number: int) -> torch.dtype:
    """Return the dtype of a `TensorProto.DataType`; raises `Unsupported` for strings and the like."""
    if number not in DTYPES:
        raise Unsupported(f"dtype {NAMES.get(number, number)}")
    return DTYPES[number]


@dataclass(frozen=True)
class Sizes:
    """A few numbers, some of them symbolic, of the shape of `array` and of a tensor's dtype."""

    array: np.ndarray  # of objects: int, SymInt, float, SymFloat or bool
    dtype: torch.dtype = torch.int64

    @staticmethod
    def of(values: Any, dtype: torch.dtype = torch.int64) -> Sizes:
        """Build sizes of nested numbers; results of float32 are rounded to it."""
        array = np.array(values, dtype=object)
        if dtype == torch.float32:
            rounded = [float(np.float32(v)) if isinstance(v, float) else v for v in array.reshape(-1)]
            array = np.array(rounded, dtype=object).reshape(array.shape)
        return Sizes(array, dtype)

    @staticmethod
    def known(tensor: Tensor) -> Sizes | None:
        """Return a small constant as numbers, or None where it is data."""
        few = tensor.numel() <= MOST and not tensor.is_complex()
        return Sizes.of(tensor.tolist(), tensor.dtype) if few else None

    def list(self) -> list[Any]:
        """Return the numbers in order."""
        return list(self.array.reshape(-1))

    def tensor(self) -> Tensor:
        """Return the numbers as a tensor."""
        values = self.list()
        if all(isinstance(value, int | float) for value in values):
            return torch.tensor(values, dtype=self.dtype).reshape(self.array.shape)
        parts = [torch.full((1,), value, dtype=self.dtype) for value in values]
        return torch.cat(parts).reshape(self.array.shape)


Value = Tensor | Sizes | list[Tensor] | None


def as_tensor(value: Any) -> Any:
    """Turn sizes into a tensor; everything else stays."""
    return value.tensor() if isinstance(value, Sizes) else value


def numbers(value: Any) -> list[Any]:
    """Return the values of an input of sizes, axes or counts; of data they are read, which no capture follows."""
    if isinstance(value, Sizes):
        return value.list()
    return list(value.reshape(-1).tolist())


def tensor_of(proto: onnx.TensorProto, folder: Path) -> Tensor:
    """Return the tensor of a `TensorProto`; external data is mapped from its file, not read."""
    from onnx import numpy_helper

    dtype, shape = torch_dtype(proto.data_type), tuple(proto.dims)
    if proto.data_location == 1:
        fields = {entry.key: entry.value for entry in proto.external_data}
        path, offset = folder / fields["location"], int(fields.get("offset", "0"))
        count = math.prod(shape)
        if proto.data_type in NARROW:
            raise Unsupported("integers of 4 or 2 bits in an external file")
        if not count:
            return torch.zeros(shape, dtype=dtype)
        # "c": a private mapping that torch may call writable; nothing is written to the file
        raw = np.memmap(path, np.uint8, "c", offset, (count * dtype.itemsize,))
        return torch.from_numpy(raw).view(dtype).reshape(shape)
    array = numpy_helper.to_array(proto)
    if proto.data_type in NARROW:
        array = array.astype(np.int8 if NARROW[proto.data_type][0] else np.uint8)
    return from_numpy(array, dtype)


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return an array as a tensor of `dtype`, also of those that numpy knows by ml_dtypes only."""
    array = np.require(array, requirements=["C", "W"]).reshape(array.shape)
    if dtype.is_floating_point and dtype.itemsize < 4 and dtype != torch.float16:
        return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).reshape(array.shape)
    return torch.from_numpy(array)


def whole(value: Any) -> Any:
    """Return a number as an integer where it is one in value: `2.0` times a symbolic size stays a size."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def number_of(dtype: torch.dtype) -> int:
    """Return the `TensorProto.DataType` of a dtype."""
    return next(number for number, known in DTYPES.items() if known == dtype)


def prod(values: Sequence[Any]) -> Any:
    """Multiply numbers, symbolic ones included."""
    result: Any = 1
    for value in values:
        result = result * value
    return result


def is_static(value: Any) -> bool:
    """Return true for a number that is known while a program is captured."""
    return isinstance(value, int | float)
