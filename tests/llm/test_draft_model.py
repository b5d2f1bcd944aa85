"""Drafts of a second language model: what it reads, keeps and forgets, and that nobody can tell from the output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infer import Predictor
from infer.errors import UsageError
from infer.llm.engine.acceptance import StepCosts
from infer.llm.engine.draft_model import DraftModel
from infer.llm.engine.engine import Engine
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.llm.engine.sequence import RequestState, Sequence
from tests.support.fake_step import VOCABULARY, FakeStep, fake_shape, logits_after
from tests.support.llm_artifacts import tiny
from tests.support.tiny_hybrids import STATEFUL

PAGE = 4
SHAPE = fake_shape(PAGE)
PAGE_BYTES = SHAPE.layers * SHAPE.page_bytes


class Wrong(FakeStep):
    """A step whose logits are now and then those of another text."""

    def __init__(self, share: float, seed: int = 0) -> None:
        super().__init__(PAGE)
        self.random, self.share = np.random.default_rng(seed), share

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = super().run(inputs)["logits"]
        wrong = torch.from_numpy(self.random.random(len(logits)) < self.share)
        return {"logits": torch.where(wrong[:, None], logits.flip(1), logits)}


def drafts(
    step: FakeStep, pages: int = 400, *, free: bool = True, positions: int = 256, **limits: Any
) -> DraftModel:
    """Make a draft model; `free`: its steps and verification cost next to nothing, whatever they take here."""
    chosen = EngineLimits(**{"step_tokens": 64, "max_running": 8, "mixed_tokens": 64, **limits})
    made = DraftModel(
        step,
        fake_shape(PAGE, positions),
        vocab_size=VOCABULARY,
        limits=chosen,
        kv_bytes=pages * PAGE_BYTES,
        clock=lambda: 0.0,
    )
    if free:
        made.measured = lambda tokens, sequences, seconds: None  # type: ignore[method-assign]
        made.costs = StepCosts(0.01)
        made.costs.add(1, 1, 1.0)
    return made


def generate(
    speculation: DraftModel | None, *, count: int = 4, length: int = 30, step: Any = None, **sampling: Any
) -> tuple[list[list[int]], Engine]:
    options = Sampling(**{"temperature": 0, "max_tokens": 40, **sampling})
    limits = EngineLimits(step_tokens=64, max_running=8, mixed_tokens=64)
    engine = Engine(
        step or FakeStep(PAGE),
        SHAPE,
        tokenizer=None,
        eos_ids=[],
        kv_bytes=400 * PAGE_BYTES,
        limits=limits,
        speculation=speculation,
    )
    random = np.random.default_rng(4)
    for i in range(count):
        prompt = random.integers(3, VOCABULARY, max(length + 7 * i, 1)).tolist()
        engine.submit(Request(id=str(i), prompt=prompt, sampling=options))
    texts: dict[str, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            texts.setdefault(output.id, []).extend(output.token_ids)
        engine.check_integrity()
        if speculation is not None:
            speculation.check_integrity()
    return [texts[str(i)] for i in range(count)], engine


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5, "seed": 5},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"repetition_penalty": 1.1, "logprobs": 1},
        {"max_tokens": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_output_with_a_draft_model_equals_output_without(share: float, sampling: dict[str, Any]) -> None:
    speculation = drafts(Wrong(share))
    assert generate(speculation, **sampling)[0] == generate(None, **sampling)[0]
    assert speculation.stats.checks > 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 2}], ids=str)
def test_all_drafts_of_an_equal_model_are_accepted(sampling: dict[str, Any]) -> None:
    """Also sampled ones: both draw with the number of the position. Each reads its whole text from its own cache."""
    speculation = drafts(FakeStep(PAGE))
    _, engine = generate(speculation, **sampling)
    assert speculation.stats.acceptance == 1
    assert engine.stats().steps < 40 / 2


def test_a_draft_after_a_rejection_reads_what_came_in_its_place() -> None:
    """After a wrong token the rest of that draft is lost, and nothing of the next one."""
    step = Wrong(0.15)
    speculation = drafts(step)
    speculation.most = 3
    generate(speculation, count=1, max_tokens=200)
    stats = speculation.stats
    assert stats.acceptance is not None
    expected = sum(0.85**k for k in (1, 2, 3)) / 3
    assert stats.acceptance == pytest.approx(expected, abs=0.12)


def test_drafts_of_all_sequences_are_computed_in_common_steps() -> None:
    step = FakeStep(PAGE)
    speculation = drafts(step)
    _, engine = generate(speculation, count=6)
    assert len(step.calls) < 12 * engine.stats().steps
    assert max(sequences for _, sequences in step.calls) >= 5


def test_long_prompts_are_read_in_pieces_beside_the_drafts_of_others() -> None:
    step = FakeStep(PAGE)
    speculation = drafts(step, step_tokens=16)
    assert generate(speculation, length=100)[0] == generate(None, length=100)[0]
    assert max(tokens for tokens, _ in step.calls) <= 16
    assert speculation.stats.acceptance == 1


@pytest.mark.parametrize("pages", [1, 12, 30, 60])
def test_a_small_cache_forgets_the_sequences_that_drafted_longest_ago(pages: int) -> None:
    speculation = drafts(FakeStep(PAGE), pages)
    assert generate(speculation)[0] == generate(None)[0]
    assert speculation.stats.acceptance in (None, 1)
    assert (speculation.stats.drafted > 0) == (pages > 1), pages


def completions(speculation: DraftModel, lengths: list[int]) -> list[Sequence]:
    """Return sequences that decode their second token, each with a prompt of its own."""
    made = []
    for number, length in enumerate(lengths):
        prompt = np.random.default_rng(number).integers(3, VOCABULARY, length).tolist()
        request = Request(id=str(number), prompt=prompt, sampling=Sampling(temperature=0, max_tokens=60))
        sequence = Sequence(RequestState(request, number, 0.0, 30.0), 0)
        sequence.speculator = speculation.open(request)
        sequence.num_output_tokens = 1
        made.append(sequence)
    return made


def true_draft(sequence: Sequence, count: int) -> list[int]:
    history = list(sequence.tokens)
    for _ in range(count):
        history.append(int(logits_after(np.array(history)).argmax()))
    return history[len(sequence.tokens) :]


def test_a_sequence_that_was_forgotten_is_read_again() -> None:
    speculation = drafts(FakeStep(PAGE), 24)  # room for two of them
    one, two, three = completions(speculation, [40, 30, 33])
    for sequence in (one, two, three, one, two, one, three, two, one):
        assert speculation.draft([sequence], [5]) == [true_draft(sequence, 5)]
        speculation.check_integrity()


def test_tokens_that_came_in_place_of_an_unverified_draft_are_read() -> None:
    speculation = drafts(FakeStep(PAGE))
    (sequence,) = completions(speculation, [30])
    for added in ([7], [8, 9], [], [3, 4, 5, 6, 7, 8]):
        sequence.tokens += added
        assert speculation.draft([sequence], [5]) == [true_draft(sequence, 5)]


def test_sequences_that_ended_leave_their_room_to_others() -> None:
    step = FakeStep(PAGE)
    speculation = drafts(step, 40)
    for _ in range(4):
        before = speculation.stats.drafted
        generate(speculation, count=2)
        assert speculation.stats.drafted > before


def test_texts_longer_than_the_draft_models_context_go_on_without_drafts() -> None:
    speculation = drafts(FakeStep(PAGE), positions=64)
    assert generate(speculation, count=1, max_tokens=120)[0] == generate(None, count=1, max_tokens=120)[0]


def test_a_token_that_the_model_does_not_have_ends_a_draft() -> None:
    class Larger(FakeStep):
        def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            logits = super().run(inputs)["logits"]
            more = torch.full((len(logits), 3), -1.0)
            more[::2] = 100.0
            return {"logits": torch.cat([logits, more], 1)}

    speculation = drafts(Larger(PAGE))
    assert generate(speculation)[0] == generate(None)[0]


def test_a_failing_draft_model_costs_the_drafts_alone() -> None:
    step = FakeStep(PAGE)
    step.poison = {7}
    speculation = drafts(step)
    texts, engine = generate(speculation)
    assert texts == generate(None)[0]
    assert engine.stats().failed == 0
    assert speculation.stats.drafted > 0


def test_drafts_that_cost_as_much_as_they_bring_are_not_made() -> None:
    now = [0.0]

    class Timed(FakeStep):
        def __init__(self, seconds: float) -> None:
            super().__init__(PAGE)
            self.seconds = seconds

        def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            now[0] += self.seconds
            return super().run(inputs)

    def steps_of(seconds: float) -> tuple[int, int]:
        step = Timed(seconds)
        speculation = drafts(step, free=False)
        speculation._clock = lambda: now[0]
        target = Timed(1.0)
        engine = Engine(
            target, SHAPE, tokenizer=None, eos_ids=[], kv_bytes=400 * PAGE_BYTES, speculation=speculation,
            clock=lambda: now[0],
        )  # fmt: skip
        engine.submit(Request(id="a", prompt=[3, 4, 5], sampling=Sampling(temperature=0, max_tokens=200)))
        while not engine.idle:
            engine.step()
        return len(target.calls), len(step.calls)

    quick, slow = steps_of(0.1), steps_of(1.2)
    assert quick[0] < 50
    assert slow[1] < 40


def test_drafts_that_are_never_accepted_are_hardly_tried() -> None:
    """Also of new sequences, which begin with what was seen of all; and again where they may be accepted by now."""
    step = Wrong(1.0)
    speculation = drafts(step)
    speculation.costs = StepCosts(0.3)
    speculation.costs.add(1, 1, 1.0)
    for _ in range(20):
        generate(speculation, count=1, max_tokens=60)
    checks = speculation.stats.checks
    assert checks < 30
    step.share = 0.0
    for _ in range(20):
        generate(speculation, count=1, max_tokens=60)
    assert speculation.stats.accepted > 300


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random decoder of bytes."""
    return tiny(tmp_path_factory.mktemp("target"), speaks=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make another one, with the same tokens."""
    return tiny(tmp_path_factory.mktemp("other"), speaks=True, name="qwen2")


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "n": 2}], ids=str)
def test_a_predictor_writes_the_same_with_any_draft_model(
    artifact: Path, other: Path, options: dict[str, Any]
) -> None:
    prompts, texts, accepted = ["ab", "cdef"], [], []
    for given in ({"speculation": False}, {"draft": artifact}, {"draft": other}):
        with Predictor.load(artifact, **given) as predictor:
            rows = predictor.generate(prompts, max_tokens=40, ignore_eos=True, **options)
            texts.append([one.token_ids for row in rows for one in (row if isinstance(row, list) else [row])])
            stats = predictor.language_model.engine.stats()
            accepted.append((stats.draft_tokens, stats.accepted_tokens))
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]
    assert accepted[0] == (0, 0)
    assert accepted[1][0] == accepted[1][1] > 0
    assert accepted[2][0] > 0


def test_the_memory_of_the_cache_is_divided_between_both_models(artifact: Path) -> None:
    pages = []
    for given in ({}, {"draft": artifact}):
        with Predictor.load(artifact, kv_memory="1MiB", **given) as predictor:
            pages.append(predictor.language_model.engine.block_manager.num_pages)
    assert pages[1] == pytest.approx(pages[0] / 2, abs=1)


def test_a_draft_model_of_other_tokens_is_refused(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tiny can't draft for tiny: its tokens are others"):
        Predictor.load(artifact, draft=tiny(tmp_path))


def test_a_model_that_cannot_take_back_tokens_has_no_drafts(artifact: Path, tmp_path: Path) -> None:
    hybrid = tiny(tmp_path, name="lfm2", sizes=STATEFUL["lfm2"])
    for first, second in ((artifact, hybrid), (hybrid, artifact)):
        with pytest.raises(UsageError, match="can't take back tokens that are rejected"):
            Predictor.load(first, draft=second)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"batch_invariant": True}, "batch_invariant"), ({"speculation": False}, "speculation")],
)
def test_a_draft_model_beside_options_without_drafts_is_refused(
    artifact: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        Predictor.load(artifact, draft=artifact, **options)
