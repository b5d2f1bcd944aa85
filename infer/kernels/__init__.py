"""The operators `infer::*` that compute with packed weights. Importing this package registers them.

    linear_int8, linear_int8_weight, linear_int8_static      [..., K] x int8 [N, K]
    conv2d_int8, conv2d_int8_weight, conv2d_int8_static      [B, I, H, W] x int8 [O, I/groups, kh, kw]
    linear_fp8                                               [..., K] x float8 e4m3 [N, K]
    linear_codes                                             [..., K] x codes with scales, see `ops.coded_weight`
    linear_experts, linear_experts_codes, …                  the experts that each token asks for
    linear_lut4_fragments                                    4-bit ones in the order of tensor-core fragments
    embedding_int8, embedding_codes                          rows of the same tensors
    linear_lut4_packed, linear_int8_packed, …                the same layers on weights packed for this CPU
    conv2d_int8_packed, …                                    chains of convolutions on bytes
    recurrent                                                LSTM, GRU and RNN over any number of steps
    causal_conv, …                                           layers over a state cache, see `ops.state_cache`

Each portable one has a reference in pure torch, which defines its result, and all but `recurrent` a decomposition into
plain operators for backends that lack a kernel. `prepack` swaps them for the packed ones, which the `native` library
computes.
On NVIDIA GPUs the kernels are those of `gpu`, in Triton.
"""

from __future__ import annotations

from . import gpu
from .ops import (
    conv2d_int8,
    conv2d_packed,
    embedding,
    fused_program,
    linear_codes,
    linear_experts,
    linear_experts_packed,
    linear_fp8,
    linear_int8,
    linear_lut4_fragments,
    linear_packed,
    recurrent,
)
from .ops.define_op import c_functions, decompositions, library, names
from .ops.state_space import causal_conv, gated_delta, linear_scan, selective_scan

__all__ = [
    "c_functions",
    "causal_conv",
    "conv2d_int8",
    "conv2d_packed",
    "decompositions",
    "embedding",
    "fused_program",
    "gated_delta",
    "gpu",
    "library",
    "linear_codes",
    "linear_experts",
    "linear_experts_packed",
    "linear_fp8",
    "linear_int8",
    "linear_lut4_fragments",
    "linear_packed",
    "linear_scan",
    "names",
    "recurrent",
    "selective_scan",
]

gpu.register()
