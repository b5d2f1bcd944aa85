"""Forms of raw inputs: texts, pairs of texts, questions with choices, images with candidate labels, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError


def is_raw(inputs: Any) -> bool:
    """Return true for a text, pair, file or Pillow image, or a list of these; arrays and their mappings are not."""
    if isinstance(inputs, dict):
        of_image = isinstance(inputs.get("text"), str) and set(inputs) == {"image", "text"}
        return isinstance(inputs.get("question"), str) or "candidate_labels" in inputs or of_image
    if isinstance(inputs, list):
        return bool(inputs) and is_raw(inputs[0])
    if isinstance(inputs, tuple) and inputs and not isinstance(inputs[0], str):
        return is_raw(inputs[0])  # an image, and texts
    if isinstance(inputs, tuple):
        return len(inputs) > 1 and all(isinstance(part, str) for part in inputs)
    return isinstance(inputs, str | bytes | Path) or hasattr(inputs, "getbands")


def texts(rows: Sequence[Any]) -> list[str]:
    """Return the rows, each of which must be one text; raises `InputError`."""
    for index, row in enumerate(rows):
        if not isinstance(row, str):
            raise InputError(f"expected one text, got {type(row).__name__}", where=f"texts[{index}]")
    return list(rows)


def question_and_choices(row: Any, index: int) -> tuple[str, list[str]]:
    """Return the question and the choices of a mapping or a tuple; raises `InputError` for fewer than two choices."""
    parts = row
    if isinstance(row, Mapping) and isinstance(row.get("choices"), list | tuple):
        parts = [row.get("question"), *row["choices"]]
    if isinstance(parts, list | tuple) and len(parts) > 2 and all(isinstance(part, str) for part in parts):
        return parts[0], list(parts[1:])
    raise InputError("expected a question and at least two choices", where=f"texts[{index}]")


def question_and_context(row: Any, index: int) -> tuple[str, str]:
    """Return the question and the context of a mapping or a pair; raises `InputError` for anything else."""
    pair = (row.get("question"), row.get("context")) if isinstance(row, Mapping) else row
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
        return pair[0], pair[1]
    raise InputError("expected a pair of texts, question and context", where=f"texts[{index}]")


def image_and_candidates(row: Any, where: str) -> Mapping[str, Any]:
    """Return the mapping of "image" and "candidate_labels" of a row, or of a tuple (image, label, …).

    Raises `InputError` without an image.
    """
    if isinstance(row, tuple):
        row = {"image": row[0], "candidate_labels": list(row[1:])}
    if not isinstance(row, Mapping) or "image" not in row:
        raise InputError("expected an image and candidate_labels", where=where)
    return row
