"""AOTInductor packages of one test run: equal programs are compiled once, by whichever worker comes first."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

Compile = Callable[..., str]


def compile_once(compile: Compile, locked: Callable[[str], AbstractContextManager[Path]]) -> Compile:
    """Return `torch._inductor.aoti_compile_and_package` with a memory; `locked(name)` gives the folder of a package."""

    def compiled(
        program: torch.export.ExportedProgram,
        *,
        inductor_configs: Mapping[str, Any],
        package_path: io.BytesIO | None = None,
    ) -> Any:
        if package_path is None:
            return compile(program, inductor_configs=inductor_configs)
        with locked(f"package-{digest(program, inductor_configs)}") as folder:
            kept = folder / "package.pt2"
            if not kept.exists():
                compile(program, package_path=package_path, inductor_configs=inductor_configs)
                fresh = kept.with_suffix(".part")
                fresh.write_bytes(package_path.getvalue())
                fresh.replace(kept)
            else:
                package_path.write(kept.read_bytes())
        return package_path

    return compiled


def digest(program: torch.export.ExportedProgram, options: Mapping[str, Any]) -> str:
    """Hash the operators, shapes, strides and dtypes of a program, the bytes of its tensors, and the options."""
    lines = (line.strip() for line in str(program).splitlines())
    code = [line for line in lines if not line.startswith("#")]  # comments name the files that were captured
    found = hashlib.sha256("\n".join([*code, repr(sorted(options.items(), key=str))]).encode())
    found.update(f"{torch.get_num_threads()} {torch.utils.deterministic.fill_uninitialized_memory}".encode())
    for name, value in sorted({**program.state_dict, **program.constants}.items()):
        found.update(name.encode())
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            found.update(f"{value.dtype} {tuple(value.shape)} {value.stride()}".encode())
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:24]
