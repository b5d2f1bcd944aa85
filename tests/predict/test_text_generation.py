"""Predictor generates what transformers generates, whole or piece by piece; scores text; says what it can't do."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from infer import Predictor
from infer.errors import InputError, UsageError
from infer.llm.completion import merge_logprobs, scoring_windows
from infer.llm.engine.requests import TokenLogprob
from infer.llm.llm import parse_size
from tests.support.llm_artifacts import tiny
from tests.support.tiny_decoders import VOCABULARY, build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
PROMPT = [1, 5, 9, 13, 200]


@pytest.fixture(scope="module")
def model(tiny_artifact: Path) -> Iterator[Predictor]:
    """Open the tiny llama: token ids only, 256 positions."""
    with Predictor.load(tiny_artifact, kv_memory="8MB") as p:
        yield p


@pytest.fixture(scope="module")
def lm(pydoc_artifact: Path) -> Iterator[Predictor]:
    with Predictor.load(pydoc_artifact, kv_memory="16MiB") as p:
        yield p


def greedy(prompt: list[int], count: int) -> list[int]:
    """Generate by transformers, the whole text again for each token."""
    network, ids = build("llama"), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def settled(predictor: Predictor) -> bool:
    """Tell if nothing runs any more, and the engine's books agree."""
    deadline = time.monotonic() + 20
    while predictor.engine_client.running and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = predictor.engine_client.stats()
    predictor.language_model.engine.check_integrity()
    return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def test_greedy_tokens_are_those_of_transformers(model: Predictor) -> None:
    made = model.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
    assert made.token_ids == greedy(PROMPT, 8)
    assert (made.finish_reason, made.prompt_tokens, made.text) == ("length", 5, "")
    assert 0 < made.first_token_seconds <= made.seconds
    assert made.tokens_per_second > 0


def test_many_prompts_give_a_list_and_n_gives_lists(model: Predictor) -> None:
    prompts = [PROMPT, [7, 8], [9]]
    made = model.generate(prompts, max_tokens=4, temperature=0, ignore_eos=True)
    assert [c.token_ids for c in made] == [greedy(p, 4) for p in prompts]
    both = model.generate([PROMPT], max_tokens=4, n=2, seed=3, ignore_eos=True, logprobs=2)
    assert [len(row) for row in both] == [2]
    first, second = both[0]
    assert first.token_ids != second.token_ids
    assert [len(entry.top) for entry in first.logprobs] == [2] * 4
    assert model.generate([]) == []


def test_generation_is_reproducible_by_seed(model: Predictor) -> None:
    one, two = (model.generate(PROMPT, max_tokens=8, seed=11).token_ids for _ in range(2))
    assert one == two


def test_more_prompts_than_the_engine_queues_all_get_done(model: Predictor) -> None:
    made = model.generate([[3, 4]] * 1100, max_tokens=1, temperature=0)
    assert len(made) == 1100
    assert {tuple(c.token_ids) for c in made} == {tuple(greedy([3, 4], 1))}


def test_a_repeated_prompt_is_a_prefix_cache_hit(model: Predictor) -> None:
    prompt = list(range(10, 110))
    assert model.generate(prompt, max_tokens=1).cached_tokens == 0
    assert model.generate(prompt, max_tokens=1).cached_tokens == 96


def test_a_batch_invariant_model_gives_the_same_bits_under_load(model: Predictor) -> None:
    asked = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    others = [[i + 3] * (5 * i + 1) for i in range(9)]
    with Predictor.load(model.path, kv_memory="8MB", batch_invariant=True) as predictor:
        alone = predictor.generate(PROMPT, **asked)
        among = predictor.generate([*others, PROMPT, *others], **asked)[len(others)]
        calls = predictor.language_model.engine.stats().step_tokens
    assert [one.logprob for one in among.logprobs] == [one.logprob for one in alone.logprobs]
    assert among.token_ids == alone.token_ids == greedy(PROMPT, 12)
    assert calls[0] >= 20 * 11  # of one token: nobody's next token was computed beside another's


def test_generate_takes_and_returns_text(lm: Predictor) -> None:
    made = lm.generate("Return the", max_tokens=6, temperature=0)
    assert made.text == lm.language_model.decode(made.token_ids)
    assert str(made) == made.text
    assert made.prompt_tokens == len(lm.language_model.encode("Return the"))


