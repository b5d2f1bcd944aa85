"""Machine code of the Triton kernels against the dated table: a kernel that has grown is named."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from bench.gpu import kernel_table  # noqa: E402
from bench.gpu.kernel_table import Count, instructions, longest_loop, worse  # noqa: E402

CODE = """
_rows:
.text._rows:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E R2, [R2.64] ;
.L_x_0:
        /*0020*/                   FFMA R1, R2, R3, R1 ;
        /*0030*/              @P0  BRA `(.L_x_0) ;
        /*0040*/              @!P1 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2);
        /*0070*/                   NOP ;
"""
# The quickest to compile of those that matter; `python -m bench.gpu.kernel_table` makes all of them.
COMPARED = ("lut4 rows, 1", "int8 rows, 1", "int4 fragments, 1")


def test_instruction_counts_leave_out_padding() -> None:
    lines = instructions(CODE)
    assert sum(kind == "instruction" for kind, _ in lines) == 6
    assert longest_loop(lines) == 2


def test_a_kernel_grown_beyond_a_tenth_is_reported() -> None:
    old = Count(kernel="rows", capability=90, instructions=100, loop=50, registers=64, shared=0, spills=0)
    new = Count(kernel="rows", capability=90, instructions=111, loop=55, registers=70, shared=0, spills=8)
    assert worse(old, old) == []
    assert worse(old, new) == [
        "rows, sm_90: 111 instructions, 100 before",
        "rows, sm_90: 8 bytes of spills, 0 before",
    ]


def test_tables_hold_every_kernel_on_three_architectures() -> None:
    found = sorted(kernel_table.RESULTS.glob("gpu-kernels-triton-*.json"))
    assert found
    for path in found:
        counts = kernel_table.read(path)
        assert {(c.kernel, c.capability) for c in counts} == {
            (case, sm) for case in kernel_table.CASES for sm in kernel_table.CAPABILITIES
        }
        assert not [c for c in counts if c.spills > 8], "spilled registers"


@pytest.mark.skipif(not kernel_table.result_path().exists(), reason="no table of the installed triton")
@pytest.mark.parametrize("case", COMPARED)
def test_no_kernel_has_grown_since_the_table(case: str) -> None:
    [old] = [
        c for c in kernel_table.read(kernel_table.result_path()) if (c.kernel, c.capability) == (case, 90)
    ]
    assert worse(old, kernel_table.count(case, 90)) == []
