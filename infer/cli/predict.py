"""`infer predict`: its input files and its output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ..errors import InputError, UsageError
from ..paths import writing
from ..regular_files import is_path
from .options import Artifact, Trust

if TYPE_CHECKING:
    from ..predict.predictor import Predictor


TENSORS = (".npz", ".npy", ".json")


def predict(
    artifact: Artifact,
    input: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="tensors (.npz, .npy, .json), an image, a sound, a text, or a file of texts, one a line; - is stdin",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="file to write, .npz or .json; default: JSON on stdout")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="write the output tensors, not labels, spans, boxes or text")
    ] = False,
    trust_code: Trust = False,
) -> None:
    """Run an artifact on an input; write the answer of its task, or its output tensors."""
    from ..predict import isolated_open
    from ..predict.predictor import Predictor

    isolated_open.open_in_subprocess(artifact, trust_code=trust_code)
    with Predictor.load(artifact, trust_code=trust_code) as predictor:
        tensors = raw or (output is not None and output.suffix == ".npz")
        write_outputs(run_file(predictor, input) if tensors else answer_file(predictor, input), output)


def answer_file(predictor: Predictor, source: str) -> Any:
    """Answer for an image, a sound, a text or the lines of a text file; tensors for tensors.

    A line of a pair, for questions and for models of two texts, has a tab between them; so have a question and its
    choices, an image and its candidate labels, and a text and its candidate labels (two or more).
    """
    if source.endswith(TENSORS) or not predictor.answers_task or predictor.task == "embedding":
        return run_file(predictor, source)
    rows = _rows(predictor, source)
    answers = predictor.answer(rows)
    is_list = predictor.preprocessor is None and _is_text_file(source)
    return answers if is_list else answers[0]


def run_file(predictor: Predictor, source: str) -> dict[str, np.ndarray]:
    """Run an input: tensors of .npz, .npy or .json, an image or a sound, or text for models with a tokenizer.

    Raises `UsageError` when there is no such file, and `InputError` for content that does not fit the model.
    """
    if source.endswith(TENSORS):
        _require_file(source)
        return dict(predictor.predict(_read_tensors(predictor, Path(source))))
    rows = _rows(predictor, source)
    if predictor.task == "embedding":
        return {predictor.outputs[0].name: predictor.embed(rows)}
    return dict(predictor.predict(predictor.preprocess(rows)))


def _rows(predictor: Predictor, source: str) -> list[Any]:
    """Return the path of an image or sound, or texts: the lines of a file or stdin, or the argument itself."""
    if predictor.preprocessor is not None:
        source, *labels = source.split("\t")
        _require_file(source)
        return [(source, *labels)] if labels else [source]
    if not _is_text_file(source):
        # A sentence has spaces; one word could be a file that was misspelled.
        if " " not in source.strip():
            _refuse_folder(source)
            raise UsageError(
                f"no such file: {source}", hint="A text of one word comes from stdin: echo WORD | ... -"
            )
        return _pairs(predictor, [source])
    lines = [line for line in _read_text(predictor, source).splitlines() if line.strip()]
    if not lines:
        raise InputError("expected at least one line of text, got none", where=source)
    return _pairs(predictor, lines)


def _read_text(predictor: Predictor, source: str) -> str:
    """Read a file or stdin as UTF-8; raise `InputError` for any other bytes, such as an image."""
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            "expected tensors (.npz, .npy, .json) or UTF-8 text, got other bytes", where=source,
            hint=f"{predictor.name} takes no image and no sound",
        ) from error  # fmt: skip


def _require_file(source: str) -> None:
    _refuse_folder(source)
    if not is_path(source) or not Path(source).is_file():
        raise UsageError(f"no such file: {source}")


def _refuse_folder(source: str) -> None:
    if is_path(source) and Path(source).is_dir():
        raise UsageError(f"expected a file, got the folder {source}", hint="Give its files one by one")


def _is_text_file(source: str) -> bool:
    return source == "-" or (is_path(source) and Path(source).is_file())


def _pairs(predictor: Predictor, lines: list[str]) -> list[Any]:
    """Split lines with one tab into pairs, for tasks that take them."""
    if predictor.task == "multiple-choice":
        return [tuple(line.split("\t")) for line in lines]
    if predictor.task not in ("classification", "question-answering"):
        return list(lines)
    return [_with_tabs(line.split("\t")) for line in lines]


def _with_tabs(parts: list[str]) -> Any:
    """Return a text, a pair of texts, or a text with the labels that a model of entailment chooses from."""
    if len(parts) > 2:
        return {"text": parts[0], "candidate_labels": parts[1:]}
    return tuple(parts) if len(parts) == 2 else parts[0]


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
        if path.suffix == ".json":
            raise InputError(f"the inputs can't be read: {error}", where=str(path)) from error
        # numpy's own sentence recommends to unpickle the file
        raise InputError(
            "expected arrays of numbers, as numpy.savez and numpy.save write them", where=str(path)
        ) from error
    if not isinstance(arrays, dict):
        arrays = {predictor.inputs[0].name: arrays}
    specs = {spec.name: spec for spec in predictor.inputs}
    if path.suffix != ".json":
        return arrays
    try:
        return {n: np.asarray(v, dtype=specs[n].dtype if n in specs else None) for n, v in arrays.items()}
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"expected a rectangular array of numbers: {error}", where=str(path)) from error


def write_outputs(outputs: Any, path: Path | None) -> None:
    """Write tensors or answers: an .npz file, or JSON to a file or stdout; NaN becomes the string "NaN"."""
    if path is not None and path.suffix == ".npz":
        with writing(path):
            np.savez(path, allow_pickle=False, **outputs)
        return
    text = json.dumps(_json_values(outputs), allow_nan=False)
    if path is None:
        print(text)
    else:
        with writing(path):
            path.write_text(text + "\n")


def _json_values(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _json_values(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json_values(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
