"""`export_model`: a source in another format, written beside its final name, read back, and renamed when it fits."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import load as sources
from ..errors import BusyError, InferError, NotUsableError, unknown
from ..load.gguf.header import read_gguf_header
from ..load.gguf.open_gguf import open_gguf
from ..load.sources.folder_model import read_settings
from ..plan import Plan
from ..regular_files import read_json
from ..spec import Finding
from ..weights import Checkpoint, finite
from .artifact_source import is_artifact, open_artifact
from .checkpoint_folder import FolderWriter
from .exact_float import DTYPES
from .gguf_metadata import (
    architecture_for,
    check_settings,
    llama3_factors,
    model_metadata,
    resolved,
)
from .gguf_tensors import TensorWriter
from .gguf_vocabulary import vocabulary_metadata
from .gguf_writer import KEEP, TYPES, OutputTensor, flat_rows, write_gguf
from .onnx_folder import write_onnx_folder
from .packed_linears import PACKED
from .stored_rows import BOUND

FORMS = {
    "gguf": (*TYPES, KEEP),
    "hf": tuple(DTYPES),
    "compressed-tensors": (*PACKED, KEEP),
    "onnx": (),
}
DEFAULTS = {"gguf": "F16", "hf": "BF16", "compressed-tensors": "int4", "onnx": ""}
# Relative error of the rows that are read back, by type of the file.
_BOUNDS = {"F32": 1e-6, "F16": 1e-2, "BF16": 1e-2, "Q8_0": 2e-2, "Q4_0": 0.3, "Q4_1": 0.3}
_CHECKED_ROWS = 8


def export_model(
    source: str, form: str, output: Path, *, kind: str = "", replace: bool = False
) -> list[Finding]:
    """Write the model of `source` to `output`: a file for gguf, else a folder.

    `source`: a Hugging Face folder, a GGUF file, or an artifact of a language model; of onnx, an artifact.
    `kind`: type of the matrices, one of `FORMS[form]`; its default is keep for quantized sources, else F16 (gguf), BF16
    (hf) or int4. With keep, codes of the source are carried over where the form holds them.
    Raises `UsageError` for an unknown form or type, `NotUsableError` where the form has no place for the model,
    `BusyError` where `output` exists and `replace` is false.
    """
    if form not in FORMS:
        raise unknown("--to", form, FORMS)
    if kind and kind not in FORMS[form]:
        raise unknown(f"--type of {form}", kind, FORMS[form])
    if output.exists() and not replace:
        raise BusyError("the output exists", where=str(output), hint="Choose another path, or give --force")
    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=".export-") as work:
        made = Path(work) / output.name
        if form == "onnx":
            found = write_onnx_folder(Path(source), made)
        else:
            opened = _open(source)
            kind = kind or (KEEP if opened.quantized and KEEP in FORMS[form] else DEFAULTS[form])
            found = _gguf(opened, made, kind) if form == "gguf" else _folder(opened, made, kind)
        if output.is_dir() and not output.is_symlink():
            shutil.rmtree(output)
        os.replace(made, output)
    return found


@dataclass(frozen=True)
class _Source:
    """Model to export: weights by transformers' names and by the checkpoint's own, config.json, files beside it."""

    weights: Checkpoint
    own_names: Checkpoint
    config: dict[str, Any]
    folder: Path  # of config.json
    files: Mapping[str, Path]
    task: str
    quantized: bool
    held: Any  # keeps temporary folders


def _open(source: str) -> _Source:
    if is_artifact(Path(source)):
        artifact = open_artifact(Path(source))
        weights = finite(artifact.weights, source)
        quantized = any(weight.codes() is not None for weight in weights.values())
        return _Source(
            weights=weights,
            own_names=weights,
            config=artifact.config,
            folder=artifact.folder,
            files=artifact.files,
            task="text-generation",
            quantized=quantized,
            held=artifact,
        )
    loaded = sources.load(Plan(source=source, data="random"))
    if "config.json" not in loaded.files:
        raise NotUsableError(
            f"a source of kind {loaded.kind} is not exported to other formats",
            hint="Give a Hugging Face folder, a GGUF file or an artifact",
        )
    if loaded.checkpoint is None:
        raise NotUsableError(f"a source of kind {loaded.kind} has no weights to export")
    config = loaded.files["config.json"]
    settings = dict(read_json(config))
    if _differs_from_embedding(loaded):
        settings["tie_word_embeddings"] = False
    return _Source(
        weights=loaded.checkpoint,
        own_names=loaded.own_names or finite(loaded.checkpoint),
        config=settings,
        folder=config.parent,
        files=loaded.files,
        task=loaded.task,
        quantized=bool(loaded.stored_as),
        held=loaded,
    )


def _differs_from_embedding(loaded: sources.LoadedModel) -> bool:
    """Return true for a decoder with an output matrix of its own, whatever its config.json says."""
    model: Any = getattr(loaded.module, "model", None)
    if loaded.task != "text-generation" or not hasattr(model, "get_output_embeddings"):
        return False
    head = model.get_output_embeddings()
    is_decoder = head is not None and not model.config.is_encoder_decoder
    return is_decoder and head.weight is not model.get_input_embeddings().weight


def _head_of_its_own(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of a head that is not tied, which config.json of the folder may not know."""
    return {"tie_word_embeddings": False} if config.get("tie_word_embeddings") is False else {}


