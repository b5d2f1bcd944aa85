"""Decode steps whose sampling is recorded: the tokens of the host's sampler, read one step late.

The stream is a fake that runs what is enqueued only when an event behind it is waited for.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.llm.engine.engine import Engine
from infer.llm.engine.recorded import decoder
from infer.llm.engine.recorded.decoder import PendingTokens
from infer.llm.engine.recorded.sampling_tensors import SamplingTensors
from infer.llm.engine.requests import Output, Request
from infer.llm.engine.sampling.sampler import SampledTokens, Sampler, SampleRow, sampling_columns
from infer.llm.engine.sampling.sampler_device import sample
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.llm.engine.sequence import RequestState, Sequence
from tests.support.fake_graphs import FakeGraphs, recorded
from tests.support.fake_step import EOS, VOCABULARY, FakeStep, FallibleDrafts, fake_shape

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": -0.6},
    {"temperature": 1.1, "top_p": 0.95, "frequency_penalty": 1.5, "logit_bias": {4: 3.0, 9: -50.0}},
    {"temperature": 0.8, "min_tokens": 9, "stop_token_ids": (11, 12, 13)},
    {"temperature": 1.0, "top_k": 20, "n": 3},
    {
        "temperature": 0.9,
        "allowed_token_ids": (4, 5, 9, 17, 33),
        "repetition_penalty": 1.2,
        "logit_bias": {4: 2.0},
    },
    {"temperature": 0.6, "logprobs": 2, "max_tokens": 6},
]


class EvenThenOdd:
    """A grammar of even tokens and odd ones in turns."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.finished = False

    def check(self, constraint: Any) -> None: ...

    def open(self, constraint: Any) -> EvenThenOdd:
        return EvenThenOdd()

    def fill(self, bitmask: Tensor, row: int) -> None:
        bitmask[row] = 0x55555555 if len(self.taken) % 2 == 0 else -0x55555556

    def accept(self, token: int) -> bool:
        self.taken.append(token)
        return token % 2 == (len(self.taken) - 1) % 2

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]


def engine(step: Any, speculation: Any = None, **limits: Any) -> Engine:
    shape = fake_shape()
    return Engine(
        step, shape, tokenizer=None, eos_ids=[EOS], kv_bytes=200 * shape.layers * shape.page_bytes,
        limits=EngineLimits(step_tokens=64, **{"max_running": 16, **limits}), grammars=EvenThenOdd(),
        speculation=speculation,
    )  # fmt: skip


def answers(made: Engine, requests: list[Request], *, late: int = 0) -> dict[tuple[str, int], Any]:
    """Run all requests, the last `late` of them once the others decode."""
    found: dict[tuple[str, int], list[Output]] = {}
    waiting = list(requests)
    for turn in range(400):
        while waiting and (turn >= 4 or len(waiting) > late):
            made.submit(waiting.pop(0))
        for output in made.step():
            found.setdefault((output.id, output.index), []).append(output)
        made.check_integrity()
        if made.idle and not waiting:
            break
    assert made.idle
    assert made.block_manager.num_used == 0
    return {
        key: ([t for o in outputs for t in o.token_ids], outputs[-1].finish, outputs[-1].stopped_by)
        for key, outputs in found.items()
    }


def requests_with(samplings: list[dict[str, Any]], **more: Any) -> list[Request]:
    return [
        Request(
            id=f"{i}",
            prompt=[3 + i, 5, 8],
            sampling=Sampling(**{"max_tokens": 25, "seed": i, **options}),
            **more,
        )
        for i, options in enumerate(samplings)
    ]


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("seed", [0, 1000])
def test_recorded_steps_give_the_tokens_of_the_host_sampler(seed: int, late: int) -> None:
    requests = requests_with([{**options, "seed": seed + i} for i, options in enumerate(SAMPLINGS)])
    step, graphs = recorded(FakeStep())
    assert answers(engine(step), requests, late=late) == answers(engine(FakeStep()), requests, late=late)
    assert graphs.replays > 40


@pytest.mark.parametrize("options", SAMPLINGS[:-1], ids=str)
def test_each_sampling_option_runs_on_the_device(options: dict[str, Any]) -> None:
    requests = requests_with([options] * 2)
    fake = FakeStep()
    step, graphs = recorded(fake)
    made = engine(step)
    made.prepare()
    assert answers(made, requests) == answers(engine(FakeStep()), requests)
    plain = made.stats().steps - graphs.replays // 2
    assert plain <= 2  # prefill


def test_prompts_and_drafts_run_in_graphs_alone_once_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [{"temperature": 0, "ignore_eos": True}] * 3
    found = answers(engine(FakeStep(), FallibleDrafts(0)), requests_with(options), late=1)
    step, graphs = recorded(FakeStep())
    drafts, launch, replayed = FallibleDrafts(0), step.launch, []

    def noted(inputs: Any) -> Tensor | None:
        replayed.append(launch(inputs) is not None)
        return step.shared.logits

    monkeypatch.setattr(step, "launch", noted)
    made = engine(step, drafts)
    made.prepare()
    before = graphs.records
    assert answers(made, requests_with(options), late=1) == found
    assert graphs.records == before
    assert len(replayed) > 5
    assert all(replayed)
    assert sum(accepted for _, accepted in drafts.observed) > 0


