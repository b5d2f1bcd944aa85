"""Selection of the library that builds and runs engines: TensorRT, or TensorRT-RTX for the GPUs of RTX cards.

Both have one Python API. TensorRT builds for the GPU at hand. TensorRT-RTX builds for many GPUs, without having one:
an engine serves a group of compute capabilities, and its kernels are chosen where it is opened.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from infer.distribution import install
from infer.errors import UsageError
from infer.spec import Finding

TENSORRT, RTX = "tensorrt", "rtx"
MODULES = {TENSORRT: ("tensorrt",), RTX: ("tensorrt_rtx", "tensorrt_rtx_bindings")}
PACKAGES = {TENSORRT: ("tensorrt",), RTX: ("tensorrt-rtx", "tensorrt-rtx-cu13-bindings")}
TITLES = {TENSORRT: "TensorRT", RTX: "TensorRT-RTX"}
INSTALL = {
    TENSORRT: install("gpu"),
    RTX: install("rtx"),
}
# Compute capabilities that one engine can serve: 7.5 has no float32 products there, float8 begins with 8.9.
RTX_GROUPS = (("75",), ("80", "86"), ("89", "120", "121"))
RTX_CAPABILITIES = tuple(sm for group in RTX_GROUPS for sm in group)


def module_name(kind: str) -> str | None:
    """Return the importable module of a library, or None when it is not installed."""
    return next((name for name in MODULES[kind] if find_spec(name) is not None), None)


def select_library(option: str = "") -> str:
    """Return the library that an option of the backend names; without one TensorRT where it is installed, else RTX.

    Raises `UsageError` for another option.
    """
    if named := capability(option):
        if named not in RTX_CAPABILITIES:
            known = ", ".join(f"sm_{sm}" for sm in RTX_CAPABILITIES)
            raise UsageError(f"TensorRT-RTX builds no engines for {option}", hint=f"It builds for {known}")
        return RTX
    if option not in ("", RTX):
        raise UsageError(f"backend trt has no option {option!r}", hint="Known: trt, trt:rtx, trt:sm_89")
    if option == RTX or (module_name(TENSORRT) is None and module_name(RTX) is not None):
        return RTX
    return TENSORRT


def capability(option: str) -> str:
    """Return the compute capability of an option like `sm_89`: "89"; of any other option ""."""
    return option[3:] if re.fullmatch(r"sm_\d+", option) else ""


def rtx_group(sm: str) -> tuple[str, ...]:
    """Return the capabilities that one engine serves together with `sm`; of a GPU that is not covered, `sm` alone."""
    return next((group for group in RTX_GROUPS if sm in group), (sm,))


def lacking(capabilities: Iterable[str], quant: str, dtype: str) -> str | None:
    """Return the reason why a GPU among `capabilities` can't compute in a format with TensorRT-RTX, or None.

    Its builder would refuse it too, in words that name neither the option nor what to use instead.
    """
    oldest = min(map(int, capabilities))
    named = f"compute capability {oldest / 10:g}"
    if quant.partition(":")[0] == "fp8" and oldest < 89:
        return f"{named} has no float8 (it came with 8.9): use --quant int8:static"
    if dtype == "bfloat16" and oldest < 80:
        return f"{named} has no bfloat16 (it came with 8): use --dtype fp16"
    if dtype in ("float32", "tf32") and oldest < 80:
        return f"TensorRT-RTX multiplies no float32 on {named}: use --dtype fp16"
    return None


def missing(kind: str) -> str | None:
    """Return `TensorRT is not installed (pip install …)`, or None."""
    return None if module_name(kind) else f"{TITLES[kind]} is not installed ({INSTALL[kind]})"


def imported(kind: str) -> Any:
    """Import a library that `missing` knows to be installed."""
    return importlib.import_module(str(module_name(kind)))


def library_version(kind: str) -> str:
    """Return the version of an installed library, without importing it where its package says so."""
    for package in PACKAGES[kind]:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return str(imported(kind).__version__)


def findings() -> list[Finding]:
    """Return one finding per library: its version and the GPUs that it can build for, or how to install it."""
    targets = {
        TENSORRT: "builds for the GPU of this machine only",
        RTX: f"builds for compute capability {', '.join(f'{int(sm) / 10:g}' for sm in RTX_CAPABILITIES)}, "
        "with or without a GPU (--backend trt:sm_89)",
    }
    return [
        Finding("tensorrt", TITLES[kind], "no", why=reason)
        if (reason := missing(kind))
        else Finding("tensorrt", TITLES[kind], library_version(kind), why=targets[kind])
        for kind in MODULES
    ]
