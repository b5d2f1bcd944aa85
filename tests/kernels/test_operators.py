"""Every `infer::` operator against a slow numpy twin; then the promises of rows, dtypes, shapes and decompositions."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import infer.attention
import infer.kernels
from infer.kernels.ops import bitpack, linear_lut4_fragments
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.ops.linear_int8 import EXACT_TERMS
from infer.kernels.ops.state_space.state_cache import STATE_LAYERS
from tests.support.attention_cases import Case
from tests.support.state_cases import state_operands

OPS = torch.ops.infer
ROWS = (1, 3, 63, 65, 100)


def weights_int8(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return codes, torch.rand(rows) * 0.01 + 0.001, torch.randn(rows)


def weights_lut(rows: int, columns: int, bits: int, group: int = 64) -> tuple[CodedWeight, np.ndarray]:
    """Packed weight, and the float64 weight they stand for computed by indexing alone."""
    tables = -(-rows // bitpack.TABLE_ROWS) if bits != 4 else 1
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    table = torch.rand(tables, 2**bits).mul(2).sub(1).sort(1).values
    scale = torch.randint(-127, 128, (rows, columns // group), dtype=torch.int8)
    row_scale = torch.rand(rows) + 0.1
    weight = np.empty((rows, columns))
    for n in range(rows):
        for k in range(columns):
            entry = float(table[n // 32 if tables > 1 else 0, int(codes[n, k])])
            weight[n, k] = entry * int(scale[n, k // group]) / 127 * float(row_scale[n])
    return CodedWeight(bitpack.pack(codes, bits), scale, table, super_scale=row_scale), weight


def twin_int8(x: np.ndarray, codes: np.ndarray, scale: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Exact int64 products of integers, then scales: x [M, K], codes [N, K], step broadcasts to [M, 1]."""
    grid = np.clip(np.rint(x.astype(np.float32) / step), -127, 127).astype(np.int64)
    return (grid @ codes.astype(np.int64).T).astype(np.float32) * step * scale


def row_steps(x: np.ndarray) -> np.ndarray:
    return np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(127)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", [1, 63, 100, EXACT_TERMS + 1, 3000])
def test_linear_int8_is_bit_equal_to_integer_accumulation(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns)
    codes, scale, _ = weights_int8(65, columns)
    want = twin_int8(x.numpy(), codes.numpy(), scale.numpy(), row_steps(x.numpy()))
    assert np.array_equal(OPS.linear_int8(x, codes, scale).numpy(), want)


def test_linear_int8_of_the_largest_products_is_exact() -> None:
    x = torch.cat([torch.ones(1, 4097), torch.ones(1, 4097)])
    x[1, ::2] = -1
    codes = torch.full((3, 4097), 127, dtype=torch.int8)
    codes[1, 0], codes[2] = 126, -127
    sums = OPS.linear_int8(x, codes, torch.ones(3)) * 127  # the step is 1 / 127
    full = 4097 * 127 * 127
    want = torch.tensor(
        [[full, full - 127, -full], [-127 * 127, -127 * 127 + 127, 127 * 127]], dtype=torch.float64
    )
    assert torch.allclose(sums.double(), want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("make", ["relu", "positive", "same sign"])
def test_linear_int8_does_not_saturate(make: str) -> None:
    """Data on which 8-bit dot products of AVX2 lose up to 13.7 %: large weights of one sign, positive activations."""
    x = torch.rand(9, 512) + 0.5 if make != "relu" else torch.randn(9, 512).relu()
    weight = torch.rand(33, 512) * 2 - 1 if make != "same sign" else torch.rand(33, 512) * 0.01 + 1
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8)
    want = x.double() @ weight.double().T
    error = (OPS.linear_int8(x, codes, scale).double() - want).norm() / want.norm()
    assert error < (0.001 if make == "same sign" else 0.01)


def test_linear_int8_static_clamps_and_weight_only_does_not_round() -> None:
    x = torch.randn(7, 65)
    codes, scale, bias = weights_int8(33, 65)
    step = torch.tensor(0.005)
    want = twin_int8(x.numpy(), codes.numpy(), scale.numpy(), np.float32(0.005)) + bias.numpy()
    assert (x.abs() > 127 * step).any()
    np.testing.assert_allclose(
        OPS.linear_int8_static(x, codes, scale, step, bias).numpy(), want, rtol=1e-6, atol=1e-6
    )
    weight = codes.double() * scale.double()[:, None]
    got = OPS.linear_int8_weight(x, codes, scale, bias).double()
    torch.testing.assert_close(got, x.double() @ weight.T + bias.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["linear_int8", "linear_int8_weight", "linear_codes"])
