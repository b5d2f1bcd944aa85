"""Machine that a compiled result depends on: instruction sets of the CPU, its name, the GPU, versions of packages.

Each is read once in a process, at the first question; torch is imported only for what it alone knows.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path

from . import __version__

_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "msgspec",
    "transformers",
    "tokenizers",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "onnxscript",
    "onnx-ir",
    "tensorrt",
    "tensorrt-rtx-cu13-bindings",
    "triton",
    "uvicorn",
    "starlette",
)

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
    import torch

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
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        marks |= {"gpu": torch.cuda.get_device_name(device), "sm": f"{major}{minor}"}
        marks |= {"driver": _driver(), "cuda": torch.version.cuda or ""}
    return marks


def gpus() -> tuple[str, ...]:
    """Return the models of the NVIDIA GPUs, as their driver lists them, and those that this process may use."""
    listed = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = (
        re.search(r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.MULTILINE) for path in listed
    )
    names = tuple(model[1] for model in models if model)
    return (*names, f"visible {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}") if names else ()


def _driver() -> str:
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text()) if _DRIVER.exists() else None
    return match[1] if match else "unknown"


@functools.cache
def versions() -> dict[str, str]:
    """Return the installed versions of relevant packages and of Python."""
    installed = {"python": platform.python_version(), "infer": __version__}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed
