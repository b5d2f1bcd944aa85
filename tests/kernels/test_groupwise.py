"""Layers on groupwise codes: every instruction set against the slow twin, and the portable operator against it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infer.kernels import cpu
from infer.kernels.cpu.groupwise_layout import code_bytes, groupwise_layout, pack_groupwise, record_bytes
from infer.kernels.ops.bitpack import pack, unpack
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.ops.linear_packed import groupwise_twin
from tests.support.groupwise_operands import FORMS, operands

ISAS = ("amx", "avx512_vnni", "avx_vnni", "avx2", "neon_dotprod", "scalar")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if reason := cpu.why_not():  # asked here, since collecting tests compiles nothing
        pytest.skip(f"no native kernels: {reason}")
    if request.param not in cpu.isas():
        pytest.skip(f"no {request.param} here")
    before = cpu.isa()
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(before)


def packed(x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> Tensor:
    weight = CodedWeight.of(tensors)
    layout, parts = groupwise_layout(weight), pack_groupwise(weight)
    assert parts[1].shape[1] == record_bytes(layout, x.shape[-1])
    return torch.ops.infer.linear_groupwise_packed(x, *parts, bias, layout, weight.num_rows)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_groupwise_kernels_equal_the_reference_on_every_isa(form: tuple, isa: str) -> None:  # type: ignore[type-arg]
    for rows, columns, count in ((1, 320, 1), (35, 640, 3), (64, 320, 17), (16, 960, 40), (90, 640, 195)):
        columns += -columns % (256 if form[2] == torch.uint8 else form[0])
        tensors = operands(form, rows, columns)
        rng = torch.Generator().manual_seed(count)
        x, bias = torch.randn((count, columns), generator=rng), torch.randn(rows, generator=rng)
        coded = CodedWeight.of(tensors)
        expected = groupwise_twin(x, coded, bias)
        found = packed(x, tensors, bias)
        weight = torch.ops.infer.embedding_codes(torch.arange(rows), *coded)
        size = x.norm(dim=1, keepdim=True) * weight.norm(dim=1) + bias.abs()
        torch.testing.assert_close(found / size, expected / size, rtol=0, atol=1e-6)
        for row in {0, count // 2, count - 1}:
            alone = packed(x[row : row + 1], tensors, bias)
            assert torch.equal(alone[0], found[row]), "a row has other bits beside other rows"


def test_rows_of_a_wide_layer_have_the_bits_of_a_row_alone(isa: str) -> None:
    for columns in (
        8192,
        32768,
    ):  # codes and scales of two blocks, and not even of one, are kept for the next tile
        tensors, x = operands((16, 6, torch.int8, False), 70, columns), torch.randn(20, columns)
        alone = torch.cat([packed(row[None], tensors, None) for row in x])
        assert torch.equal(packed(x, tensors, None), alone)


def test_codes_and_scales_take_no_more_bits_than_their_values() -> None:
    q6_k, q5_0, q4_k, q2_k, q3_k, iq2_xxs = (
        (16, 6, torch.int8),
        (32, 5, torch.float16),
        (32, 4, torch.uint8),
        (16, 2, torch.uint8),
        (16, 3, torch.int8),
        (32, 3, torch.int8),
    )
    for form, minimum, codes, record in (
        (q6_k, False, 6, 18),
        (q5_0, False, 5, 16),
        (q4_k, True, 4, 16),
        (q2_k, True, 2, 20),
        (q3_k, False, 3, 18),
        (iq2_xxs, False, 3, 10),
    ):
        layout = groupwise_layout(CodedWeight.of(operands((*form, minimum), 16, 2560)))
        assert code_bytes(layout) == codes * 128
        assert record_bytes(layout, 2560) == 64 + 16 * 10 * record, "bytes for each 256 columns of 16 rows"


def test_integer_codes_with_integer_scales_give_exact_integers(isa: str) -> None:
    for group, bits, zero in ((32, 4, 8), (32, 4, 0), (64, 4, 7), (16, 3, 4), (32, 3, 4), (16, 2, 0)):
        codes = torch.randint(0, 2**bits, (35, 320)).to(torch.uint8)
        table = torch.arange(2.0**bits)[None] - zero
        scale = torch.randint(1, 4, (35, 320 // group)).half()
        x = torch.randint(-127, 128, (3, 320)).float()
        x[:, ::32] = 127  # the largest of all columns that share a step: it is 1
        weight = table[0, codes.int()] * scale.float().repeat_interleave(group, 1)
        found = packed(x, {"codes": pack(codes, bits), "scale": scale, "table": table}, None)
        assert torch.equal(found, x @ weight.t()), (group, bits, zero)


def test_bytes_that_fit_in_planes_are_packed_as_bit_streams_are(isa: str) -> None:
    for form in ((16, 6, torch.int8, False), (32, 5, torch.float16, False), (32, 5, torch.int8, True)):
        tensors = operands(form, 35, 320)
        table = tensors.pop("table")
        stream = pack_groupwise(CodedWeight.of({**tensors, "table": table}))
        values = table[0, unpack(tensors["codes"], form[1]).int()].to(torch.int8)
        in_bytes = pack_groupwise(CodedWeight.of({**tensors, "codes": values}))
        assert all(torch.equal(one, other) for one, other in zip(stream, in_bytes, strict=True))


@pytest.mark.parametrize(
    "form", [(16, 6, torch.int8, False), (32, 5, torch.uint8, True), (32, 4, torch.uint8, True)], ids=str
)
def test_groupwise_kernels_write_and_need_nothing_beyond_their_rows(form: tuple, isa: str) -> None:  # type: ignore[type-arg]
    tensors, x = operands(form, 35, 256), torch.randn(3, 256)
    weight = CodedWeight.of(tensors)
    layout, parts = groupwise_layout(weight), pack_groupwise(weight)
    wanted = torch.ops.infer.linear_groupwise_packed(x, *parts, None, layout, 35)
    poisoned = []
    for part in parts:  # each right before memory of other values
        room = torch.full((part.numel() + 4096,), 0xA5, dtype=torch.uint8).view(part.dtype)
        poisoned.append(room[: part.numel()].copy_(part.flatten()).view(part.shape))
    found = torch.ops.infer.linear_groupwise_packed(x, *poisoned, None, layout, 35)
    assert torch.equal(found, wanted)
    assert wanted.isfinite().all()


def test_groupwise_experts_share_the_layout_of_all(isa: str) -> None:
    form, features = (16, 8, torch.int8, False), 16
    tensors = operands(form, 2 * features, 64)
    tensors["codes"][:features] = 1  # of the first expert they would fit in planes
    layout = groupwise_layout(CodedWeight.of(tensors))
    each = [{k: v[e * features : (e + 1) * features] for k, v in tensors.items()} for e in range(2)]
    joined = [
        torch.cat(part)
        for part in zip(*(pack_groupwise(CodedWeight.of(one), layout) for one in each), strict=True)
    ]
    x, expert = torch.randn(2, 64), torch.tensor([0, 1])
    found = torch.ops.infer.linear_experts_groupwise_packed(x, expert, *joined, layout, features, 1)
    for place in range(2):
        assert torch.equal(found[place : place + 1], packed(x[place][None], each[place], None))


def test_nan_stays_in_its_row_of_a_groupwise_product(isa: str) -> None:
    tensors = operands((32, 4, torch.float16, True), 20, 128)
    x = torch.randn(5, 128)
    x[2, 77] = torch.nan
    assert packed(x, tensors, None).isnan().all(1).tolist() == [False, False, True, False, False]
    assert packed(x[:0], tensors, None).shape == (0, 20)


def test_groupwise_experts_are_bit_equal_to_single_layers(isa: str) -> None:
    features, columns = 24, 128
    tensors = operands((32, 4, torch.int8, True), 3 * features, columns)
    each = [
        {k: v if k == "table" else v[e * features : (e + 1) * features] for k, v in tensors.items()}
        for e in range(3)
    ]
    parts = [pack_groupwise(CodedWeight.of(one)) for one in each]
    joined = [torch.cat(part) for part in zip(*parts, strict=True)]
    x, expert = torch.randn(4, columns), torch.tensor([0, 2, 2, 0, 1, 2, 1, 1])
    found = torch.ops.infer.linear_experts_groupwise_packed(
        x, expert, *joined, groupwise_layout(CodedWeight.of(tensors)), features, 2
    )
    for place, e in enumerate(expert.tolist()):
        assert torch.equal(found[place : place + 1], packed(x[place // 2][None], each[e], None))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_portable_operator_and_its_decomposition_decode_the_same(form: tuple) -> None:  # type: ignore[type-arg]
    tensors = operands(form, 35, 640)
    x = torch.randn(3, 640)
    coded = CodedWeight.of(tensors)
    found = torch.ops.infer.linear_codes(x, *coded)
    weight = torch.ops.infer.embedding_codes(torch.arange(35), *coded)
    torch.testing.assert_close(found, x @ weight.t(), rtol=1e-4, atol=1e-4)
    near = groupwise_twin(x, coded)
    assert float((near - found).norm() / found.norm()) < 0.02


def test_every_instruction_set_of_this_processor_is_in_the_list() -> None:
    if reason := cpu.why_not():
        pytest.skip(f"no native kernels: {reason}")
    assert set(cpu.isas()) <= set(ISAS)
