"""Inputs of ours for a model whose user gives none: they fit what it takes, and claim nothing about the user's data.

Texts are docstrings of Python's standard library; images and sounds are drawn. Other tensors are numbers of several
distributions and scales, integers within the range that the model itself takes, which is tried on it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import tempfile
import wave
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ... import carried_state
from ...preprocess.audio import AudioPreprocessor
from ...spec import BATCH, TEXT_INPUTS, UNBOUNDED, TensorSpec
from ..loaded_model import LoadedModel
from . import drawn_images
from .batch_axes import LENGTHS, MOST_VALUES, Runs, num_values
from .sample_files import read_files
from .sample_split import Samples

ROWS = 64
IMAGES, SOUNDS = 32, 12
RATE = 16_000  # hertz of drawn sounds, and what a model that asks for a rate is told
SECONDS = 3
SHORTEST_SOUND = 128  # values of a row that may be one
SOUND_NAMES = ("audio", "wav", "speech", "sound", "voice", "pcm")  # parts of names of inputs
PARAMETERS = (  # patterns of the name of a single number, and what it may be
    (re.compile(r"(?<![a-z])(?:f?min|low)"), 0.0),
    (re.compile(r"(?<![a-z])(?:f?max|high)"), 1000.0),
    (re.compile("thresh"), 0.3),
)
FILLED_LENGTHS = re.compile(r"(?<![a-z])(?:len|length|num_frames|num_tokens)s?(?![a-z])")
# Tried for a symbolic size that alone is another.
WIDTHS = (32, 16, 8, 128, 256, 512, 80, 40, 48, 24, 12, 10, 6, 5, 4, 3, 2, 1)
MOST_INTEGER = 1 << 20
USUAL_INTEGER = 1000  # where a model takes any
MODULES = (
    "argparse", "asyncio", "calendar", "codecs", "collections", "configparser", "contextlib", "csv", "datetime",
    "decimal", "difflib", "email.message", "fractions", "functools", "heapq", "html", "http.client", "inspect", "io",
    "itertools", "json", "logging", "math", "os", "pathlib", "pickle", "random", "re", "shutil", "socket", "sqlite3",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time", "unittest",
    "urllib.request", "uuid", "zipfile",
)  # fmt: skip


def make(
    loaded: LoadedModel, seed: int, most: int | None = None, runs: Runs | None = None
) -> tuple[Samples, str, bool]:
    """Return inputs that fit the model, by name, what they are, and whether they are texts.

    `runs` tells whether the model takes inputs, where that can be tried.
    """
    kind, write = _files(loaded)
    if write is not None:
        with tempfile.TemporaryDirectory() as folder:
            files = list(write(Path(folder), seed))
            samples, _ = read_files(files, loaded, f"{kind} of ours", most)
        return samples, kind, kind == "texts"
    return (
        tensors(
            loaded.inputs,
            seed,
            sizes=loaded.sizes,
            runs=runs,
            most=_tables(loaded),
            states=carried_state.states_of(loaded.inputs, loaded.meta.get("outputs")),
            pictures=drawn_images.value_range(loaded),
        ),
        "numbers",
        False,
    )


def _files(loaded: LoadedModel) -> tuple[str, Callable[[Path, int], Iterator[Path]] | None]:
    """Return the kind of files that the model's inputs are made of, and what writes them."""
    if "tokenizer.json" in loaded.files and all(spec.name in TEXT_INPUTS for spec in loaded.inputs):
        return "texts", _write_texts
    steps = loaded.preprocessor
    if steps is None:
        return "numbers", None
    if isinstance(steps, AudioPreprocessor) or getattr(steps, "sampling_rate", False):
        return "sounds", _write_sounds
    return "images", _write_images


def texts() -> list[str]:
    """Return docstrings of Python's standard library, which every machine has."""
    found: dict[str, None] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for value in (
            module,
            *(value for key, value in sorted(vars(module).items()) if not key.startswith("_")),
        ):
            own = value is module or getattr(value, "__module__", "") == name
            said = inspect.getdoc(value) if own and (value is module or callable(value)) else None
            if said and len(said) > 80:
                found[said] = None
    return list(found)


