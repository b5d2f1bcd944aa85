"""Safetensors files, read row by row after a strict check of the header.

The format (https://huggingface.co/docs/safetensors): 8 bytes of header length, little-endian; a JSON object
`{name: {dtype, shape, data_offsets}}`; the data, without holes. Duplicate keys, which the format forbids and
the reference reader accepts, are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import SourceError
from ..regular_files import open_regular
from . import Weight, in_file
from .file_blocks import FileBlocks, FileExtent
from .shard_index import shards, weight_map

MAX_HEADER = 100_000_000
MAX_NUMEL = 2**63 - 1
MAX_LENGTH = 1 << 48  # eight bytes of text, read as the length of a header, are far above this
INDEX = ".json"  # suffix of the index of several shards
UNREAD = ("F4", "F6_E2M3", "F6_E3M2")  # of the safetensors format, without a dtype of one element in torch
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFiles(NamedTuple):
    """Weights of safetensors files, the `__metadata__` of all, and the files."""

    weights: dict[str, Weight]
    metadata: dict[str, str]
    paths: list[Path]


def open_safetensors(paths: Path | Sequence[Path]) -> SafetensorsFiles:
    """Open one file, several shards, or the `*.safetensors.index.json` that names them."""
    named = [paths] if isinstance(paths, Path) else list(paths)
    extents: dict[str, FileExtent] = {}
    opened = SafetensorsFiles(
        {}, {}, [shard for path in named for shard in (shards(path) if path.suffix == INDEX else [path])]
    )
    for path in opened.paths:
        extents_here, metadata = read_header(path)
        if twice := sorted(extents_here.keys() & extents.keys()):
            raise SourceError(
                f"tensor {twice[0]!r} is in two shards",
                where=str(path),
                hint="Shards of two downloads are mixed: download the folder again, whole",
            )
        file = FileBlocks(path)
        extents |= extents_here
        opened.weights.update({name: in_file(file, extent) for name, extent in extents_here.items()})
        opened.metadata.update(metadata)
    for index in (path for path in named if path.suffix == INDEX):
        _check_index(index, extents)
    return opened


def _check_index(index: Path, extents: dict[str, FileExtent]) -> None:
    for name, shard in weight_map(index).items():
        if name not in extents or extents[name].path.name != shard:
            where = f"in {extents[name].path.name}" if name in extents else "in no shard"
            raise SourceError(f"the index promises {name!r} in {shard}, it is {where}", where=str(index))


def has_header(head: bytes) -> bool:
    """Return true for the first bytes of a safetensors file: the length of its header, and its beginning."""
    return int.from_bytes(head[:8], "little") < MAX_LENGTH and head[8:9] == b"{"


def read_header(path: Path) -> tuple[dict[str, FileExtent], dict[str, str]]:
    """Read each tensor's extent and the `__metadata__`; raise `SourceError` for any violation of the format."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > MAX_HEADER:
            raise _bad(path, f"expected a header of at most {MAX_HEADER} bytes, got {length}")
        if 8 + length > size:
            raise _bad(path, f"expected {8 + length} bytes of header, got a file of {size}: truncated")
        raw = file.read(length)
    entries = _parse(raw, path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _bad(path, "expected '__metadata__' to be an object")
    begin = 8 + length
    spans = [(name, *_entry(name, entry, path)) for name, entry in entries.items()]
    _check_coverage(spans, size - begin, path)
    extents = {name: FileExtent(path, begin + start, dtype, shape) for name, dtype, shape, start, _ in spans}
    return extents, {str(key): str(value) for key, value in metadata.items()}


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries_by_name: dict[str, Any] = {}
        for key, value in pairs:
            if key in entries_by_name:
                raise _bad(path, f"duplicate key {key!r} in the header")
            entries_by_name[key] = value
        return entries_by_name

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"the header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _bad(path, f"expected a JSON object as header, got {type(entries).__name__}")
    return entries


def _entry(name: str, entry: Any, path: Path) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"expected dtype, shape and data_offsets for {name!r}, got {str(entry)[:80]}")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if entry["dtype"] in UNREAD:
        raise SourceError(
            f"{name!r} has the dtype {entry['dtype']}, which is not supported",
            where=str(path),
            hint="Give the checkpoint in float32, float16 or bfloat16",
        )
    if dtype is None:
        raise _bad(path, f"dtype {entry['dtype']!r} of {name!r} can't be read. Known: {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _bad(
            path, f"expected sizes and offsets that are not negative for {name!r}, got {str(entry)[:80]}"
        )
    numel = 1
    for dim in shape:
        numel *= dim
        if numel * dtype.itemsize > MAX_NUMEL or dim > MAX_NUMEL // 8:
            raise _bad(path, f"the shape {shape} of {name!r} overflows")
    if offsets[1] - offsets[0] != numel * dtype.itemsize:
        raise _bad(
            path,
            f"expected {numel * dtype.itemsize} bytes for {name!r} {entry['dtype']} {shape}, "
            f"got {offsets[1] - offsets[0]}",
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_coverage(
    spans: list[tuple[str, torch.dtype, tuple[int, ...], int, int]], have: int, path: Path
) -> None:
    """Raise `SourceError` unless the tensors tile the data without hole, overlap or remainder."""
    at = 0
    for name, _, _, start, stop in sorted(spans, key=lambda span: (span[3], span[4])):
        if start != at:
            kind = "overlaps the tensor before it" if start < at else "leaves a hole before it"
            raise _bad(path, f"{name!r} {kind}: expected offset {at}, got {start}")
        at = stop
    if at > have:
        raise _bad(path, f"expected {at} bytes of tensors, got {have}: truncated")
    if at < have:
        raise _bad(path, f"expected {at} bytes of tensors, got {have}: {have - at} bytes belong to none")


def _bad(path: Path, message: str) -> SourceError:
    return SourceError(message, where=str(path), hint="Not a sound safetensors file: copy or save it again")
