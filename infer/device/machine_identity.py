"""Properties of machine and packages that a compiled result depends on."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
from pathlib import Path

import torch

from .cpu_features import cpu_name, isa

_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = (
    "infer",
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
