"""The Triton kernels for layers of experts against the portable operators: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer.kernels.ops import bitpack
from infer.kernels.ops.coded_weight import CodedWeight
from tests.support.groupwise_operands import FORMS, Form, operands
from tests.support.triton_compile import DEVICE, assembly, assert_near, in_turns, on_device, on_host

triton = pytest.importorskip("triton", reason="triton is not installed")
from infer.kernels.gpu import epilogue, expert_tiles, experts, gemv_tiles  # noqa: E402
from infer.kernels.gpu.groupwise import groupwise_experts, groupwise_gemv  # noqa: E402
from infer.kernels.gpu.int8 import int8_quantize  # noqa: E402

OPS = torch.ops.infer
E = 5
ASKED = [(0, 2), (1, 2), (3, 2), (40, 1)]  # rows, experts of each
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3}


def drawn(rows: int, top_k: int, columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    expert = torch.randint(0, E - 1, (rows * top_k,), generator=generator)  # nobody asks for the last one
    return x.to(DEVICE), expert.to(DEVICE)


def lut_weights(features: int, columns: int, bits: int, group: int) -> CodedWeight:
    generator = torch.Generator().manual_seed(bits)
    rows = E * features
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    tables = 1 if bits == 4 else rows // bitpack.TABLE_ROWS
    table = torch.rand(tables, 2**bits, generator=generator) * 2 - 1
    scale = torch.randint(-127, 128, (rows, columns // group), dtype=torch.int8, generator=generator)
    row_scale = torch.rand(rows, generator=generator) + 0.1
    made = (part.to(DEVICE) for part in (bitpack.pack(codes, bits), scale, table))
    return CodedWeight(*made, super_scale=row_scale.to(DEVICE))


def int8_weights(features: int, columns: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(-127, 128, (E * features, columns), dtype=torch.int8, generator=generator)
    scale = torch.rand(E * features, generator=generator)
    scale[-features:] = torch.nan  # an expert that nobody asks for is not read
    return [codes.to(DEVICE), scale.to(DEVICE)]


def reference(name: str, *args: object) -> Tensor:
    """Compute the portable operator on the CPU."""
    moved = [a.cpu() if isinstance(a, Tensor) else a for a in args]
    return getattr(OPS, name)(*moved).to(DEVICE)


@on_device
@pytest.mark.parametrize(
    ("form", "asked"),
    in_turns([(4, 64, 33), (4, 16, 70), (3, 64, 96), (6, 64, 32)], [*ASKED, (5, 2)]),
    ids=str,
)
def test_lut_experts_equal_the_portable_operator(form: tuple[int, int, int], asked: tuple[int, int]) -> None:
    (bits, group, features), (rows, top_k) = form, asked
    x, expert = drawn(rows, top_k, 128)
    weights = lut_weights(features, 128, bits, group)
    for dtype, tolerance in CLOSE.items():
        got = experts.linear_experts_codes(x.to(dtype), expert, *weights, features, top_k)
        assert got.dtype == dtype
        want = reference("linear_experts_codes", x.to(dtype).float(), expert, *weights, features, top_k)
        assert_near(got, want, tolerance)


@on_device
@pytest.mark.parametrize(("size", "asked"), in_turns([(1, 1), (33, 63), (70, 130)], ASKED), ids=str)
def test_int8_experts_equal_the_portable_operator(size: tuple[int, int], asked: tuple[int, int]) -> None:
    (features, columns), (rows, top_k) = size, asked
    x, expert = drawn(rows, top_k, columns)
    weights = int8_weights(features, columns)
    want = reference("linear_experts_int8", x, expert, *weights, features, top_k)
    assert torch.equal(experts.linear_experts_int8(x, expert, *weights, features, top_k), want)
    for dtype, tolerance in CLOSE.items():
        want = reference("linear_experts_int8_weight", x.to(dtype).float(), expert, *weights, features, top_k)
        got = experts.linear_experts_int8_weight(x.to(dtype), expert, *weights, features, top_k)
        assert_near(got, want.to(dtype), tolerance)


@on_device
@pytest.mark.parametrize("transposed", [False, True])
def test_float_experts_equal_the_portable_operator(transposed: bool) -> None:
    weight = torch.randn(E, 33, 70, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    weight[E - 1] = torch.nan
    stored = weight.transpose(1, 2).contiguous() if transposed else weight
    for rows, top_k in ASKED:
        x, expert = drawn(rows, top_k, 70)
        want = reference("linear_experts", x, expert, stored, top_k, transposed)
        assert_near(experts.linear_experts(x, expert, stored, top_k, transposed), want, 1e-5)


def groupwise(form: Form, features: int, columns: int) -> CodedWeight:
    """Draw the weights of E experts, of which that nobody asks for is NaN."""
    made = operands(form, E * features, columns)
    if made["scale"].is_floating_point():
        made["scale"][-features:] = torch.nan
    return CodedWeight.of({name: part.to(DEVICE) for name, part in made.items()})


@on_device
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_groupwise_experts_equal_the_portable_operator(form: Form) -> None:
    features, columns = 5, form[0] * (2 if form[0] >= 64 else 6)
    given = groupwise(form, features, columns)
    operator = experts.linear_experts_codes
    # Fewer places than experts, and more.
    for rows, top_k, dtype in ((2, 2, torch.float16), (4, 2, torch.float16), (7, 1, torch.float32)):
        x, expert = drawn(rows, top_k, columns)
        want = reference("linear_experts_codes", x.to(dtype).float(), expert, *given, features, top_k)
        got = operator(x.to(dtype), expert, *given, features, top_k)
        assert got.dtype == dtype
        assert_near(got, want, CLOSE[dtype])
    if gemv_tiles.usable(given):
        assert_near(groupwise_gemv.linear_experts(x, expert, given, features, top_k, split=2), want, 1e-5)


@on_device
def test_groupwise_experts_take_no_row_and_refuse_a_wrong_number() -> None:
    given = groupwise(FORMS[4], 3, 96)
    operator = experts.linear_experts_codes
    x, expert = drawn(0, 2, 96)
    assert operator(x, expert, *given, 3, 2).shape == (0, 3)
    with pytest.raises(ValueError, match="expected 4 experts for 2 rows, got 3"):
        operator(torch.zeros(2, 96, device=DEVICE), expert.new_zeros(3), *given, 3, 2)


@on_device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy computes for the interpreter
def test_nan_affects_its_own_row_of_experts_only() -> None:
    x, expert = drawn(4, 2, 64)
    x[1, 7] = torch.nan
    given = groupwise(FORMS[4], 8, 64)
    for y in (
        groupwise_experts.tiles(x, expert, given, 8, 2),
        groupwise_gemv.linear_experts(x, expert, given, 8, 2),
        experts.linear_experts_int8(x, expert, *int8_weights(8, 64), 8, 2),
        experts.linear_experts_codes(x, expert, *lut_weights(8, 64, 4, 64), 8, 2),
    ):
        assert y[2:4].isnan().all()
        assert y[[0, 1, 4, 5, 6, 7]].isfinite().all()


@pytest.mark.parametrize("height", [1, 4, 16])
@pytest.mark.parametrize("places", [0, 1, 7, 64])
def test_tiles_hold_every_place_once_and_one_expert_each(height: int, places: int) -> None:
    expert = torch.randint(0, E, (places,), generator=torch.Generator().manual_seed(places))
    tiles = expert_tiles.tiles_of(expert, E, height)
    seen = []
    for owner, begin, rows in zip(*(part.tolist() for part in tiles[1:4]), strict=True):
        if owner >= 0:
            its = tiles.order[begin : begin + rows].tolist()
            assert 0 < rows <= height
            assert {int(expert[place]) for place in its} == {owner}
            seen += its
    assert sorted(seen) == list(range(places))


def test_a_wrong_number_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 4 experts for 2 rows, got 3"):
        experts.linear_experts(torch.zeros(2, 8), torch.zeros(3, dtype=torch.int64), torch.zeros(E, 8, 8), 2)
    with pytest.raises(RuntimeError):  # on CUDA it is an assertion of the device, which can't be caught
        expert_tiles.in_range(torch.zeros(1, 8), torch.tensor([E]), E, 1)


@on_host
@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "mma"), (120, "mma.sync")])
def test_expert_kernels_compile_to_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, capability: int, instruction: str
) -> None:
    captured: list[tuple] = []
    for module in (experts, int8_quantize, groupwise_gemv, groupwise_experts, epilogue):
        monkeypatch.setattr(module, "launch", lambda kernel, _, *a, **o: captured.append((kernel, a, o)))
    x, expert = torch.zeros(3, 128, dtype=torch.float16), torch.zeros(6, dtype=torch.int64)
    experts.linear_experts_codes(x, expert, *lut_weights(64, 128, 4, 64), 64, 2)
    experts.linear_experts_codes(x, expert, *lut_weights(64, 128, 3, 64), 64, 2)
    experts.linear_experts_int8(x, expert, *int8_weights(64, 128), 64, 2)
    experts.linear_experts_int8_weight(x, expert, *int8_weights(64, 128), 64, 2)
    experts.linear_experts(x, expert, torch.zeros(E, 128, 64, dtype=torch.float16), 2, True)
    given = groupwise(FORMS[5], 64, 128)
    groupwise_experts.tiles(x, expert, given, 64, 2)
    groupwise_gemv.linear_experts(x, expert, given, 64, 2)
    texts = [text for text in assembly(captured, capability) if "_quantize" not in text]
    assert len(texts) == 7
    assert all(instruction in text for text in texts[:6])
    assert not any("atom." in text or ".local" in text for text in texts)
