"""State dicts in `torch.save` zips: metadata by the weights-only loader, rows by offset.

Nothing is unpickled but by `torch.load(weights_only=True)` under fake tensors, so no data is read for it.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from ..errors import SourceError, UnsafeSourceError
from ..library_errors import describe
from . import Weight, in_file
from .file_blocks import FileBlocks, FileExtent
from .nested_state_dict import unwrap
from .pickle_scan import MAX_PICKLE, code_among, globals_of, inert_among, inert_types_allowed
from .torch_zip import TorchZip

MAX_RANK = 16
_DENSE = "Save it again after .to_dense() of these tensors, or without them"
# Functions that rebuild tensors without plain rows, kind, hint.
NOT_DENSE = {
    "torch._utils._rebuild_qtensor": (
        "quantized (torch.ao.quantization)",
        "Give the checkpoint of the float model, and --quant int8 to quantize it",
    ),
    "torch._utils._rebuild_sparse_tensor": ("sparse", _DENSE),
    "torch._utils._rebuild_sparse_csr_tensor": ("sparse", _DENSE),
    "torch._utils._rebuild_nested_tensor": (
        "nested",
        "Save it again with the parts of these tensors one by one",
    ),
}


class TorchFile(NamedTuple):
    """Weights of a `.pt` zip, what was unwrapped or left out, and the rest of the key that names no mapping."""

    weights: dict[str, Weight]
    notes: list[str]
    prefix: str


def open_torch(path: Path, *, verify: bool = False, key: str = "") -> TorchFile:
    """Open the state dict in a `.pt` zip, that of the mapping `key` in it where there is one."""
    file = TorchZip(path)
    if verify:
        file.verify()
    saved, inert = _metadata(file)
    tensors, notes, prefix = unwrap(saved, str(path), key)
    if inert:
        notes.append(f"not run, left as data: {', '.join(inert[:6])}")
    members = {member.offset: member.num_bytes for member in file.members.values()}
    weights = {name: _weight(name, tensor, members, file.blocks) for name, tensor in tensors.items()}
    return TorchFile(weights, notes, prefix)


def load_safely(path: Path) -> Any:
    """Call `torch.load(weights_only=True)`, its failures as `SourceError`; never anything less safe."""
    try:
        with inert_types_allowed(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported operand" in str(error):
            raise SourceError(
                "expected pickle protocol 2, got a newer one, which torch's weights-only loader does not read",
                where=str(path),
                hint="Save it again with torch.save, without pickle_protocol",
            ) from error
        raise UnsafeSourceError(
            f"torch's weights-only loader refuses it: {describe(error)}", where=str(path)
        ) from error
    except (RuntimeError, ValueError, KeyError, EOFError, AssertionError, TypeError, AttributeError) as error:
        raise SourceError(f"torch can't read it: {describe(error)}", where=str(path)) from error


def _metadata(file: TorchZip) -> tuple[Any, list[str]]:
    """Return the saved object with fake tensors, and the names of inert types in it."""
    where = str(file.path)
    if file.has("byteorder") and file.read("byteorder", 16).strip() != b"little":
        raise SourceError(
            "a big-endian checkpoint can't be read by offset", where=where, hint="Save it again here"
        )
    names = globals_of(io.BytesIO(file.read("data.pkl", MAX_PICKLE)), where)
    code = code_among(names)
    if code:
        raise UnsafeSourceError(
            f"the file holds code: {', '.join(code[:8])}",
            where=where,
            hint="Save model.state_dict() instead and give --model file.py:factory, or pass --trust-code",
        )
    for name, (kind, hint) in NOT_DENSE.items():
        if name in names:
            raise SourceError(
                f"it holds {kind} tensors; only plain dense tensors can be read", where=where, hint=hint
            )
    with FakeTensorMode():
        return load_safely(file.path), inert_among(names)


def _weight(name: str, tensor: Tensor, members: Mapping[int, int], file: FileBlocks) -> Weight:
    """Return a tensor of the file by its storage and strides; raise `SourceError` where they do not fit the file."""
    where, shape = str(file.path), tuple(tensor.shape)
    if tensor.layout != torch.strided or tensor.is_quantized or not isinstance(tensor, FakeTensor):
        kind = str(tensor.layout) if tensor.layout != torch.strided else type(tensor).__name__
        raise SourceError(f"tensor {name!r} is {kind}; only plain dense tensors can be read", where=where)
    storage = tensor.untyped_storage()
    offset, have = getattr(storage, "_checkpoint_offset", None), storage.nbytes()
    if offset is None or members.get(offset, -1) != have:
        raise SourceError(
            f"the storage of {name!r} claims {have} bytes, there are {members.get(offset or -1, 'none')}",
            where=where,
            hint="The file is damaged, or was packed again by another tool: save it with torch.save",
        )
    first, stride, itemsize = int(tensor.storage_offset()), tuple(tensor.stride()), tensor.dtype.itemsize
    if (
        len(shape) > MAX_RANK
        or any(size >= 2**31 for size in shape)
        and torch.Size(shape).numel() * itemsize > have
    ):
        raise SourceError(
            f"expected a weight, got {name!r} of shape {list(shape)} over {have} bytes", where=where
        )
    last = (
        first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if 0 not in shape
        else 0
    )
    need = torch.Size(shape).numel() * itemsize
    if need > have or (last + 1) * itemsize > max(have, itemsize):
        raise SourceError(
            f"tensor {name!r} {list(shape)} needs {need} bytes, its storage has {have}",
            where=where,
            hint="An expanded tensor: save it after .contiguous()",
        )
    if tensor.is_contiguous():
        return in_file(file, FileExtent(file.path, offset + first * itemsize, tensor.dtype, shape))
    return _strided(file, FileExtent(file.path, offset, tensor.dtype, shape), stride, first)


def _strided(file: FileBlocks, storage: FileExtent, stride: tuple[int, ...], first: int) -> Weight:
    """Return a tensor whose elements lie at strides over a storage, `first` elements behind its start."""
    shape, dtype = storage.shape, storage.dtype

    def rows(start: int, stop: int) -> Tensor:
        """Read the span that the strides cover (for a transposed weight: all of it), then select."""
        part = (stop - start, *shape[1:])
        if 0 in part:
            return torch.empty(part, dtype=dtype)
        span = 1 + sum((size - 1) * step for size, step in zip(part, stride, strict=True))
        offset = storage.offset + (first + start * stride[0]) * dtype.itemsize
        return file.tensor(dtype, (span,), offset).as_strided(part, stride).contiguous()

    return Weight(dtype, shape, rows)
