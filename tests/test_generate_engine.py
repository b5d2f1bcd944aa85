"""The engine gives what transformers' generate gives, however prompts are cut, shared, pushed out and forked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer.generate.engine import Engine
from infer.generate.requests import Output, Request, Sampling
from infer.generate.scheduler import EngineLimits
from infer.generate.step import Step, paged, probe
from tests.tiny_decoders import VOCABULARY, build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)


class Eager:
    """The step by the model's own code."""

    def __init__(self, model: nn.Module, page: int = 4, kv_dtype: str = "float32") -> None:
        self.model, self.shape = model, probe(model, page=page, kv_dtype=kv_dtype)
        self.step = Step(model, page, kv_dtype).eval()
        self.calls: list[tuple[int, int]] = []  # tokens, sequences

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.calls.append((len(inputs["token_ids"]), len(inputs["seq_lens"])))
        with paged(self.model), torch.no_grad():
            return {"logits": self.step(**inputs)}


@pytest.fixture(scope="module")
def llama() -> Eager:
    return Eager(build("llama"))


def pages(step: Eager, count: int) -> int:
    return count * step.shape.layers * step.shape.page_bytes


def engine(step: Eager, *, room: int = 512, **limits: Any) -> Engine:
    return Engine(
        step,
        step.shape,
        tokenizer=None,
        eos_ids=[2],
        kv_bytes=pages(step, room),
        limits=EngineLimits(**limits),
    )


def finish(running: Engine, *, each: Callable[[], None] | None = None) -> dict[tuple[str, int], list[Output]]:
    """Run until idle, integrity checked after each step."""
    found: dict[tuple[str, int], list[Output]] = {}
    while not running.idle:
        for output in running.step():
            found.setdefault((output.id, output.index), []).append(output)
        running.check_integrity()
        if each:
            each()
    assert all(outputs[-1].finish for outputs in found.values())
    assert running.pool.used == 0
    return found


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def run(running: Engine, prompts: list[list[int]], sampling: Sampling = GREEDY) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        running.submit(Request(id=str(i), prompt=prompt, sampling=sampling))
    found = finish(running)
    return [tokens(found[str(i), 0]) for i in range(len(prompts))]


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def by_transformers(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    step = Eager(build(name))
    prompts = prompts_of(1, 5, 13, 32, 40)
    expected = [by_transformers(step.model, prompt, 24) for prompt in prompts]
    assert run(engine(step), prompts) == expected
