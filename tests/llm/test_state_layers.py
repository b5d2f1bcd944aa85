"""A step over a state cache gives transformers' own logits, for every architecture with such layers."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.ops.state_space.causal_conv import causal_conv
from infer.llm.step.full_sequence_runner import FullSequenceRunner
from infer.llm.step.paged_step import capture_step
from infer.llm.step.probe import probe
from infer.llm.step.schedules.schedule_consistency import require_float_step
from infer.llm.step.step_shape import StepShape
from tests.support.tiny_decoders import VOCABULARY, build
from tests.support.tiny_hybrids import STATEFUL

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
IDS = torch.randint(3, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", STATEFUL)
def test_every_schedule_gives_the_logits_of_transformers(name: str) -> None:
    model = build(name, sizes=STATEFUL[name])
    shape = probe(model)
    assert shape.state_layers > 0
    (found,) = require_float_step(model, shape, IDS)
    assert isinstance(found.value, float)
    assert found.value < 1e-5


class Captured:
    """Runs a captured step."""

    def __init__(self, model: torch.nn.Module, shape: StepShape) -> None:
        self._call = capture_step(model, shape).callable()

    def run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"logits": self._call(**inputs)[0]}


def test_a_captured_step_gives_the_logits_of_transformers() -> None:
    model = build("lfm2", sizes=STATEFUL["lfm2"])
    shape = probe(model, page=4, kv_dtype="float32")
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
    runner = FullSequenceRunner(Captured(model, shape), shape)
    for ids, wanted in ((IDS, expected), (IDS[:1, :1], expected[:1, :1])):
        torch.testing.assert_close(runner.run({"input_ids": ids})["logits"], wanted, atol=2e-5, rtol=1e-4)


def conv(x: torch.Tensor, cache: torch.Tensor, *segments: tuple[int, int, int, int]) -> torch.Tensor:
    weight = torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 0.0]])
    return causal_conv(x, weight, None, cache, torch.tensor(segments), 1, False)


def test_segments_read_and_write_the_rows_they_name() -> None:
    cache = torch.full((4, 6), 9.0)  # one number before and one behind what the layer owns
    x = torch.tensor([[1.0, 1.0], [2.0, 3.0], [3.0, 5.0], [4.0, 7.0]])
    whole = conv(x, cache, (0, 4, -1, 0))
    assert whole.tolist() == [[4.0, 0.0], [10.0, 0.0], [17.0, 1.0], [24.0, 3.0]]
    assert cache[0].tolist() == [9.0, 3.0, 5.0, 4.0, 7.0, 9.0]
    # Two segments of one sequence: the second reads what the first wrote, in the same call.
    assert torch.equal(conv(x, cache, (0, 1, -1, 1), (1, 4, 1, 2)), whole)
    assert torch.equal(cache[2], cache[0])
    assert cache[1].tolist() == [9.0, 0.0, 0.0, 1.0, 1.0, 9.0]
    # A segment that keeps nothing, one without tokens, and tokens of no segment.
    out = conv(x, cache, (2, 3, 1, -1), (3, 3, 0, 3))
    assert out.tolist() == [[0.0, 0.0], [0.0, 0.0], [14.0, 0.0], [0.0, 0.0]]
    assert torch.equal(cache[3], cache[0])


def test_a_state_row_outside_the_cache_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a row of 2"):
        conv(torch.zeros(1, 2), torch.zeros(2, 6), (0, 1, -1, 2))
