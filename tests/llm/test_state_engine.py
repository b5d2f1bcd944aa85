"""The engine on models with state layers gives what transformers' generate gives, which keeps its own cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer.errors import ResourceError
from infer.llm.engine.engine import Engine
from infer.llm.engine.prompt_lookup import PromptLookup
from infer.llm.engine.requests import Output, Request, Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.llm.step.attention.paged_attention import use_paged_attention
from infer.llm.step.paged_step import Step
from infer.llm.step.probe import probe
from tests.support.tiny_decoders import VOCABULARY, build
from tests.support.tiny_hybrids import STATEFUL

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
GREEDY = Sampling(temperature=0, max_tokens=16, ignore_eos=True)


class Eager:
    """The step by the model's own code; `fails` counts calls of several sequences that still raise."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shape = model, probe(model, page=4, kv_dtype="float32")
        self.step, self.fails, self.segments = Step(model, 4, "float32").eval(), 0, list[int]()

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with use_paged_attention(self.model), torch.no_grad():
            logits = self.step(**inputs)
        self.segments.append(len(inputs["state_segments"]))
        if self.fails and len(inputs["seq_lens"]) > 1:
            self.fails -= 1
            raise RuntimeError("after the state was written")
        return {"logits": logits}


@pytest.fixture(scope="module")
def hybrid() -> Eager:
    return Eager(build("lfm2", sizes=STATEFUL["lfm2"]))


def engine(step: Eager, *, room: int = 512, speculation: Any = None, **limits: Any) -> Engine:
    chosen = EngineLimits(**{"max_running": 8, **limits})
    rows = 2 * chosen.max_running + (64 if chosen.prefix_cache else 0)
    size = room * step.shape.layers * step.shape.page_bytes + rows * step.shape.state_bytes
    return Engine(
        step, step.shape, tokenizer=None, eos_ids=[2], kv_bytes=size, limits=chosen, speculation=speculation
    )


def finish(running: Engine) -> dict[tuple[str, int], list[int]]:
    """Run until idle, integrity checked after each step: the tokens of each completion."""
    found: dict[tuple[str, int], list[Output]] = {}
    while not running.idle:
        for output in running.step():
            found.setdefault((output.id, output.index), []).append(output)
        running.check_integrity()
    assert all(outputs[-1].finish in ("length", "stop") for outputs in found.values())
    return {
        key: [token for output in outputs for token in output.token_ids] for key, outputs in found.items()
    }


def run(running: Engine, prompts: list[list[int]], sampling: Sampling = GREEDY) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        running.submit(Request(id=str(i), prompt=prompt, sampling=sampling))
    found = finish(running)
    return [found[str(i), 0] for i in range(len(prompts))]


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def expected(model: Any, prompt: list[int], count: int = 16) -> list[int]:
    """Greedy tokens of transformers' own generate over its own cache."""
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), eos_token_id=None,
        )  # fmt: skip
    return ids[0, len(prompt) :].tolist()


def test_greedy_output_of_state_space_models_equals_transformers(hybrid: Eager) -> None:
    prompts = prompts_of(5, 1, 33, 16)
    assert run(engine(hybrid), prompts) == [expected(hybrid.model, prompt) for prompt in prompts]


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "mamba2", "jamba"])
def test_every_kind_of_state_layer_generates_as_transformers(name: str) -> None:
    step = Eager(build(name, sizes=STATEFUL[name]))
    prompts = prompts_of(9, 21)
    running = engine(step)
    wanted = [expected(step.model, prompt, 8) for prompt in prompts]
    short = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    assert run(running, prompts, short) == wanted
    assert run(running, prompts[1:], short) == wanted[1:]
    assert running.stats().prefix_hits == 20  # pages of 4, without attention layers too


