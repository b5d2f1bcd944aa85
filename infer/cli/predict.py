"""`infer predict`: its input files and its output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ..errors import InputError, UsageError
from .options import Artifact, Trust

if TYPE_CHECKING:
    from ..predict import Predictor


def predict(
    artifact: Artifact,
    input: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="tensors (.npz, .npy, .json) or text, one item a line; - reads text from stdin",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="file to write, .npz or .json; default: JSON on stdout")
    ] = None,
    trust_code: Trust = False,
) -> None:
    """Run an artifact on a file of inputs."""
    from ..predict import Predictor, isolated_open

    isolated_open.open_in_subprocess(artifact, trust_code=trust_code)
    with Predictor.load(artifact, trust_code=trust_code) as predictor:
        write_outputs(run_file(predictor, input), output)


def run_file(predictor: Predictor, source: str) -> dict[str, np.ndarray]:
    """Run the inputs of a file: tensors of .npz, .npy or .json; anything else is text, for models with a tokenizer.

    Raises `UsageError` when there is no such file, and `InputError` for content that does not fit the model.
    """
    if source != "-" and not Path(source).is_file():
        raise UsageError(f"no such file: {source}")
    if source.endswith((".npz", ".npy", ".json")):
        return dict(predictor.predict(_read_tensors(predictor, Path(source))))
    text = sys.stdin.read() if source == "-" else Path(source).read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError("expected at least one line of text, got none", where=source)
    if predictor.task == "embedding":
        return {predictor.outputs[0].name: predictor.embed(lines)}
    return dict(predictor.predict(predictor.tokenize(lines)))


def _read_tensors(predictor: Predictor, path: Path) -> dict[str, np.ndarray]:
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


def write_outputs(outputs: dict[str, np.ndarray], path: Path | None) -> None:
    """Write an .npz file, or JSON to a file or stdout; NaN and infinities become strings like "NaN" there."""
    if path is not None and path.suffix == ".npz":
        np.savez(path, allow_pickle=False, **outputs)
        return
    text = json.dumps(
        {name: _json_values(value.tolist()) for name, value in outputs.items()}, allow_nan=False
    )
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n")


def _json_values(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_values(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
