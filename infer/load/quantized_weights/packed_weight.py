"""One packed weight of a quantized checkpoint, and the unpacking of codes that the methods share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import SourceError
from ...weights import Checkpoint, StoredCodes, Weight
from .group_codes import byte_codes

Settings = Mapping[str, Any]
_LARGEST = 1 << 40
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class PackedWeight(NamedTuple):
    """A float weight decoded from tensors of the checkpoint, and the names of these."""

    weight: Weight
    parts: tuple[str, ...]


def unpack(words: Tensor, bits: int) -> Tensor:
    """Split int32 [..., k] into codes int32 [..., k * 32 / bits], lowest bits first.

    Of 3 bits, 32 codes are a stream of three words, by whose number k is divided.
    """
    if 32 % bits:
        place = torch.arange(32) * bits
        wide = words.reshape(*words.shape[:-1], -1, bits).long() & 0xFFFFFFFF
        both = wide | torch.nn.functional.pad(wide[..., 1:], (0, 1)) << 32
        return (both[..., place // 32] >> place % 32 & (1 << bits) - 1).flatten(-2).int()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def nibbles(raw: Tensor, *, high_first: bool = False) -> Tensor:
    """Split uint8 [..., k] into codes int32 [..., 2k]."""
    halves = [raw & 15, raw >> 4]
    return torch.stack(halves[::-1] if high_first else halves, -1).flatten(-2).int()


def modules(checkpoint: Checkpoint, part: str) -> list[str]:
    """Return the names of the modules that have a tensor `part`, such as ".qweight"."""
    return [name.removesuffix(part) for name in checkpoint if name.endswith(part)]


def shape_of(checkpoint: Checkpoint, name: str, dims: int) -> tuple[int, ...]:
    """Return the shape of a part; raise `SourceError` where the checkpoint lacks it or it has other dimensions."""
    if name not in checkpoint:
        raise SourceError(f"a packed weight lacks its part {name!r}")
    found = checkpoint[name].shape
    if len(found) != dims or 0 in found:
        raise SourceError(f"expected {name!r} of {dims} dimensions above 0, got {list(found)}")
    return found


def require_shape(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    """Raise `SourceError` unless the checkpoint holds `name` in this shape."""
    if name not in checkpoint:
        raise SourceError(f"a packed weight lacks its part {name!r}")
    if checkpoint[name].shape != shape:
        raise SourceError(f"expected {name!r} of shape {list(shape)}, got {list(checkpoint[name].shape)}")
    if dtype is not None and checkpoint[name].dtype != dtype:
        raise SourceError(f"expected {name!r} in {dtype}, got {checkpoint[name].dtype}")


def bits_of(settings: Settings, name: str, known: tuple[int, ...]) -> int:
    """Return the bits per weight that the settings name; raise `SourceError` for others than `known`."""
    found = settings.get(name)
    if found not in known:
        raise SourceError(
            f"expected {' or '.join(map(str, known))} bits per weight, got {name} = {str(found)[:80]}"
        )
    return int(found)


def is_size(value: object) -> bool:
    """Return true for a number that can be the size of a dimension or of a block."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST


def exponents(stored: Tensor) -> Tensor:
    """Return 2^(e - 127) of uint8 exponents, exactly; 255 is NaN."""
    values = torch.ldexp(torch.ones(stored.shape), stored.int() - 127)
    return torch.where(stored == 255, torch.nan, values)


def scaled_bytes(
    kind: str,
    checkpoint: Checkpoint,
    weight: str,
    scale: str,
    block: tuple[int, ...],
    dtype: torch.dtype,
    parts: tuple[str, ...],
) -> PackedWeight:
    """Return a weight of int8 or float8 values [out, in] with a scale of the tensor, of rows, groups or blocks.

    `kind`: the method; `block`: rows and columns of a block where the settings name them, else (). Raises `SourceError`
    where the scale's shape fits none of these.
    """
    shape = checkpoint[weight].shape if weight in checkpoint else ()
    empty = 0 in (*shape, *checkpoint[scale].shape)
    if len(shape) != 2 or empty or checkpoint[weight].dtype not in (torch.int8, torch.float8_e4m3fn):
        raise SourceError(f"expected int8 or float8_e4m3fn [out, in] in {weight!r} beside its scale")
    outputs, inputs = shape
    of_scale = tuple(checkpoint[scale].shape)
    if len(block) == 2 and of_scale == (-(-outputs // block[0]), -(-inputs // block[1])):
        height, width = block
    elif torch.Size(of_scale).numel() == 1:
        height, width = outputs, inputs
    elif of_scale[0] == outputs and len(of_scale) < 3 and inputs % (*of_scale, 1)[1] == 0:
        height, width = 1, inputs // (*of_scale, 1)[1]
    else:
        wanted = (
            f"{scale!r} for the tensor, {outputs} rows, groups of {inputs} columns or blocks {list(block)}"
        )
        raise SourceError(f"expected {wanted}, got {list(of_scale)}")
    column = torch.arange(inputs) // width

    def rows(start: int, stop: int) -> Tensor:
        scales = checkpoint[scale].read().float().reshape(-(-outputs // height), -1)
        row = torch.arange(start, stop) // height
        return (checkpoint[weight].rows(start, stop).float() * scales[row][:, column]).to(dtype)

    def codes() -> StoredCodes:
        if checkpoint[weight].dtype != torch.int8 or height > 1:
            return StoredCodes.without(kind, f"codes of {kind} have no packed form here")
        steps = lambda start, stop: checkpoint[scale].read().reshape(outputs, -1)[start:stop]  # noqa: E731
        return byte_codes("int8", (outputs, inputs), dtype, lambda *at: checkpoint[weight].rows(*at), steps)

    return PackedWeight(Weight(dtype, shape, rows, codes=codes), parts)
