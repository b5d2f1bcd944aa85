"""Recognition of ONNX and other protobuf models by their outermost fields, without a protobuf library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ...errors import SourceError

IR_VERSION, GRAPH = 1, 7
# Field number → wire type, of onnx.proto3's ModelProto.
FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
VARINT, BYTES, FIXED = 0, 2, {1: 8, 5: 4}  # wire types
CORE_ML_MODEL = range(200, 4000)  # fields of Core ML's `oneof Type`
CAFFE_LAYERS = {2, 100}
MAX_VARINT = 10
MAX_FIELDS = 100_000


def looks_like_onnx(path: Path) -> bool:
    """Return true for a complete ModelProto; raise `SourceError` for a truncated one."""
    size, seen, end = path.stat().st_size, set[int](), 0
    for field, kind, end in _fields(path):
        if FIELDS.get(field) != kind:
            return False
        seen.add(field)
        if end > size:
            return _cut(path, seen, end, size)
    return end == size and {IR_VERSION, GRAPH} <= seen


def foreign_protobuf(path: Path) -> tuple[str, str] | None:
    """Recognise a Core ML, TensorFlow or Caffe model by its outermost fields; return (name, hint) or None."""
    fields = list(_fields(path))
    whole = bool(fields) and fields[-1][2] == path.stat().st_size
    kinds = {field: kind for field, kind, _ in fields} if whole else {}
    if kinds.get(1) == VARINT and kinds.get(2) == BYTES and any(f in CORE_ML_MODEL for f in kinds):
        return "a Core ML model (.mlmodel)", "Give the PyTorch model it was converted from"
    if kinds == {1: VARINT, 2: BYTES}:
        return "a TensorFlow SavedModel (saved_model.pb)", "Convert its folder to ONNX with tf2onnx"
    if kinds.get(1) == BYTES and set(kinds) <= {1, 2, 3, 4} and _first_is_a_node(path):
        return "a TensorFlow graph (frozen .pb)", "Convert it to ONNX with tf2onnx"
    if kinds.get(1) == BYTES and any(kinds.get(f) == BYTES for f in CAFFE_LAYERS):
        return "a Caffe model (.caffemodel)", "Convert it to ONNX, or give a PyTorch model"
    return None


def _fields(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield field number, wire type and end of each outermost field, up to one that is none or ends behind the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for _ in range(MAX_FIELDS):
            tag = _varint(file)
            if tag is None or tag >> 3 == 0 or tag & 7 not in (VARINT, BYTES, *FIXED):
                return
            length = FIXED.get(tag & 7) or _varint(file)
            if length is None:
                return
            end = file.tell() + (0 if tag & 7 == VARINT else length)
            yield tag >> 3, tag & 7, end
            if end > size:
                return
            file.seek(end)


def _first_is_a_node(path: Path) -> bool:
    """Return true if field 1 starts like a NodeDef: a printable name (1) and operator (2)."""
    with path.open("rb") as file:
        if _varint(file) is None or _varint(file) is None:
            return False
        for field in (1, 2):
            length = _varint(file) if _varint(file) == field << 3 | BYTES else None
            if length is None or not 0 < length < 1000 or not file.read(length).isascii():
                return False
    return True


def _cut(path: Path, seen: set[int], end: int, size: int) -> bool:
    if IR_VERSION not in seen:
        return False
    raise SourceError(
        f"a truncated ONNX model: expected at least {end} bytes, got {size}",
        where=str(path),
        hint="The download or copy was cut off: fetch it again",
    )


def _varint(file: IO[bytes]) -> int | None:
    value = 0
    for shift in range(0, 7 * MAX_VARINT, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
    return None
