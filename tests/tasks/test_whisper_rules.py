"""Whisper's rules for tokens, and its segments, beside transformers' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from infer.errors import ArtifactError, InputError
from infer.tasks.whisper import STEP, WhisperTokens

VOCABULARY, END, NO_TIMESTAMPS = 60, 20, 29  # texts, then special tokens, then timestamps from 30 on
CONFIG: dict[str, Any] = {
    "decoder_start_token_id": 21, "eos_token_id": END, "no_timestamps_token_id": NO_TIMESTAMPS,
    "lang_to_id": {"<|en|>": 22, "<|de|>": 23}, "task_to_id": {"transcribe": 24, "translate": 25},
    "suppress_tokens": [3, 5], "begin_suppress_tokens": [7, END], "max_initial_timestamp_index": 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokens() -> WhisperTokens:
    return WhisperTokens(CONFIG, "here")


@pytest.mark.parametrize("timestamps", [False, True])
def test_whisper_rules_equal_the_transformers_logits_processors(
    tokens: WhisperTokens, timestamps: bool
) -> None:
    module = pytest.importorskip("transformers.generation.logits_process")
    generator = np.random.default_rng(0)
    prompt = tokens.prompt("en", "transcribe", timestamps=timestamps)
    begin, settings = len(prompt), SimpleNamespace(**CONFIG, bos_token_id=0)
    processors = [
        module.SuppressTokensAtBeginLogitsProcessor(CONFIG["begin_suppress_tokens"], begin),
        module.SuppressTokensLogitsProcessor(CONFIG["suppress_tokens"]),
    ]
    if timestamps:
        processors.append(module.WhisperTimeStampLogitsProcessor(settings, begin))
    rules = tokens.rules(timestamps=timestamps)
    for trial in range(40):
        output: list[int] = []
        for _ in range(12):
            logits = (generator.standard_normal(VOCABULARY) * (1 + trial % 4)).astype(np.float32)
            want = torch.from_numpy(logits.copy())[None]
            for processor in processors:
                want = processor(torch.tensor([prompt + output]), want)
            rules.apply(logits, output)
            np.testing.assert_array_equal(logits, want[0].numpy())
            output.append(int(logits.argmax()))
            if output[-1] == END:
                break


def test_language_detection_allows_language_tokens_only(tokens: WhisperTokens) -> None:
    logits = np.arange(VOCABULARY, dtype=np.float32)
    tokens.detection.apply(logits, [])
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [22, 23]
    assert tokens.language_name(int(logits.argmax())) == "de"


@pytest.mark.parametrize(
    "output",
    [
        [30, 1, 2, 40, 40, 4, 45],  # a timestamp alone at the end: nothing is said after it
        [30, 1, 2, 40, 40, 4, 45, 45],
        [30, 1, 2, 40, 40, 4],  # an unfinished segment
        [30, 1, 2, 40, 40],
        [30, 1, 2, 40],
        [30, 1, 2],
        [1, 2, 4],
        [30],
        [],
        [31, 1, 33, 33, 2, 36, 36, 4, 40, 40, 1],
    ],
)
def test_whisper_segments_equal_transformers(tokens: WhisperTokens, output: list[int]) -> None:
    module = pytest.importorskip("transformers.models.whisper.generation_whisper")
    seconds = 30.0
    theirs, offset = module.WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(output, dtype=torch.int64), seek_outputs=[{}],
        time_offset=torch.tensor([0.0], dtype=torch.float64), timestamp_begin=NO_TIMESTAMPS + 1,
        seek_num_frames=torch.tensor([3000]), time_precision=STEP, time_precision_features=0.01, input_stride=2,
        prev_idx=0, idx=0, return_token_timestamps=False, decoder_input_ids=torch.zeros((1, 4)),
    )  # fmt: skip
    ours, next_start = tokens.segments([*output, END], seconds)
    assert next_start == pytest.approx(float(offset) * 0.01)
    assert [one.start for one in ours] == pytest.approx([float(one["start"]) for one in theirs])
    assert [one.end for one in ours] == pytest.approx([float(one["end"]) for one in theirs])
    want = [[int(token) for token in one["tokens"] if token <= NO_TIMESTAMPS] for one in theirs]
    assert [list(one.tokens) for one in ours] == want


def test_the_whisper_prompt_has_language_task_and_timestamp_tokens(tokens: WhisperTokens) -> None:
    assert tokens.prompt("de", "translate", timestamps=True) == [21, 23, 25]
    assert tokens.prompt("en", "transcribe", timestamps=False) == [21, 22, 24, 29]
    english = WhisperTokens({**CONFIG, "lang_to_id": None, "task_to_id": None}, "here")
    assert english.prompt(None, "transcribe", timestamps=False) == [21, 29]
    with pytest.raises(InputError, match="only transcribes English, got language 'de'"):
        english.prompt("de", "transcribe", timestamps=False)
    with pytest.raises(InputError, match="such as en, de"):
        tokens.prompt("xx", "transcribe", timestamps=False)
    with pytest.raises(ArtifactError, match="no_timestamps_token_id"):
        WhisperTokens({"decoder_start_token_id": 1, "eos_token_id": [2]}, "here")


@pytest.mark.parametrize("drafts", [[], [40, 2]])
def test_the_sampler_applies_the_rules_after_output_and_drafts(
    tokens: WhisperTokens, drafts: list[int]
) -> None:
    from infer.llm.engine.requests import Request
    from infer.llm.engine.sampling.sampler import Sampler, SampleRow
    from infer.llm.engine.sampling.sampling_options import Sampling
    from infer.llm.engine.sequence import RequestState, Sequence

    rules = tokens.rules(timestamps=True)
    prompt = tokens.prompt("en", "transcribe", timestamps=True)
    request = Request(id="a", prompt=prompt, sampling=Sampling(temperature=0.0), transcription=rules)
    state = RequestState(request, 0, 0.0, 1.0)
    assert not state.fast_decode
    sequence = Sequence(state, 0)
    sequence.tokens += [30, 1, 2]
    sequence.num_output_tokens = 3
    sequence.draft_tokens = drafts
    logits = torch.from_numpy(
        np.random.default_rng(3).standard_normal((len(drafts) + 1, VOCABULARY)).astype(np.float32)
    )
    want = []
    for count in range(len(drafts) + 1):
        row = logits[count].numpy().copy()
        rules.apply(row, [30, 1, 2, *drafts[:count]])
        want.append(int(row.argmax()))
    rows = [SampleRow(sequence, count, count) for count in range(len(drafts) + 1)]
    assert Sampler(VOCABULARY, [END])(logits, rows).tokens == want
