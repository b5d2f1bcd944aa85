"""Drafts by prompt lookup: where they come from, when they are tried, and that nobody can tell from the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.llm.engine.acceptance import AcceptanceRate, StepCosts
from infer.llm.engine.engine import Engine
from infer.llm.engine.prompt_lookup import WINDOW, PromptLookup, SequenceLookup
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.step.step_shape import StepShape

VOCAB, PAGE = 32, 4


def lookup(most: int = 4, **options: Any) -> SequenceLookup:
    found = PromptLookup(most, prior_cost=0.0, **options).open(Request(id="a", prompt=[1]))
    assert found is not None
    return found


def test_a_draft_continues_an_earlier_match_of_the_last_tokens() -> None:
    assert lookup().draft([5, 1, 2, 3, 7, 8, 9, 4, 1, 2, 3], 3) == [7, 8, 9]


def test_the_longest_match_wins_over_the_latest() -> None:
    assert lookup().draft([1, 2, 3, 7, 7, 7, 9, 2, 3, 8, 8, 8, 1, 2, 3], 2) == [7, 7]


def test_the_latest_of_equally_long_matches_wins() -> None:
    assert lookup().draft([2, 3, 7, 2, 3, 8, 2, 3], 1) == [8]


def test_a_single_token_is_matched_when_no_pair_is() -> None:
    assert lookup().draft([9, 3, 7, 6, 3], 1) == [7]


def test_a_repetition_is_drafted_beyond_its_end() -> None:
    assert lookup().draft([4, 1, 2, 1, 2, 1, 2], 4) == [1, 2, 1, 2]
    assert lookup().draft([6, 6, 6], 4) == [6, 6, 6, 6]


def test_there_is_no_draft_without_a_match() -> None:
    for tokens in ([1], [1, 2], [1, 2, 3, 4]):
        assert not lookup().draft(tokens, 4)


def test_the_index_follows_the_output() -> None:
    speculator = lookup()
    tokens = [1, 2, 3]
    assert not speculator.draft(tokens, 4)
    tokens += [9, 1, 2]
    assert speculator.draft(tokens, 4)[:2] == [3, 9]
    tokens += [5, 1, 2]
    assert speculator.draft(tokens, 1) == [5]


def test_the_ngram_index_equals_a_linear_search() -> None:
    random = np.random.default_rng(0)
    tokens: list[int] = random.integers(0, 4, 6).tolist()
    speculator = lookup(patience=10**9)
    for _ in range(300):
        tokens.append(int(random.integers(0, 4)))
        place, length = speculator._match(tokens)
        ends = range(len(tokens) - 1)  # of matches that came before
        sizes = [next((n for n in range(8) if n > e or tokens[e - n] != tokens[-1 - n]), 8) for e in ends]
        if not length:
            assert max(sizes) == 0
        elif length == 1:
            assert max(sizes) == 1
            assert tokens[place - 1] == tokens[-1]
        else:
            near = sorted(e for e in ends if sizes[e] >= 2)[-16:]
            assert length == max(sizes[e] for e in near)
            assert sizes[place - 1] == length


def test_of_a_long_prompt_only_the_end_is_indexed() -> None:
    speculator = lookup()
    tokens = [5, 6, 7, *range(100, 100 + WINDOW), 5, 6]
    assert not speculator.draft(tokens, 4)
    assert len(speculator._before) < WINDOW


def test_a_draft_is_never_longer_than_its_limit() -> None:
    assert len(lookup(most=8).draft([1, 2, 3, 4, 5, 6, 1, 2], 3)) <= 3
    assert len(lookup(most=2).draft([1, 2, 3, 4, 5, 6, 1, 2], 9)) <= 2


def test_a_draft_grows_with_its_acceptance_and_shrinks_with_its_cost() -> None:
    rate = AcceptanceRate(0.5, patience=8, retry=32)
    for _ in range(30):
        rate.add(4, 4)
    assert rate.rate > 0.9
    assert rate.length(4, 0.3, 0.15) == 4
    assert rate.length(4, 0.97, 0.15) == 1
    for _ in range(20):
        rate.add(4, 1)
    assert 0.4 < rate.rate < 0.7
    assert rate.length(4, 0.3, 0.15) == 1


def test_a_draft_has_the_length_that_brings_most_tokens_a_step() -> None:
    for hits in range(9):
        for cost in (0.05, 0.1, 0.2, 0.3, 0.5, 0.8):
            rate = AcceptanceRate(0.5)
            for _ in range(40):
                rate.add(8, hits)
            p = rate.rate
            worth = [sum(p**i for i in range(k + 1)) / (1 + k * cost) for k in range(9)]
            assert rate.best_length(8, cost) == int(np.argmax(worth)), (p, cost)


def test_rejected_drafts_pause_drafting_after_eight_checks() -> None:
    rate = AcceptanceRate(0.6, patience=8, retry=32)
    tried = []
    for chance in range(400):
        if rate.length(4, 0.3, 0.15):
            rate.add(1, 0)
            tried.append(chance)
    assert tried[:8] == list(range(8))
    assert np.diff(tried[7:]).tolist() == [32, 64, 128]
    rate.add(1, 1)
    assert rate._retry == 32


def test_a_step_that_costs_as_much_as_its_tokens_is_not_drafted_for() -> None:
    costs = StepCosts(prior=0.3)
    assert costs.ratio(1) == 0.3
    for _ in range(50):
        costs.add(1, 1, 0.010)
        costs.add(4, 1, 0.028)
        costs.add(8, 8, 0.020)
        costs.add(12, 8, 0.024)
    assert costs.ratio(1) == pytest.approx(0.6)
    assert costs.ratio(8) == pytest.approx(0.4)
    costs.add(2, 1, 99.0)  # somebody else had the machine
    assert costs.ratio(1) < 0.65
    costs.add(1, 1, 0.005)  # and had it all the time before
    assert costs.plain(1) == 0.005
    costs.add(1, 1, 0.010)
    assert costs.plain(1) == pytest.approx(0.0055)
    speculation = PromptLookup()
    speculation.costs = costs
    speculation.measured(1, 1, 0.010)
    assert speculation.stats.token_cost == speculation.cost


class Copier:
    """A step whose next token depends on the last two, so that the output repeats; with `noise` less so."""

    def __init__(self, noise: float) -> None:
        random = np.random.default_rng(3)
        self.table = random.normal(0, 1, (VOCAB, VOCAB, VOCAB)).astype(np.float32)
        self.noise, self.tokens, self.calls = noise, 0, 0

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = {name: value.numpy() for name, value in inputs.items()}
        ids, rows, places = named["token_ids"], named["logit_rows"], named["slot_mapping"]
        cells = named["kv_cache"].view(np.int64)[0]
        cells[places // PAGE, places % PAGE] = ids
        owner = np.searchsorted(named["query_start"], rows, side="right") - 1
        self.tokens, self.calls = self.tokens + len(ids), self.calls + 1
        logits = np.empty((len(rows), VOCAB), np.float32)
        for i, (row, who) in enumerate(zip(rows, owner, strict=True)):
            at = int(named["positions"][row])
            pages = named["block_table"][who]
            last, before = (int(cells[pages[p // PAGE], p % PAGE]) for p in (at, max(at - 1, 0)))
            logits[i] = self.table[before, last] * 3
            logits[i] += self.noise * np.random.default_rng(at).normal(0, 3, VOCAB)
        return {"logits": torch.from_numpy(logits)}


class Shape(StepShape, frozen=True):
    @property
    def page_bytes(self) -> int:
        return 8 * self.page


SHAPE = Shape(
    layers=1,
    query_heads=1,
    kv_heads=1,
    head_dim=1,
    vocab_size=VOCAB,
    max_positions=2048,
    page=PAGE,
    kv_dtype="float32",
)


def generate(step: Copier, speculation: PromptLookup | None, sampling: Sampling) -> list[list[int]]:
    engine = Engine(
        step,
        SHAPE,
        tokenizer=None,
        eos_ids=[],
        kv_bytes=8 * PAGE * 1024,
        speculation=speculation,
    )
    for i in range(3):
        engine.submit(Request(id=str(i), prompt=[i + 1, i + 2, i + 3], sampling=sampling))
    found: dict[str, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.token_ids)
        engine.check_integrity()
    return [found[str(i)] for i in range(3)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, max_tokens=120),
        Sampling(temperature=0.3, seed=5, max_tokens=120),
        Sampling(temperature=1.0, seed=5, max_tokens=120, top_p=0.9),
        Sampling(temperature=0, max_tokens=120, repetition_penalty=1.1, logprobs=1),
    ],
    ids=["greedy", "cool", "nucleus", "penalty"],
)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_output_with_drafts_equals_output_without(sampling: Sampling, noise: float) -> None:
    speculation = PromptLookup(prior_cost=0.1)
    assert generate(Copier(noise), speculation, sampling) == generate(Copier(noise), None, sampling)
    assert speculation.stats.checks > 0


def test_a_repeating_output_takes_fewer_steps() -> None:
    sampling = Sampling(temperature=0, max_tokens=300)
    plain, drafted, speculation = Copier(0.0), Copier(0.0), PromptLookup(prior_cost=0.1)
    speculation.measured = lambda tokens, sequences, seconds: None  # type: ignore[method-assign]
    generate(plain, None, sampling)
    generate(drafted, speculation, sampling)
    assert drafted.calls < 0.6 * plain.calls
    assert (speculation.stats.acceptance or 0) > 0.8


def test_an_output_that_never_repeats_costs_few_drafts() -> None:
    sampling = Sampling(temperature=0, max_tokens=300)
    step, speculation = Copier(10.0), PromptLookup()
    speculation.measured = lambda tokens, sequences, seconds: None  # type: ignore[method-assign]
    generate(step, speculation, sampling)
    assert speculation.stats.declined > 0
    assert speculation.stats.drafted < 0.15 * 3 * 300


def test_no_lookup_index_is_built_for_two_output_tokens() -> None:
    assert PromptLookup().open(Request(id="a", prompt=[1], sampling=Sampling(max_tokens=2))) is None