def _write_texts(folder: Path, seed: int) -> Iterator[Path]:
    path = folder / "texts.txt"
    path.write_text("\n\n".join(" ".join(text.split()) for text in texts()))
    yield path


def _write_images(folder: Path, seed: int) -> Iterator[Path]:
    from PIL import Image

    for index in range(IMAGES):
        path = folder / f"{index:02}.png"
        Image.fromarray(drawn_images.draw(seed + index, text=index % 2 == 0)).save(path)
        yield path


def _write_sounds(folder: Path, seed: int) -> Iterator[Path]:
    for index in range(SOUNDS):
        path = folder / f"{index:02}.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((_voice(np.random.default_rng(seed + index)) * 20_000).astype("<i2").tobytes())
        yield path


def _voice(draw: np.random.Generator) -> np.ndarray:
    """Draw syllables: harmonics of a moving pitch within moving bands, pauses and noise, float [SECONDS * RATE]."""
    count = SECONDS * RATE
    time = np.arange(count) / RATE
    pitch = draw.uniform(90, 220) * (1 + 0.15 * np.sin(2 * np.pi * draw.uniform(0.5, 3) * time))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    band = draw.uniform(400, 1800) * (1 + 0.4 * np.sin(2 * np.pi * draw.uniform(1, 4) * time))
    sound = sum(np.sin(k * phase) * np.exp(-(((k * pitch - band) / 500) ** 2)) / k**0.3 for k in range(1, 25))
    loud = np.clip(np.sin(2 * np.pi * draw.uniform(2, 4) * time + draw.uniform(0, 6)) + 0.3, 0, 1)
    mixed = np.asarray(sound) * loud + 0.02 * draw.normal(size=count)
    return mixed / np.abs(mixed).max()


@lru_cache(SOUNDS)
def _speaker(number: int) -> np.ndarray:
    """Return the voice that rows are cut of, which takes 40 ms to draw."""
    return _voice(np.random.default_rng(number))


def tensors(
    specs: tuple[TensorSpec, ...],
    seed: int,
    *,
    sizes: Mapping[str, tuple[int, int]],
    runs: Runs | None = None,
    most: Mapping[str, int] | None = None,
    states: Collection[str] = (),
    pictures: str = drawn_images.UNIT,
) -> Samples:
    """Draw inputs of any kind, `ROWS` rows; `runs` tells whether the model takes inputs, `most` its largest integers.

    A symbolic size is the first of `LENGTHS` that the model runs with; integers reach from 0 to the largest it takes;
    `states` are zeros. `pictures`: the range of the values of what may be pictures.
    """
    largest = {spec.name: 1 for spec in specs if not _is_float(spec)} | dict(most or {})
    chosen = _lengths(specs, sizes, runs, largest)
    if runs is not None:
        for spec in specs:
            known = spec.name in (most or {}) or _is_mask(spec) or _counted(spec, specs, chosen) is not None
            if spec.name in largest and not known:
                largest[spec.name] = _largest(spec, specs, chosen, runs, largest)
    generator = torch.Generator().manual_seed(seed)
    heard = any(_is_rate(spec) or _is_called_sound(spec) for spec in specs)
    found = {spec.name: _draw(spec, specs, chosen, largest, generator, pictures, heard) for spec in specs}
    return {name: torch.zeros_like(value) if name in states else value for name, value in found.items()}


