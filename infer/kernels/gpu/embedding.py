"""`embedding_codes` and `embedding_int8` on a GPU: rows gathered and decoded in one kernel.

An id outside the table can't raise from inside a kernel: it is checked first as torch's own `F.embedding` does on CUDA,
by an assertion on the device that stops the process's CUDA work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.coded_weight import LUT, CodedWeight
from .groupwise import groupwise_decode
from .launch import cdiv, launch, same_device
from .lut import lut_decode

_BLOCK = 1024


@triton.jit
def _int8_rows(
    ids_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + i).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + row * num_columns + k, mask=k < num_columns, other=0)
    value = codes.to(tl.float32) * tl.load(scale_ptr + row).to(tl.float32)
    tl.store(out_ptr + i * num_columns + k, value.to(out_ptr.dtype.element_ty), mask=k < num_columns)


def embedding_int8(ids: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """`infer::embedding_int8` on CUDA tensors: ids of any shape → [*ids.shape, K] in the scale's dtype."""
    same_device(ids, codes, scale)
    flat, num_columns = _checked(ids, codes.shape[0]), codes.shape[1]
    out = torch.empty((flat.shape[0], num_columns), dtype=scale.dtype, device=codes.device)
    launch(
        _int8_rows,
        (flat.shape[0], cdiv(num_columns, _BLOCK)),
        flat,
        codes.contiguous(),
        scale.contiguous(),
        out,
        num_columns,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out.reshape(*ids.shape, num_columns)


def embedding_codes(
    ids: Tensor,
    codes: Tensor,
    scale: Tensor,
    table: Tensor | None,
    minimum: Tensor | None,
    super_scale: Tensor | None,
    super_minimum: Tensor | None,
) -> Tensor:
    """`infer::embedding_codes` on CUDA tensors: ids of any shape → float32 [*ids.shape, K]."""
    weight = CodedWeight(codes, scale, table, minimum, super_scale, super_minimum)
    same_device(ids, *weight)
    decode = lut_decode.decode if weight.layout == LUT else groupwise_decode.decode
    rows = decode(weight, torch.float32, _checked(ids, weight.num_rows))
    return rows.reshape(*ids.shape, rows.shape[1])


def _checked(ids: Tensor, num_rows: int) -> Tensor:
    flat = ids.reshape(-1).contiguous()
    torch._assert_async(((flat >= 0) & (flat < num_rows)).all())
    return flat