def test_nan_affects_its_row_only_and_a_zero_row_gives_the_bias(name: str, value: float) -> None:
    x = torch.randn(5, 128)
    x[3] = 0
    run = runner(name, 128)
    clean = run(x)
    x[1, 7] = value
    dirty = run(x)
    others = [0, 2, 3, 4]
    assert torch.equal(dirty[others], clean[others])
    assert not dirty[1].isfinite().any()
    assert torch.equal(clean[3], run.bias)


class runner:
    """One linear operator with fixed weights; calling it runs it."""

    def __init__(self, name: str, columns: int) -> None:
        self.op, (codes, scale, self.bias) = getattr(OPS, name), weights_int8(40, columns)
        self.tensors: tuple[Tensor | None, ...] = (codes, scale)
        if name == "linear_codes":
            self.tensors = weights_lut(40, columns, 3)[0]
        if name == "linear_int8_static":
            self.tensors = (codes, scale, torch.tensor(0.02))

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(x, *self.tensors, self.bias)


LINEAR = ["linear_int8", "linear_int8_static", "linear_int8_weight", "linear_codes"]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_takes_any_leading_sizes_and_float_dtype(name: str) -> None:
    run, x = runner(name, 128), torch.randn(2, 3, 128)
    whole = run(x)
    assert whole.shape == (2, 3, 40)
    assert run(x[:0]).shape == (0, 3, 40)
    torch.testing.assert_close(run(x[1, 2]), whole[1, 2], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(run(x.transpose(0, 1)), whole.transpose(0, 1), rtol=1e-5, atol=1e-4)
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float64, 1e-6)):
        half = run(x.to(dtype))
        assert half.dtype == dtype
        want = run(x.to(dtype).float())
        assert (half.float() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("bits", bitpack.BITS)
def test_packing_is_a_little_endian_stream_of_bits(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 64), dtype=torch.uint8)
    packed = bitpack.pack(codes, bits)
    streams = ["".join(format(int(code), f"0{bits}b")[::-1] for code in row) for row in codes]
    want = [[int(stream[i : i + 8][::-1], 2) for i in range(0, len(stream), 8)] for stream in streams]
    assert packed.tolist() == want
    assert torch.equal(bitpack.unpack(packed, bits), codes)
    assert torch.equal(bitpack.unpack_arithmetic(packed, bits), codes.float())


@pytest.mark.parametrize(("bits", "group"), [*((bits, 64) for bits in bitpack.BITS), (4, 16)])
@pytest.mark.parametrize("rows", ROWS)
def test_linear_and_embedding_codes_equal_indexing(bits: int, group: int, rows: int) -> None:
    tensors, weight = weights_lut(rows, 128, bits, group)
    x, bias = torch.randn(5, 128), torch.randn(rows)
    want = x.double().numpy() @ weight.T + bias.double().numpy()
    got = OPS.linear_codes(x, *tensors, bias).double().numpy()
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    ids = torch.randint(0, rows, (2, 7))
    np.testing.assert_allclose(OPS.embedding_codes(ids, *tensors), weight[ids.numpy()], rtol=1e-5, atol=1e-7)
    assert OPS.embedding_codes(ids[:, :0], *tensors).shape == (2, 0, 128)
    with pytest.raises(IndexError):
        OPS.embedding_codes(torch.tensor([rows]), *tensors)


def test_a_large_coded_weight_is_decoded_in_blocks_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, weight = weights_lut(100, 128, 3)
    x = torch.randn(4, 128)
    whole = OPS.linear_codes(x, *tensors)
    monkeypatch.setattr("infer.kernels.ops.coded_weight.BLOCK", 40 * 128)
    blocks = OPS.linear_codes(x, *tensors)
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(blocks, x.double().numpy() @ weight.T, rtol=1e-3, atol=1e-4)


def test_embedding_int8_scales_rows() -> None:
    codes, scale, _ = weights_int8(50, 33)
    ids = torch.tensor([[0, 49, 7]], dtype=torch.int32)
    want = codes[ids.long()].float() * scale[ids.long()][..., None]
    assert torch.equal(OPS.embedding_int8(ids, codes, scale), want)
    assert OPS.embedding_int8(ids, codes, scale.half()).dtype == torch.float16


