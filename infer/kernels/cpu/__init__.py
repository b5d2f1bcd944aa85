"""Native CPU kernels behind `infer::*_packed`: brought by a wheel or compiled at first use, or absent with a reason.

Weights are packed for the instruction set at hand when an artifact opens (`pack_lut4`, `pack_int8`); artifacts hold
the portable form only, so that they run on any machine.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import NotUsableError
from ..ops.bitpack import GROUP
from ..ops.coded_weight import CodedWeight
from .build import compiled, library
from .compile_library import source_digest

OFF = "INFER_NATIVE"  # 0: compute with the portable operators; all: compile every instruction set, not this CPU's alone
ROWS = 16  # output rows of a packed block
_LOADED: ctypes.CDLL | None = None
_FAILED: str | None = None


def load(progress: Callable[[int, int, str], None] | None = None) -> ctypes.CDLL:
    """Return the library with its operators registered, compiled first where needed; raises `NotUsableError`."""
    global _LOADED, _FAILED
    if _LOADED is None:
        if reason := _refused():
            raise NotUsableError(f"the native kernels are not usable: {reason}", hint="Run 'infer doctor'")
        try:
            path = library(progress)
            # Global, so that compiled graphs find the C functions in it.
            loaded = ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
            for name in ("infer_isa", "infer_isas"):
                getattr(loaded, name).restype = ctypes.c_char_p
            if not loaded.infer_isas():
                raise NotUsableError(f"{path} has no instruction set of this CPU")
        except (NotUsableError, OSError) as error:
            _FAILED = str(error)
            raise NotUsableError(f"the native kernels are not usable: {error}") from error
        _LOADED = loaded
    return _LOADED


def _refused() -> str | None:
    return f"switched off by {OFF}=0" if os.environ.get(OFF) == "0" else _FAILED


def why_not(progress: Callable[[int, int, str], None] | None = None) -> str | None:
    """Return the reason why the native kernels can't be used, or None; compiles them on first use."""
    if reason := _refused():
        return reason
    try:
        load(progress)
    except NotUsableError as error:
        return str(error)
    return None


def built() -> bool:
    """Return true if the next use compiles nothing: the library is loaded, cached, or not available."""
    return _LOADED is not None or _refused() is not None or compiled()


def isa() -> str:
    """Return the instruction set in use: amx, avx512_vnni, avx_vnni, avx2, neon_dotprod or scalar."""
    return str(load().infer_isa().decode())


def isas() -> list[str]:
    """Return the instruction sets that this CPU can run."""
    return str(load().infer_isas().decode()).split(",")


def use_isa(name: str) -> None:
    """Compute with another instruction set; weights packed before must be packed again. For tests."""
    if load().infer_set_isa(name.encode()):
        raise NotUsableError(f"this CPU has no {name}", hint=f"It has {', '.join(isas())}")


@functools.cache
def fingerprint() -> str:
    """Return the sources that a compiled graph with native operators depends on; `none` without kernels.

    One value for a library of a wheel and one compiled here, by any compiler.
    """
    return "none" if _refused() else source_digest()


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class FusedProgramTimes(NamedTuple):
    """Seconds that the first thread spent in fused programs, by kind of operation."""

    quantizing: float
    multiplying: float
    rows: float
    waiting: float
    attention: float


def watch_fused_programs(*, on: bool) -> FusedProgramTimes:
    """Start or stop timing and return the times since the last call; zeros where no native kernel was loaded."""
    spent = (ctypes.c_double * len(FusedProgramTimes._fields))()
    if _LOADED is not None and _refused() is None:
        load().infer_chain_watch(ctypes.c_int(on), spent)
    return FusedProgramTimes(*spent)


