"""The device of a plan: auto, cpu, cuda or cuda:N, resolved against the GPUs that are there, and its native dtypes."""

from __future__ import annotations

import re

import torch

from ..errors import NotUsableError, unknown
from ..machine import isa
from ..spec import Choice


def resolve(device: str) -> Choice:
    """Resolve auto, cpu, cuda or cuda:N to a device, with the reason.

    Raises `UsageError` for an unknown name and `NotUsableError` for a CUDA device that is not there.
    """
    if device == "auto":
        reason = _no_cuda()
        if reason is None:
            return Choice("device", device, "cuda", f"found {torch.cuda.get_device_name(0)}")
        return Choice("device", device, "cpu", reason)
    if device == "cpu":
        return Choice("device", device, "cpu", "asked for")
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise unknown("device", device, ("auto", "cpu", "cuda"))
    reason = _no_cuda()
    if reason is None and int(match[1] or 0) >= torch.cuda.device_count():
        reason = f"it has {torch.cuda.device_count()} CUDA devices, numbered from 0"
    if reason is not None:
        raise NotUsableError(
            f"device {device} is not usable on this machine: {reason}",
            hint="Use --device cpu, or run 'infer doctor'",
        )
    return Choice("device", device, device, "asked for")


def _no_cuda() -> str | None:
    if torch.cuda.is_available():
        return None
    return "no CUDA device" if torch.version.cuda else "this build of torch is for CPUs only"


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
