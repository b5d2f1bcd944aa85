"""Random schedules against a step that notices a wrong page: everyone gets their own tokens, nothing leaks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from infer.llm.engine.engine import Engine
from infer.llm.engine.requests import Output, Request
from infer.llm.engine.sampling.sampler import Sampler
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from tests.support.fake_graphs import recorded
from tests.support.fake_step import EOS, VOCABULARY, FakeStep, FallibleDrafts, expected, fake_shape

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = 4
COUNT = 2000
SCHEDULES: dict[str, dict[str, Any]] = {
    "roomy": {"pages": 600, "limits": {"step_tokens": 64, "max_running": 32}},
    "tiny pool": {"pages": 40, "limits": {"step_tokens": 48, "max_running": 24, "mixed_tokens": 16}},
    "drafts": {"pages": 60, "limits": {"step_tokens": 96, "max_running": 16, "max_draft": 5}, "drafts": True},
    "no prefix cache": {"pages": 60, "limits": {"step_tokens": 16, "max_running": 16, "prefix_cache": False}},
    "recorded": {"pages": 60, "limits": {"step_tokens": 48, "max_running": 16}, "recorded": True},
    "batch-invariant": {
        "pages": 60,
        "limits": {"step_tokens": 16, "max_running": 8, "batch_invariant": True},
    },
}


class RandomClients:
    """Clients with prompts of a few families with common beginnings; some sampled, some with n > 1, some cancelled."""

    def __init__(self, seed: int, longest: int) -> None:
        self.random = np.random.default_rng(seed)
        self.families = [self.random.integers(3, VOCABULARY, 40).tolist() for _ in range(4)]
        self.longest = longest

    def request(self, name: str) -> Request:
        random = self.random
        family = self.families[int(random.integers(4))]
        shared = int(random.integers(0, min(len(family), self.longest - 30)))
        prompt = family[:shared] + random.integers(3, VOCABULARY, int(random.integers(1, 20))).tolist()
        kind = random.random()
        sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": int(random.integers(0, 12))}
        if kind < 0.05:
            sampling |= {"temperature": 0.8, "top_k": 5, "seed": int(random.integers(100))}
        elif kind < 0.1:
            sampling |= {"temperature": 1.0, "frequency_penalty": 1.0, "min_tokens": 3, "seed": 3}
        elif kind < 0.15:
            sampling |= {"prompt_logprobs": 1}
        if random.random() < 0.15:
            sampling["n"] = int(random.integers(2, 5))
        return Request(
            id=name, prompt=prompt, sampling=Sampling(**sampling), priority=int(random.integers(-1, 2)),
            salt="other" if random.random() < 0.1 else "",
        )  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_ten_thousand_requests_get_their_own_tokens_and_leak_nothing(name: str) -> None:
    setting, count = SCHEDULES[name], COUNT
    shape, now = fake_shape(PAGE), [0.0]
    step = recorded(FakeStep(PAGE))[0] if "recorded" in setting else FakeStep(PAGE)
    engine = Engine(
        step, shape, tokenizer=None, eos_ids=[EOS], limits=EngineLimits(**setting["limits"]),
        kv_bytes=setting["pages"] * shape.layers * shape.page_bytes, clock=lambda: now[0],
        speculation=FallibleDrafts(5) if setting.get("drafts") else None,
    )  # fmt: skip
    clients = RandomClients(11, longest=PAGE * setting["pages"])
    asked: dict[str, Request] = {}
    found: dict[tuple[str, int], list[Output]] = defaultdict(list)
    random = np.random.default_rng(13)
    while len(asked) < count or not engine.idle:
        while len(asked) < count and len(engine.scheduler.waiting) < 20 and random.random() < 0.8:
            request = clients.request(f"r{len(asked)}")
            engine.submit(request)
            asked[request.id] = request
        if random.random() < 0.1:
            engine.cancel(f"r{int(random.integers(max(len(asked) - 40, 0), len(asked) + 1))}")
        for output in engine.step():
            found[output.id, output.index].append(output)
        now[0] += 0.1
        engine.check_integrity()
    assert engine.block_manager.num_used == 0
    sampler = Sampler(VOCABULARY, [EOS])
    finished = 0
    for request in asked.values():
        for index in range(request.sampling.n):
            outputs = found[request.id, index]
            assert [o.finish for o in outputs[:-1]] == [None] * (len(outputs) - 1)
            got = [token for output in outputs for token in output.token_ids]
            wanted = expected(request, index, sampler)
            if outputs[-1].finish == "cancelled":
                wanted = wanted[: len(got)]
            else:
                finished += 1
                assert outputs[-1].finish in ("stop", "length")
                scores = outputs[0].prompt_logprobs
                assert len(scores) == (0 if request.sampling.prompt_logprobs is None else len(request.prompt))
            assert got == wanted, (request, index)
    stats = engine.stats()
    assert finished > count / 2
    assert stats.cancelled > 20
    if name == "tiny pool":
        assert stats.preemptions > 50
    if setting["limits"].get("prefix_cache", True):
        assert stats.prefix_hits > 1000
    if setting.get("drafts"):
        assert 0 < stats.accepted_tokens < stats.draft_tokens