def some(specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> Samples:
    """Draw inputs of these sizes that most models take: normal floats, integers of 1."""
    generator = torch.Generator().manual_seed(0)
    found = {spec.name: _constant(spec, specs, sizes, 1) for spec in specs}
    for spec in specs:
        if _is_float(spec):
            found[spec.name] = torch.randn(found[spec.name].shape, generator=generator).to(spec.torch_dtype)
    return found


def _lengths(
    specs: tuple[TensorSpec, ...],
    sizes: Mapping[str, tuple[int, int]],
    runs: Runs | None,
    largest: Mapping[str, int],
) -> dict[str, int]:
    """Return a number for every symbolic size, those other than the batch being equal but for one where it runs so."""
    named = dict.fromkeys(size for spec in specs for size in spec.shape if isinstance(size, str))
    bounds = {name: sizes.get(name, (1, UNBOUNDED)) for name in named}
    low, high = bounds.get(BATCH, (1, ROWS))
    rows = min(max(ROWS, low), high) if high > 1 else ROWS
    # Of a sound whose name says so a second: 64 values would be one window of its spectrum.
    lengths = (RATE, *LENGTHS) if any(map(_is_waveform, specs)) else LENGTHS
    equal = [
        {name: min(max(length, low), high) for name, (low, high) in bounds.items()} | {BATCH: low}
        for length in lengths
    ]
    others = [name for name in named if name != BATCH]
    apart = [{**equal[0], name: width} for name in others for width in WIDTHS if len(others) > 1]
    for chosen in [*equal[:2], *apart, *equal[2:]]:  # the small ones first
        within = all(low <= chosen[name] <= high for name, (low, high) in bounds.items())
        small = num_values(specs, chosen) <= MOST_VALUES  # four free sizes of 16,000 would take hours
        ones = {spec.name: _constant(spec, specs, chosen, 1) for spec in specs} if within and small else {}
        if within and (runs is None or (small and runs(ones))):
            return {**chosen, BATCH: rows}
    return {**equal[0], BATCH: rows}


def _largest(
    spec: TensorSpec,
    specs: tuple[TensorSpec, ...],
    chosen: Mapping[str, int],
    runs: Runs,
    largest: Mapping[str, int],
) -> int:
    """Return the largest integer that the model takes in one input, the others being 0 or 1."""

    def takes(value: int) -> bool:
        one = {**chosen, BATCH: 1}
        numbers = {s.name: value if s is spec else min(1, largest.get(s.name, 1)) for s in specs}
        return bool(runs({s.name: _constant(s, specs, one, numbers[s.name]) for s in specs}))

    top = min(MOST_INTEGER, torch.iinfo(spec.torch_dtype).max) if spec.dtype != "bool" else 1
    if top == 1 or takes(top):
        return min(top, USUAL_INTEGER)
    low, high = 0, top  # taken, not taken
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) else (low, middle)
    return low


def _constant(spec: TensorSpec, specs: Sequence[TensorSpec], chosen: Mapping[str, int], value: int) -> Tensor:
    shape = [chosen[size] if isinstance(size, str) else size for size in spec.shape]
    known = _parameter(spec)
    if known is None:
        known = _counted(spec, specs, chosen)
    return torch.full(shape, value if known is None else known, dtype=spec.torch_dtype)


def _parameter(spec: TensorSpec) -> float | None:
    """Return a usual value of an input that holds one parameter of all rows: a sampling rate, the ends of a range, a
    threshold, else 1, as of a scale or a temperature; None of other inputs.
    """
    if _is_rate(spec):
        return RATE
    if not _is_float(spec) or spec.batched or any(size != 1 for size in spec.shape):
        return None
    name = spec.name.lower()
    return next((value for pattern, value in PARAMETERS if pattern.search(name)), 1.0)


def _counted(spec: TensorSpec, specs: Sequence[TensorSpec], chosen: Mapping[str, int]) -> int | None:
    """Return the size along which an input says how much of each row is filled; None of other inputs.

    It holds an integer, for each row where it has rows, is called a length, and the size is the one that most of the
    other inputs have.
    """
    if _is_float(spec) or not FILLED_LENGTHS.search(spec.name.lower()):
        return None
    if any(size not in (BATCH, 1) for size in spec.shape):
        return None
    sizes = Counter(
        size
        for other in specs
        if other is not spec
        for size in other.shape
        if isinstance(size, str) and size != BATCH
    )
    return chosen[sizes.most_common(1)[0][0]] if sizes else None


