"""Triton kernels on a machine without a GPU: the tests of all of them, in one process that interprets the kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.triton_compile import run_in_interpreter

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="each file runs its tests on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
def test_triton_kernels_equal_their_references_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    definition = 'INTERPRETED = os.environ.get("TRITON_INTERPRET")'
    files = [
        path for path in sorted(TESTS.rglob("test_*.py")) if path.read_text().count(f"\n{definition}") == 1
    ]
    assert len(files) >= 5
    run_in_interpreter(files)
