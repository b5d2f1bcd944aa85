"""Safetensors writer, one tensor at a time: neither the file nor two copies of a tensor are in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InferError, ResourceError
from .file_blocks import raw_bytes
from .safetensors_file import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
Meta = tuple[torch.dtype, tuple[int, ...]]


def write_safetensors(
    path: Path,
    metas: Mapping[str, Meta],
    give: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the tensors that `metas` describes, calling `give(name)` for each, then rename into place.

    Raises `ResourceError` when the disk is full; nothing is left at `path` then.
    """
    entries, at = {"__metadata__": dict(metadata)} if metadata else {}, 0
    # Wider items first keeps every tensor aligned, so that all can be mapped.
    order = sorted(metas, key=lambda name: -metas[name][0].itemsize)
    for name in order:
        dtype, shape = metas[name]
        end = at + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}  # type: ignore[dict-item]
        at = end
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for name in order:
                file.write(raw_bytes(_checked(name, give(name), metas[name])))
        os.replace(partial, path)
    except OSError as error:
        raise ResourceError(f"the weights could not be written: {error}", where=str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def _checked(name: str, tensor: Tensor, meta: Meta) -> Tensor:
    if (tensor.dtype, tuple(tensor.shape)) != meta:
        raise InferError(
            f"expected {name!r} as {meta[0]} {list(meta[1])}, got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor
