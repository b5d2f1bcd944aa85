"""A language model that generates is captured once, as its step; its own module stands for the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer.errors import SourceError
from infer.graph import capture
from infer.graph.program import ModuleGraph
from infer.plan import Plan
from infer.reporter import Reporter
from infer.run import stages
from infer.run.float_graph import Original
from tests.support.tiny_decoders import build

Loaded = tuple[stages.Resolved, Any]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    build("llama").save_pretrained(tmp_path)
    plan = Plan(source=str(tmp_path), quant="int8:weight", device="cpu", data="random", batches=())
    found, run = stages.load(stages.resolve(plan))
    return run, found


def captured(loaded: Loaded) -> Original:
    return stages.capture_original(loaded[0].plan, loaded[1], Reporter())


def test_the_whole_is_captured_only_when_it_is_asked_for(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs: list[list[str]] = []
    real = capture.capture

    def counted(module: nn.Module, specs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs.append([spec.name for spec in specs])
        return real(module, specs, *args, **kwargs)

    monkeypatch.setattr(capture, "capture", counted)
    original = captured(loaded)
    assert isinstance(original.graph, ModuleGraph)
    assert [names[0] for names in inputs] == ["token_ids"]
    small = stages.compress_model(loaded[0].plan, original)
    assert [names[0] for names in inputs] == ["token_ids"] * 2, "the quantized copy is a step too"
    assert small.shape is not None
    assert "whole" not in vars(original)
    wanted = original.graph.run(original.graph.samples)["logits"]
    assert torch.allclose(original.whole.run(original.graph.samples)["logits"], wanted, atol=1e-4)


def test_a_language_model_without_numbers_is_refused_before_its_capture(loaded: Loaded) -> None:
    with torch.no_grad():
        loaded[1].module.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(SourceError, match="every value of output 0 is NaN"):
        captured(loaded)


def test_a_language_model_that_draws_random_numbers_is_refused(loaded: Loaded) -> None:
    head = loaded[1].module.model.lm_head

    def noisy(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
        return logits + torch.randn_like(logits)

    head.register_forward_hook(noisy)
    with pytest.raises(SourceError, match="two runs of the original on the same rows differ"):
        captured(loaded)
