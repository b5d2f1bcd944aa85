"""The engine gives what transformers' generate gives, however prompts are cut, shared, pushed out and forked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer.compress import quantize_model
from infer.llm.engine.engine import Engine
from infer.llm.engine.requests import Output, Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.llm.step.attention.paged_attention import use_paged_attention
from infer.llm.step.paged_step import Step
from infer.llm.step.probe import probe
from infer.plan import Plan
from tests.support.llm_artifacts import PYDOC
from tests.support.tiny_decoders import VOCABULARY, build

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
# Decoders that differ in what an engine keeps for them; the logits of every one: test_paged_step.
CACHES = (
    "llama",
    "qwen2",
    "gemma2",
    "gpt_oss",
    "llama4_text",
    "deepseek_v3",
    "gemma4_text",
    "falcon (alibi)",
)
GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)


class Eager:
    """The step by the model's own code."""

    def __init__(self, model: nn.Module, page: int = 4, kv_dtype: str = "float32") -> None:
        self.model, self.shape = model, probe(model, page=page, kv_dtype=kv_dtype)
        self.step = Step(model, page, kv_dtype).eval()
        self.calls: list[tuple[int, int]] = []  # tokens, sequences

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.calls.append((len(inputs["token_ids"]), len(inputs["seq_lens"])))
        with use_paged_attention(self.model), torch.no_grad():
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
    assert running.block_manager.num_used == 0
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


def perplexity(model: Any, rows: Tensor) -> float:
    with torch.no_grad():
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
    return math.exp(float(nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())))


def by_transformers(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", CACHES)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    step = Eager(build(name))
    prompts = prompts_of(1, 5, 13, 32, 40)
    expected = [by_transformers(step.model, prompt, 24) for prompt in prompts]
    assert run(engine(step), prompts) == expected


@pytest.mark.parametrize(
    ("quant", "most"), [("none", 0.0005), ("int8", 0.005), ("nf4", 0.04), ("cluster:4", 0.04)]
)
def test_paged_perplexity_of_a_trained_model_equals_transformers(quant: str, most: float) -> None:
    """Compare with the quantized model's own code, and with the floats in windows by transformers."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    text = (PYDOC / "samples.txt").read_text()
    ids = torch.tensor(Tokenizer.from_file(str(PYDOC / "tokenizer.json")).encode(text).ids[: 12 * 100])
    model = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32).eval()
    plain = perplexity(model, ids.reshape(12, 100))
    if quant != "none":
        quantize_model(model, Plan(source="test", quant=quant))
    step = Eager(model, page=16)
    running = engine(step, room=64, step_tokens=128, mixed_tokens=48, max_running=6)
    for i, row in enumerate(ids.reshape(12, 100).tolist()):
        sampling = Sampling(temperature=0, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
        running.submit(Request(id=str(i), prompt=row, sampling=sampling))
    given = [one for outputs in finish(running).values() for one in outputs[0].prompt_logprobs[1:]]
    assert len(given) == 12 * 99
    found = math.exp(-math.fsum(one.logprob for one in given if one is not None) / len(given))
    assert found == pytest.approx(perplexity(model, ids.reshape(12, 100)), rel=2e-3)
    assert found / plain - 1 < most
    assert (found == pytest.approx(plain, rel=1e-5)) == (quant == "none")


def test_chunked_prefill_does_not_change_the_output(llama: Eager) -> None:
    prompts = prompts_of(1, 5, 13, 32, 40)
    whole = run(engine(llama), prompts)
    assert run(engine(llama, step_tokens=8, mixed_tokens=3, max_running=4), prompts) == whole


def test_a_cached_prefix_is_not_recomputed_and_changes_no_output(llama: Eager) -> None:
    (first, tail, other) = prompts_of(30, 6, 9)
    cold = run(engine(llama), [first + tail, first + other])
    warm = engine(llama)
    assert run(warm, [first]) == run(engine(llama), [first])
    llama.calls.clear()
    assert run(warm, [first + tail, first + other]) == cold
    assert max(tokens for tokens, _ in llama.calls) < 30
    assert warm.stats().prefix_hits == 2 * 28  # seven full pages each


def test_the_prefix_cache_holds_generated_tokens_too(llama: Eager) -> None:
    running = engine(llama)
    (prompt,) = prompts_of(10)
    answer = run(running, [prompt])[0]
    turn = [*prompt, *answer, 7, 8]
    assert run(running, [turn]) == run(engine(llama), [turn])
    assert running.stats().prefix_hits == 32  # of 36 tokens, the last of which was never run


def test_prompts_of_another_salt_or_adapter_share_no_pages(llama: Eager) -> None:
    running = engine(llama)
    (prompt,) = prompts_of(20)
    for i, named in enumerate(({}, {"salt": "b"})):
        running.submit(Request(id=str(i), prompt=prompt, sampling=GREEDY, **named))
        finish(running)
    assert running.stats().prefix_hits == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_preemption_does_not_change_the_output(name: str) -> None:
    step = Eager(build(name))
    prompts = prompts_of(9, 14, 17, 11, 20)
    roomy = run(engine(step), prompts)
    small = engine(step, room=16, prefix_cache=False)
    assert run(small, prompts) == roomy
    assert small.stats().preemptions > 0


def test_parallel_completions_equal_single_ones_of_their_seed(llama: Eager) -> None:
    (prompt,) = prompts_of(14)  # ends within a page: the copies must not write to one another's
    sampling = Sampling(temperature=1.0, max_tokens=16, seed=5, n=4, ignore_eos=True)
    together = engine(llama)
    llama.calls.clear()
    together.submit(Request(id="a", prompt=prompt, sampling=sampling))
    found = finish(together)
    assert sum(tokens for tokens, _ in llama.calls) == 14 + 4 * 15  # the prompt once
    texts = [tuple(tokens(found["a", i])) for i in range(4)]
    assert len(set(texts)) == 4
    narrow = engine(llama, max_running=1)  # no place for copies: they wait and are read again
    narrow.submit(Request(id="a", prompt=prompt, sampling=sampling))
    again = finish(narrow)
    assert [tuple(tokens(again["a", i])) for i in range(4)] == texts


def test_logprobs_of_a_prompt_are_those_of_the_model(llama: Eager) -> None:
    (prompt,) = prompts_of(23)
    running = engine(llama, step_tokens=8, max_running=4)
    running.submit(Request(id="a", prompt=prompt, sampling=Sampling(max_tokens=0, prompt_logprobs=2)))
    (output,) = finish(running)["a", 0]
    with torch.no_grad():
        own = llama.model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert output.finish == "length"
    assert output.prompt_logprobs[0] is None
    for i, given in enumerate(output.prompt_logprobs[1:]):
        assert given is not None
        assert given.token_id == prompt[i + 1]
        assert given.logprob == pytest.approx(float(own[i, prompt[i + 1]]), abs=1e-4)
        assert [t for t, _ in given.top] == own[i].topk(2).indices.tolist()
