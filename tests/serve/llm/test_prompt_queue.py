"""The prompt queue by tenant: no tenant can fill it for others or lengthen their predicted wait."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from infer.serve.limits import ServeLimits
from infer.serve.llm.prompt_queue import PromptQueue, QueuedPrompt
from tests.support.fake_llm import FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import live

LIMITS = ServeLimits(max_queue_requests=10, max_queue_tokens=1000)


def flooded(count: int = 10, tokens: int = 50, rank: float = -3000.0) -> PromptQueue:
    line = PromptQueue()
    for _ in range(count):
        line.add(QueuedPrompt("flood", rank, tokens, 0.0))
    return line


def test_other_tenants_count_at_most_as_many_tokens() -> None:
    line = flooded()
    assert line.tokens_ahead("flood", 0.0, 5) == 500
    assert line.tokens_ahead("quiet", 0.0, 5) == 5
    line.add(QueuedPrompt("quiet", 1.0, 30, 0.0))
    assert line.tokens_ahead("quiet", 2.0, 5) == 30 + 35
    assert line.tokens_ahead("quiet", 0.0, 5) == 5, "an own request of lower rank is not ahead"


def test_queue_filled_by_one_tenant_admits_another() -> None:
    line = flooded()
    assert line.is_full("flood", 1, 1, LIMITS)
    assert not line.is_full("quiet", 1, 1, LIMITS)
    for _ in range(5):
        assert not line.is_full("quiet", 1, 1, LIMITS)
        line.add(QueuedPrompt("quiet", 0.0, 1, 0.0))
    assert line.is_full("quiet", 1, 1, LIMITS)
    assert not line.is_full("third", 1, 1, LIMITS)


def test_queue_is_bounded_for_any_number_of_tenants() -> None:
    line = flooded()
    for number in range(100):
        if not line.is_full(f"t{number}", 1, 1, LIMITS):
            line.add(QueuedPrompt(f"t{number}", 0.0, 1, 0.0))
    assert LIMITS.max_queue_requests < line.requests <= 2 * LIMITS.max_queue_requests


def test_removed_prompts_are_not_counted() -> None:
    line, prompts = PromptQueue(), [QueuedPrompt("flood", 0.0, 50, 0.0) for _ in range(3)]
    for prompt in prompts:
        line.add(prompt)
    assert (line.requests, line.tokens) == (3, 150)
    for prompt in prompts:
        line.remove(prompt)
    assert (line.requests, line.tokens, line.tokens_ahead("flood", 0.0)) == (0, 0, 0)
    assert not line._tenants


@pytest.mark.parametrize("priority", [-101, 101, -(2**31)])
def test_priority_out_of_range_returns_400(priority: int, tmp_path: Path) -> None:
    with live(FakeLLMPredictor(tmp_path, engine=FakeEngine())) as server:
        body = {"model": "fake_llm", "prompt": "x", "max_tokens": 1, "priority": priority}
        refused = httpx.post(f"{server.url}/v1/completions", json=body)
        assert refused.status_code in (400, 422)
        assert "priority" in refused.text
        assert httpx.post(f"{server.url}/v1/completions", json={**body, "priority": -100}).status_code == 200
