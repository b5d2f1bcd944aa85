"""The sampler against a slow twin that sorts a list and walks it; draws that depend on nothing but their own row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infer.kernels import cpu
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling import sampler_cpu, sampler_device
from infer.llm.engine.sampling.sampler import Sampler, SampleRow, uniform
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.sequence import RequestState, Sequence

VOCABULARY = 700  # more than the candidates and no multiple of a block


def sequence(prompt: tuple[int, ...] = (5,), outputs: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    found = Sequence(
        RequestState(Request(id="r", prompt=list(prompt), sampling=Sampling(**sampling)), 0, 0.0, 1.0), 0
    )
    found.tokens += outputs
    found.num_output_tokens = len(outputs)
    return found


def distribution(row: list[float], s: Sampling) -> dict[int, float]:
    """Token → probability, slow and obvious."""
    top = max(row)
    weights = {t: math.exp((x - top) / s.temperature) for t, x in enumerate(row) if x > -math.inf}
    order = sorted(weights, key=lambda t: (-weights[t], t))
    if s.top_k:
        order = order[: s.top_k]
    total, reached, kept = sum(weights[t] for t in order), 0.0, []
    for token in order:
        if reached < s.top_p * total or s.top_p >= 1:
            kept.append(token)
        reached += weights[token]
    kept = [t for t in kept if weights[t] >= s.min_p]
    total = sum(weights[t] for t in kept)
    return {t: weights[t] / total for t in kept}


def walk(row: list[float], s: Sampling, draw: float) -> tuple[int, float]:
    """Return the token by the inverse of the cumulative distribution, and how near the draw was to a border."""
    probabilities = distribution(row, s)
    cut = s.top_k or s.top_p < 1 or s.min_p > 0
    order = list(probabilities) if cut else sorted(probabilities)
    reached = 0.0
    for token in order:
        reached += probabilities[token]
        if draw < reached:
            return token, min(reached - draw, draw - reached + probabilities[token])
    return order[-1], 0.0


CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 600},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1e-6},
    {"top_k": 30, "top_p": 0.7},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
]


def columns(samplings: list[Sampling], places: list[float]) -> np.ndarray:
    asked = [(s.temperature, s.top_k, s.top_p, s.min_p, p) for s, p in zip(samplings, places, strict=True)]
    return np.array(asked)


def by_rows(logits: Tensor, samplings: list[Sampling], places: list[float]) -> list[int]:
    return sampler_cpu.choose(logits, columns(samplings, places))


def natively(logits: Tensor, samplings: list[Sampling], places: list[float]) -> list[int]:
    return cpu.sample(logits, columns(samplings, places))


def on_a_device(logits: Tensor, samplings: list[Sampling], places: list[float]) -> list[int]:
    return sampler_device.choose(logits, columns(samplings, places))


@pytest.fixture(params=["avx512_vnni", "avx2", "neon_dotprod", "scalar"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if reason := cpu.why_not():
        pytest.skip(reason)
    if request.param not in cpu.isas():
        pytest.skip(f"this CPU has no {request.param}")
    before = cpu.isa()
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(before)


@pytest.mark.parametrize("vocabulary", [1, 15, 63, 64, 65, 257, 700, 5003])
def test_the_native_sampler_equals_numpy_on_every_instruction_set(isa: str, vocabulary: int) -> None:
    logits = torch.randn(len(CUTS), vocabulary) * 3
    if vocabulary > 1:
        logits[:, ::3] = -torch.inf  # as a grammar leaves it
        logits[:, 1] = 0.5
    samplings = [Sampling(temperature=0.8, **cut) for cut in CUTS] if vocabulary > 1 else [Sampling()] * 11
    logits[0] = 1.0
    for place in (0.0, 0.3, 1 - 2**-53):
        places = [place] * len(CUTS)
        assert natively(logits, samplings, places) == by_rows(logits, samplings, places)


def test_the_native_sampler_gives_no_token_for_nan_or_empty_rows(isa: str) -> None:
    logits = torch.randn(6, 70)
    logits[0, 69], logits[1, 3], logits[2, 64] = torch.nan, torch.nan, torch.inf
    logits[3] = -torch.inf
    for temperature in (0.0, 1.0):
        samplings = [Sampling(temperature=temperature)] * 6
        found = natively(logits, samplings, [0.5] * 6)
        assert found[:4] == [-1] * 4
        assert min(found[4:]) >= 0


def test_the_native_sampler_breaks_ties_by_the_lowest_id(isa: str) -> None:
    logits = torch.zeros(2, 200)
    logits[0, [70, 130]] = 2.0
    assert natively(logits, [Sampling(temperature=0.0)] * 2, [0.0] * 2) == [70, 0]


@pytest.mark.parametrize(
    ("vocabulary", "spread", "heat"),
    [*((700, s, h) for s in (0.1, 4.0) for h in (0.3, 1.0, 5.0)), (20000, 4.0, 1.0)],
)
def test_sampled_tokens_equal_the_reference_sampler(heat: float, spread: float, vocabulary: int) -> None:
    """40,000: more blocks than candidates."""
    logits = torch.randn(len(CUTS), vocabulary) * spread
    samplings = [Sampling(temperature=heat, **cut) for cut in CUTS]
    for place in torch.rand(20 if vocabulary == 700 else 1, dtype=torch.float64).tolist():
        slow = [walk(logits[i].tolist(), sampling, place) for i, sampling in enumerate(samplings)]
        for choose in (by_rows, on_a_device, natively):
            found = choose(logits.clone(), samplings, [place] * len(CUTS))
            for token, (expected, distance) in zip(found, slow, strict=True):
                assert token == expected or distance < 1e-5, choose


@pytest.mark.parametrize("count", [1, 7, 63, 400])
def test_candidates_are_the_largest_in_order_with_ties_by_id(count: int) -> None:
    row = np.random.default_rng(1).integers(0, 300, 40001).astype(np.float32)
    wanted = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert sampler_cpu.candidates(row, count)[:count].tolist() == wanted


def test_a_sampled_token_does_not_depend_on_other_rows() -> None:
    logits = torch.randn(len(CUTS), VOCABULARY) * 3
    rows = [sequence(temperature=1.0, seed=i, **cut) for i, cut in enumerate(CUTS)]
    sampler = Sampler(VOCABULARY, [])
    together = sampler(logits.clone(), [SampleRow(s, i) for i, s in enumerate(rows)]).tokens
    for i, s in enumerate(rows):
        assert sampler(logits[i : i + 1].clone(), [SampleRow(s, 0)]).tokens == [together[i]]


def test_sampled_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    one = sequence(temperature=0.7, seed=11)
    counts = np.zeros(5)
    sampler = Sampler(5, [])
    for place in range(4000):
        one.num_output_tokens = place
        counts[sampler(logits.clone(), [SampleRow(one, 0)]).tokens[0]] += 1
    expected = (logits[0] / 0.7).softmax(0).numpy() * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 23.5  # chi square of 4 degrees: one in ten thousand


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 127), place=st.integers(0, 2**20))
@settings(max_examples=100, deadline=None)
def test_random_numbers_are_below_one_and_differ_between_completions(
    seed: int, index: int, place: int
) -> None:
    first = uniform(seed, index, place)
    assert 0 <= first < 1
    assert first != uniform(seed, index + 1, place)
    assert first != uniform(seed, index, place + 1)


def test_the_largest_random_number_takes_a_token_that_has_weight() -> None:
    values = torch.full((1, VOCABULARY), -torch.inf)
    values[0, 3] = 0.0
    for choose in (by_rows, on_a_device):
        for cut in ({}, {"top_p": 0.9}):
            assert choose(values, [Sampling(**cut)], [1 - 2.0**-53]) == [3]


def shaped(row: Tensor, one: Sequence, end_ids: tuple[int, ...] = ()) -> Tensor:
    """Logits after bias and penalties."""
    logits = row.clone()[None]
    Sampler(len(row), end_ids)(logits, [SampleRow(one, 0)])
    return logits[0]


def test_penalties_follow_their_formulas() -> None:
    row = torch.randn(16)
    one = sequence(
        (1, 2, 3, 2), temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25
    )
    shaped(row, one)  # the first draw knows only the prompt
    for token in (3, 7, 7):
        one.tokens.append(token)
        one.num_output_tokens += 1
        assert one.token_counts is not None
        one.token_counts.add(token)
    expected = row.clone()
    for token in (1, 2, 3, 7):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    expected[3] -= 0.5 + 0.25
    expected[7] -= 0.5 + 0.25 * 2
    torch.testing.assert_close(shaped(row, one), expected)


def test_drafts_count_for_penalties_only_in_the_rows_behind_them() -> None:
    row = torch.zeros(8)
    one = sequence((1,), temperature=0, presence_penalty=1.0)
    one.draft_tokens = [3, 4]
    logits = row.repeat(3, 1)
    for _ in range(2):  # nothing is left behind by the first time
        logits = row.repeat(3, 1)
        Sampler(8, [])(logits, [SampleRow(one, place, place) for place in range(3)])
    assert (logits != 0).nonzero().tolist() == [[1, 3], [2, 3], [2, 4]]


def test_logit_bias_and_min_tokens_are_applied() -> None:
    row = torch.zeros(8)
    one = sequence(temperature=0, logit_bias={3: 2.5}, min_tokens=2, stop_token_ids=(6,))
    assert shaped(row, one, (1,)).tolist() == [0, -math.inf, 0, 2.5, 0, 0, -math.inf, 0]
    one.num_output_tokens = 2
    assert shaped(row, one, (1,)).tolist() == [0, 0, 0, 2.5, 0, 0, 0, 0]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(2, 20)
    rows = [
        sequence(temperature=0.1, logprobs=3, logit_bias={4: 100.0}, top_k=2),
        sequence(temperature=0, logprobs=0),
    ]
    picked = Sampler(20, [])(logits.clone(), [SampleRow(s, i) for i, s in enumerate(rows)])
    own = logits.log_softmax(-1)
    first, second = picked.logprobs[0], picked.logprobs[1]
    assert first.token_id == picked.tokens[0] == 4
    assert first.logprob == pytest.approx(float(own[0, 4]), abs=1e-5)
    best = own[0].topk(3)
    assert [t for t, _ in first.top] == best.indices.tolist()
    assert [x for _, x in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert second.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_give_no_token_and_affect_no_other_row(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 600)
    logits[0, 7] = bad
    logits[1, 9] = 50.0
    rows = [sequence(temperature=temperature, top_p=0.9), sequence(temperature=temperature)]
    picked = Sampler(600, [])(logits, [SampleRow(s, i) for i, s in enumerate(rows)])
    assert picked.tokens == [-1, 9]


def test_greedy_and_truncated_sampling_synchronize_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Tensor] = []
    whole = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (copies.append(self), whole(self))[1])
    logits = torch.randn(3, VOCABULARY)
    logits[1, 7] = math.nan
    tokens = on_a_device(logits, [Sampling(temperature=0)] * 3, [0.0] * 3)
    assert tokens == [whole(logits[0].argmax()), -1, whole(logits[2].argmax())]
    assert len(copies) == 1
    on_a_device(logits[:1], [Sampling(temperature=1.0, top_k=5)], [0.5])
    assert len(copies) == 2
