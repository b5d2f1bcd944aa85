"""Differences that rounding makes in the original itself: no form of the model can be blamed for them.

A quantized output steps, the logarithm of a silent band amplifies: such a value moves by a thousand times what its
inputs move by, and every order of summation gives another one. What is judged there is what lies beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..spec import TensorSpec

Run = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
RoundedRun = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | None]

NUDGE = 1e-6  # relative, of the inputs: some roundings of float32
STEADY = 1e-4  # relative to a value and its output's root mean square: what rounding of the inputs may move
MOST = 0.75  # of the rows: where a value is not steady in so many, it stayed in place in the others by chance
BEYOND = 2.0  # times what a value that is not steady moves by, or the usual one of these, are no difference
# Where rounding moves an output by more than this share of its root mean square, and the difference as a whole is no
# larger than `BEYOND` allows, single values may be so many times off: of thousands one lies far from the usual.
CHAOTIC, BEYOND_CHAOS = 0.02, 8.0


def beyond_rounding(
    reference: Run, run: Run, specs: Sequence[TensorSpec], others: Sequence[RoundedRun] = ()
) -> Run:
    """Return what answers for `run`: values that rounding of the inputs `specs` moves in the original are nearer to the
    original's, by `BEYOND` times as much as it moves them; of other shapes and integers the original's own.

    `others`: the original with its constants rounded elsewhere, which moves values too; asked where answers differ.
    One that returns None does not run so.
    """
    rounded = [spec.name for spec in specs if spec.torch_dtype.is_floating_point]
    return partial(_determined, reference, run, rounded, others)


def _determined(
    reference: Run,
    run: Run,
    rounded: Sequence[str],
    others: Sequence[RoundedRun],
    inputs: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    got: dict[str, Tensor | None] = {name: value.cpu() for name, value in run(inputs).items()}
    if not rounded:
        return {name: value for name, value in got.items() if value is not None}
    expected = {name: value.cpu() for name, value in reference(inputs).items()}
    moved = [
        reference({**inputs, **{name: _nudged(inputs[name], sign) for name in rounded}})
        for sign in (1.0, -1.0)
    ]
    if any(_differs(value, got.get(name)) for name, value in expected.items()):
        answers = (other(inputs) for other in others)
        moved += [_comparable(expected, answer) for answer in answers if answer is not None]
    for name, value in expected.items():
        got[name] = _nearer(value, [answer[name].cpu() for answer in moved], got.get(name))
    return {name: value for name, value in got.items() if value is not None}


def _comparable(expected: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return answers with the expected ones where these alone are finite, and for those of another shape: a rounded
    constant may leave the domain of its function, or be a scale of shapes, which says nothing of the value.
    """
    found = {name: value.cpu() for name, value in moved.items()}
    same = {
        name: value if value.shape == expected[name].shape else expected[name]
        for name, value in found.items()
    }
    return {
        name: value.where(value.isfinite() | ~expected[name].isfinite(), expected[name])
        if value.is_floating_point()
        else value
        for name, value in same.items()
    }


def _differs(expected: Tensor, got: Tensor | None) -> bool:
    """Return true where any value is not `STEADY`, and so is judged."""
    if got is None or got.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return not torch.equal(expected, got)
    return not torch.allclose(
        got.double(), expected.double(), STEADY, STEADY * _size(expected), equal_nan=True
    )


def _size(values: Tensor) -> float:
    """Return the root mean square of what is finite."""
    finite = values[values.isfinite()].double()
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _nudged(value: Tensor, sign: float) -> Tensor:
    """Move every number by half to all of `NUDGE`, up or down at random."""
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5
    return (value * (1 + sign * NUDGE * (noise + noise.sign() / 2))).to(value.dtype)


def _nearer(expected: Tensor, moved: Sequence[Tensor], got: Tensor | None) -> Tensor | None:
    """Return `got`, nearer to `expected` where that moves; `expected` everywhere where it moves to another shape."""
    if any(other.shape != expected.shape for other in moved):
        return expected
    if got is None or got.shape != expected.shape:
        return got
    if not expected.is_floating_point():
        same = torch.stack([other == expected for other in moved]).all(0)
        return torch.where(same, got, expected)
    one = expected.double()
    finite = one.isfinite()
    size = _size(one)
    steps = torch.zeros_like(one)
    lost = torch.zeros_like(finite)  # to or from infinity, or NaN
    for other in (value.double() for value in moved):
        known = finite & other.isfinite()
        lost |= ~known & ~((one == other) | (one.isnan() & other.isnan()))
        steps = torch.maximum(steps, (other - one).abs().where(known, 0.0))
    unsteady = steps > STEADY * (one.abs() + size)
    if not bool((unsteady | lost).any()):
        return got
    usual, difference = _size(steps[unsteady]), got.double() - one
    chaotic = usual > CHAOTIC * size and _size(difference[unsteady]) <= BEYOND * usual
    beyond = BEYOND_CHAOS if chaotic else BEYOND
    room = beyond * steps.clamp(min=usual)
    if (
        expected.dim()
    ):  # by place: another place of the output may hold numbers of another size, which do not step
        by_chance = ~unsteady & finite & (unsteady.double().mean(0, keepdim=True) >= MOST)
        room = torch.where(by_chance, beyond * steps.square().mean(0, keepdim=True).sqrt(), room)
        unsteady |= by_chance
    left = one + difference.sign() * (difference.abs() - room).clamp(min=0)
    nearer = torch.where(unsteady & difference.isfinite(), left.to(expected.dtype), got)
    return torch.where(lost, expected, nearer)
