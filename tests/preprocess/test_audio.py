"""Sound files to samples: bit depths, channels, sampling rates, and the normalization of transformers."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infer.errors import InputError, NotUsableError, SourceError
from infer.load.hf_preprocessor import read_preprocessor
from infer.preprocess.audio import AudioPreprocessor, open_sound
from infer.preprocess.transformers_processor import TransformersProcessor
from infer.sanitize import sanitize_values


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
def test_audio_is_read_at_every_bit_depth(width: int, channels: int) -> None:
    want = tone(8000)
    got = open_sound(wav(want, 8000, width, channels), 8000)
    np.testing.assert_allclose(got, want, atol=1.1 / 2 ** (8 * width - 1))


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_resampling_keeps_a_tone(rate: int) -> None:
    got, want = open_sound(wav(tone(rate), rate), 16000), tone(16000)
    assert abs(len(got) - len(want)) <= 1
    middle = slice(600, 2600)  # the ends lack their neighbours
    np.testing.assert_allclose(got[middle], want[middle], atol=2e-3)


def test_resampling_down_removes_what_the_rate_cannot_hold() -> None:
    assert np.abs(open_sound(wav(tone(48000, hertz=15000), 48000), 16000)[300:-300]).max() < 5e-3


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("normalizes", [False, True])
def test_decoded_audio_equals_transformers(tmp_path: Path, masks: bool, normalizes: bool) -> None:
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


@pytest.mark.filterwarnings("ignore:At least one mel filter")
@pytest.mark.parametrize(("name", "reads"), [("AST", "input_values"), ("Whisper", "input_features")])
def test_spectrograms_equal_transformers(tmp_path: Path, name: str, reads: str) -> None:
    extractor = getattr(pytest.importorskip("transformers"), f"{name}FeatureExtractor")()
    extractor.save_pretrained(tmp_path)
    found, why = read_preprocessor(tmp_path, reads, 1)
    assert isinstance(found, TransformersProcessor), why
    stored = msgspec.convert(sanitize_values(msgspec.to_builtins(found)), TransformersProcessor)
    sound = tone(16000, 1.5).astype(np.float32)
    theirs = extractor(sound, sampling_rate=16000, return_tensors="np")
    got = stored.batch([sound])
    assert list(got) == [reads]
    np.testing.assert_array_equal(got[reads], theirs[reads])
    longest = {"AST": 10.255, "Whisper": 30}[name]
    assert stored.batch([np.zeros(int(longest * 16000), np.float32)])[reads].shape == theirs[reads].shape
    with pytest.raises(InputError, match=rf"at most {longest:g} s of sound, got 31.00 s"):
        stored.batch([np.zeros(31 * 16000, np.float32)])


def test_rows_of_a_batch_are_padded_with_their_mask() -> None:
    steps = AudioPreprocessor(normalizes=False, masks=True, padding_value=-1.0)
    found = steps.batch([np.ones(3, np.float32), np.ones(5, np.float32)])
    assert found["input_values"].tolist() == [[1, 1, 1, -1, -1], [1, 1, 1, 1, 1]]
    assert found["attention_mask"].sum(1).tolist() == [3, 5]


def test_files_that_are_not_audio_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="expected a WAV file"):
        open_sound(b"RIFF" + bytes(40), 16000)
    with pytest.raises(InputError, match="no samples"):
        AudioPreprocessor().batch([np.zeros(0, np.float32)])
    monkeypatch.setattr("infer.preprocess.audio.find_spec", lambda name: None)
    with pytest.raises(NotUsableError, match=r"infer-engine\[audio\]"):
        open_sound(b"fLaC" + bytes(40), 16000)


def test_compressed_sound_is_read_and_bounded_while_it_is_decoded() -> None:
    soundfile = pytest.importorskip("soundfile")
    want = tone(16000, 2.0).astype(np.float32)
    for kind in ("FLAC", "OGG", "WAV"):
        file = io.BytesIO()
        named = {"subtype": "FLOAT"} if kind == "WAV" else {}
        soundfile.write(file, np.stack([want, want], 1), 16000, format=kind, **named)
        got = open_sound(file.getvalue(), 16000)
        assert len(got) == len(want)
        np.testing.assert_allclose(got, want, atol=0.05 if kind == "OGG" else 1e-4)
        with pytest.raises(InputError, match=r"at most 1.5 s of sound"):
            open_sound(file.getvalue(), 16000, max_seconds=1.5)
        with pytest.raises(SourceError, match="expected a sound file"):
            open_sound(file.getvalue()[4:], 16000)


def test_a_truncated_file_gives_the_samples_that_it_has() -> None:
    data = wav(tone(16000), 16000, 2, 2)
    assert len(open_sound(data[:-3], 16000)) == 3199
    assert len(open_sound(data[:44], 16000)) == 0


def test_another_sampling_rate_needs_a_resampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.preprocess.audio.find_spec", lambda name: None)
    assert len(open_sound(wav(tone(16000), 16000), 16000)) == 3200
    with pytest.raises(NotUsableError, match="expected sound of 16000 Hz, got 8000 Hz"):
        open_sound(wav(tone(8000), 8000), 16000)


def test_a_header_of_many_channels_is_refused() -> None:
    data = bytearray(wav(tone(8000), 8000))
    data[22:24] = (60_000).to_bytes(2, "little")
    with pytest.raises(SourceError, match="1 to 32 channels, got 60000"):
        open_sound(bytes(data), 8000)
