"""Header of a GGUF file: metadata and the places of tensors, checked before anything is read.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: magic, version, counts; key and
typed value pairs; name, sizes (innermost first), type and offset of each tensor; then, aligned, the data.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import SourceError
from ...regular_files import open_regular
from .block_types import BLOCK_TYPES, UNREAD_TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16  # key and value pairs
MAX_TENSORS = 1 << 18
MAX_KEY = 1 << 16  # bytes
MAX_STRING = 1 << 26  # bytes
MAX_DIMS = 4
MAX_BYTES = 1 << 50  # of one tensor: sizes beyond are damage
DEFAULT_ALIGNMENT = 32
STRING, ARRAY, BOOL = 8, 9, 7
# Number of a value's type → NumPy dtype.
NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
# Number of a type in the file → the type.
_TYPES = {kind.number: kind for kind in BLOCK_TYPES.values()}


@dataclass(frozen=True)
class GgufTensor:
    """Place of one tensor: `shape` outermost first, `offset` in bytes from the beginning of the file."""

    path: Path
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.num_bytes


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (arrays of numbers as NumPy arrays, of strings as lists) and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of one file; raise `SourceError` for any violation of the format."""
    with open_regular(path) as file:
        return _HeaderParser(path, file).parse()


def _bad(path: Path, message: str) -> SourceError:
    return SourceError(message, where=str(path), hint="Not a sound GGUF file: download or convert it again")


class _HeaderParser:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0

    def parse(self) -> GgufHeader:
        if self.take(4) != MAGIC:
            raise _bad(self.path, "expected the magic bytes GGUF at the beginning")
        version = self.integer("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big-endian file" if swapped in VERSIONS else f"version {version}"
            raise _bad(self.path, f"expected GGUF version 2 or 3, little-endian; got a {what}")
        tensors = self.count("<Q", MAX_TENSORS, "tensors")
        entries = self.count("<Q", MAX_ENTRIES, "key and value pairs")
        metadata = self.metadata(entries)
        places = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise _bad(self.path, f"expected general.alignment to be a power of two from 8, got {alignment}")
        begin = -(-self.at // alignment) * alignment
        return GgufHeader(metadata, self.placed(places, begin, alignment))

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise _bad(
                self.path,
                f"expected {count} bytes of header at {self.at}, got a file of {self.size}: truncated",
            )
        raw = self.file.read(count)
        if len(raw) != count:
            raise _bad(self.path, f"expected {count} bytes of header at {self.at}, got {len(raw)}: truncated")
        self.at += count
        return raw

    def integer(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def count(self, form: str, most: int, of: str) -> int:
        found = self.integer(form)
        if found > most:
            raise _bad(self.path, f"expected at most {most} {of}, got {found}")
        return found

    def text(self, most: int = MAX_STRING) -> str:
        raw = self.take(self.count("<Q", most, "bytes of a string"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _bad(self.path, f"expected UTF-8 in a string at {self.at - len(raw)}: {error}") from error

    def metadata(self, entries: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(entries):
            key = self.text(MAX_KEY)
            if key in found:
                raise _bad(self.path, f"duplicate key {key!r}")
            found[key] = self.value(self.integer("<I"), key)
        return found

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(key)
        if kind not in NUMBERS:
            raise _bad(self.path, f"unknown type {kind} of the value of {key!r}")
        dtype = np.dtype(NUMBERS[kind])
        raw = self.take(dtype.itemsize)
        if kind == BOOL and raw not in (b"\0", b"\1"):
            raise _bad(self.path, f"expected 0 or 1 for the boolean {key!r}, got {raw[0]}")
        return np.frombuffer(raw, dtype)[0].item()

    def array(self, key: str) -> Any:
        kind, count = self.integer("<I"), self.integer("<Q")
        if kind == STRING:
            if count > (self.size - self.at) // 8:
                raise _bad(self.path, f"expected {count} strings in {key!r}, more than the file can hold")
            return [self.text() for _ in range(count)]
        if kind not in NUMBERS:
            held = "arrays" if kind == ARRAY else f"values of unknown type {kind}"
            raise _bad(self.path, f"expected an array of numbers or strings in {key!r}, got {held}")
        dtype = np.dtype(NUMBERS[kind])
        if count > (self.size - self.at) // dtype.itemsize:
            raise _bad(self.path, f"expected {count} values in {key!r}, more than the file can hold")
        raw = self.take(count * dtype.itemsize)
        if kind == BOOL and raw.strip(b"\0\1"):
            raise _bad(self.path, f"expected 0 and 1 in the boolean array {key!r}")
        return np.frombuffer(raw, dtype)

    def tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name = self.text(MAX_KEY)
        dims = self.count("<I", MAX_DIMS, f"dimensions of {name!r}")
        sizes = tuple(self.integer("<Q") for _ in range(dims))
        number, offset = self.integer("<I"), self.integer("<Q")
        if number not in _TYPES:
            named = UNREAD_TYPES.get(number, f"number {number}")
            raise SourceError(
                f"tensor {name!r} has type {named}, which infer does not read",
                where=str(self.path),
                hint=f"Known: {', '.join(BLOCK_TYPES)}",
            )
        kind = _TYPES[number]
        if not sizes or 0 in sizes:
            raise _bad(self.path, f"expected sizes above 0 for {name!r}, got {list(sizes)}")
        numel = 1
        for size in sizes:
            numel *= size
            if numel > MAX_BYTES:
                raise _bad(self.path, f"the sizes {list(sizes)} of {name!r} overflow")
        if sizes[0] % kind.block:
            raise _bad(
                self.path,
                f"expected rows of {name!r} ({kind.name}) to be a multiple of {kind.block}, got {sizes[0]}",
            )
        return name, kind, sizes[::-1], offset

    def placed(
        self, found: list[tuple[str, BlockType, tuple[int, ...], int]], begin: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors by name; raise `SourceError` where two overlap or one leaves the file."""
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in found:
            if name in tensors:
                raise _bad(self.path, f"duplicate tensor {name!r}")
            if offset % alignment:
                raise _bad(self.path, f"the offset {offset} of {name!r} is not a multiple of {alignment}")
            tensors[name] = GgufTensor(self.path, kind, shape, begin + offset)
        end, before = begin, ""
        for name, place in sorted(tensors.items(), key=lambda item: item[1].offset):
            if place.offset < end:
                raise _bad(self.path, f"{name!r} overlaps {before!r} before it")
            end, before = place.offset + place.num_bytes, name
            if end > self.size:
                raise _bad(
                    self.path, f"expected {end} bytes for {name!r}, got a file of {self.size}: truncated"
                )
        return tensors
