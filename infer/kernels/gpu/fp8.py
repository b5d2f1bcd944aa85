"""`linear_fp8` on a GPU with float8 units: rows to float8, then the library's product with a scale for each row.

`torch._scaled_mm` with row-wise scales gives bfloat16; in a result of another type the bias is added in float32 after
it, so one rounding to 8 bits is left, far below that of float8 (4 bits).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import decompositions
from ..ops.linear_fp8 import to_float8
from .launch import same_device

UNITS = (8, 9)  # compute capability from which on there are float8 units
_MULTIPLE = 16


def linear_fp8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`infer::linear_fp8` on CUDA tensors; sizes that are no multiples of 16 and older GPUs decode to float32."""
    same_device(x, codes, scale, bias)
    num_out, num_columns = codes.shape
    odd = num_out % _MULTIPLE or num_columns % _MULTIPLE or x.numel() == 0
    if odd or torch.cuda.get_device_capability(x.device) < UNITS:
        return decompositions()[torch.ops.infer.linear_fp8.default](x, codes, scale, bias)
    rows = x.reshape(x.shape[:-1].numel(), num_columns).float()
    q, step = to_float8(rows)
    y = torch._scaled_mm(
        q,
        codes.t(),
        scale_a=step,
        scale_b=scale.float()[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    y = y if bias is None else y.float() + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], num_out)