def sample(logits: Tensor, asked: np.ndarray) -> list[int]:
    """Sample a token of each row of float32 [rows, vocab]; -1 for rows that are not numbers.

    `llm.engine.sampling.sampler_cpu` is the reference. asked float64 [rows, 5]: temperature (0: the most likely token),
    top_k, top_p, min_p, place in [0, 1).
    """
    rows, vocab = logits.shape
    logits, asked = logits.contiguous(), np.ascontiguousarray(asked, np.float64)
    if logits.dtype != torch.float32 or asked.shape != (rows, 5):
        raise TypeError(f"expected float32 logits and [{rows}, 5] wishes, got {logits.dtype}, {asked.shape}")
    tokens = np.empty(rows, np.int64)
    load().infer_sample(
        *(_pointer(logits), ctypes.c_int64(rows), ctypes.c_int64(vocab)),
        *(ctypes.c_void_p(asked.ctypes.data), ctypes.c_void_p(tokens.ctypes.data)),
    )
    return tokens.tolist()


def blocks(rows: int) -> int:
    """Blocks of `ROWS` output rows."""
    return -(-rows // ROWS)


def pack_lut4(weight: CodedWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack a weight in the layout `lut` of 2, 3 or 4 bits: codes, scale, table, row_scale of the native layout.

    codes uint8 [blocks, K/64, 512], scale int8 [blocks, K/group, 16], table int8 [blocks, 16] and row_scale float32
    [blocks, 16]; rows beyond N have scale 0.
    """
    weight.check()
    codes, table, scale, row_scale = weight.lut_tensors()
    codes, scale = codes.contiguous(), scale.contiguous()
    table, row_scale = table.float().contiguous(), row_scale.float().contiguous()
    rows, columns = weight.num_rows, weight.columns
    count, scales = blocks(rows), GROUP // weight.group
    packed = (
        torch.empty((count, columns // GROUP, ROWS * GROUP // 2), dtype=torch.uint8),
        torch.empty((count, columns // GROUP * scales, ROWS), dtype=torch.int8),
        torch.empty((count, ROWS), dtype=torch.int8),
        torch.empty((count, ROWS), dtype=torch.float32),
    )
    load().infer_pack_lut4(
        *(_pointer(codes), ctypes.c_int(weight.bits), _pointer(table), ctypes.c_int64(table.shape[0])),
        *(_pointer(scale), _pointer(row_scale)),
        *(ctypes.c_int64(size) for size in (rows, columns, scales)),
        *map(_pointer, packed),
    )
    return packed


def pack_int8(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 [N, K] and scale [N] → codes int8 [blocks, ceil(K/4), 16, 4], scale float32 and row sum int32 [blocks, 16].

    Zeros beyond N and K.
    """
    codes, scale = codes.contiguous(), scale.float().contiguous()
    rows, columns = codes.shape
    packed = (
        torch.empty((blocks(rows), -(-columns // 4), ROWS, 4), dtype=torch.int8),
        torch.empty((blocks(rows), ROWS), dtype=torch.float32),
        torch.empty((blocks(rows), ROWS), dtype=torch.int32),
    )
    load().infer_pack_int8(
        *(_pointer(codes), _pointer(scale), ctypes.c_int64(rows), ctypes.c_int64(columns)),
        *map(_pointer, packed),
    )
    return packed


def pack_planes(codes: Tensor, bits: int, add: int, planes: int, columns: int) -> Tensor:
    """Pack codes [N, K] of 2, 3, 5 or 6 bits in a bit stream, or of 8 (int8): uint8 [blocks, K/64, planes * 128].

    `add` makes them unsigned integers below 2**`planes`.
    """
    codes = codes.contiguous()
    packed = torch.empty((blocks(len(codes)), columns // GROUP, planes * 128), dtype=torch.uint8)
    load().infer_pack_planes(
        *(_pointer(codes), ctypes.c_int(bits), ctypes.c_int(add), ctypes.c_int(planes)),
        *(ctypes.c_int64(len(codes)), ctypes.c_int64(columns), _pointer(packed)),
    )
    return packed


__all__ = [
    "blocks",
    "built",
    "fingerprint",
    "isa",
    "isas",
    "load",
    "pack_int8",
    "pack_lut4",
    "pack_planes",
    "use_isa",
    "why_not",
]
