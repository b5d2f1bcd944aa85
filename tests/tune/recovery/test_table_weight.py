"""Trainable table weights: they begin as the packed ones, their gradients are right, and packing keeps them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer import compress
from infer.compress import Quantizer
from infer.plan import Plan
from infer.tune.recovery.table_weight import POSITION_UNIT, RANKS, TableWeight, codes_at

FORMATS = ["nf4", "nf4:16", "int4", "fp4", "cluster:2", "cluster:3", "cluster:6"]
ROWS, COLUMNS = 70, 128


def quantized(name: str) -> tuple[Quantizer, dict[str, Tensor], Tensor]:
    plan = Plan(source="m.pt", quant=name)
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    weight[0] = 0
    return compress.get(plan), compress.get(plan).quantize(weight, None, plan), weight


def disturbed(weight: TableWeight) -> TableWeight:
    make = torch.Generator().manual_seed(2)
    for parameter in weight.parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape, generator=make)
    return weight


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_trainable_weight_begins_as_the_packed_one(name: str, codes: bool) -> None:
    way, tensors, original = quantized(name)
    weight = TableWeight(tensors, original if codes else None)
    torch.testing.assert_close(weight().detach(), way.dequantize(tensors), rtol=1e-6, atol=1e-7)
    again = weight.tensors()
    assert {n: (t.dtype, t.shape) for n, t in again.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    torch.testing.assert_close(way.dequantize(again), way.dequantize(tensors), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_tensors_hold_what_was_trained(name: str, codes: bool) -> None:
    way, tensors, original = quantized(name)
    weight = disturbed(TableWeight(tensors, original if codes else None))
    packed = weight.tensors()
    torch.testing.assert_close(way.dequantize(packed), weight().detach(), rtol=1e-5, atol=1e-6)
    assert bool((packed["table"].diff(dim=1) >= 0).all())
    assert float(packed["table"].abs().max()) == 1
    assert not torch.equal(packed["table"], tensors["table"])


@pytest.mark.parametrize("name", ["nf4:16", "cluster:3"])
def test_gradients_are_those_of_the_decoded_weight(name: str) -> None:
    _, tensors, _ = quantized(name)
    weight = TableWeight(tensors)
    upstream = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    (weight() * upstream).sum().backward()
    table = weight.table.clone().requires_grad_()
    level, row_scale = weight.level.clone().requires_grad_(), weight.row_scale.clone().requires_grad_()
    index = torch.arange(ROWS) // 32 if len(table) > 1 else torch.zeros(ROWS, dtype=torch.int64)
    values = table[index].gather(1, weight.codes.long())
    steps = (level * (row_scale / 127)[:, None]).repeat_interleave(weight.group, 1)
    (values * steps * upstream).sum().backward()
    pairs = [
        (weight.table_change.grad, table.grad),
        (weight.level_change.grad, level.grad * 127),
        (weight.row_change.grad, row_scale.grad * weight.row_scale),
    ]
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["nf4", "cluster:2"])
def test_frozen_codes_withstand_a_step_and_free_ones_do_not(name: str) -> None:
    _, tensors, original = quantized(name)
    weight = TableWeight(tensors, original)
    assert weight.position is not None
    before = codes_at(weight.position.detach(), weight.table.shape[1])
    weight.freeze(0.5)
    torch.testing.assert_close(
        codes_at(weight.position.detach(), weight.table.shape[1]), before, rtol=0, atol=0
    )
    weight.position.data += 0.4 / POSITION_UNIT
    moved = codes_at(weight.position.detach(), weight.table.shape[1]) != before
    frozen = weight.rank < RANKS // 2
    assert 0.4 < float(frozen.float().mean()) < 0.6
    assert not bool(moved[frozen].any())
    assert bool(moved[~frozen].any())


@pytest.mark.parametrize("name", ["nf4", "cluster:3"])
def test_positions_outside_their_code_are_mirrored_into_it(name: str) -> None:
    _, tensors, original = quantized(name)
    weight = TableWeight(tensors, original + 0.1 * original.std())
    assert weight.position is not None
    inside = weight.position.detach() * POSITION_UNIT - weight.codes
    assert float(inside.abs().max()) < 0.5
    at_threshold = (inside.abs() > 0.49).float().mean()
    assert float(at_threshold) < 0.05, "clamped to it, every moved one would lie there"


@pytest.mark.parametrize("name", ["nf4", "nf4:16", "cluster:3"])
def test_a_ramp_moves_values_only_near_thresholds_and_is_continuous(name: str) -> None:
    _, tensors, original = quantized(name)
    weight = TableWeight(tensors, original)
    assert weight.position is not None
    rounded, inside = weight().detach(), (weight.position.detach() * POSITION_UNIT - weight.codes).abs()
    weight.width = 0.25
    ramped = weight().detach()
    far = inside < 0.5 - weight.width / 2 - 1e-4
    torch.testing.assert_close(ramped[far], rounded[far], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(ramped, rounded)
    largest = weight.table.diff(dim=1).max() * rounded.abs().max()
    weight.position.data += 0.001 / POSITION_UNIT
    assert float((weight().detach() - ramped).abs().max()) < 0.01 * float(largest), (
        "a step of a thousandth of a code"
    )


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("name", ["nf4", "cluster:2"])
def test_looked_up_rows_and_their_gradients_are_those_of_the_weight(name: str, codes: bool) -> None:
    _, tensors, original = quantized(name)
    ids = torch.tensor([[3, 69, 3], [40, 0, 41]])
    upstream = torch.randn(2, 3, COLUMNS, generator=torch.Generator().manual_seed(4))
    whole, part = (TableWeight(tensors, original if codes else None) for _ in range(2))
    for weight in (whole, part):
        disturbed(weight).width = 0.2
    want, got = torch.nn.functional.embedding(ids, whole()), part.rows(ids)
    torch.testing.assert_close(got, want)
    (want * upstream).sum().backward()
    (got * upstream).sum().backward()
    for given, expected in zip(part.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(given.grad, expected.grad, rtol=1e-4, atol=1e-5)
