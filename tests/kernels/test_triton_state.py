"""The Triton kernels over a state cache against their slow twins: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from infer.kernels.ops.state_space.state_cache import STATE_LAYERS
from tests.support.state_cases import state_operands
from tests.support.triton_compile import DEVICE, assembly, in_turns, on_device, on_host

triton = pytest.importorskip("triton", reason="triton is not installed")
from infer.kernels.gpu import state_space  # noqa: E402

ROWS = 5
SEGMENTS = {
    # Two sequences, one in two segments; one that keeps nothing, one without tokens, tokens of nobody at the end.
    "apart": [[0, 3, -1, 0], [3, 5, 0, 1], [5, 6, 2, 2], [6, 9, 3, -1], [9, 9, 4, 3]],
    "crossed": [
        [0, 3, -1, 0],
        [3, 5, -1, 1],
        [5, 6, 0, 2],
        [6, 9, 1, 3],
    ],  # segments of two sequences take turns
    "one": [[0, 9, 1, 1]],
}


@on_device
@pytest.mark.parametrize(
    ("case", "width"), in_turns(list(itertools.product(SEGMENTS, STATE_LAYERS)), [1, 19, 40]), ids=str
)
def test_triton_state_kernels_equal_the_reference(case: tuple[str, str], width: int) -> None:
    segments, name = SEGMENTS[case[0]], case[1]
    generator = torch.Generator().manual_seed(width)
    first, last, floats = state_operands(name, width, generator)
    cache = torch.randn((ROWS, floats + 3), generator=generator)
    twin, own, tail = cache.clone(), cache.to(DEVICE), (torch.tensor(segments), 2)
    wanted = getattr(torch.ops.infer, name)(*first, twin, *tail, *last)
    there = [part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in first]
    got = getattr(state_space, name)(*there, own, tail[0].to(DEVICE), 2, *last)
    torch.testing.assert_close(got.cpu(), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(own.cpu(), twin, atol=2e-5, rtol=1e-5)
    assert torch.equal(own[:, :2].cpu(), cache[:, :2])
    assert torch.equal(own[:, floats + 2 :].cpu(), cache[:, floats + 2 :])


def test_segments_that_share_no_row_run_side_by_side() -> None:
    assert state_space.runs(torch.tensor(SEGMENTS["apart"]), ROWS).tolist() == [2, 1, 3, 5, 4]
    assert state_space.runs(torch.tensor(SEGMENTS["crossed"]), ROWS).tolist() == [4, 1, 2, 3]
    assert state_space.runs(torch.tensor([[0, 1, 0, 0], [1, 2, 1, 1]]), ROWS).tolist() == [1, 2]
    assert state_space.runs(torch.tensor([[0, 1, 0, 1], [1, 2, 2, 0]]), ROWS).tolist() == [2, 1]
    with pytest.raises(RuntimeError):  # on CUDA it is an assertion of the device, which can't be caught
        state_space.runs(torch.tensor([[0, 1, -1, ROWS]]), ROWS)


@on_host
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_state_kernels_compile(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    captured: list[tuple] = []
    monkeypatch.setattr(state_space, "launch", lambda kernel, _, *a, **o: captured.append((kernel, a, o)))
    for name in STATE_LAYERS:
        first, last, floats = state_operands(name, 32, torch.Generator().manual_seed(0))
        getattr(state_space, name)(
            *first, torch.zeros(ROWS, floats), torch.tensor(SEGMENTS["apart"]), 0, *last
        )
    texts = assembly(captured, capability)
    assert len(texts) == len(STATE_LAYERS)
    assert not any("atom." in text for text in texts)
