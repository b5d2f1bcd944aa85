"""Is it an ONNX ModelProto? Its outermost fields, walked without a protobuf library or reading tensors."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from ..errors import SourceError

IR_VERSION, GRAPH = 1, 7
# Field number → wire type, of onnx.proto3's ModelProto.
FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
MAX_VARINT = 10
MAX_FIELDS = 100_000


def looks_like_onnx(path: Path) -> bool:
    """True for a whole ModelProto, False for other bytes; raises `SourceError` for one that is cut off."""
    size = path.stat().st_size
    seen: set[int] = set()
    with path.open("rb") as file:
        for _ in range(MAX_FIELDS):
            if file.tell() == size:
                break
            tag = _varint(file)
            if tag is None or FIELDS.get(tag >> 3) != tag & 7:
                return False
            seen.add(tag >> 3)
            value = _varint(file)
            if value is None:
                return False
            if tag & 7 == 2:
                end = file.tell() + value
                if end > size:
                    return _cut(path, seen, end, size)
                file.seek(end)
    return {IR_VERSION, GRAPH} <= seen


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
