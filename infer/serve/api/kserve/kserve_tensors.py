"""Conversion of KServe tensors from and to numpy: JSON lists, raw little-endian bytes, and strings."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import msgspec
import numpy as np

from ....errors import InputError
from ....spec import TensorSpec

# Our dtype → KServe datatype, Triton's configuration name, bytes on the wire. bfloat16 travels as uint16.
DATATYPES: dict[str, tuple[str, str, np.dtype[Any]]] = {
    "float64": ("FP64", "TYPE_FP64", np.dtype("<f8")),
    "float32": ("FP32", "TYPE_FP32", np.dtype("<f4")),
    "float16": ("FP16", "TYPE_FP16", np.dtype("<f2")),
    "bfloat16": ("BF16", "TYPE_BF16", np.dtype("<u2")),
    "int64": ("INT64", "TYPE_INT64", np.dtype("<i8")),
    "int32": ("INT32", "TYPE_INT32", np.dtype("<i4")),
    "int16": ("INT16", "TYPE_INT16", np.dtype("<i2")),
    "int8": ("INT8", "TYPE_INT8", np.dtype("i1")),
    "uint8": ("UINT8", "TYPE_UINT8", np.dtype("u1")),
    "bool": ("BOOL", "TYPE_BOOL", np.dtype("?")),
}
SMALL = 8192  # elements
BINARY_ONLY = ("float16", "bfloat16")


def datatype(spec: TensorSpec) -> str:
    return DATATYPES[spec.dtype][0]


def shape_of(spec: TensorSpec) -> list[int]:
    """Return the shape with -1 for every symbolic size."""
    return [-1 if isinstance(size, str) else size for size in spec.shape]


def from_json(spec: TensorSpec, shape: list[int], data: list[Any], where: str) -> np.ndarray:
    """Convert flat or nested numbers of exactly `shape`; nothing is rounded, wrapped or cast."""
    if spec.dtype in BINARY_ONLY:
        raise InputError(
            f"{datatype(spec)} can't be written in JSON", where=where, hint="Send it as binary data"
        )
    kind: Any = float if spec.dtype.startswith("float") else bool if spec.dtype == "bool" else int
    nested = bool(data) and isinstance(data[0], list)
    depth = len(shape) if nested else 1
    try:
        values = msgspec.convert(data, reduce(lambda inner, _: list[inner], range(depth), kind))  # type: ignore[valid-type]
        wide: np.ndarray = np.array(values, dtype={float: np.float64, bool: np.bool_, int: np.int64}[kind])
    except msgspec.ValidationError as error:
        raise InputError(f"expected {datatype(spec)} values: {error}", where=where) from error
    except (ValueError, OverflowError) as error:
        raise InputError(f"expected numbers of {datatype(spec)} in shape {shape}", where=where) from error
    if wide.size != math.prod(shape) or (nested and list(wide.shape) != shape):
        raise InputError(
            f"shape {shape} holds {math.prod(shape)} elements, the data has shape {list(wide.shape)}",
            where=where,
        )
    return narrow(wide, spec, where).reshape(shape)


def narrow(wide: np.ndarray, spec: TensorSpec, where: str) -> np.ndarray:
    """Convert float64 or int64 values to the model's dtype; raise `InputError` for a value out of range."""
    to = DATATYPES[spec.dtype][2]
    if to.kind in "iu" and wide.size:
        info = np.iinfo(to)
        if wide.min() < info.min or wide.max() > info.max:
            raise InputError(f"a value does not fit into {datatype(spec)}", where=where)
    with np.errstate(over="ignore"):
        narrow = wide.astype(to, copy=False)
    if to.kind == "f" and not np.isfinite(narrow).all():
        raise InputError(f"a value does not fit into {datatype(spec)}", where=where)
    return narrow


def from_binary(spec: TensorSpec, shape: list[int], raw: memoryview, where: str) -> np.ndarray:
    """Return a read-only, possibly unaligned view of little-endian row-major bytes."""
    dtype = DATATYPES[spec.dtype][2]
    want = math.prod(shape) * dtype.itemsize
    if len(raw) != want:
        raise InputError(f"{datatype(spec)} {shape} takes {want} bytes, got {len(raw)}", where=where)
    if spec.dtype == "bool":
        bits = np.frombuffer(raw, dtype=np.uint8)
        if bits.size and bits.max() > 1:
            raise InputError("a BOOL byte is neither 0 nor 1", where=where)
    return np.frombuffer(raw, dtype=dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def count_nonfinite(array: np.ndarray, spec: TensorSpec) -> int:
    """Count the values that are NaN or infinite; bfloat16 is stored as uint16."""
    if spec.dtype == "bfloat16":
        return int(((array & 0x7F80) == 0x7F80).sum())
    if array.dtype.kind != "f":
        return 0
    flat = array.ravel()
    # What is not finite makes the sum of squares so; large values may, too. Larger arrays would wake BLAS' threads.
    if flat.size <= SMALL and flat.itemsize >= 4 and math.isfinite(flat.dot(flat)):
        return 0
    return array.size - int(np.isfinite(array).sum())


def to_json(array: np.ndarray) -> list[Any]:
    """Return the flat values; non-finite ones become the strings "NaN", "Infinity" and "-Infinity"."""
    flat = array.ravel()
    values = flat.tolist()
    if flat.dtype.kind != "f" or np.isfinite(flat).all():
        return values
    for index in np.flatnonzero(~np.isfinite(flat)).tolist():
        value = values[index]
        values[index] = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return values


def to_binary(array: np.ndarray, spec: TensorSpec) -> bytes:
    return np.ascontiguousarray(array, dtype=DATATYPES[spec.dtype][2]).tobytes()


def texts_from_json(shape: list[int], data: list[Any], where: str) -> list[str]:
    """Return the strings of a BYTES tensor; raise `InputError` for anything else."""
    try:
        texts = msgspec.convert(_flat(data, len(shape)), list[str])
    except msgspec.ValidationError as error:
        raise InputError(f"expected BYTES values: {error}", where=where) from error
    if len(texts) != math.prod(shape):
        raise InputError(f"shape {shape} holds {math.prod(shape)} elements, got {len(texts)}", where=where)
    return texts


def texts_from_binary(shape: list[int], raw: memoryview, where: str) -> list[str]:
    """Return the strings of a BYTES tensor: each element after its length as little-endian u32."""
    texts: list[str] = []
    at = 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        if at + 4 + size > len(raw):
            raise InputError(f"BYTES element {len(texts)} is cut short", where=where)
        try:
            texts.append(str(raw[at + 4 : at + 4 + size], "utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"BYTES element {len(texts)} is not valid UTF-8", where=where) from error
        at += 4 + size
    if len(texts) != math.prod(shape):
        raise InputError(f"shape {shape} holds {math.prod(shape)} elements, got {len(texts)}", where=where)
    return texts


def _flat(data: list[Any], depth: int) -> list[Any]:
    for _ in range(depth - 1):
        if data and all(isinstance(item, list) for item in data):
            data = [value for item in data for value in item]
    return data