@pytest.mark.parametrize(
    "limits",
    [
        {"step_tokens": 7, "max_running": 3},  # prompts in chunks that end anywhere
        {"max_running": 1},
        {"prefix_cache": False},
        {"batch_invariant": True, "step_tokens": 64},
    ],
    ids=str,
)
def test_state_space_output_does_not_depend_on_engine_limits(hybrid: Eager, limits: dict[str, Any]) -> None:
    prompts = prompts_of(19, 6, 40, 3)
    assert run(engine(hybrid, **limits), prompts) == run(engine(hybrid), prompts)


def test_a_preempted_sequence_is_recomputed_from_no_state(hybrid: Eager) -> None:
    prompts = prompts_of(17, 18, 19, 20)
    wide, narrow = engine(hybrid), engine(hybrid, room=22, max_running=4, prefix_cache=False)
    assert run(narrow, prompts) == run(wide, prompts)
    assert narrow.stats().preemptions > 0


def test_a_prefix_is_reused_up_to_a_page_with_a_state_snapshot(hybrid: Eager) -> None:
    (prompt,) = prompts_of(30)
    running, fresh = engine(hybrid), engine(hybrid, prefix_cache=False)
    first = run(running, [prompt])[0]
    again, longer, other = prompt, [*prompt, *first[:12], 7, 8], [*prompt[:14], 5, 6, 7]
    assert run(running, [again]) == [first]
    assert running.stats().prefix_hits == 28  # of 30, in pages of 4
    assert run(running, [longer]) == run(fresh, [longer])
    assert running.stats().prefix_hits == 28 + 40  # the completion left the state of its last whole page
    assert run(running, [other]) == run(fresh, [other])
    assert running.stats().prefix_hits == 28 + 40  # 12 tokens are in pages, but nobody kept the state there


def test_snapshots_are_bounded_and_the_least_used_goes_first(hybrid: Eager) -> None:
    running = engine(hybrid)
    rows = running.state_rows
    assert rows is not None
    rows.max_snapshots = 3
    prompts = prompts_of(9, 10, 11, 12, 13, 14)
    alone = [run(engine(hybrid, prefix_cache=False), [prompt])[0] for prompt in prompts]
    for prompt, tokens in zip(prompts, alone, strict=True):
        assert run(running, [prompt])[0] == tokens
        assert rows.num_snapshots <= 3
    assert run(running, prompts) == alone


def test_forked_completions_share_the_state_of_their_prompt(hybrid: Eager) -> None:
    (prompt,) = prompts_of(11)
    several = Sampling(temperature=1.0, n=3, seed=5, max_tokens=16, ignore_eos=True)
    for limits in ({}, {"max_running": 2}):  # without a free row a fork waits and recomputes
        running = engine(hybrid, **limits)
        running.submit(Request(id="a", prompt=prompt, sampling=several))
        found = finish(running)
        if not limits:
            first = found
    assert found == first
    assert len({tuple(tokens) for tokens in found.values()}) == 3


def test_a_step_that_failed_runs_again_from_the_state_before(hybrid: Eager) -> None:
    prompts = prompts_of(9, 17, 5)
    usual = run(engine(hybrid), prompts)
    hybrid.fails = 6
    assert run(engine(hybrid), prompts) == usual
    assert hybrid.fails == 0


def test_speculation_is_off_for_models_with_recurrent_state(hybrid: Eager) -> None:
    prompt = [5, 6, 7, 8] * 6
    running = engine(hybrid, speculation=PromptLookup())
    assert run(running, [prompt]) == run(engine(hybrid), [prompt])
    assert running.stats().draft_tokens == 0


def test_little_memory_lowers_the_number_of_running_sequences(hybrid: Eager) -> None:
    shape = hybrid.shape
    page = shape.layers * shape.page_bytes
    running = Engine(hybrid, shape, tokenizer=None, eos_ids=[2], kv_bytes=20 * page)
    assert 1 <= running.limits.max_running < 64
    assert run(running, prompts_of(5, 6, 7)) == run(engine(hybrid), prompts_of(5, 6, 7))
    with pytest.raises(ResourceError, match="the state of one sequence takes"):
        Engine(hybrid, shape, tokenizer=None, eos_ids=[2], kv_bytes=3 * shape.state_bytes)
