"""Whisper behind /v1/audio: what `generate` of transformers gives, window after window, by the openai client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from infer import Plan, Predictor, optimize
from infer.load import load
from infer.load.samples.transcript_samples import MAX_TOKENS
from tests.support import tiny_whisper
from tests.support.fake_media import wav
from tests.support.fake_predictors import Live, live
from tests.support.tiny_whisper import END, RATE, SECONDS, START, TEXTS

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper.folder_of(tmp_path_factory.mktemp("whisper") / "tiny")


@pytest.fixture(scope="module")
def sounds(folder: Path) -> Path:
    found = folder.with_name("sounds")
    found.mkdir()
    for seed, seconds in enumerate((1.0, 1.4, 3.0)):
        (found / f"{seed}.wav").write_bytes(wav(sound(seconds, seed), RATE))
    return found


def artifact(folder: Path, sounds: Path, backend: str) -> Path:
    given: dict[str, Any] = {"backend": backend, "batches": (), "data": str(sounds), "kv_dtype": "float32"}
    place = folder.with_name(backend)
    place.mkdir()
    return optimize(Plan(source=str(folder), allow_slower=True, **given), place / "tiny.infer").path


@pytest.fixture(scope="module")
def predictor(folder: Path, sounds: Path) -> Iterator[Predictor]:
    with Predictor.load(artifact(folder, sounds, "eager")) as predictor:
        yield predictor


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Live]:
    with live(predictor) as server:
        yield server


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.1, int(RATE * seconds))
    return np.round(values.clip(-1, 1) * 32767) / 32768


def expected(folder: Path, samples: np.ndarray, **options: Any) -> list[dict[str, Any]]:
    """Return the segments of transformers' `generate`."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    long = len(samples) > SECONDS * RATE
    given = extractor(
        samples.astype(np.float32), sampling_rate=RATE, return_tensors="pt", return_attention_mask=True,
        **({"truncation": False, "padding": "longest"} if long else {}),
    )  # fmt: skip
    found = model.generate(**given, return_segments=True, num_beams=1, do_sample=False, **options)
    return [
        {
            "start": float(one["start"]),
            "end": float(one["end"]),
            "tokens": [int(token) for token in one["tokens"] if token < TEXTS],
        }
        for one in found["segments"][0]
    ]


def transcription(client: openai.OpenAI, samples: np.ndarray, **options: Any) -> Any:
    return client.audio.transcriptions.create(
        model="tiny", file=("a.wav", wav(samples, RATE)), response_format="verbose_json", **options
    )


def assert_same(answer: Any, want: list[dict[str, Any]]) -> None:
    want = [one for one in want if one["tokens"]]
    assert [one.tokens for one in answer.segments] == [one["tokens"] for one in want]
    assert [one.start for one in answer.segments] == pytest.approx([one["start"] for one in want], abs=1e-6)
    assert [one.end for one in answer.segments] == pytest.approx([one["end"] for one in want], abs=1e-6)


def test_sounds_as_data_get_the_tokens_that_the_model_writes(folder: Path, sounds: Path) -> None:
    samples = load(Plan(source=str(folder), data=str(sounds))).samples
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    tokens = samples["decoder_input_ids"]
    assert tokens.shape == (3, 1 + MAX_TOKENS)
    with torch.inference_mode():
        logits = model(input_features=samples["input_features"], decoder_input_ids=tokens).logits
    following = torch.cat([torch.full((3, 1), START), logits.argmax(-1)[:, :-1]], 1)
    ended = torch.cumsum(tokens == END, 1) > 0
    assert torch.equal(torch.where(ended, tokens, following), tokens)


def test_predictor_answers_a_recording_with_its_transcript(
    predictor: Predictor, folder: Path, client: openai.OpenAI, tmp_path: Path
) -> None:
    samples = sound(3.1, seed=5)
    path = tmp_path / "a.wav"
    path.write_bytes(wav(samples, RATE))
    answer, want = predictor.predict(path), transcription(client, samples)
    assert answer["text"] == want.text
    assert [one["start"] for one in answer["segments"]] == pytest.approx([one.start for one in want.segments])
    assert answer["language"] == want.language
    assert predictor.predict([path, path]) == [answer, answer]


@pytest.mark.parametrize("language", ["en", "de"])
def test_a_window_is_transcribed_as_transformers_does(
    client: openai.OpenAI, folder: Path, language: str
) -> None:
    samples = sound(SECONDS)
    answer = transcription(client, samples, language=language)
    assert_same(
        answer, expected(folder, samples, language=language, task="transcribe", return_timestamps=True)
    )
    assert answer.language == language
    assert answer.segments


def test_text_without_times_is_that_of_transformers(client: openai.OpenAI, folder: Path) -> None:
    samples = sound(SECONDS, 1)
    text = client.audio.transcriptions.create(
        model="tiny", file=("a.wav", wav(samples, RATE)), language="en"
    ).text
    want = expected(folder, samples, language="en", task="transcribe")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = [token for one in want for token in one["tokens"]]
    assert text == tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert text


def test_the_language_is_detected(client: openai.OpenAI, folder: Path) -> None:
    samples = sound(SECONDS, 2)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    given = extractor(samples.astype(np.float32), sampling_rate=RATE, return_tensors="pt")
    want = {322: "en", 323: "de"}[int(model.detect_language(**given)[0])]
    assert transcription(client, samples).language == want


def test_long_sound_goes_on_at_the_last_timestamp(client: openai.OpenAI, folder: Path) -> None:
    samples = sound(3.3 * SECONDS, 3)
    answer = transcription(client, samples, language="en")
    assert_same(answer, expected(folder, samples, language="en", task="transcribe", return_timestamps=True))
    assert answer.segments[-1].start > SECONDS


def test_onnx_runtime_transcribes_with_times(folder: Path, sounds: Path) -> None:
    """Segments of long sound are those of transformers, and subtitles have them as cues."""
    samples = sound(3.3 * SECONDS, 3)
    want = expected(folder, samples, language="en", task="transcribe", return_timestamps=True)
    with Predictor.load(artifact(folder, sounds, "ort")) as predictor, live(predictor) as server:
        assert predictor.manifest.backend == "ort"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answer = transcription(client, samples, language="en")
            given: Any = {"model": predictor.name, "file": ("a.wav", wav(samples, RATE)), "language": "en"}
            subtitles = client.audio.transcriptions.create(**given, response_format="srt")
    assert_same(answer, want)
    assert subtitles.count(" --> ") == len(answer.segments)
    assert re.match(r"1\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\n", subtitles)


def test_translation_has_a_route_of_its_own(client: openai.OpenAI, folder: Path) -> None:
    samples = sound(SECONDS, 4)
    answer = client.audio.translations.create(
        model="tiny",
        file=("a.wav", wav(samples, RATE)),
        response_format="verbose_json",
        extra_body={"language": "de"},
    )
    assert_same(answer, expected(folder, samples, language="de", task="translate", return_timestamps=True))


def test_unsupported_transcription_tasks_are_refused(client: openai.OpenAI) -> None:
    for options, said in (
        ({"language": "fr"}, "a language code such as"),
        ({"timestamp_granularities": ["word"]}, "times of segments, not of words"),
        ({"prompt": "a name"}, "reads no prompt"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            transcription(client, sound(1), **options)
