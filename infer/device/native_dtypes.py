"""Dtypes that a device computes in natively."""

from __future__ import annotations

import torch

from ..errors import NotUsableError
from .machine import isa


def use_tf32(dtype: str, device: str) -> None:
    """Let CUDA multiply and convolve float32 in TF32 for dtype tf32 alone; raise `NotUsableError` where unsupported."""
    if dtype != "tf32":
        if device.startswith("cuda"):
            torch.backends.cudnn.allow_tf32 = False  # torch's own default is True
        return
    if not device.startswith("cuda"):
        raise NotUsableError(
            "dtype tf32 is not usable on this machine: no CUDA device", hint="Use --dtype fp32"
        )
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def why_slow(dtype: torch.dtype | str, device: str = "cpu") -> str | None:
    """Return the reason why a dtype is slow or unsupported on the device, or None when it is native."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if device.startswith("cuda"):
        return _cuda_lacks(name, torch.cuda.get_device_capability(device))
    have = set(isa())
    if name == "float16" and have.isdisjoint({"avx512_fp16", "amx_fp16", "fp16"}):
        return "this CPU has no float16 arithmetic (avx512_fp16): every step converts to float32"
    if name == "bfloat16" and have.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"}):
        return "this CPU has no bfloat16 arithmetic (avx512_bf16): every step converts to float32"
    if name == "int8" and have.isdisjoint({"avx512_vnni", "avx_vnni", "amx_int8", "dotprod", "i8mm"}):
        return "this CPU has no int8 dot product (VNNI, dotprod): int8 takes three instructions, not one"
    if name.startswith("float8"):
        return "no CPU multiplies float8: it is decoded to float32 first"
    return None


def _cuda_lacks(name: str, capability: tuple[int, int]) -> str | None:
    needs = {"float16": (7, 0), "bfloat16": (8, 0), "int8": (7, 5)}.get(name)
    if name.startswith("float8"):
        needs = (8, 9)
    if needs is None or capability >= needs:
        return None
    have, first = (".".join(map(str, version)) for version in (capability, needs))
    return f"compute capability {have} has no {name} tensor cores; they came with {first}"
