"""The Triton kernels for groupwise codes against the portable operators: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer.kernels.ops.coded_weight import CodedWeight
from tests.support.groupwise_operands import FORMS, Form, operands
from tests.support.triton_compile import CUDA, DEVICE, assembly, assert_near, on_device, on_host

triton = pytest.importorskip("triton", reason="triton is not installed")
from infer.kernels.gpu import (  # noqa: E402
    embedding,
    epilogue,
    gemv_tiles,
    kernel_thresholds,
    linear_codes,
)
from infer.kernels.gpu.groupwise import groupwise_decode, groupwise_gemm, groupwise_gemv  # noqa: E402

OPS = torch.ops.infer
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def columns_of(form: Form) -> int:
    """Return a number of columns that is no multiple of a tile where the group allows it."""
    return form[0] * (7 if form[0] < 64 and form[1] != 3 else 6 if form[1] == 3 else 2)


def layer(form: Form, rows: int, columns: int) -> tuple[CodedWeight, Tensor]:
    parts = operands(form, rows, columns)
    found = CodedWeight.of({name: part.to(DEVICE) for name, part in parts.items()})
    return found, torch.randn(rows, generator=torch.Generator().manual_seed(rows)).to(DEVICE)


def reference(x: Tensor, given: CodedWeight, bias: Tensor | None) -> Tensor:
    """Compute the portable operator on the CPU, in float32."""
    moved = [None if t is None else t.cpu() for t in (x.float(), *given, bias)]
    return OPS.linear_codes(*moved).to(DEVICE)


@on_device
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_groupwise_products_of_few_rows_have_exact_weights(form: Form) -> None:
    if form[1] == 3:
        assert not gemv_tiles.usable(layer(form, 5, 48)[0])
    given, bias = layer(form, 5, columns_of(form))
    for rows, dtype in ((1, torch.float32), (3, torch.float16)):
        x = torch.randn(rows, given.columns, device=DEVICE).to(dtype)
        want = reference(x, given, bias)
        assert_near(groupwise_gemv.linear(x, given, bias), want, CLOSE[dtype])
    assert_near(groupwise_gemv.linear(x, given, split=2), want - bias, CLOSE[dtype])


@on_device
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tiles_and_decoded_weights_are_rounded_once(form: Form) -> None:
    given, bias = layer(form, 66, columns_of(form))
    # The interpreter multiplies the bits of bfloat16, not its values.
    for dtype in (torch.float16, torch.bfloat16)[: 2 if CUDA else 1]:
        x = torch.randn(17, given.columns, device=DEVICE).to(dtype)
        want = reference(x, given, bias)
        for split in (1, 2):
            assert_near(groupwise_gemm.linear(x, given, bias, split), want, CLOSE[dtype])
        assert_near(linear_codes.multiply_decoded(x, given, bias), want, 2 * CLOSE[dtype])


@on_device
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_groupwise_embeddings_equal_the_reference(form: Form) -> None:
    given, _ = layer(form, 20, columns_of(form))
    for dtype in (torch.int64, torch.int32):
        ids = torch.tensor([[19, 0], [3, 3]], device=DEVICE, dtype=dtype)
        want = OPS.embedding_codes(ids.cpu(), *(None if t is None else t.cpu() for t in given)).to(DEVICE)
        found = embedding.embedding_codes(ids, *given)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)
    assert embedding.embedding_codes(ids[:0], *given).shape == (0, 2, given.columns)


@on_device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy computes for the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_affects_its_own_groupwise_row_only(value: float) -> None:
    given, bias = layer((32, 4, torch.float16, True), 5, 96)
    x = torch.randn(4, 96, device=DEVICE)
    x[1, 7], x[2] = value, 0
    for y in (groupwise_gemv.linear(x, given, bias), groupwise_gemm.linear(x.half(), given, bias)):
        assert not y[1].isfinite().any()
        assert y[[0, 3]].isfinite().all()
        assert torch.equal(y[2], bias.to(y.dtype))


@on_device
def test_the_operator_takes_any_rows_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    given, bias = layer((32, 4, torch.int8, True), 6, 96)
    x = torch.randn(2, 96, 3, device=DEVICE).transpose(1, 2)
    want = reference(x, given, bias)
    operator = linear_codes.linear_codes
    assert_near(operator(x, *given, bias), want, 1e-5)
    assert_near(operator(x.repeat(1, 4, 1), *given, bias), want.repeat(1, 4, 1), 1e-5)
    assert operator(x[:0], *given, bias).shape == (0, 3, 6)
    assert operator(x.double(), *given, bias).dtype == torch.float64
    monkeypatch.setattr(linear_codes, "MOST_WEIGHTS", 4 * 96)
    for crossover in ((100, 100), (1, 100), (1, 1)):  # few rows, tiles, library
        limit = kernel_thresholds.Crossover(*crossover)
        monkeypatch.setattr(kernel_thresholds, "of", lambda *_, found=limit: found)
        assert_near(operator(x.half(), *given, bias), want, 2e-3)


@on_host
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_kernels_compile_and_use_tensor_cores(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple] = []
    for module in (groupwise_decode, groupwise_gemv, groupwise_gemm, epilogue):
        monkeypatch.setattr(module, "launch", lambda k, _, *a, **o: launches.append((k, a, o)))
    forms: list[Form] = {
        80: [*FORMS[1:3], (16, 4, torch.float8_e4m3fn, False)],
        90: [(32, 4, torch.int8, True), (16, 6, torch.int8, False)],
        120: [(16, 3, torch.int8, False), (32, 5, torch.uint8, True)],
    }[capability]
    for form in forms:
        given, bias = layer(form, 64, 192)
        groupwise_gemv.linear(torch.empty(1, 192, dtype=torch.bfloat16), given, bias)
        groupwise_gemm.linear(torch.empty(64, 192, dtype=torch.bfloat16), given, bias, split=2)
        groupwise_decode.decode(given, torch.bfloat16)
    codes = assembly(launches, capability)
    products = [text for text in codes if "mma.sync" in text or "wgmma" in text]
    assert len(products) == len(forms)
    assert not any("atom" in text or ".local" in text for text in codes)
