"""The rival of decode steps on a GPU, on a CPU: it computes the model, and compiles it once for all positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.gpu.static_cache_step import COMPILED, StaticCacheStep
from infer.kernels import gpu
from tests.support.tiny_decoders import VOCABULARY, build


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it compiles
@pytest.mark.parametrize("compiled", [False, True])
def test_the_static_cache_rival_computes_the_model_in_one_graph(compiled: bool) -> None:
    torch.manual_seed(0)
    model = build("llama")
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    options = {"fullgraph": COMPILED["fullgraph"], "dynamic": COMPILED["dynamic"], "backend": backend}
    ids = torch.randint(3, VOCABULARY, (2, 9))
    step = StaticCacheStep(model, 2, 6, 8, options if compiled else None)
    step.prefill(ids[:, :6])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    for place in range(6, 9):
        torch.testing.assert_close(step(ids[:, place]), expected[:, place], rtol=1e-4, atol=1e-4)
    assert len(graphs) == (1 if compiled else 0)


def test_a_benchmark_row_beyond_memory_is_skipped_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "why_not", lambda: None)  # else the module ends the process
    from bench.gpu import decode_step

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139_000_000_000, 150_000_000_000))
    assert decode_step.room_missing(100e9) == ""
    assert decode_step.room_missing(154e9) == "needs 154 GB, 139 GB are free"
