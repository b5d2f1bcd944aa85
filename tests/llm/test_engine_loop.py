"""The engine's loop: order of requests, admission, refusals, cancellation and ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from infer.errors import InferError, InputError, OverloadedError, UsageError
from infer.llm.engine.engine import Engine
from infer.llm.engine.requests import Output, Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from tests.support.fake_step import (
    EOS,
    VOCABULARY,
    FakeStep,
    FallibleDrafts,
    expected,
    fake_shape,
    logits_after,
)

PAGE = 4


def engine(*, pages: int = 64, step: Any = None, **settings: Any) -> Engine:
    shape = fake_shape(PAGE)
    hooks = {
        name: settings.pop(name)
        for name in ("speculation", "grammars", "tokenizer", "clock")
        if name in settings
    }
    return Engine(
        step or FakeStep(PAGE), shape, eos_ids=[EOS], kv_bytes=pages * shape.layers * shape.page_bytes,
        limits=EngineLimits(**settings), **{"tokenizer": None, **hooks},
    )  # fmt: skip


def request(name: str, prompt: list[int], *, priority: int = 0, **sampling: Any) -> Request:
    defaults = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    return Request(id=name, prompt=prompt, sampling=Sampling(**{**defaults, **sampling}), priority=priority)


def letters(count: int, start: int = 3) -> list[int]:
    return [3 + (start + i * 7) % (VOCABULARY - 3) for i in range(count)]


def drive(running: Engine) -> list[Output]:
    outputs = []
    while not running.idle:
        outputs += running.step()
        running.check_integrity()
    return outputs


def tokens(outputs: list[Output], name: str, index: int = 0) -> list[int]:
    return [t for o in outputs if (o.id, o.index) == (name, index) for t in o.token_ids]


def words() -> Tokenizer:
    """Token i is the letter of that number, so that text shows tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={chr(64 + i): i for i in range(VOCABULARY)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_a_long_prompt_stalls_neither_decoding_nor_short_prompts() -> None:
    running = engine(step_tokens=16, mixed_tokens=8, max_running=8)
    running.submit(request("decoding", letters(3), max_tokens=60))
    running.step()
    running.submit(request("long", letters(200), max_tokens=1))
    running.submit(request("short", letters(5, 11), max_tokens=1))
    ended: dict[str, int] = {}
    for number in range(60):
        outputs = running.step()
        if number < 30:
            assert [o for o in outputs if o.id == "decoding"]
        ended |= {o.id: number for o in outputs if o.finish}
    assert ended["short"] < 3
    assert ended["long"] <= 30  # 200 tokens, eight a step


def test_a_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    running = engine(step_tokens=16, max_running=8)
    running.submit(request("long", letters(100), max_tokens=1))
    for number in range(40):
        running.submit(request(f"s{number}", letters(14, number), max_tokens=1))
        if any(o.id == "long" and o.finish for o in running.step()):
            return
    pytest.fail("the long prompt starved")


def test_requests_run_by_priority_raised_by_waiting_time() -> None:
    now = [0.0]
    running = engine(max_running=1, aging=10.0, clock=lambda: now[0], step_tokens=32)
    running.submit(request("first", letters(4), max_tokens=4))
    running.step()
    running.submit(request("later", letters(5), priority=1))
    running.submit(request("soon", letters(6), priority=0))
    now[0] = 20.0
    running.submit(request("last", letters(7), priority=0))  # "later" is ten seconds of waiting ahead of it
    order = [o.id for o in drive(running) if o.finish]
    assert order == ["first", "soon", "later", "last"]


def test_an_urgent_request_preempts_a_running_one_of_lower_priority() -> None:
    running = engine(max_running=1, step_tokens=32, clock=lambda: 0.0)
    running.submit(request("slow", letters(4), priority=1, max_tokens=20))
    running.step()
    running.submit(request("urgent", letters(5), priority=0, max_tokens=2))
    outputs = drive(running)
    assert [o.id for o in outputs if o.finish] == ["urgent", "slow"]
    assert running.stats().preemptions == 1
    assert tokens(outputs, "urgent") == expected(request("urgent", letters(5), max_tokens=2))


def test_a_cancelled_request_frees_its_pages_at_once_and_reports_its_end() -> None:
    running = engine()
    running.submit(request("a", letters(30), n=3, temperature=1.0))
    running.submit(request("b", letters(9)))
    running.step()
    assert running.block_manager.num_used == 8 + 3
    running.cancel("a")
    assert running.block_manager.num_used == 3
    running.check_integrity()
    ends = [(o.id, o.index, o.finish) for o in running.step() if o.finish]
    assert ends == [("a", 0, "cancelled"), ("a", 1, "cancelled"), ("a", 2, "cancelled")]
    running.cancel("a")
    running.cancel("nobody")
    assert tokens(drive(running), "b")


def test_cancelling_a_waiting_request_is_reported_before_going_idle() -> None:
    running = engine(max_running=1)
    running.submit(request("a", letters(3)))
    running.submit(request("b", letters(3), n=2))
    running.step()
    running.cancel("b")
    running.cancel("a")
    assert not running.idle
    assert sorted((o.id, o.index) for o in running.step()) == [("a", 0), ("b", 0), ("b", 1)]
    assert running.idle


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (request("a", []), "at least one token"),
        (request("a", [VOCABULARY]), "token ids between 0 and 60"),
        (request("a", [-1]), "token ids"),
        (request("a", letters(90), max_tokens=8), "need 98 tokens; the KV cache has pages for 80"),
        (request("a", letters(3), max_tokens=-1), "max_tokens"),
        (request("a", letters(3), temperature=float("nan")), "temperature"),
        (request("a", letters(3), stop=("x",)), "stop strings need a tokenizer"),
        (
            Request(id="a", prompt=[3], sampling=Sampling(max_tokens=4), grammar={"regex": "a"}),
            "without structured output",
        ),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_a_message(asked: Request, sentence: str) -> None:
    running = engine(pages=20)
    for call in (running.check, running.submit):
        with pytest.raises(InputError, match=sentence):
            call(asked)
    assert running.idle


def test_a_request_that_fits_alone_always_finishes_under_load() -> None:
    running = engine(pages=20, max_running=8)
    for i in range(6):
        running.submit(request(str(i), letters(20, i), max_tokens=60))
    outputs = drive(running)
    assert sorted(o.id for o in outputs if o.finish == "length") == [str(i) for i in range(6)]
    assert running.stats().preemptions > 0


def test_a_duplicate_request_id_is_refused() -> None:
    running = engine()
    running.submit(request("a", letters(3)))
    with pytest.raises(InputError, match="already running"):
        running.submit(request("a", letters(4)))
    drive(running)
    running.submit(request("a", letters(4)))


def test_requests_beyond_the_queue_limits_are_refused_with_retry_after() -> None:
    running = engine(max_queued=2, max_running=1)
    running.submit(request("0", letters(3)))
    running.step()
    running.submit(request("1", letters(3)))
    running.submit(request("2", letters(3)))
    with pytest.raises(OverloadedError, match="2 requests are waiting") as caught:
        running.submit(request("3", letters(3)))
    assert 1 <= caught.value.retry_after <= 60
    running = engine(max_queued_tokens=20)
    running.submit(request("0", letters(15)))
    with pytest.raises(OverloadedError, match="15 tokens of prompts"):
        running.check(request("1", letters(6)))
    running.check(request("1", letters(5)))


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="can't decode in steps of 8 tokens"):
        engine(step_tokens=8, max_running=9)
    with pytest.raises(UsageError, match="divisible by the page"):
        engine(step_tokens=66, batch_invariant=True)


