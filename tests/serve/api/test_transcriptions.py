"""/v1/audio/transcriptions with the official openai client, and with forms that no client would send."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from infer.serve.limits import ServeLimits
from infer.tasks import transcription
from infer.tasks.ctc import CTCDecoder
from infer.tasks.media_model import MediaModel
from tests.support.fake_media import FRAME, LONGEST, RATE, listener, speech, transcriber, wav
from tests.support.fake_predictors import Live, classifier, live

URL = "/v1/audio/transcriptions"
WORDS = "ab cad bee"
SECONDS = FRAME / RATE  # of a frame


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    limits = ServeLimits(max_audio_seconds=60, max_body_bytes=4 << 20)
    folder = tmp_path_factory.mktemp("hearing")
    with live(transcriber(folder), listener(), classifier("moods", ["good"]), limits=limits) as server:
        yield server


def post(raw: httpx.Client, data: dict[str, Any] | None = None, file: bytes = b"") -> httpx.Response:
    return raw.post(URL, data=data or {}, files={"file": ("a.wav", file or wav(speech(WORDS)))})


def test_text_and_json_are_those_of_openai(client: openai.OpenAI) -> None:
    file = ("speech.wav", wav(speech(WORDS)), "audio/wav")
    answer = client.audio.transcriptions.create(model="hearing", file=file)
    assert answer.text == WORDS
    assert answer.usage is not None
    assert answer.usage.to_dict() == {"type": "duration", "seconds": 1}
    text = client.audio.transcriptions.create(model="hearing", file=file, response_format="text")
    assert str(text) == f"{WORDS}\n"
    with io.BytesIO(wav(speech(WORDS))) as opened:
        opened.name = "speech.wav"
        assert client.audio.transcriptions.create(model="hearing", file=opened, temperature=0).text == WORDS


def test_words_and_segments_have_their_times(client: openai.OpenAI) -> None:
    file = ("speech.wav", wav(speech(WORDS)))
    answer = client.audio.transcriptions.create(
        model="hearing", file=file, response_format="verbose_json", language="en",
        timestamp_granularities=["word", "segment"],
    )  # fmt: skip
    assert answer.words is not None
    assert answer.segments is not None
    assert (answer.text, answer.language, answer.duration) == (WORDS, "en", 2 * 2 * len(WORDS) * SECONDS)
    assert [word.word for word in answer.words] == WORDS.split()
    starts = [4 * WORDS.index(word) * SECONDS for word in WORDS.split()]
    assert [word.start for word in answer.words] == pytest.approx(starts)
    # A word ends with its last letter: two frames of the next token, or blank, are not its own.
    ends = [start + (4 * len(word) - 2) * SECONDS for start, word in zip(starts, WORDS.split(), strict=True)]
    assert [word.end for word in answer.words] == pytest.approx(ends)
    (segment,) = answer.segments
    assert (segment.text, segment.id, segment.start) == (WORDS, 0, 0)
    assert segment.end == answer.words[-1].end
    assert len(segment.tokens) == len(WORDS.replace(" ", ""))
    assert -0.1 < segment.avg_logprob < 0


def test_verbose_json_gives_segments_by_default(raw: httpx.Client) -> None:
    answer = post(raw, {"response_format": "verbose_json"}).json()
    assert "words" not in answer
    assert len(answer["segments"]) == 1
    assert answer["language"] == "unknown"


def test_a_pause_starts_a_new_subtitle(raw: httpx.Client) -> None:
    sound = np.concatenate([speech("ab "), np.zeros(RATE * 2, np.float32), speech("cad")])
    answer = post(raw, {"response_format": "srt"}, wav(sound))
    assert answer.headers["content-type"].startswith("text/plain")
    assert re.fullmatch(
        r"1\n00:00:00,000 --> 00:00:00,120\nab\n\n2\n00:00:02,240 --> 00:00:02,440\ncad\n\n", answer.text
    )
    answer = post(raw, {"response_format": "vtt"}, wav(sound))
    assert answer.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.120\nab\n\n")


def test_long_sound_is_read_in_windows_that_overlap(raw: httpx.Client) -> None:
    text = " ".join(["abc", "defg", "hah", "bead"] * 12)
    sound = speech(text, 3)
    assert len(sound) > 3 * LONGEST
    answer = post(
        raw, {"response_format": "verbose_json", "timestamp_granularities[]": "word"}, wav(sound)
    ).json()
    assert answer["text"] == text
    starts = [word["start"] for word in answer["words"]]
    places = [match.start() for match in re.finditer(r"\w+", text)]
    assert starts == pytest.approx([place * 6 * SECONDS for place in places])


@pytest.mark.parametrize("samples", [LONGEST + 1, 2 * LONGEST - 7, 3 * LONGEST + 555])
def test_windows_and_kept_frames_are_those_of_transformers(samples: int, tmp_path: Path) -> None:
    module = pytest.importorskip("transformers.pipelines.automatic_speech_recognition")
    model = MediaModel(transcriber(tmp_path).info)
    length = LONGEST // FRAME * FRAME
    stride = length // 6 // FRAME * FRAME
    sound = np.arange(samples)

    def features(chunk: Any, **_: Any) -> dict[str, Any]:
        return {"input_features": chunk}

    features.sampling_rate = RATE  # type: ignore[attr-defined]
    theirs = list(module.chunk_iter(sound, features, length, stride, stride))
    ours = list(transcription.windows(model, samples))
    assert [(one.start, one.end) for one in ours] == [
        (c["input_features"][0], c["input_features"][-1] + 1) for c in theirs
    ]
    for one, chunk in zip(ours, module.rescale_stride([c["stride"] for c in theirs], 1 / FRAME), strict=True):
        total, left, right = chunk
        assert (one.left, one.right) == (left, total - right if right else None)


def test_word_times_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transcriber(tmp_path)
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"), unk_token="<pad>")
    ids = np.random.default_rng(0).integers(0, 10, 200)
    ids[::3] = 0
    theirs = tokenizer.decode(ids, output_word_offsets=True)
    decoder = CTCDecoder(tokenizer.get_vocab(), 0)
    frames = decoder.frames(np.eye(len(tokenizer))[ids])
    assert decoder.text(decoder.tokens(frames)) == theirs.text.strip()
    ours = [(word.text, word.start, word.end) for word in decoder.words(decoder.tokens(frames))]
    assert ours == [(one["word"], one["start_offset"], one["end_offset"]) for one in theirs.word_offsets]


def test_other_sampling_rates_and_audio_formats_are_read(raw: httpx.Client) -> None:
    soundfile = pytest.importorskip("soundfile")
    sound = np.repeat(speech(WORDS, 4), 4)  # at four times the rate
    file = io.BytesIO()
    soundfile.write(file, np.stack([sound, sound], 1), RATE * 4, format="FLAC")
    assert post(raw, file=file.getvalue()).json()["text"] == WORDS


def test_an_old_artifact_refuses_unsupported_transcription_options(tmp_path: Path) -> None:
    with (
        live(transcriber(tmp_path, samples_per_frame=None)) as server,
        httpx.Client(base_url=server.url) as raw,
    ):
        assert post(raw).json()["text"] == WORDS
        assert "does not record the duration of a frame" in post(raw, {"response_format": "srt"}).text
        answer = post(raw, file=wav(np.zeros(LONGEST + 1, np.float32)))
        assert answer.status_code == 400
        assert "expected at most 4 s of sound, got 4.0 s" in answer.text


REFUSED: list[tuple[str, dict[str, Any], bytes, int, str]] = [
    ("no such model", {"model": "nope"}, b"", 404, "no such model"),
    ("another task", {"model": "loudness"}, b"", 400, "can't transcribe"),
    ("text model", {"model": "moods"}, b"", 400, "can't transcribe"),
    ("format", {"response_format": "xml"}, b"", 400, "response_format"),
    ("temperature", {"temperature": "0.5"}, b"", 400, "does not sample"),
    ("temperature range", {"temperature": "2"}, b"", 400, "temperature"),
    ("no number", {"temperature": "hot"}, b"", 400, "temperature"),
    ("prompt", {"prompt": "a name"}, b"", 400, "reads no prompt"),
    ("stream", {"stream": "true"}, b"", 400, "not streamed"),
    ("language", {"language": "../en"}, b"", 400, "language"),
    ("granularity", {"timestamp_granularities[]": "letter"}, b"", 400, "timestamp_granularities"),
    ("words in json", {"timestamp_granularities[]": "word"}, b"", 400, "verbose_json"),
    ("twice", {"model": ["hearing", "hearing"]}, b"", 400, "expected one field model, got 2"),
    ("no sound", {}, b"RIFF no sound", 400, "expected a WAV file"),
    ("noise", {}, bytes(range(256)) * 4, 400, "expected a sound file"),
    ("a moment", {}, wav(np.zeros(8, np.float32)), 400, "expected at least 0.02 s of sound, got 0.002 s"),
    ("nothing", {}, wav(np.zeros(0, np.float32)), 400, "got 0 s"),
    ("an hour", {}, wav(np.zeros(61 * 1000, np.float32), 1000), 400, "expected at most 60 s of sound"),
    ("too large", {}, bytes(5 << 20), 413, "larger than"),
]


@pytest.mark.parametrize(
    ("fields", "file", "status", "text"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_an_invalid_transcription_request_is_refused(
    raw: httpx.Client, fields: dict[str, Any], file: bytes, status: int, text: str
) -> None:
    answer = post(raw, fields, file)
    assert answer.status_code == status, answer.text
    assert text in answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert post(raw).json()["text"] == WORDS


def test_the_api_key_is_checked_before_the_body_is_read(tmp_path: Path) -> None:
    with live(transcriber(tmp_path), api_key="secret") as server:
        assert httpx.post(server.url + URL, files={"file": ("a", b"")}).status_code == 401
