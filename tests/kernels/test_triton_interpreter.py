"""Triton kernels on a machine without a GPU: the tests of all of them, in one process that interprets the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.triton_compile import CUDA, run_in_interpreter

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(CUDA, reason="each file runs its tests on the GPU")
def test_triton_kernels_equal_their_references_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "\n@on_device\n" in path.read_text()]
    assert len(files) >= 7
    run_in_interpreter(files)
