"""Input files of `infer predict`, and its output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, UsageError
from ..predict import Predictor


def answer(predictor: Predictor, source: str) -> dict[str, np.ndarray]:
    """Tensors from .npz, .npy or .json; anything else is text, one item a line, for models with a tokenizer."""
    if source != "-" and not Path(source).is_file():
        raise UsageError(f"no such file: {source}")
    if source.endswith((".npz", ".npy", ".json")):
        return _tensors(predictor.predict(_read(predictor, Path(source))))
    text = sys.stdin.read() if source == "-" else Path(source).read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError("expected at least one line of text, got none", where=source)
    if predictor.task == "embedding":
        return {predictor.outputs[0].name: predictor.embed(lines)}
    return _tensors(predictor.predict(predictor.tokenize(lines)))


def _tensors(value: Any) -> dict[str, np.ndarray]:
    return dict(value)


def _read(predictor: Predictor, path: Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays: dict[str, Any] = {name: file[name] for name in file.files}
        elif path.suffix == ".npy":
            arrays = {predictor.inputs[0].name: np.load(path, allow_pickle=False)}
        else:
            arrays = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"the inputs can't be read: {error}", where=str(path)) from error
    if not isinstance(arrays, dict):
        arrays = {predictor.inputs[0].name: arrays}
    specs = {spec.name: spec for spec in predictor.inputs}
    if path.suffix != ".json":
        return arrays
    try:
        return {n: np.asarray(v, dtype=specs[n].dtype if n in specs else None) for n, v in arrays.items()}
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"expected a rectangular array of numbers: {error}", where=str(path)) from error


def write(outputs: dict[str, np.ndarray], path: Path | None) -> None:
    """To .npz, or as JSON to a file or stdout; non-finite numbers become the strings "NaN", "Infinity", "-Infinity"."""
    if path is not None and path.suffix == ".npz":
        np.savez(path, allow_pickle=False, **outputs)
        return
    text = json.dumps({name: _plain(value.tolist()) for name, value in outputs.items()}, allow_nan=False)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