CONV = [((1, 1), (1, 1), (1, 1), 1), ((2, 1), (0, 2), (1, 2), 1), ((1, 2), (1, 0), (1, 1), 3)]


def twin_conv(x: np.ndarray, codes: np.ndarray, options: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Integer convolution by definition, one output at a time."""
    (sh, sw), (ph, pw), (dh, dw), groups = options
    count, kh, kw = codes.shape[0], codes.shape[2], codes.shape[3]
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    height = (padded.shape[2] - dh * (kh - 1) - 1) // sh + 1
    width = (padded.shape[3] - dw * (kw - 1) - 1) // sw + 1
    out = np.zeros((x.shape[0], count, height, width), np.int64)
    for o in range(count):
        first = o // (count // groups) * codes.shape[1]
        for i in range(height):
            for j in range(width):
                rows, columns = slice(i * sh, i * sh + dh * kh, dh), slice(j * sw, j * sw + dw * kw, dw)
                part = padded[:, first : first + codes.shape[1], rows, columns]
                out[:, o, i, j] = (part * codes[o]).sum((1, 2, 3))
    return out


@pytest.mark.parametrize("options", CONV)
@pytest.mark.parametrize("kind", ["dynamic", "static", "weight"])
def test_conv2d_int8_equals_its_definition(options: tuple, kind: str) -> None:
    x = torch.randn(3, 6, 9, 8)
    codes = torch.randint(-127, 128, (9, 6 // options[3], 3, 2), dtype=torch.int8)
    scale, bias = torch.rand(9) * 0.01, torch.randn(9)
    added = bias.numpy()[:, None, None]
    channels = scale.numpy()[:, None, None]
    if kind == "weight":
        weight = codes.double() * scale.double()[:, None, None, None]
        want = nn.functional.conv2d(x.double(), weight, bias.double(), *options).numpy()
        got = OPS.conv2d_int8_weight(x, codes, scale, bias, *options)
    else:
        peak = np.abs(x.numpy()).max((1, 2, 3), keepdims=True)
        step = np.float32(0.01) if kind == "static" else peak / np.float32(127)
        grid = np.clip(np.rint(x.numpy() / step), -127, 127).astype(np.int64)
        want = (
            twin_conv(grid, codes.numpy().astype(np.int64), options).astype(np.float32) * step * channels
            + added
        )
        static = (torch.tensor(0.01),) if kind == "static" else ()
        got = getattr(OPS, "conv2d_int8_static" if static else "conv2d_int8")(
            x, codes, scale, *static, bias, *options
        )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert got.is_contiguous()


def test_conv2d_int8_isolates_samples_and_takes_an_empty_batch() -> None:
    x = torch.randn(3, 8, 5, 5).to(memory_format=torch.channels_last)
    codes, scale = torch.randint(-127, 128, (4, 8, 3, 3), dtype=torch.int8), torch.rand(4)
    clean = OPS.conv2d_int8(x, codes, scale)
    x[1, 0, 0, 0] = torch.nan
    dirty = OPS.conv2d_int8(x, codes, scale)
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
    assert dirty[1].isnan().any()
    assert OPS.conv2d_int8(x[:0], codes, scale).shape == (0, 4, 3, 3)


def test_operators_can_be_reloaded_and_have_decompositions() -> None:
    before = infer.kernels.names()
    for module in (infer.kernels.ops.linear_int8, infer.kernels.ops.linear_codes, infer.kernels):
        importlib.reload(module)
    assert infer.kernels.names() == before
    assert len(infer.kernels.decompositions()) == len(before)
    assert set(before) == set(sample_calls())


def sample_calls() -> dict[str, tuple]:
    codes, scale, bias = weights_int8(40, 128)
    tensors = weights_lut(40, 128, 6)[0]
    kernels = torch.randint(-127, 128, (4, 2, 3, 3), dtype=torch.int8)
    x, image, ids = torch.randn(3, 128), torch.randn(2, 4, 6, 6), torch.randint(0, 40, (2, 5))
    step, conv = torch.tensor(0.02), ((2, 2), (1, 1), (1, 1), 2)
    experts, rows = weights_lut(64, 128, 6)[0], weights_int8(64, 128)[:2]
    asked = torch.tensor([0, 1, 1, 0, 1, 1])  # of two experts, by three rows of x
    fragments = linear_lut4_fragments.pack(weights_lut(40, 128, 4)[0], False)
    return {
        "linear_experts": (x, asked, torch.randn(2, 32, 128), 2),
        "linear_experts_int8": (x, asked, *rows, 32, 2),
        "linear_experts_int8_weight": (x, asked, *rows, 32, 2),
        "linear_experts_codes": (x, asked, *experts, 32, 2),
        "linear_int8": (x, codes, scale, bias),
        "linear_int8_static": (x, codes, scale, step, bias),
        "linear_int8_weight": (x, codes, scale, bias),
        "linear_fp8": (x, codes.to(torch.float8_e4m3fn), scale, bias),
        "linear_codes": (x, *tensors, bias),
        "linear_lut4_fragments": (x, *fragments, bias, 40, False),
        "embedding_int8": (ids, codes, scale),
        "embedding_codes": (ids, *tensors),
        "conv2d_int8": (image, kernels, scale[:4], bias[:4], *conv),
        "conv2d_int8_static": (image, kernels, scale[:4], step, bias[:4], *conv),
        "conv2d_int8_weight": (image, kernels, scale[:4], bias[:4], *conv),
        "rms_norm": (x, torch.randn(128), 1.0, 1e-6),
        "rotate": (x.view(3, 2, 64), torch.randn(3, 1, 32), torch.randn(3, 1, 32)),
        "attend_paged": attention(),
        "attend_paged_rotary": rotary_attention(),
        **{name: state_layer(name) for name in STATE_LAYERS},
    }


def groupwise_calls() -> dict[str, tuple]:
    """Return calls on the codes of a checkpoint: the other layout of these operators."""
    steps, table = torch.rand(64, 2) + 0.1, torch.linspace(-1, 1, 16)[None]
    weight = CodedWeight(weights_lut(64, 128, 4)[0].codes, steps, table)
    x, ids, asked = torch.randn(3, 128), torch.randint(0, 64, (2, 5)), torch.tensor([0, 1, 1, 0, 1, 1])
    return {
        "linear_codes groupwise": (x, *weight, None),
        "embedding_codes groupwise": (ids, *weight),
        "linear_experts_codes groupwise": (x, asked, *weight, 32, 2),
    }


def state_layer(name: str) -> tuple:
    """One sequence from no state."""
    first, last, floats = state_operands(name, 16, torch.Generator().manual_seed(0))
    segments = torch.tensor([[0, len(first[0]), -1, 1]])
    return (*first, torch.zeros(2, floats), segments, 0, *last)


def attention() -> tuple:
    case = Case(done=(0, 0), new=(3, 1))
    args = case.args(case.cache().zero_(), case.done, case.new)
    return tuple(getattr(args, field.name) for field in dataclasses.fields(args))


def rotary_attention() -> tuple:
    """Rotate 8 columns of each head, which lie in interleaved pairs."""
    heads, rest = attention()[:3], attention()[3:]
    angles = torch.randn(len(heads[0]), 8)
    return (*heads, angles.cos(), angles.sin(), 0, 8, 1, *rest)


@pytest.mark.parametrize("name", [*sorted(infer.kernels.names()), *groupwise_calls()])
def test_schema_shape_function_and_decomposition_agree_with_the_reference(name: str) -> None:
    args = (sample_calls() | groupwise_calls())[name]
    op = getattr(OPS, name.split()[0]).default
    # torch can't compare float8 tensors, as its check of the schema does.
    checks = ("test_faketensor",) if name == "linear_fp8" else ("test_schema", "test_faketensor")
    torch.library.opcheck(op, args, test_utils=checks)
    want = op(*args)
    got = infer.kernels.decompositions()[op](*args)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert (got - want).norm() <= 1e-5 * want.norm()
    assert want.norm() > 0


def test_long_sums_decompose_within_1e_5() -> None:
    codes, scale, bias = weights_int8(16, 4096)
    x = torch.rand(4, 4096) + 0.5
    codes[:8] = codes[:8].abs()
    op = OPS.linear_int8.default
    want, got = op(x, codes, scale, bias), infer.kernels.decompositions()[op](x, codes, scale, bias)
    assert (got - want).norm() <= 1e-5 * want.norm()