def test_a_stop_string_ends_the_text_before_it(lm: Predictor) -> None:
    free = lm.generate("class A:", max_tokens=8, seed=1)
    stop = free.text[2:5]
    made = lm.generate("class A:", max_tokens=8, seed=1, stop=stop)
    assert (made.finish_reason, made.stopped_by) == ("stop", stop)
    assert made.text == free.text[: free.text.index(stop)]


def test_streamed_pieces_join_to_the_completion(lm: Predictor) -> None:
    whole = lm.generate("import os", max_tokens=12, seed=5)
    with lm.stream("import os", max_tokens=12, seed=5) as stream:
        pieces = list(stream)
    assert "".join(map(str, pieces)) == whole.text == stream.completion.text
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason


@pytest.mark.parametrize("way", ["close", "with", "drop"])
def test_a_stream_that_is_not_read_is_cancelled(model: Predictor, way: str) -> None:
    cancelled = model.engine_client.stats().cancelled
    stream = model.stream(PROMPT, max_tokens=200, ignore_eos=True)
    next(stream)
    if way == "with":
        with stream:
            pass
    elif way == "close":
        stream.close()
    del stream
    gc.collect()
    assert settled(model)
    assert model.engine_client.stats().cancelled == cancelled + 1


def test_async_methods_equal_their_sync_forms(model: Predictor) -> None:
    async def both() -> tuple[list[int], list[int]]:
        one = asyncio.create_task(model.agenerate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True))
        async with model.astream(PROMPT, max_tokens=6, temperature=0, ignore_eos=True) as stream:
            pieces = [t async for p in stream for t in p.token_ids]
        return (await one).token_ids, pieces

    assert asyncio.run(both()) == (greedy(PROMPT, 6), greedy(PROMPT, 6))


def test_a_cancelled_task_cancels_its_request(model: Predictor) -> None:
    async def run() -> None:
        task = asyncio.create_task(model.agenerate([PROMPT] * 3, max_tokens=200, ignore_eos=True))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert settled(model)


def test_scores_are_the_logprobs_of_transformers(model: Predictor) -> None:
    ids = torch.randint(3, VOCABULARY, (40,)).tolist()
    with torch.no_grad():
        logprobs = build("llama")(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
    score = model.score(ids)
    assert score.logprobs[0] is None
    assert score.logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(-sum(expected) / 39), rel=1e-4)
    assert (score.windows, score.bits_per_byte) == (1, None)


def test_a_text_longer_than_the_context_is_scored_in_windows_that_overlap(model: Predictor) -> None:
    ids = torch.randint(3, VOCABULARY, (300,)).tolist()
    score = model.score([ids, ids[:9]])[0]
    with torch.no_grad():
        late = build("llama")(torch.tensor([ids[44:]])).logits[0].log_softmax(-1)
    assert score.windows == 2
    assert sum(value is None for value in score.logprobs) == 1
    assert score.logprobs[256] == pytest.approx(float(late[255 - 44, ids[256]]), abs=1e-4)


def test_windows_cover_every_token_once() -> None:
    for count in (1, 2, 7, 8, 9, 12, 13, 100):
        cuts = scoring_windows(count, 8)
        assert [first for *_, first in cuts[1:]] == [stop for _, stop, _ in cuts[:-1]]
        assert cuts[-1][1] == count
        assert all(stop - start <= 8 for start, stop, _ in cuts)
        assert all(first - start >= 4 for start, _, first in cuts[1:])
    assert merge_logprobs([5, 6, 7], [(1, [TokenLogprob(6, -1.0), TokenLogprob(7, -2.0)])]) == [
        None,
        -1.0,
        -2.0,
    ]


def test_text_is_scored_per_byte_too(lm: Predictor) -> None:
    text = "Return the absolute value of the argument."
    score = lm.score(text)
    assert score.token_ids == lm.language_model.encode(text)
    assert score.bits_per_byte == pytest.approx(-score.total / math.log(2) / len(text))
    assert 1 < score.perplexity < 4096


def test_chat_completes_the_rendered_template(lm: Predictor) -> None:
    messages = [{"role": "user", "content": "What is a list?"}]
    made = lm.chat(messages, max_tokens=5, temperature=0)
    prompt = "<|begin|>What is a list?\n\n"
    assert lm.language_model.render_chat(messages) == prompt
    ids = lm.language_model.encode(prompt, special=False)
    assert made.token_ids == lm.generate(ids, max_tokens=5, temperature=0).token_ids
    assert made.prompt_tokens == len(ids)
    streamed = lm.stream_chat(messages, max_tokens=5, temperature=0)
    assert "".join(map(str, streamed)) == made.text


