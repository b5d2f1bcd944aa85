"""GPU twins of the quantized operators, in Triton: `register()` gives them to CUDA tensors.

    linear_codes                    `lut/` and `groupwise/`: GEMV, tensor-core GEMM, or decoded for cuBLAS
    linear_lut4_fragments           `lut/`: 4-bit weights in the order of tensor-core fragments
    linear_int8, _static, _weight   `int8/`: exact int32 sums, or float activations
    linear_fp8                      `fp8`, through `torch._scaled_mm`
    embedding_codes, _int8          `embedding`
    linear_experts and its forms    `experts`: grouped, only the experts asked for; on groupwise codes in `groupwise/`
    gated_delta, ssd_scan, …        `state_space`: layers over a state cache

conv2d_int8 has no kernel here: the reference, in torch, computes it on GPUs too. Nothing imports Triton before the
first CUDA tensor arrives. Compilers build the kernels into their programs: see `embed`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..ops.define_op import NAMESPACE, decompositions, library

OLDEST = (8, 0)  # compute capability of the GPUs that the kernels were compiled for in the tests: 8.0 and 9.0
_STATE_LAYERS = ("causal_conv", "gated_delta", "linear_scan", "selective_scan", "ssd_scan")
_WHERE = {
    "linear_codes": "linear_codes",
    "linear_lut4_fragments": "lut.linear_lut4_fragments",
    "linear_int8": "int8.linear_int8",
    "linear_int8_static": "int8.linear_int8",
    "linear_int8_weight": "int8.linear_int8",
    "linear_fp8": "fp8",
    "embedding_codes": "embedding",
    "embedding_int8": "embedding",
    "linear_experts": "experts",
    "linear_experts_int8": "experts",
    "linear_experts_int8_weight": "experts",
    "linear_experts_codes": "experts",
    **dict.fromkeys(_STATE_LAYERS, "state_space"),
}


def why_not() -> str | None:
    """Return why the Triton kernels can't run here, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if not torch.cuda.is_available():
        return "no GPU that this torch can use"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        name, has, needed = (
            torch.cuda.get_device_name(),
            ".".join(map(str, capability)),
            ".".join(map(str, OLDEST)),
        )
        return f"{name} has compute capability {has}; the kernels need {needed}"
    return None


def packs(device: str) -> bool:
    """Return true if weights of a program for `device` are packed in the layout of the Triton kernels."""
    return device.startswith("cuda") and _registrable() and _capable(torch.device(device))


def function(name: str) -> Callable[..., Any]:
    """Return the GPU implementation of `infer::<name>`; imports Triton."""
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


@functools.cache
def register() -> None:
    """Give CUDA tensors the Triton kernels, if this torch has CUDA and Triton is installed. Does not touch the GPU."""
    if not _registrable():
        return
    for name in _WHERE:
        library().impl(name, functools.partial(_run, name), "CUDA")
    from .compile_inline import embed

    # Layers over a state cache write an operand: in compiled programs they stay operators.
    embed(_WHERE.keys() - set(_STATE_LAYERS), function)


def _run(name: str, x: Tensor, *rest: Any) -> Tensor:
    if _capable(x.device):
        return function(name)(x, *rest)
    return decompositions()[getattr(getattr(torch.ops, NAMESPACE), name).default](x, *rest)


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST


def in_graph() -> dict[OpOverload, Callable[..., Any]]:
    """Return decompositions for a program on CUDA: only operators without a kernel here become plain torch."""
    kept = (
        {getattr(getattr(torch.ops, NAMESPACE), name).default for name in _WHERE} if _registrable() else set()
    )
    return {op: plain for op, plain in decompositions().items() if op not in kept}


def _registrable() -> bool:
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