def _full_config(folder: Path) -> dict[str, Any]:
    return dict(read_settings(folder).to_dict())


def _gguf(source: _Source, path: Path, kind: str) -> list[Finding]:
    if source.task != "text-generation":
        raise NotUsableError(
            f"GGUF files hold language models, the task of this one is {source.task}", hint="Use --to hf"
        )
    config = resolved(_full_config(source.folder) | _head_of_its_own(source.config), source.weights)
    _, architecture = architecture_for(str(config["model_type"]))
    metadata = model_metadata(config, path.stem)
    writer = TensorWriter(source.weights, config, architecture, kind)
    tensors = writer.tensors()
    if (factors := llama3_factors(config)) is not None:
        tensors["rope_freqs.weight"] = OutputTensor(
            "F32", (len(factors),), flat_rows(torch.tensor([factors]))
        )
    metadata |= vocabulary_metadata(source.folder, tensors["token_embd.weight"].shape[0])
    write_gguf(path, metadata, tensors)
    again = open_gguf(path)
    check_settings(config, _full_config(again.folder))
    _check_rows(source.weights, again.weights, _kinds(path))
    matrices = "codes of the source" if kind == KEEP else f"matrices in {kind}"
    why = f"{metadata['general.architecture']}, {matrices}; read back and compared"
    found = Finding("export", "GGUF", path.stat().st_size / 1e6, "MB", why)
    return [found, *writer.report.findings()]


def _kinds(path: Path) -> set[str]:
    return {tensor.type.name for tensor in read_gguf_header(path).tensors.values()}


def _check_rows(weights: Checkpoint, again: Checkpoint, kinds: set[str]) -> None:
    """Raise `InferError` where first rows of a tensor come back otherwise than its type rounds them."""
    bound = max(_BOUNDS.get(kind, BOUND) for kind in kinds)
    for name in again:
        if name not in weights or not weights[name].shape:
            continue
        wanted = weights[name].rows(0, _CHECKED_ROWS).float()
        found = again[name].rows(0, _CHECKED_ROWS).float()
        error = float((found.reshape(wanted.shape) - wanted).norm() / wanted.norm().clamp_min(1e-20))
        if not error <= bound and float(wanted.norm()) > 0:
            raise InferError(
                f"{name!r} comes back with relative error {error:.2g}, expected at most {bound:g}"
            )


def _folder(source: _Source, folder: Path, kind: str) -> list[Finding]:
    writer = FolderWriter(source.own_names, source.config, source.files, kind)
    count = writer.write(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    why = f"{count} weights packed" if count else f"weights in {kind}"
    if (kind in PACKED or kind == KEEP) and not count:
        raise NotUsableError(f"no Linear layer of this model has whole groups of columns for {kind}")
    return [Finding("export", "folder", size / 1e6, "MB", why), *writer.report.findings()]
