"""The native linear kernels against their slow twins, on every instruction set of this CPU: the same bits on each."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infer.kernels import cpu
from infer.kernels.cpu import build, compile_library
from infer.kernels.ops import bitpack
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.ops.linear_int8 import _static, _weight_only
from infer.kernels.ops.linear_packed import int8_twin, lut4_twin

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
HEIGHTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 40)  # every path: one pass, one tile, several
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def isas() -> Iterator[list[str]]:
    """Yield the instruction sets of this CPU; the best is in use again afterwards."""
    found = cpu.isas()
    yield found
    cpu.use_isa(found[0])


def lut4_tensors(rows: int, columns: int, bits: int, group: int = bitpack.GROUP) -> CodedWeight:
    tables = 1 if bits == 4 else -(-rows // bitpack.TABLE_ROWS)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    scale = torch.randint(-127, 128, (rows, columns // group), dtype=torch.int8)
    table, packed = torch.randn(tables, 2**bits), bitpack.pack(codes, bits)
    return CodedWeight(packed, scale, table, super_scale=torch.rand(rows) + 0.1)


def lut4(x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
    return torch.ops.infer.linear_lut4_packed(x, *cpu.pack_lut4(weight), bias, weight.num_rows)


def int8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, x_scale: Tensor | None) -> Tensor:
    packed = cpu.pack_int8(codes, scale)
    return torch.ops.infer.linear_int8_packed(x, *packed, x_scale, bias, *codes.shape)


def int8_balanced(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, by: Tensor) -> Tensor:
    packed = cpu.pack_int8(codes, scale)
    return torch.ops.infer.linear_int8_balanced_packed(x, *packed, by, bias, *codes.shape)


def int8_weight(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    packed = cpu.pack_int8(codes, scale)
    return torch.ops.infer.linear_int8_weight_packed(x, *packed[:2], bias, *codes.shape)


def int8_tensors(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return codes, torch.rand(rows) + 0.1, torch.randn(rows)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN in the same places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0, 1, -1), b.nan_to_num(0, 1, -1))


@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 64), (4, 64), (4, 16)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (16, 64), (17, 128), (100, 512), (333, 192)])
def test_lut4_equals_the_reference_on_every_instruction_set(
    isas: list[str], rows: int, columns: int, bits: int, group: int
) -> None:
    tensors, bias = lut4_tensors(rows, columns, bits, group), torch.randn(rows)
    x = torch.randn(40, columns) * torch.rand(40, 1)
    x[7] = 0
    twin, first = lut4_twin(x, tensors, bias), None
    for isa in isas:
        cpu.use_isa(isa)
        y = lut4(x, tensors, bias)
        torch.testing.assert_close(y, twin, rtol=1e-5, atol=1e-5 * float(twin.abs().max()))
        first = y if first is None else first
        assert torch.equal(y, first), isa
        for height in HEIGHTS:
            assert torch.equal(lut4(x[:height], tensors, bias), y[:height]), (isa, height)


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (5, 130), (17, 3), (16, 64), (100, 190), (333, 1025), (20, 20_000)]
)
@pytest.mark.parametrize("kind", ["normal", "halves", "tiny", "huge"])
def test_native_int8_is_bit_equal_to_the_reference(
    isas: list[str], rows: int, columns: int, kind: str
) -> None:
    codes, scale, bias = int8_tensors(rows, columns)
    x = {
        "normal": torch.randn(40, columns) * 3,
        "halves": torch.randint(-254, 255, (40, columns)) / 2,  # quotients on the edge between two integers
        "tiny": torch.randn(40, columns) * 1e-38,
        "huge": torch.randn(40, columns) * 1e34,
    }[kind]
    x[7] = 0
    dynamic = int8_twin(x, codes, scale, bias)
    for step in (torch.tensor([0.5]), torch.tensor([1e-33])):
        static = _static(x, codes, scale, step, bias)
        for isa in isas:
            cpu.use_isa(isa)
            for height in HEIGHTS:
                assert same(int8(x[:height], codes, scale, bias, None), dynamic[:height]), (isa, height)
                assert same(int8(x[:height], codes, scale, bias, step), static[:height]), (isa, height)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 130), (17, 3), (100, 190), (333, 1025)])
def test_balanced_int8_equals_the_reference(isas: list[str], rows: int, columns: int) -> None:
    codes, scale, bias = int8_tensors(rows, columns)
    x, by = torch.randn(40, columns), torch.rand(columns) * 8 + 0.01
    x[7], x[9, -1] = 0, NAN
    want = int8_twin(x * by, codes, scale, bias)
    for isa in isas:
        cpu.use_isa(isa)
        for height in HEIGHTS:
            assert same(int8_balanced(x[:height], codes, scale, bias, by), want[:height]), (isa, height)
    with pytest.raises(RuntimeError, match="x_multiplier"):
        int8_balanced(x, codes, scale, bias, torch.ones(columns + 1))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 130), (100, 190), (64, 4096)])
def test_float_activations_are_close_and_do_not_depend_on_the_batch(
    isas: list[str], rows: int, columns: int
) -> None:
    codes, scale, bias = int8_tensors(rows, columns)
    x = torch.randn(40, columns)
    twin, first = _weight_only(x, codes, scale, bias), None
    for isa in isas:
        cpu.use_isa(isa)
        y = int8_weight(x, codes, scale, bias)
        torch.testing.assert_close(y, twin, rtol=1e-5, atol=1e-5 * float(twin.abs().max()))
        first = y if first is None else first
        for height in HEIGHTS:
            assert torch.equal(int8_weight(x[:height], codes, scale, bias), first[:height]), (isa, height)


def test_extreme_int8_products_do_not_saturate(isas: list[str]) -> None:
    codes = torch.full((16, 4096), 127, dtype=torch.int8)
    x = torch.ones(3, 4096)
    x[1] = -1
    for isa in isas:
        cpu.use_isa(isa)
        y = int8(x, codes, torch.ones(16), None, None)
        torch.testing.assert_close(y, (x @ codes.float().t()), rtol=1e-6, atol=0)


def test_nan_and_infinity_stay_in_their_row_of_a_product(isas: list[str]) -> None:
    tensors, (codes, scale, bias) = lut4_tensors(33, 128, 4), int8_tensors(33, 128)
    fine = lut4_tensors(33, 128, 4, 16)
    clean = torch.randn(20, 128)
    x = clean.clone()
    x[3, 5], x[8, 127], x[11, 0] = NAN, INFINITY, -INFINITY
    bad = torch.tensor([3, 8, 11])
    good = torch.tensor([row for row in range(20) if row not in bad])
    for isa in isas:
        cpu.use_isa(isa)
        for parts in (tensors, fine):
            y = lut4(x, parts)
            assert y[bad].isnan().all()
            assert torch.equal(y[good], lut4(clean, parts)[good])
        y = int8(x, codes, scale, bias, None)
        assert y[bad].isnan().all()
        assert torch.equal(y[good], int8(clean, codes, scale, bias, None)[good])
        y = int8(x, codes, scale, bias, torch.tensor([0.01]))  # a fixed step clamps infinity
        assert y[3].isnan().all()
        assert y[8].isfinite().all()
        assert lut4(x[3:4], tensors).isnan().all()


def test_native_linear_is_bit_equal_for_any_thread_count(isas: list[str]) -> None:
    tensors, (codes, scale, bias) = lut4_tensors(640, 1024, 4), int8_tensors(640, 1024)
    fine = lut4_tensors(640, 1024, 4, 16)
    x, threads = torch.randn(70, 1024), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            integers = int8(x, codes, scale, bias, None), int8_weight(x, codes, scale, bias)
            results.append(torch.stack([lut4(x, tensors), lut4(x, fine), *integers]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_scales_of_another_number_of_columns_are_refused(isas: list[str]) -> None:
    with pytest.raises(ValueError, match="4 scales for 128 columns of 4 bits"):
        cpu.pack_lut4(lut4_tensors(32, 128, 4, 32))
    with pytest.raises(ValueError, match="8 scales for 128 columns of 3 bits"):
        cpu.pack_lut4(lut4_tensors(32, 128, 3, 16))
    packed = cpu.pack_lut4(lut4_tensors(32, 128, 4))
    wrong = packed[0], torch.cat([packed[1]] * 2, 1), *packed[2:]
    with pytest.raises(RuntimeError, match="expected 2 or 8 scales of a block"):
        torch.ops.infer.linear_lut4_packed(torch.randn(1, 128), *wrong, None, 32)


def test_delayed_threads_leave_the_thread_team_temporarily(tmp_path: Path) -> None:
    compiler, program = build.compiler(), tmp_path / "team_size"
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = Path(__file__).with_name("native_team_size.cpp")
    command = [compiler, "-std=c++17", f"-I{compile_library.SOURCES}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_thread_leaves_a_barrier_before_all_have_arrived(tmp_path: Path) -> None:
    """Teams of 1 to 9 threads, some of whom are late by so long that the others sleep."""
    compiler, program = build.compiler(), tmp_path / "barrier"
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = Path(__file__).with_name("native_barrier.cpp")
    command = [
        compiler,
        "-O2",
        "-pthread",
        "-std=c++17",
        f"-I{compile_library.SOURCES}",
        str(source),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
