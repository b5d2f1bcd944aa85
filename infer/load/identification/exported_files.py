"""The model file of a folder that Optimum or another exporter wrote: of ONNX files and OpenVINO IRs the one to open.

ONNX comes before OpenVINO, which one backend runs; the float model before its quantized forms. Optimum writes the files
of one model into the folder, the Hub's repositories have them in `onnx/` and `openvino/`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import NotUsableError, UsageError
from ...hub.choose_files import EXPORTED

PLACES = (("", "*.onnx"), ("onnx", "*.onnx"), ("", "*.xml"), ("openvino", "*.xml"))  # folder within, files
# Stems of the halves of a model that generates, of which one is no model to generate with.
HALVES = re.compile(
    r"(openvino_)?(encoder|decoder)(_with_past|_merged)?(_model)?(_merged|_with_past)?(_\w+)?"
)
NO_MODEL = re.compile(r"openvino_(de)?tokenizer")
SHOWN = 6


@dataclass(frozen=True)
class ExportedFile:
    """File that is opened in place of its folder, and a description of it for people."""

    path: Path
    says: str


def exported_file(folder: Path) -> ExportedFile | None:
    """Return the model file of a folder without weights of torch; None where it has none.

    Raises `NotUsableError` for the halves of a model that generates, `UsageError` for several that are all float.
    """
    for inner, pattern in PLACES:
        files = [path for path in sorted((folder / inner).glob(pattern)) if not NO_MODEL.fullmatch(path.stem)]
        files = [path for path in files if path.suffix == ".onnx" or path.with_suffix(".bin").is_file()]
        if files:
            return _one_of(folder, files)
    return None


def _one_of(folder: Path, files: Sequence[Path]) -> ExportedFile:
    kind = "an ONNX file" if files[0].suffix == ".onnx" else "an OpenVINO IR"
    names = [str(path.relative_to(folder)) for path in files]
    usual = [path for path in files if path.stem in EXPORTED]
    if not usual and (halves := [path for path in files if HALVES.fullmatch(path.stem)]):
        raise _refusal_of_halves(folder, halves)
    if len(files) > 1 and len(usual) != 1:
        raise UsageError(
            f"the folder holds {len(files)} models: {_some(names)}",
            where=str(folder),
            hint=f"Name one: {files[0]}",
        )
    chosen = usual[0] if usual else files[0]
    others = [path for path in files if path != chosen]
    name = chosen.relative_to(folder)
    one_of = f", the float one of {len(files)}; another by {others[0]}" if others else ""
    return ExportedFile(chosen, f"{kind}, {name} of the folder{one_of}")


def _refusal_of_halves(folder: Path, halves: Sequence[Path]) -> NotUsableError:
    """Return why the encoder and the decoder of a model that generates are not opened together."""
    encoder = next((path for path in halves if "encoder" in path.stem), None)
    names = _some([path.name for path in halves])
    alone = f", or {encoder} alone, for its hidden states" if encoder else ""
    return NotUsableError(
        f"the folder holds the parts of a model that generates ({names}), and infer generates with models of torch",
        where=str(folder),
        hint=f"Give the model that they were exported from (its safetensors, or ORG/NAME){alone}",
    )


def _some(names: Sequence[str]) -> str:
    left = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {left} more" if left > 0 else "")
