"""Triton kernels on a GPU, or without one: compiled ahead of time for one, or run in the interpreter."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which counts when kernels are defined
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
on_device = pytest.mark.skipif(
    not (CUDA or INTERPRETED), reason="no GPU: runs in the interpreter, see test_triton_interpreter"
)
on_host = pytest.mark.skipif(INTERPRETED, reason="compiles the kernels, which the interpreter can't")
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
NAMES |= {torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}


def in_turns(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combine the values of parameters: all with all on a GPU; in the interpreter each of them at least once."""
    if CUDA:
        return list(itertools.product(*values))
    count = max(len(each) for each in values)
    return [tuple(each[i % len(each)] for each in values) for i in range(count)]


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Compare shapes, and the norm of the difference with that of what was wanted."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).norm()
    assert error <= tolerance * want.double().norm() + 1e-12, float(error / want.double().norm())


def run_in_interpreter(files: Iterable[Path]) -> None:
    """Run the tests of files in one process whose Triton kernels are interpreted on the CPU."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def assembly(captured: list[tuple], capability: int) -> list[str]:
    """PTX of captured launches (kernel, arguments, options), as Triton would compile them; no GPU is asked."""
    return [compiled(launch, capability).asm["ptx"] for launch in captured]


def compiled(launch: tuple, capability: int) -> Any:
    """Compile a captured launch for an architecture, 90 for 9.0: Triton's kernel with `asm` and `metadata`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, args, options = launch
    signature, constants, hints = {}, {}, {}
    for i, (parameter, argument) in enumerate(itertools.zip_longest(kernel.params, args, fillvalue=None)):
        name = parameter.name
        plain = not parameter.do_not_specialize
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", options[name]
        elif isinstance(argument, Tensor):
            signature[name], hints[(i,)] = "*" + NAMES[argument.dtype], [["tt.divisibility", 16]]
        elif isinstance(argument, float):
            signature[name] = "fp32"
        elif argument == 1 and plain:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            if argument % 16 == 0 and plain:
                hints[(i,)] = [["tt.divisibility", 16]]
    chosen = {key: options[key] for key in ("num_warps", "num_stages") if key in options}
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints),
        target=GPUTarget("cuda", capability, 32),
        options={**chosen, "enable_fp_fusion": True},
    )
