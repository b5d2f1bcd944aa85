"""Limits of an engine and times of its steps on a GPU; properties and clock are given, no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infer.llm.engine.model_runner import step_seconds
from infer.llm.engine.scheduling.engine_limits import EngineLimits, default_limits
from infer.llm.step.graph_inputs import LARGEST

GIB = 1 << 30


@pytest.mark.parametrize(
    ("sms", "memory", "limits"),
    [(132, 141, (2048, 512, 256)), (58, 24, (1024, 256, 256)), (36, 12, (1024, 256, 128))],
)
def test_limits_come_from_memory_and_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, sms: int, memory: int, limits: tuple[int, int, int]
) -> None:
    card = SimpleNamespace(multi_processor_count=sms, total_memory=memory * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    found = default_limits("cuda:1")
    assert (found.step_tokens, found.mixed_tokens, found.max_running) == limits
    found.check(16)
    assert found.max_running <= LARGEST


def test_limits_of_a_cpu_stay_those_of_the_class() -> None:
    assert default_limits("cpu") == EngineLimits()


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 2.0), ("meta", 5.0)])
def test_a_step_of_another_device_ends_with_its_tokens(device: str, seconds: float) -> None:
    assert step_seconds(device, 1.0, 3.0, 6.0) == seconds
