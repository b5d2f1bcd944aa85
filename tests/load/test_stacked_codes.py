"""Stacked codes of experts decode to the weights of their projections, whatever the zero points of each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer.kernels.ops.coded_weight import CodedWeight
from infer.load.checkpoint.stacked_codes import stack_codes
from infer.load.quantized_weights.group_codes import GroupedIntegers
from infer.weights import StoredCodes

ROWS, COLUMNS, GROUP = 6, 128, 64


def projection(bits: int, zero: int | None, seed: int, order: Tensor | None = None) -> StoredCodes:
    """Return random codes with one zero point, or with one drawn for each row and group."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (ROWS, COLUMNS), generator=generator)
    scales = torch.rand((ROWS, COLUMNS // GROUP), generator=generator) + 0.1
    drawn = torch.randint(1, 2**bits, scales.shape, generator=generator)
    zeros = drawn if zero is None else torch.full_like(drawn, zero)
    integers = GroupedIntegers(
        *("gptq", bits, (ROWS, COLUMNS), torch.float32),
        codes=lambda start, stop: codes[start:stop],
        zeros=lambda start, stop: zeros[start:stop],
        scales=lambda start, stop: scales[start:stop],
        group=torch.arange(COLUMNS) // GROUP if order is None else order,
    )
    stored = integers.weight().codes
    assert stored is not None
    return stored()


def decoded(codes: StoredCodes, start: int, stop: int) -> Tensor:
    found = codes.rows(start, stop)
    return CodedWeight.of(found).decode()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    "zeros", [(None, 1), (1, None), (1, 2), (None, None), (2, 2)], ids=lambda zeros: f"{zeros[0]}-{zeros[1]}"
)
def test_a_stack_of_experts_keeps_the_zero_points_of_each(
    bits: int, zeros: tuple[int | None, int | None]
) -> None:
    middle = 128 if bits == 8 else 1
    named = [None if zero is None else zero * middle for zero in zeros]
    experts = [[projection(bits, zero, 10 * e + i) for i, zero in enumerate(named)] for e in range(3)]
    experts[1].reverse()  # one expert's first projection is another's second in form
    stack = stack_codes(experts, lambda parts: torch.cat(parts))
    assert not stack.refused
    wanted = torch.cat([decoded(codes, 0, ROWS) for own in experts for codes in own])
    # A zero point in a minimum, not in the table, is one rounding more.
    torch.testing.assert_close(decoded(stack, 0, len(wanted)), wanted, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(decoded(stack, 5, 31), wanted[5:31], rtol=1e-6, atol=1e-5)


def test_experts_sorted_by_group_are_no_stack_of_codes() -> None:
    shuffled = (torch.arange(COLUMNS) // GROUP).flip(0)
    experts = [[projection(4, 8, e, shuffled)] for e in range(2)]
    assert "sorted by group" in stack_codes(experts, lambda parts: torch.cat(parts)).refused
