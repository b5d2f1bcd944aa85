"""Writer of GGUF files (version 3): metadata, then tensors one at a time, as float or as blocks of codes.

The blocks are those of ggml's `quantize_row_*_ref`, bit for bit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..load.gguf.block_types import BLOCK_TYPES, BlockType, Parts
from ..load.gguf.header import DEFAULT_ALIGNMENT, MAGIC

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
ROWS = 1 << 22  # weights quantized at a time


@dataclass(frozen=True)
class OutputTensor:
    """Tensor of the file: its type, its shape outermost first, and `rows(start, stop)` in float of its flat rows.

    `encoded(start, stop)` gives the bytes of these rows, uint8 [rows, bytes], where codes are carried over.
    """

    type: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    encoded: Callable[[int, int], Tensor] | None = None

    @property
    def kind(self) -> BlockType:
        return BLOCK_TYPES[self.type]

    @property
    def num_rows(self) -> int:
        return torch.Size(self.shape[:-1]).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.kind.row_bytes(self.shape[-1])

    def bytes_of(self, start: int, stop: int) -> Tensor:
        """Return the bytes of flat rows, uint8."""
        if self.encoded is not None:
            return self.encoded(start, stop)
        return encode(self.rows(start, stop).float(), self.type)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, OutputTensor]) -> None:
    """Write a file; values of `metadata` are bool, int, float, str, or lists of one of these."""
    head = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _string(key) + _typed(value)
    at = 0
    for name, tensor in tensors.items():
        head += _string(name) + struct.pack(
            f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape)
        )
        head += struct.pack("<IQ", tensor.kind.number, at)
        at += -(-tensor.num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    with path.open("wb") as file:
        file.write(head)
        _pad(file)
        for tensor in tensors.values():
            step = max(ROWS // tensor.shape[-1], 1)
            for start in range(0, tensor.num_rows, step):
                stop = min(start + step, tensor.num_rows)
                file.write(tensor.bytes_of(start, stop).contiguous().numpy().tobytes())
            _pad(file)


def encode(rows: Tensor, kind: str) -> Tensor:
    """Return float32 rows [n, K] as the bytes of a type, uint8 [...]."""
    if kind in _FLOATS:
        return rows.to(_FLOATS[kind]).contiguous().view(torch.uint8)
    return BLOCK_TYPES[kind].join(_BLOCKS[kind](rows.reshape(-1, 32)))


def _q8_0(blocks: Tensor) -> Parts:
    step = blocks.abs().amax(1, keepdim=True) / 127
    return {"codes": _away_from_zero(blocks * _inverse(step)), "scale": step}


def _q4_0(blocks: Tensor) -> Parts:
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    step = largest / -8
    codes = (blocks.double() * _inverse(step).double() + 8.5).float().trunc().clamp(0, 15).to(torch.uint8)
    return {"codes": codes, "scale": step}


def _q4_1(blocks: Tensor) -> Parts:
    least = blocks.amin(1, keepdim=True)
    step = (blocks.amax(1, keepdim=True) - least) / 15
    codes = ((blocks - least) * _inverse(step) + 0.5).trunc().clamp(0, 15).to(torch.uint8)
    return {"codes": codes, "scale": step, "minimum": least}


def _inverse(step: Tensor) -> Tensor:
    return torch.where(step == 0, 0.0, 1 / step)


def _away_from_zero(values: Tensor) -> Tensor:
    """Round halves away from zero, as C's `roundf`."""
    whole = values.abs().floor()
    return torch.copysign(whole + (values.abs() - whole >= 0.5).float(), values)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
TYPES = (*_FLOATS, *_BLOCKS)
KEEP = "keep"  # codes of the source as they are, where a type holds them


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    if not isinstance(value, list):
        return struct.pack("<I", _kind(value)) + _value(_kind(value), value)
    kind = _kind(value[0])
    kind = INT32 if kind == UINT32 else kind  # llama.cpp opens types of tokens as int32 only
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_value(kind, one) for one in value)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return UINT32 if value >= 0 else INT32
    return FLOAT32 if isinstance(value, float) else STRING


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    return struct.pack({BOOL: "<?", UINT32: "<I", INT32: "<i", FLOAT32: "<f"}[kind], value)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


def flat_rows(values: Sequence[Tensor] | Tensor) -> Callable[[int, int], Tensor]:
    """Return the rows of a tensor in memory, its last dimension the columns."""
    held = values if isinstance(values, Tensor) else torch.stack(list(values))
    rows = held.reshape(-1, held.shape[-1])
    return lambda start, stop: rows[start:stop]
