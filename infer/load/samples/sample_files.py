"""Sample inputs read from files: arrays, tensors, text, images and sounds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ... import rows
from ...errors import InputError, SourceError
from ...preprocess.audio import SUFFIXES as SOUNDS
from ...preprocess.audio import AudioPreprocessor
from ...preprocess.image import SUFFIXES as IMAGES
from ...regular_files import require_regular
from ...spec import DECODER_IDS, DTYPE_NAMES, TEXT_INPUTS, ZERO_SHOT_IMAGES, TensorSpec
from ...weights.nested_state_dict import refuse_expanded
from ...weights.torch_file import load_safely
from ..loaded_model import LoadedModel
from .sample_split import Samples

ARRAYS = (".npy", ".npz")
MOST_COMPARED, MOST_LINES = 16, 128  # images and texts, of which every pair is judged at once
MOST_DECODED = 16  # images of a model whose decoder needs tokens too


def read_files(
    files: list[Path], loaded: LoadedModel, where: str, most: int | None = None
) -> tuple[Samples, list[Path]]:
    """Read samples from files of one kind, by input name, and return the files that were used.

    `most`: rows that are made of texts and images at most, by default as many as a judgement needs.
    Arrays of several files are concatenated. Raises `SourceError` for unknown kinds, `InputError` for arrays that do
    not fit together.
    """
    for path in files:
        require_regular(path)
    texts = [path for path in files if _is_text(path)]
    arrays = [path for path in files if path.suffix in ARRAYS]
    if arrays:
        parts = [_arrays(path, loaded.inputs) for path in arrays]
        if len(parts) == 1:
            return parts[0], arrays
        return _together(parts, loaded.inputs, where), arrays
    if len(files) == 1 and files[0].suffix in (".pt", ".pth"):
        return _torch_tensors(files[0], loaded.inputs), files
    if pictures := [path for path in files if path.suffix.lower() in IMAGES]:
        if loaded.task == ZERO_SHOT_IMAGES:
            return _from_images_and_texts(pictures, texts, loaded, where)
        if loaded.decode_greedily is not None:
            return _from_described_images(pictures, texts, loaded, where)
        return _from_images(pictures, loaded, where, most)
    if recordings := [path for path in files if path.suffix.lower() in SOUNDS]:
        from .audio_samples import read_sounds

        return read_sounds(recordings, loaded, where)
    if texts:
        from .text_samples import tokenize

        return tokenize([_text(path) for path in texts], loaded, most), texts
    held = ", ".join(path.name for path in files[:5]) or "nothing"
    raise SourceError(
        f"expected .npz, .npy, .pt, .txt, images or sounds, got {held}",
        where=where,
        hint=f"Give {example_option(loaded)}",
    )


def _from_images(
    files: list[Path], loaded: LoadedModel, where: str, most: int | None = None
) -> tuple[Samples, list[Path]]:
    from . import image_samples

    steps = loaded.preprocessor
    if steps is not None and not isinstance(steps, AudioPreprocessor):
        return image_samples.preprocess_images(files, steps, most)
    pixels, used = image_samples.read_images(files, loaded.inputs, where, most)
    return {loaded.inputs[0].name: pixels}, used


def _from_described_images(
    files: list[Path], texts: list[Path], loaded: LoadedModel, where: str
) -> tuple[Samples, list[Path]]:
    """Read images, the texts that some models read beside them, one a line, and what the model writes about them."""
    from .text_samples import tokenize_lines

    found, used = _from_images(files, loaded, where, MOST_DECODED)
    source = {loaded.inputs[0].name: found[loaded.inputs[0].name]}
    if any(spec.name == "input_ids" for spec in loaded.inputs):
        rows = tokenize_lines(_lines(texts), loaded)
        if not rows:
            raise InputError(
                "expected a text beside the images, which this model reads with them",
                where=where,
                hint="Put a .txt file beside the images, one text a line",
            )
        # Nothing masks padding: all texts are as long as the shortest.
        length = min(map(len, rows))
        count = len(source[loaded.inputs[0].name])
        source["input_ids"] = torch.tensor([rows[i % len(rows)][:length] for i in range(count)])
        used = [*used, *texts]
    if (decode := loaded.decode_greedily) is not None:
        found |= source | {DECODER_IDS: decode(source)}
    return found, used


def _together(parts: list[Samples], specs: tuple[TensorSpec, ...], where: str) -> Samples:
    """Join the arrays of several files along the batch axis of each input; what has none is equal in all files."""
    axes = {spec.name: spec.batch_axis or 0 for spec in specs}
    shared = {s.name for s in specs if not s.batched and (not s.shape or rows.have_rows(specs))}
    try:
        for name in shared & set(parts[0]):
            if not all(torch.equal(part[name], parts[0][name]) for part in parts):
                raise InputError(
                    f"the files don't fit together: {name!r} has no rows, and differs between them",
                    where=where,
                )
        return {
            name: value if name in shared else torch.cat([part[name] for part in parts], axes.get(name, 0))
            for name, value in parts[0].items()
        }
    except (RuntimeError, KeyError) as error:
        raise InputError(f"the files don't fit together: {error}", where=where) from error


def _from_images_and_texts(
    files: list[Path], texts: list[Path], loaded: LoadedModel, where: str
) -> tuple[Samples, list[Path]]:
    """Read images, and the texts that each of them is compared with: one a line."""
    from .image_samples import spread
    from .text_samples import tokenize_candidates

    lines = _lines(texts)
    if len(lines) < 2:
        raise InputError(
            f"expected at least two texts to compare the images with, got {len(lines)}",
            where=where,
            hint="Put a .txt file beside the images, one text a line",
        )
    samples, used = _from_images(spread(files, MOST_COMPARED), loaded, where)
    return samples | tokenize_candidates(lines[:MOST_LINES], loaded), [*used, *texts]


def list_files(folder: Path) -> list[Path]:
    """List the files of a folder, or of its subfolders when it holds no file (one folder per class)."""
    files = sorted(item for item in folder.iterdir() if item.is_file())
    return files or sorted(item for item in folder.rglob("*") if item.is_file())


def _lines(texts: list[Path]) -> list[str]:
    return [line.strip() for path in texts for line in _text(path).splitlines() if line.strip()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"expected UTF-8 text: {error}", where=str(path)) from error


def are_texts(files: list[Path]) -> bool:
    """Tell whether `read_files` makes rows of text of these files: there are texts and no arrays, images or sounds."""
    others = (*ARRAYS, *IMAGES, *SOUNDS)
    return any(map(_is_text, files)) and not any(path.suffix.lower() in others for path in files)


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


def specs_of(
    data: str | None, names: tuple[str, ...], optional: tuple[str, ...] = ()
) -> tuple[TensorSpec, ...]:
    """Return specs for these inputs from the arrays of a `--data` file; empty where it does not hold each of `names`.

    Those of `optional` that it holds are inputs too. The first size is the batch. Floats are float32, as weights are.
    """
    path = Path(data or "")
    if not names or path.suffix not in (*ARRAYS, ".pt", ".pth") or not path.is_file():
        return ()
    require_regular(path)
    blank = tuple(TensorSpec(name, "float32", ()) for name in names)
    arrays = _arrays(path, blank) if path.suffix in ARRAYS else _torch_tensors(path, blank)
    if set(names) - set(arrays) or any(arrays[name].ndim == 0 for name in names):
        return ()
    held = (*names, *(name for name in optional if name in arrays and arrays[name].ndim))
    return tuple(
        TensorSpec(
            name,
            "float32" if arrays[name].is_floating_point() else DTYPE_NAMES[arrays[name].dtype],
            ("batch", *arrays[name].shape[1:]),
        )
        for name in held
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


def digest_of_files(paths: list[Path]) -> str:
    """Return the SHA-256 of the files' bytes, with their names where there are several."""
    digest = hashlib.sha256()
    for path in paths:
        if len(paths) > 1:
            digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def example_option(loaded: LoadedModel) -> str:
    """Return an example of --data for the inputs of a model, for messages."""
    if {spec.name for spec in loaded.inputs} <= set(TEXT_INPUTS) and "tokenizer.json" in loaded.files:
        return "--data texts.txt"
    if loaded.preprocessor is not None:
        kind = "sounds" if getattr(loaded.preprocessor, "sampling_rate", 0) else "images"
        if loaded.task == ZERO_SHOT_IMAGES:
            kind = "images and a .txt, one text a line"
        return f"--data FOLDER of {kind}"
    names = ", ".join(spec.name for spec in loaded.inputs)
    return f"--data inputs.npz with {names}, or --data file.py:function"