def _draw(
    spec: TensorSpec,
    specs: Sequence[TensorSpec],
    chosen: Mapping[str, int],
    largest: Mapping[str, int],
    generator: torch.Generator,
    pictures: str,
    heard: bool,
) -> Tensor:
    shape = [chosen[size] if isinstance(size, str) else size for size in spec.shape]
    if (known := 1 if _is_mask(spec) else _parameter(spec)) is not None:
        return torch.full(shape, known, dtype=spec.torch_dtype)
    if (full := _counted(spec, specs, chosen)) is not None:
        least = -(-full // 2) if spec.batched else full
        return torch.randint(least, full + 1, shape, generator=generator).to(spec.torch_dtype)
    if not _is_float(spec):
        return torch.randint(0, largest[spec.name] + 1, shape, generator=generator).to(spec.torch_dtype)
    if not spec.batched:
        return torch.randn(shape, generator=generator).to(spec.torch_dtype)
    axis = spec.batch_axis or 0
    one = [*shape[:axis], *shape[axis + 1 :]]
    rows = [_row(one, index, generator, pictures, heard) for index in range(shape[axis])]
    return (
        torch.stack(rows, axis).to(spec.torch_dtype) if rows else torch.zeros(shape, dtype=spec.torch_dtype)
    )


def _row(shape: list[int], index: int, generator: torch.Generator, pictures: str, heard: bool) -> Tensor:
    """Draw one row: normal, smooth along its last axes, uniform from 0 to 1, or small numbers, in turn.

    Three of four rows that may be pictures are, in the range of `pictures`; of rows that may be sounds three of four
    where a name says so (`heard`), else one.
    """
    seed = generator.initial_seed() + index
    if index % 4 < 3 and drawn_images.channel_axis(shape) is not None:
        return torch.from_numpy(drawn_images.row(shape, seed, pictures).copy())
    length = math.prod(shape)
    sounds = length == max(shape, default=0) >= SHORTEST_SOUND
    if sounds and (index % 4 < 3 if heard else index % 4 == 1):
        voice = _speaker(seed % SOUNDS)
        begin = (seed * RATE // 3) % max(len(voice) - length, 1)
        repeated = np.resize(voice[begin:], length).astype(np.float32)
        return torch.from_numpy(repeated).reshape(shape) * (0.5, 0.25, 0.1)[index % 3]
    noise = torch.randn(shape, generator=generator)
    if index % 4 == 1:
        for axis in range(max(0, noise.dim() - 2), noise.dim()):
            noise = noise.cumsum(axis)
        deviation = float(noise.std()) if noise.numel() > 1 else 1.0
        return (noise - noise.mean()) / max(deviation, 1e-6)
    if index % 4 == 2:
        return torch.rand(shape, generator=generator)
    return noise * 0.1 if index % 4 == 3 else noise


def _is_float(spec: TensorSpec) -> bool:
    return spec.torch_dtype.is_floating_point


def _is_mask(spec: TensorSpec) -> bool:
    return spec.dtype == "bool" or "mask" in spec.name.lower()


def _is_called_sound(spec: TensorSpec) -> bool:
    return any(word in spec.name.lower() for word in SOUND_NAMES)


def _is_waveform(spec: TensorSpec) -> bool:
    """Return true for a sound of any length, one value at a time; false for one in frames."""
    lengths = [size for size in spec.shape if isinstance(size, str) and size != BATCH]
    return _is_called_sound(spec) and len(lengths) == 1 and all(s in (BATCH, 1, *lengths) for s in spec.shape)


def _is_rate(spec: TensorSpec) -> bool:
    return spec.name.lower() in ("sr", "rate", "sample_rate", "sampling_rate")


def _tables(loaded: LoadedModel) -> dict[str, int]:
    """Return the largest token of each integer input of a torch model: of its smallest table with that many rows."""
    if loaded.module is None:
        return {}
    rows = [m.num_embeddings for m in loaded.module.modules() if isinstance(m, nn.Embedding)]
    vocabulary = loaded.meta.get("vocab_size")
    most = min(rows, default=2) - 1
    return {
        spec.name: (min(most, vocabulary - 1) if vocabulary else most)
        for spec in loaded.inputs
        if not _is_float(spec) and not _is_mask(spec)
    }
