"""Build backend: setuptools, and in wheels the native kernels, compiled for one architecture.

Such a wheel serves every Python and every torch that `infer` runs on. An editable install and a machine without a
compiler get no library: the kernels are then compiled at first use. Environment variables, for who makes wheels:

- `INFER_NATIVE`: 0 leaves the library out, 1 makes its absence an error.
- `INFER_MACHINE`: architecture to compile for (`aarch64`), with the cross compiler that `CXX` names.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("infer", "kernels", "cpu")
MACHINE = os.environ.get("INFER_MACHINE") or platform.machine()

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: dict[str, str] | None = None) -> list[str]:
    """Return what building a wheel needs besides setuptools: torch, for its headers, where kernels are compiled."""
    wanted = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    torch = [] if _uncompilable() else [name for name in wanted if name.startswith("torch")]
    return [*build_meta.get_requires_for_build_wheel(config_settings), *torch]


def _driver() -> ModuleType:
    """Load `compile_library` by its path: the package itself needs what a build environment lacks."""
    spec = importlib.util.spec_from_file_location("compile_library", KERNELS / "compile_library.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(KERNELS / "compile_library.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _uncompilable() -> str | None:
    """Return the reason why this machine compiles no kernels into a wheel, or None."""
    if os.environ.get("INFER_NATIVE") == "0":
        return "INFER_NATIVE=0"
    if sys.platform != "linux":
        return f"on {sys.platform} they are not prebuilt"
    return None if _driver().compiler() else "no C++ compiler (install g++, or set CXX)"


def _torch() -> Path | None:
    """Return the folder of torch, found without importing it."""
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def _absent() -> str | None:
    """Return the reason why the wheel gets no native library, or None."""
    return _uncompilable() or (
        None if _torch() else "no torch in the build environment, whose headers it needs"
    )


class BuildWithKernels(build_py):
    """Build of the Python files, with the native library beside them."""

    def run(self) -> None:
        super().run()
        reason = _absent()
        if self.editable_mode or (reason and os.environ.get("INFER_NATIVE") != "1"):
            print(
                f"no native kernels in this wheel, they are compiled at first use: {reason or 'it is editable'}"
            )
        elif reason:
            raise SystemExit(f"the native kernels can't be built into the wheel: {reason}")
        else:
            built = self._compile(_driver())
            shutil.copy2(built, Path(self.build_lib) / KERNELS / built.name)

    def _compile(self, driver: ModuleType) -> Path:
        work = Path(self.get_finalized_command("build").build_temp).resolve()
        objects = Path(os.environ.get("INFER_CACHE") or work) / "kernels" / "objects"
        for folder in (work, objects):
            folder.mkdir(parents=True, exist_ok=True)
        torch, target = _torch(), work / driver.LIBRARY
        driver.compile_library(
            *(driver.compiler(), target),
            include=torch / "include",
            objects=objects,
            key=driver.built_with(torch, MACHINE),
            machine=MACHINE,
            progress=lambda done, total, name: print(f"native kernels {done}/{total} {name}", flush=True),
        )
        return target


class WheelOfArchitecture(bdist_wheel):
    """Wheel whose name has an architecture and no Python: the library is loaded by its path and knows no Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = _absent() is not None
        if not self.root_is_pure:
            self.plat_name, self.plat_name_supplied = f"linux_{MACHINE}", True
            self.distribution.has_ext_modules = lambda: (
                True
            )  # all of it then goes where compiled files belong

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])