def test_recommended_sampling_settings_are_the_defaults(lm: Predictor) -> None:
    made = lm.language_model.sampling(10, {"max_tokens": None, "top_p": None})
    assert (made.temperature, made.top_p, made.max_tokens) == (0.7, 0.9, 256)
    assert lm.language_model.sampling(500, {}).max_tokens == 12


def test_a_choice_constrains_the_output(lm: Predictor) -> None:
    pytest.importorskip("llguidance")
    assert lm.generate("Is it so? ", choice=["yes", "no"]).text in ("yes", "no")


def test_tool_calls_are_parsed_from_the_output(lm: Predictor) -> None:
    pytest.importorskip("llguidance")
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    made = lm.chat([{"role": "user", "content": "1 + 1"}], tools=[tool], choice=[said], max_tokens=100)
    assert [(call.name, json.loads(call.arguments)) for call in made.tool_calls] == [("add", {"a": 1})]
    assert made.text == ""
    with pytest.raises(InputError, match="tools"):
        lm.chat([{"role": "user", "content": "x"}], tools=[{"type": "function"}])


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        (list(range(1, 258)), {}, r"a prompt of 257 tokens and max_tokens 1 need 258 tokens; .* 256"),
        (PROMPT, {"max_tokens": 300}, r"5 tokens and max_tokens 300 need 305 .* 256 - at max_tokens"),
        (PROMPT, {"temperature": -1}, "expected temperature between 0 and 100, got -1"),
        (PROMPT, {"stop": "x"}, "stop strings need a tokenizer"),
        ([1, 320], {}, "expected token ids between 0 and 319"),
        ([1, "a"], {}, r"expected text or token ids, got int - at prompt"),
        ([], {}, None),
        ([[]], {}, "the prompt is empty"),
        (None, {}, "expected text or token ids, got NoneType"),
    ],
)
def test_an_invalid_generate_call_names_the_argument(
    model: Predictor, prompt: object, options: dict, sentence: str | None
) -> None:
    if sentence is None:
        assert model.generate(prompt, **options) == []
        return
    with pytest.raises(InputError, match=sentence):
        model.generate(prompt, **options)
    assert settled(model)


def test_a_refusal_names_the_missing_part_and_what_to_do(model: Predictor) -> None:
    with pytest.raises(UsageError, match=r"tiny has no tokenizer.json. Give token ids"):
        model.generate("text")
    with pytest.raises(UsageError, match=r"no chat template.*--chat-template FILE; completions need none"):
        model.chat([{"role": "user", "content": "x"}])
    with pytest.raises(UsageError, match="no option named 'temprature'.*Did you mean temperature"):
        model.generate(PROMPT, temprature=0)
    with pytest.raises(UsageError, match="one constraint on the output, got regex and choice"):
        model.generate(PROMPT, regex="a", choice=["b"])


def test_a_backend_without_paged_attention_only_scores_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends import eager

    monkeypatch.setattr(eager, "STEPS", False)  # as TensorRT
    ids = torch.tensor([PROMPT])
    with Predictor.load(tiny(tmp_path)) as predictor:
        with torch.no_grad():
            expected = build("llama")(ids).logits
        torch.testing.assert_close(predictor.predict({"input_ids": ids})["logits"], expected)
        with pytest.raises(
            UsageError, match=r"eager has no attention over a paged KV cache.*--backend inductor"
        ):
            predictor.generate(PROMPT)


def test_a_closed_predictor_generates_nothing(model: Predictor) -> None:
    closed = Predictor.load(model.path)
    closed.generate(PROMPT, max_tokens=1)
    closed.close()
    with pytest.raises(UsageError, match="closed"):
        closed.generate(PROMPT)


def test_kv_memory_bounds_the_cache(model: Predictor) -> None:
    engine = model.language_model.engine
    assert 0 < engine.cache.nbytes <= 8_000_000
    with pytest.raises(UsageError, match="expected a size like 2GiB or 500MB, got 'much' - at kv_memory"):
        Predictor.load(model.path, kv_memory="much")
    assert [parse_size(t, "") for t in ("2GiB", "1.5 kb", "7", 9, None)] == [2 << 30, 1500, 7, 9, None]
    with pytest.raises(UsageError):
        parse_size("0", "x")
