"""Sound files to samples: bit depths, channels, sampling rates, and the normalization of transformers."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import pytest

from infer.errors import InputError, NotUsableError, SourceError
from infer.load.processors import read_preprocessor
from infer.preprocess.audio import AudioPreprocessor, read_sound, resample


def tone(rate: int, seconds: float = 0.2, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def wav(samples: np.ndarray, rate: int, width: int = 2, channels: int = 1) -> bytes:
    file = io.BytesIO()
    scaled = np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    packed = (scaled + 128 if width == 1 else scaled).astype("<i8").reshape(-1, 1).repeat(channels, 1)
    data = packed.reshape(-1, 1).view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(data)
    return file.getvalue()


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_samples_are_read_at_every_depth(width: int, channels: int) -> None:
    want = tone(8000)
    got, rate = read_sound(wav(want, 8000, width, channels))
    assert rate == 8000
    np.testing.assert_allclose(got, want, atol=1.1 / 2 ** (8 * width - 1))


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_resampling_keeps_a_tone(rate: int) -> None:
    got, want = resample(tone(rate), rate, 16000), tone(16000)
    assert abs(len(got) - len(want)) <= 1
    middle = slice(600, 2600)  # the ends lack their neighbours
    np.testing.assert_allclose(got[middle], want[middle], atol=2e-3)


def test_resampling_down_removes_what_the_rate_cannot_hold() -> None:
    assert np.abs(resample(tone(48000, hertz=15000), 48000, 16000)[300:-300]).max() < 5e-3


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("normalizes", [False, True])
def test_samples_are_those_of_transformers(tmp_path: Path, masks: bool, normalizes: bool) -> None:
    transformers = pytest.importorskip("transformers")
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=masks, do_normalize=normalizes)
    extractor.save_pretrained(tmp_path)
    ours, why = read_preprocessor(tmp_path, "input_values", 1)
    assert isinstance(ours, AudioPreprocessor), why
    sound = tone(16000).astype(np.float32)
    theirs = extractor([sound], sampling_rate=16000, return_tensors="np", padding=True)
    found = ours.batch([sound])
    assert set(found) == set(theirs)
    np.testing.assert_allclose(found["input_values"], theirs["input_values"], atol=1e-5)


def test_a_spectrogram_is_not_carried(tmp_path: Path) -> None:
    pytest.importorskip("transformers").WhisperFeatureExtractor().save_pretrained(tmp_path)
    found, why = read_preprocessor(tmp_path, "input_values", 1)
    assert found is None
    assert "WhisperFeatureExtractor" in why


def test_rows_of_a_batch_are_padded_with_their_mask() -> None:
    steps = AudioPreprocessor(normalizes=False, masks=True, padding_value=-1.0)
    found = steps.batch([np.ones(3, np.float32), np.ones(5, np.float32)])
    assert found["input_values"].tolist() == [[1, 1, 1, -1, -1], [1, 1, 1, 1, 1]]
    assert found["attention_mask"].sum(1).tolist() == [3, 5]


def test_what_is_no_sound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="expected a WAV file"):
        read_sound(b"RIFF" + bytes(40))
    with pytest.raises(InputError, match="no samples"):
        AudioPreprocessor().batch([np.zeros(0, np.float32)])
    monkeypatch.setattr("infer.preprocess.audio.find_spec", lambda name: None)
    with pytest.raises(NotUsableError, match=r"infer\[audio\]"):
        read_sound(b"fLaC" + bytes(40))
