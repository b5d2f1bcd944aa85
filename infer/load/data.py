"""Sample inputs for fidelity checks and calibration, from `--data` or shipped beside the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, SourceError, UsageError
from ..plan import Plan
from ..preprocess.audio import SUFFIXES as SOUNDS
from ..preprocess.audio import AudioPreprocessor
from ..preprocess.image import SUFFIXES as IMAGES
from ..regular_files import require_regular
from ..spec import DECODER_IDS, DTYPE_NAMES, Finding, TensorSpec
from . import data_split, images, sounds
from .loaded_model import LoadedModel
from .text_data import TEXT_INPUTS, tokenize
from .user_module import UserModule, call_for_tensors, import_file, importable
from .weights import raw_bytes
from .weights.containers import refuse_expanded
from .weights.torch_reader import load_safely

RANDOM_ROWS = 8
TOKENS = ("input_ids", DECODER_IDS)
ARRAYS = (".npy", ".npz")
RANDOM_NOTE = "random inputs say nothing about fidelity on real data"
Samples = dict[str, Tensor]


def attach_samples(plan: Plan, loaded: LoadedModel, user_module: UserModule | None) -> None:
    """Set the samples of `loaded` from `plan.data`, else from the source; raise `UsageError` asking for --data.

    When the model is quantized, calibration rows are split off: no row both calibrates and judges.
    """
    if plan.data is not None:
        samples, loaded.samples_from, digest = read_data(plan.data, loaded, seed=plan.seed)
        rows = len(next(iter(samples.values())))
        why = RANDOM_NOTE if plan.data == "random" else loaded.samples_from
        loaded.findings.append(Finding("load", "data", rows, "rows", f"{why}; sha256 {digest}"))
    else:
        samples, loaded.samples_from = _shipped_or_asked(plan, loaded, user_module)
    loaded.samples, source = samples, loaded.samples_from
    more = user_module.tensors("calibration_inputs") if user_module and plan.data is None else None
    if more and user_module:
        source = f"{user_module.path}:calibration_inputs"
        loaded.calibration = data_split.exclude_rows(select_inputs(more, loaded.inputs, source), samples)
    elif plan.quant != "none" or plan.bits is not None or plan.max_drop is not None:
        loaded.samples, loaded.calibration = data_split.split(samples, loaded.inputs)
    digest = digest_of(loaded.calibration)
    loaded.findings += data_split.describe_split(loaded.samples, loaded.calibration, source, digest)


def _shipped_or_asked(plan: Plan, loaded: LoadedModel, user_module: UserModule | None) -> tuple[Samples, str]:
    shipped = _shipped(loaded, plan, user_module)
    if shipped is None:
        takes = ", ".join(spec.format() for spec in loaded.inputs)
        raise UsageError(
            f"no real inputs to check the result with; the model takes {takes}",
            where="--data",
            hint=f"Give some: {_example(loaded)}. '--data random' checks the numbers only, not the fidelity",
        )
    found, source = shipped
    samples = select_inputs(found, loaded.inputs, source)
    why = f"{source}; sha256 {digest_of(samples)}"
    loaded.findings.append(Finding("load", "data", len(next(iter(samples.values()))), "rows", why))
    return samples, source


def read_data(spec: str, loaded: LoadedModel, *, seed: int = 0) -> tuple[Samples, str, str]:
    """Read `--data`: .npz, .npy, .pt, text, images, a folder of these, `file.py:function`, or "random".

    Samples are batch-first tensors by input name, checked against `loaded.inputs`. Raises `InputError` (a
    tensor does not fit), `SourceError` (the file can't be read) or `UsageError`.
    """
    if spec == "random":
        vocabulary = loaded.meta.get("vocab_size")
        samples = random_inputs(loaded.inputs, seed, loaded.sizes, vocabulary)
        return samples, f"--data random: {RANDOM_NOTE}", digest_of(samples)
    file, _, name = spec.rpartition(":")
    if file.endswith(".py") and name.isidentifier():
        return _from_function(Path(file), name, loaded)
    path = Path(spec)
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {spec}", where="--data", hint=f"Give {_example(loaded)}"
        )
    files = _inside(path) if path.is_dir() else [path]
    samples, used = _from_files(files, loaded, spec)
    return select_inputs(samples, loaded.inputs, spec), f"--data {spec}", _file_digest(used)


def select_inputs(samples: Mapping[str, Tensor], specs: tuple[TensorSpec, ...], where: str) -> Samples:
    """Select and order the samples by `specs`, cast to their dtypes; raise `InputError` for a missing input."""
    sizes: dict[str, int] = {}
    found: Samples = {}
    for spec in specs:
        if spec.name not in samples:
            held = ", ".join(samples) or "nothing"
            raise InputError(
                f"expected input {spec}, got {held}", where=where, hint="Name the arrays as the inputs"
            )
        value = _fit(samples[spec.name], spec)
        spec.check(value, where, sizes)
        found[spec.name] = value
    rows = {name: value.shape[0] for name, value in found.items() if value.ndim}
    if not rows or min(rows.values()) == 0:
        shown = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items())
        raise InputError(f"expected at least one row of each input, got {shown or 'no array'}", where=where)
    return found


def random_inputs(
    specs: tuple[TensorSpec, ...],
    seed: int,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    vocabulary: int | None = None,
) -> Samples:
    """Draw normal floats, ones for masks, tokens of the whole vocabulary, and 0 or 1 for other integers.

    A symbolic size is 8, or twice its smallest if larger.
    """
    known = {
        name: max(RANDOM_ROWS, 2 * low) if low > 1 else RANDOM_ROWS
        for name, (low, _) in (sizes or {}).items()
    }
    generator = torch.Generator().manual_seed(seed)
    samples: Samples = {}
    for spec in specs:
        shape = [known.get(size, RANDOM_ROWS) if isinstance(size, str) else size for size in spec.shape]
        if spec.torch_dtype.is_floating_point:
            samples[spec.name] = torch.randn(shape, generator=generator).to(spec.torch_dtype)
        elif spec.dtype == "bool" or "mask" in spec.name:
            samples[spec.name] = torch.ones(shape, dtype=spec.torch_dtype)
        else:
            most = vocabulary if vocabulary and spec.name in TOKENS else 2
            samples[spec.name] = torch.randint(0, most, shape, generator=generator).to(spec.torch_dtype)
    return samples


def _fit(value: Tensor, spec: TensorSpec) -> Tensor:
    want, have = spec.torch_dtype, value.dtype
    if have != want and (have.is_floating_point and want.is_floating_point or _whole(have) and _whole(want)):
        value = value.to(want)
    fixed = spec.shape[0] if spec.shape else None
    if isinstance(fixed, int) and value.ndim and value.shape[0] > fixed:
        value = value[:fixed]
    return value.contiguous()


def _whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _shipped(loaded: LoadedModel, plan: Plan, user_module: UserModule | None) -> tuple[Samples, str] | None:
    if user_module is not None:
        found = user_module.tensors("example_inputs")
        return None if found is None else (found, f"{user_module.path}:example_inputs")
    folder = Path(plan.source)
    for name in ("samples.npz", "samples.txt"):
        if loaded.kind == "huggingface" and (folder / name).is_file():
            samples, _ = _from_files([folder / name], loaded, name)
            return samples, str(folder / name)
    return None


def _from_function(path: Path, name: str, loaded: LoadedModel) -> tuple[Samples, str, str]:
    call = getattr(import_file(path), name, None)
    where = f"{path}:{name}"
    if not callable(call):
        raise UsageError(f"{path} has no function {name!r}", where="--data")
    with importable(path.parent):
        found = call()
        if isinstance(found, list) and found and all(isinstance(item, str) for item in found):
            found = tokenize(found, loaded)
        samples = select_inputs(call_for_tensors(lambda: found, where), loaded.inputs, where)
    return samples, f"--data {where}", digest_of(samples)


def _from_files(files: list[Path], loaded: LoadedModel, where: str) -> tuple[Samples, list[Path]]:
    for path in files:
        require_regular(path)
    texts = [path for path in files if _is_text(path)]
    arrays = [path for path in files if path.suffix in ARRAYS]
    if arrays:
        parts = [_arrays(path, loaded.inputs) for path in arrays]
        try:
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, arrays
        except (RuntimeError, KeyError) as error:
            raise InputError(f"the files don't fit together: {error}", where=where) from error
    if len(files) == 1 and files[0].suffix in (".pt", ".pth"):
        return _torch_tensors(files[0], loaded.inputs), files
    if pictures := [path for path in files if path.suffix.lower() in IMAGES]:
        return _from_images(pictures, loaded, where)
    if recordings := [path for path in files if path.suffix.lower() in SOUNDS]:
        return sounds.read_sounds(recordings, loaded, where)
    if texts:
        return tokenize([_text(path) for path in texts], loaded), texts
    held = ", ".join(path.name for path in files[:5]) or "nothing"
    raise SourceError(
        f"expected .npz, .npy, .pt, .txt, images or sounds, got {held}",
        where=where,
        hint=f"Give {_example(loaded)}",
    )


def _from_images(files: list[Path], loaded: LoadedModel, where: str) -> tuple[Samples, list[Path]]:
    steps = loaded.preprocessor
    if steps is not None and not isinstance(steps, AudioPreprocessor):
        return images.preprocess_images(files, steps)
    pixels, used = images.read_images(files, loaded.inputs, where)
    return {loaded.inputs[0].name: pixels}, used


def _inside(folder: Path) -> list[Path]:
    """List the files of a folder, or of its subfolders when it holds no file (one folder per class)."""
    files = sorted(item for item in folder.iterdir() if item.is_file())
    return files or sorted(item for item in folder.rglob("*") if item.is_file())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"expected UTF-8 text: {error}", where=str(path)) from error


def _is_text(path: Path) -> bool:
    return path.suffix in (".txt", ".md")


def _arrays(path: Path, specs: tuple[TensorSpec, ...]) -> Samples:
    try:
        found = np.load(path, allow_pickle=False)
        arrays = {name: found[name] for name in found.files} if hasattr(found, "files") else {"": found}
    except (ValueError, OSError, EOFError) as error:
        raise SourceError(f"NumPy can't read it without pickle: {error}", where=str(path)) from error
    odd = [name for name, array in arrays.items() if array.dtype.kind not in "fiub"]
    if odd:
        raise InputError(
            f"expected numbers, got {arrays[odd[0]].dtype} in {odd[0] or path.name!r}", where=str(path)
        )
    return _one_for_one({name: torch.from_numpy(array) for name, array in arrays.items()}, specs)


def specs_of(data: str | None, names: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    """Return specs for these inputs from the arrays of a `--data` file; empty where it does not hold each of them.

    The first size is the batch. Floats are float32, as weights are.
    """
    path = Path(data or "")
    if path.suffix not in (*ARRAYS, ".pt", ".pth") or not path.is_file():
        return ()
    require_regular(path)
    blank = tuple(TensorSpec(name, "float32", ()) for name in names)
    found = _arrays(path, blank) if path.suffix in ARRAYS else _torch_tensors(path, blank)
    if set(names) - set(found) or any(found[name].ndim == 0 for name in names):
        return ()
    return tuple(
        TensorSpec(
            name,
            "float32" if found[name].is_floating_point() else DTYPE_NAMES[found[name].dtype],
            ("batch", *found[name].shape[1:]),
        )
        for name in names
    )


def _torch_tensors(path: Path, specs: tuple[TensorSpec, ...]) -> Samples:
    found = load_safely(path)
    tensors = {"": found} if isinstance(found, Tensor) else found
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise SourceError(f"expected a dict of tensors, got {type(found).__name__}", where=str(path))
    refuse_expanded(tensors, str(path))
    return _one_for_one(dict(tensors), specs)


def _one_for_one(tensors: Samples, specs: tuple[TensorSpec, ...]) -> Samples:
    """Name a single unnamed array after the model's single input."""
    if len(tensors) == 1 and len(specs) == 1:
        return {specs[0].name: next(iter(tensors.values()))}
    return tensors


def digest_of(samples: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in samples.items():
        digest.update(f"{name} {DTYPE_NAMES[value.dtype]} {list(value.shape)}".encode())
        digest.update(raw_bytes(value))
    return digest.hexdigest()


def _file_digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        if len(paths) > 1:
            digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _example(loaded: LoadedModel) -> str:
    if {spec.name for spec in loaded.inputs} <= set(TEXT_INPUTS) and "tokenizer.json" in loaded.files:
        return "--data texts.txt"
    if loaded.preprocessor is not None:
        kind = "sounds" if getattr(loaded.preprocessor, "sampling_rate", 0) else "images"
        return f"--data FOLDER of {kind}"
    names = ", ".join(spec.name for spec in loaded.inputs)
    return f"--data inputs.npz with {names}, or --data file.py:function"