def test_a_request_that_the_model_fails_on_fails_alone() -> None:
    step = FakeStep(PAGE)
    step.poison = {60}
    running = engine(step=step)
    running.submit(request("good", letters(6)))
    running.submit(request("bad", [5, 60, 5], n=2))
    outputs = drive(running)
    assert tokens(outputs, "good") == expected(request("good", letters(6)))
    ends = [(o.index, o.finish, o.stopped_by) for o in outputs if o.id == "bad"]
    assert sorted(ends) == [(i, "error", "RuntimeError: a poisonous token") for i in range(2)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("where", ["append_tokens", "append_token", "build"])
def test_a_request_that_fails_in_any_part_of_a_step_fails_alone(
    monkeypatch: pytest.MonkeyPatch, where: str, n: int
) -> None:
    running = engine()

    def broken(real: Any, of: Any) -> Any:
        def call(first: Any, *rest: Any) -> Any:
            if any(s.state.request.id == "bad" and len(s.tokens) > 7 for s in of(first)):
                raise RuntimeError("the tokenizer broke")
            return real(first, *rest)

        return call

    if where == "build":
        build = broken(
            running._model_runner._step_inputs.build, lambda work: [item.sequence for item in work]
        )
        monkeypatch.setattr(running._model_runner._step_inputs, "build", build)
    else:
        from infer.llm.engine import request_manager as module

        monkeypatch.setattr(module, where, broken(getattr(module, where), lambda sequence: [sequence]))
    running.submit(request("good", letters(6)))
    size = 6 if where == "append_token" else 8  # prompts are read by one way, what follows by the other
    running.submit(request("bad", letters(size), n=n))
    outputs = drive(running)
    assert tokens(outputs, "good") == expected(request("good", letters(6)))
    ends = [(o.index, o.finish, o.stopped_by) for o in outputs if o.id == "bad" and o.finish]
    assert sorted(ends) == [(i, "error", "RuntimeError: the tokenizer broke") for i in range(n)]
    running.check_integrity()
    assert running.idle


class NanAfter(FakeStep):
    """Logits of sequences of that length are not numbers."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = super().run(inputs)["logits"]
        return {"logits": torch.where(inputs["seq_lens"][:, None] == 9, torch.nan, logits)}


def test_logits_that_are_not_finite_end_their_sequence_alone() -> None:
    running = engine(step=NanAfter(PAGE))
    running.submit(request("good", letters(12)))
    running.submit(request("bad", letters(7)))
    outputs = drive(running)
    assert tokens(outputs, "good") == expected(request("good", letters(12)))
    last = [o for o in outputs if o.id == "bad"][-1]
    assert (last.finish, last.stopped_by) == ("error", "the logits are not finite")
    assert len(tokens(outputs, "bad")) == 2


def test_stop_strings_end_the_text_but_keep_the_sampled_tokens() -> None:
    asked = request("a", letters(5), max_tokens=20)
    whole = "".join(chr(64 + t) for t in expected(asked))
    stop = whole[4:7]
    for include in (False, True):
        running = engine(tokenizer=words())
        running.submit(request("a", letters(5), max_tokens=20, stop=(stop,), include_stop=include))
        outputs = drive(running)
        end = whole.index(stop) + (len(stop) if include else 0)
        assert "".join(o.text for o in outputs) == whole[:end]
        assert (outputs[-1].finish, outputs[-1].stopped_by) == ("stop", stop)


def test_text_held_back_for_a_stop_string_is_released_at_the_end() -> None:
    asked = request("a", letters(5), max_tokens=6)
    whole = "".join(chr(64 + t) for t in expected(asked))
    running = engine(tokenizer=words())
    running.submit(request("a", letters(5), max_tokens=6, stop=(whole[3:] + "never",)))
    outputs = drive(running)
    assert [o.text for o in outputs] == [whole[0], whole[1], whole[2], "", "", whole[3:]]
    assert outputs[-1].finish == "length"


def test_end_tokens_end_a_completion_unless_they_are_ignored_or_too_early() -> None:
    free = request("a", letters(5), max_tokens=12)
    third = expected(free)[2]
    stop = {"max_tokens": 12, "stop_token_ids": (third,)}
    running = engine(tokenizer=words())
    running.submit(request("a", letters(5), **stop))
    outputs = drive(running)
    assert tokens(outputs, "a") == expected(free)[: expected(free).index(third) + 1]
    assert (outputs[-1].finish, outputs[-1].stopped_by, outputs[-1].text) == ("stop", third, "")
    running.submit(request("b", letters(5), **stop, min_tokens=5))
    assert third not in tokens(drive(running), "b")[:5]


def test_max_tokens_0_generates_no_tokens() -> None:
    running = engine()
    running.submit(request("a", letters(9), max_tokens=0, n=2, prompt_logprobs=0))
    outputs = drive(running)
    assert [(o.index, o.finish, o.token_ids, len(o.prompt_logprobs)) for o in outputs] == [
        (1, "length", (), 9),
        (0, "length", (), 9),
    ]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 4}, {"presence_penalty": 1.5, "logprobs": 1}]
)
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_speculative_drafts_save_steps_and_change_no_token(sampling: dict[str, Any], wrong: float) -> None:
    asked = request("a", letters(7), max_tokens=60, **sampling)
    plain, guesses = engine(), FallibleDrafts(3, wrong)
    plain.submit(asked)
    outputs = drive(plain)
    drafted = engine(speculation=guesses)
    drafted.submit(asked)
    again = drive(drafted)
    assert tokens(again, "a") == tokens(outputs, "a")
    if sampling.get("logprobs"):
        made = [[x for o in out for x in o.logprobs] for out in (outputs, again)]
        assert made[0] == made[1]
    stats = drafted.stats()
    assert sum(n for n, _ in guesses.observed) == stats.draft_tokens
    assert sum(n for _, n in guesses.observed) == stats.accepted_tokens
    if wrong == 0 and not sampling:
        assert stats.accepted_tokens == stats.draft_tokens
        assert stats.steps < 20


class OnlyEven:
    """Even tokens, `length` of them; refuses to go on after."""

    def __init__(self, length: int) -> None:
        self.left, self.history = length, 0

    @property
    def finished(self) -> bool:
        return self.left == 0

    def fill(self, bitmask: Tensor, row: int) -> None:
        bitmask[row] = 0x55555555

    def accept(self, token: int) -> bool:
        if token % 2 or not self.left:
            return False
        self.left -= 1
        return True

    def rollback(self, count: int) -> None:
        self.left += count


class Evens:
    def check(self, constraint: Mapping[str, Any]) -> None:
        if constraint.get("length", 0) < 1:
            raise InputError("expected a length")

    def open(self, constraint: Mapping[str, Any]) -> OnlyEven:
        return OnlyEven(constraint["length"])


LEFT_OUT: list[dict[str, Any]] = [
    {"allowed_token_ids": (4, 5, 7, 9, 30)},
    {"bad_words": ("D", "EH", "HEE")},
    {"allowed_token_ids": (4, 5, 7, 9), "bad_words": ("E", "DD", "GI"), "frequency_penalty": 0.5},
]


def slowly(asked: Request) -> list[int]:
    """Return the most likely tokens that are allowed, each by a search through all of them."""
    sampling, tokens = asked.sampling, list(asked.prompt)
    words = [[ord(letter) - 64 for letter in word] for word in sampling.bad_words]
    while len(tokens) < len(asked.prompt) + sampling.max_tokens:
        output = tokens[len(asked.prompt) :]
        row = logits_after(np.array(tokens)).astype(np.float64)
        for token in range(VOCABULARY):
            row[token] -= sampling.frequency_penalty * output.count(token)
            bad = any((output + [token])[-len(word) :] == word for word in words)
            if bad or (sampling.allowed_token_ids and token not in sampling.allowed_token_ids):
                row[token] = -np.inf
        tokens.append(int(row.argmax()))
    return tokens[len(asked.prompt) :]


@pytest.mark.parametrize("drafts", [None, FallibleDrafts(5, 0.3)], ids=["plain", "drafted"])
@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
def test_tokens_left_out_are_those_of_a_slow_search(
    left_out: dict[str, Any], drafts: FallibleDrafts | None
) -> None:
    running = engine(tokenizer=words(), speculation=drafts)
    asked = [request(str(i), letters(5, i), max_tokens=40, **left_out) for i in range(3)]
    for one in (*asked, request("free", letters(5), max_tokens=40)):
        running.submit(one)
    outputs = drive(running)
    assert [tokens(outputs, one.id) for one in asked] == [slowly(one) for one in asked]
    assert tokens(outputs, "free") == expected(request("free", letters(5), max_tokens=40))


def test_a_request_without_an_allowed_token_fails_alone() -> None:
    running = engine(tokenizer=words())
    running.submit(request("none", letters(5), allowed_token_ids=(4, 5), bad_words=("D", "E")))
    running.submit(request("free", letters(5)))
    outputs = drive(running)
    (failed,) = [o for o in outputs if o.id == "none"]
    assert (failed.finish, failed.fault) == ("error", "InputError")
    assert "no token is left" in str(failed.stopped_by)
    assert tokens(outputs, "free") == expected(request("free", letters(5)))


@pytest.mark.parametrize(
    ("options", "where"),
    [({"allowed_token_ids": (VOCABULARY,)}, "allowed_token_ids"), ({"bad_words": ("",)}, "bad_words"),
     ({"bad_words": ("a\ud800",)}, "bad_words")],
)  # fmt: skip
def test_tokens_and_words_that_can_not_be_left_out_are_refused(options: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        engine(tokenizer=words()).submit(request("a", letters(3), **options))
    assert caught.value.where == where


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(InputError, match="need a tokenizer"):
        engine().submit(request("a", letters(3), bad_words=("D",)))


def test_an_output_of_several_tokens_tells_the_text_of_each() -> None:
    running = engine(tokenizer=words(), speculation=FallibleDrafts(3, 0.0))
    running.submit(request("a", letters(5), max_tokens=30))
    outputs = drive(running)
    assert max(len(o.token_ids) for o in outputs) > 1
    for output in outputs:
        assert output.ends == (tuple(range(1, len(output.text) + 1)) if len(output.token_ids) > 1 else ())


@pytest.mark.parametrize("speculation", [None, FallibleDrafts(3, 0.2)])
def test_a_grammar_constrains_tokens_and_ends_the_completion(speculation: FallibleDrafts | None) -> None:
    running = engine(grammars=Evens(), speculation=speculation)
    for name, n in (("a", 1), ("b", 2)):
        asked = request(name, letters(5), max_tokens=30, temperature=1.0, seed=3, n=n)
        asked.grammar = {"length": 9}
        running.submit(asked)
    running.submit(request("free", letters(5), max_tokens=9))
    outputs = drive(running)
    for name, index in (("a", 0), ("b", 0), ("b", 1)):
        found = tokens(outputs, name, index)
        assert len(found) == 9
        assert not any(token % 2 for token in found)
    assert tokens(outputs, "a") == tokens(outputs, "b", 0)
    assert tokens(outputs, "free") == expected(request("free", letters(5), max_tokens=9))


def test_a_batch_invariant_sequence_runs_alone_in_chunks_of_fixed_size() -> None:
    step = FakeStep(PAGE)
    running = engine(step=step, step_tokens=16, max_running=4, batch_invariant=True, pages=25)
    running.submit(request("alone", letters(37), max_tokens=20))
    drive(running)
    alone = list(step.calls)
    assert alone[:3] == [(16, 1), (16, 1), (5, 1)]
    step.calls.clear()
    for i in range(4):
        running.submit(request(str(i), letters(37, i), max_tokens=20))
    drive(running)
    assert {sequences for _, sequences in step.calls} == {1}
    assert {tokens for tokens, _ in step.calls} == {16, 5, 1}
    assert running.stats().preemptions > 0


def test_prompts_that_are_scored_run_in_pieces_of_few_rows() -> None:
    rows: list[int] = []

    class Counting(FakeStep):
        def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            rows.append(len(inputs["logit_rows"]))
            return super().run(inputs)

    running = engine(step=Counting(PAGE), score_tokens=10)
    for i in range(3):
        running.submit(request(str(i), letters(40, i), max_tokens=2, prompt_logprobs=1))
    outputs = drive(running)
    assert max(rows) <= 10 + 3
    assert [len(o.prompt_logprobs) for o in outputs if o.prompt_logprobs] == [40, 40, 40]


def test_check_integrity_detects_a_leaked_page() -> None:
    running = engine()
    running.submit(request("a", letters(9)))
    running.step()
    running.block_manager.allocate()
    with pytest.raises(InferError, match="has 1 references but 0 holders"):
        running.check_integrity()


def test_pages_of_rejected_drafts_are_released() -> None:
    running = engine(speculation=FallibleDrafts(1, 1.0), max_draft=16)
    running.submit(request("a", letters(4), max_tokens=40))
    while not running.idle:
        running.step()
        for sequence in running.scheduler.running:
            assert len(sequence.pages) <= -(-(sequence.num_computed_tokens + 1) // PAGE)


def test_engine_statistics_count_steps_tokens_and_requests() -> None:
    running = engine()
    for i in range(3):
        running.submit(request(str(i), letters(9), max_tokens=5))
    drive(running)
    stats = running.stats()
    assert (stats.finished, stats.running, stats.waiting, stats.pages_used) == (3, 0, 0, 0)
    assert stats.decode_tokens == 15
    assert stats.prefill_tokens + stats.prefix_hits == 27
    assert stats.prefix_queries == 27
    assert stats.step_seconds > 0
    assert np.isfinite(stats.tokens_per_second)


@pytest.mark.parametrize("ending", ["finish", "cancel", "fail"])
def test_requests_are_freed_without_garbage_collection(ending: str) -> None:
    running = engine()
    gc.collect()
    gc.disable()
    try:
        running.submit(request("a", letters(6), n=2))
        held = [weakref.ref(state) for state in running._request_manager.states.values()]
        running.step()
        held += [weakref.ref(state) for state in running._request_manager.states.values()]
        assert [ref() is not None for ref in held] == [True, True]
        if ending == "cancel":
            running.cancel("a")
        elif ending == "fail":
            for state in list(running._request_manager.states.values()):
                running._request_manager.blame(state.sequences[1], ValueError("no"))
            del state
        drive(running)
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
