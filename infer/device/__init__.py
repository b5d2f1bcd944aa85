"""Hardware queries: instruction sets, GPU properties, memory and native dtypes; nothing else asks the hardware.

Nothing is asked at import; what was measured once in a process is kept.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

from ..errors import NotUsableError, unknown
from ..spec import Choice
from .cores import cpu_quota, fit_threads
from .measured_speed import bandwidth_for, busy_factor, last_level_cache, peak_flops, read_bandwidth, sync
from .memory import memory_available, mmap_large_blocks, peak_rss, reset_peak, resident_split, rss

_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")

# Our name of an instruction set, then its names in /proc/cpuinfo and in torch.cpu.get_capabilities().
_ISA: dict[str, tuple[str, ...]] = {
    "avx2": ("avx2",),
    "fma": ("fma", "fma3"),
    "f16c": ("f16c",),
    "avx512f": ("avx512f", "avx512_f"),
    "avx512bw": ("avx512bw", "avx512_bw"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "avx512_fp16": ("avx512_fp16",),
    "avx_vnni": ("avx_vnni",),
    "amx_int8": ("amx_int8",),
    "amx_bf16": ("amx_bf16",),
    "amx_fp16": ("amx_fp16",),
    "neon": ("asimd", "neon"),
    "fp16": ("asimdhp", "neon_fp16"),
    "dotprod": ("asimddp", "neon_dotprod", "arm_dot"),
    "i8mm": ("i8mm",),
    "bf16": ("bf16",),
    "sve": ("sve",),
    "sve2": ("sve2",),
}
_PACKAGES = (
    *(
        "infer",
        "torch",
        "numpy",
        "safetensors",
        "msgspec",
        "transformers",
        "tokenizers",
        "onnx",
        "onnxruntime",
    ),
    *(
        "onnxruntime-gpu",
        "openvino",
        "onnxscript",
        "onnx-ir",
        "tensorrt",
        "tensorrt-rtx-cu13-bindings",
        "triton",
        "uvicorn",
        "starlette",
    ),
)


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


@functools.cache
def isa() -> tuple[str, ...]:
    """Return the relevant instruction sets in fixed order (avx2, fma, avx512_vnni, amx_int8, dotprod, …)."""
    flags = _cpu_flags()
    return tuple(name for name, names in _ISA.items() if not flags.isdisjoint(names))


def _cpu_flags() -> set[str]:
    """Read the CPU flags from /proc/cpuinfo; elsewhere from torch's probe (macOS and Windows)."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo(), re.MULTILINE)
    if lines:
        return set(lines[0].split())
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    level = torch.backends.cpu.get_cpu_capability()
    return {"AVX2": {"avx2", "fma"}, "AVX512": {"avx2", "fma", "avx512f", "avx512bw"}}.get(level, set())


def _cpuinfo() -> str:
    return _CPUINFO.read_text(errors="replace") if _CPUINFO.exists() else ""


def has_vnni() -> bool:
    """Return true if x86 has int8 dot products (VNNI)."""
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(isa())


def has_bfloat16() -> bool:
    """Return true if x86 has bfloat16 products (AVX-512 BF16 or AMX)."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(isa())


@functools.cache
def why_no_amx() -> str | None:
    """Return why the tile registers of AMX can't be used, or None; asks Linux for them, once in a process."""
    if "amx_int8" not in isa() or platform.system() != "Linux":
        return "this CPU has no AMX"
    arch_prctl, ask_for_state, tile_data = 158, 0x1023, 18
    if ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, ask_for_state, tile_data) == 0:
        return None
    return f"Linux does not grant the tile registers: {os.strerror(ctypes.get_errno())}"


@functools.cache
def cpu_name() -> str:
    match = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    if match:
        return match[1].strip()
    return platform.processor() or platform.machine()


def fingerprint(device: str = "cpu") -> dict[str, str]:
    """Return the properties a compiled result depends on: arch, isa, cpu; for CUDA gpu, sm, driver, cuda."""
    marks = {"arch": platform.machine(), "isa": ",".join(isa()), "cpu": cpu_name()}
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(device)
        marks |= {"gpu": torch.cuda.get_device_name(device), "sm": f"{major}{minor}"}
        marks |= {"driver": _driver(), "cuda": torch.version.cuda or ""}
    return marks


def _driver() -> str:
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text()) if _DRIVER.exists() else None
    return match[1] if match else "unknown"


@functools.cache
def versions() -> dict[str, str]:
    """Return the installed versions of relevant packages and of Python."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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


__all__ = [
    "bandwidth_for",
    "busy_factor",
    "why_slow",
    "cpu_name",
    "fingerprint",
    "fit_threads",
    "has_vnni",
    "isa",
    "last_level_cache",
    "memory_available",
    "why_no_amx",
    "peak_flops",
    "peak_rss",
    "cpu_quota",
    "read_bandwidth",
    "reset_peak",
    "resident_split",
    "resolve",
    "rss",
    "sync",
    "versions",
    "mmap_large_blocks",
]
