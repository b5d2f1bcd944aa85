"""Native layers over a state cache give what their slow twins give, on odd shapes, rows and segments."""

from __future__ import annotations

import pytest
import torch

from infer.kernels import cpu, names
from infer.kernels.ops.state_space.state_cache import STATE_LAYERS
from tests.support.state_cases import state_operands

ROWS = 5
# Two sequences, one of them in two segments; one that keeps nothing, one without tokens, tokens of nobody at the end.
SEGMENTS = [[0, 3, -1, 0], [3, 5, 0, 1], [5, 6, 2, 2], [6, 9, 3, -1], [9, 9, 4, 3]]


@pytest.fixture(scope="module", autouse=True)
def native_kernels() -> None:
    """Skip the file without native kernels; asked here, since collecting tests compiles nothing."""
    if reason := cpu.why_not():
        pytest.skip(f"no native kernels: {reason}")


def test_every_state_layer_has_a_case() -> None:
    assert set(STATE_LAYERS) == {"causal_conv", "gated_delta", "linear_scan", "selective_scan", "ssd_scan"}
    assert set(STATE_LAYERS) <= set(names())


@pytest.mark.parametrize("width", [1, 16, 19, 40])
@pytest.mark.parametrize("name", STATE_LAYERS)
def test_native_state_kernels_equal_the_reference(name: str, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    first, last, floats = state_operands(name, width, generator)
    cache = torch.randn((ROWS, floats + 3), generator=generator)
    cpu.load()
    before = cpu.isa()
    for isa in cpu.isas():
        cpu.use_isa(isa)
        try:
            twin, own = cache.clone(), cache.clone()
            tail = torch.tensor(SEGMENTS), 2
            wanted = getattr(torch.ops.infer, name)(*first, twin, *tail, *last)
            got = getattr(torch.ops.infer, f"{name}_native")(*first, own, *tail, *last)
        finally:
            cpu.use_isa(before)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(own, twin, atol=2e-5, rtol=1e-5)
        assert torch.equal(own[:, :2], cache[:, :2])
        assert torch.equal(own[:, floats + 2 :], cache[:, floats + 2 :])


@pytest.mark.parametrize("name", STATE_LAYERS)
def test_nan_stays_in_its_sequence_of_a_state_kernel(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    first, last, floats = state_operands(name, 16, generator)
    first[0][4] = torch.nan
    cache = torch.zeros(ROWS, floats)
    got = getattr(torch.ops.infer, f"{name}_native")(*first, cache, torch.tensor(SEGMENTS), 0, *last)
    assert got[4].isnan().any()
    assert not got[:3].isnan().any()
    assert not got[5:].isnan().any()


def test_rows_and_tokens_that_do_not_exist_are_errors() -> None:
    x = torch.zeros(2, 16)
    for segment, said in (([0, 2, -1, 5], "expected a row of 2"), ([0, 3, -1, 0], "not within 2 tokens")):
        with pytest.raises(RuntimeError, match=said):
            torch.ops.infer.linear_scan_native(x, x, torch.zeros(2, 16), torch.tensor([segment]), 0)
    with pytest.raises(RuntimeError, match="expected rows of 17 floats"):
        torch.ops.infer.linear_scan_native(x, x, torch.zeros(2, 16), torch.tensor([[0, 2, 0, 0]]), 1)