def test_grammars_are_masked_on_the_device_and_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = reads_behind(monkeypatch)
    requests = requests_with(
        [{"temperature": 1.0}, {"temperature": 0, "min_tokens": 8}], grammar={"regex": ""}
    )
    step, graphs = recorded(FakeStep())
    found = answers(engine(step), requests)
    assert found == answers(engine(FakeStep()), requests)
    assert all(t % 2 == i % 2 for tokens, *_ in found.values() for i, t in enumerate(tokens))
    assert graphs.replays > 20
    assert not any(ahead(graphs))


def test_the_grammar_mask_of_a_reused_row_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"temperature": 1.0, "frequency_penalty": 0.1, "ignore_eos": True}
    short, *others = requests_with([{**options, "max_tokens": 4}, options, options])
    requests = [Request(id="g", prompt=[4], sampling=short.sampling, grammar={"regex": ""}), *others]
    found = answers(engine(recorded(FakeStep())[0]), requests)
    assert found == answers(engine(FakeStep()), requests)


def reads_behind(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Note at each read if another step was enqueued behind it."""
    reads: list[tuple[int, FakeGraphs]] = []
    plain = PendingTokens.read

    def read(self: Any) -> SampledTokens:
        reads.append((self.copied._owner.enqueued - self.copied._mark, self.copied._owner))
        return plain(self)

    monkeypatch.setattr(PendingTokens, "read", read)
    return lambda graphs: [behind > 0 for behind, owner in reads if owner is graphs]


def test_the_next_step_is_launched_before_the_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = reads_behind(monkeypatch)
    step, graphs = recorded(FakeStep())
    requests = requests_with([{"temperature": 0, "ignore_eos": True}] * 2)
    answers(engine(step), requests)
    assert ahead(graphs) == [True] * 23 + [False]  # the last has no next


def test_a_cancelled_request_leaves_the_step_that_is_under_way() -> None:
    step, _ = recorded(FakeStep())
    made = engine(step)
    first, second = requests_with([{"temperature": 0, "ignore_eos": True}] * 2)
    made.submit(first)
    made.submit(second)
    for _ in range(5):
        made.step()
    made.cancel("0")
    got = [output for _ in range(40) for output in made.step()]
    assert [o.finish for o in got if o.id == "0"] == ["cancelled"]
    assert [o.finish for o in got if o.id == "1"][-1] == "length"
    assert made.idle
    made.check_integrity()
    assert made.block_manager.num_used == 0


def test_a_distribution_beyond_the_candidates_is_sampled_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "sample", functools.partial(sample, width=4))
    options = {"temperature": 3.0, "top_p": 0.9, "ignore_eos": True}
    requests = requests_with([options, {**options, "temperature": 0.2}, {**options, "presence_penalty": 0.5}])
    found = answers(engine(recorded(FakeStep())[0]), requests)
    assert found == answers(engine(FakeStep()), requests)


def test_logits_that_are_not_finite_end_their_own_sequence() -> None:
    fake = FakeStep()

    class Broken:
        def run(self, inputs: Any) -> dict[str, Tensor]:
            logits = fake.run(inputs)["logits"]
            rows = inputs["seq_lens"][: len(logits)] == 9
            return {
                "logits": torch.where(rows[:, None], torch.nan, logits)
                if len(rows) == len(logits)
                else logits
            }

    requests = requests_with([{"temperature": 0.5, "ignore_eos": True}] * 2)
    requests[1].prompt.pop()
    found = answers(engine(recorded(Broken())[0]), requests)
    assert [finish for _, finish, _ in found.values()] == ["error", "error"]
    assert sorted(len(tokens) for tokens, *_ in found.values()) == [6, 7]


@pytest.mark.parametrize(
    "raised", [RuntimeError, LookupError]
)  # Triton's own errors are no RuntimeError either
def test_a_failed_sampler_recording_is_reported_and_sampling_goes_on(
    raised: type[Exception],
) -> None:
    step, graphs = recorded(FakeStep())
    made = engine(step)
    graphs.error, graphs.raised = "out of memory", raised
    made.prepare()
    requests = requests_with(SAMPLINGS[:4])
    assert answers(made, requests) == answers(engine(FakeStep()), requests)
    assert graphs.replays == 0
    assert {f.value for f in step.findings} == {"refused"}
    assert any("greedy sampler of 1 sequences" in f.what for f in step.findings)


def test_device_sampling_constraints_equal_the_host_sampler() -> None:
    rng = np.random.default_rng(0)
    sequences = []
    for i, options in enumerate(SAMPLINGS[4:7]):
        state = RequestState(Request(id="r", prompt=[7, 4, 7], sampling=Sampling(**options)), 0, 0.0, 1.0)
        sequences.append(Sequence(state, 0))
        sequences[-1].table_row = i
        sequences[-1].tokens += (outputs := rng.integers(3, VOCABULARY, 6).tolist())
        sequences[-1].num_output_tokens = len(outputs)
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    tensors = SamplingTensors(4, 3, VOCABULARY, [EOS], "cpu", FakeGraphs())
    for _ in range(2):  # the second time with the token that the device counted
        assert tensors.stage(sequences, sampling_columns(sequences), 4, 0)
        found = tensors.constrained(logits)
        assert torch.equal(found[3], logits[3])
        expected = logits[:3].clone()
        for sequence in sequences:
            sequence.token_counts = None
        Sampler(VOCABULARY, [EOS])._process_logits(
            expected, [SampleRow(s, i) for i, s in enumerate(sequences)]
        )
        torch.testing.assert_close(found[:3], expected)
        tensors.count(torch.tensor([5, 7, 9, 1]))
        for sequence, token in zip(sequences, (5, 7, 9), strict=True):
            sequence.tokens.append(token)
            sequence.num_output_tokens += 1
