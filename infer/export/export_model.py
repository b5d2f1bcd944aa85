"""`export_model`: a source in another format, written beside its final name, read back, and renamed when it fits."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import load as sources
from ..artifact import store
from ..errors import BusyError, InferError, NotUsableError, UsageError, unknown
from ..load.checkpoint.transformers_key_mapping import ConvertedReader
from ..load.gguf import open_gguf
from ..load.gguf.header import read_gguf_header
from ..load.loaded_model import LoadedModel
from ..load.model_metadata import read_json
from ..load.weights import FiniteReader, WeightReader
from ..plan import Plan
from ..spec import Finding
from .checkpoint_folder import DTYPES, PACKED, write_folder
from .gguf_metadata import architecture_for, check_settings, llama3_factors, model_metadata
from .gguf_tensors import output_tensors
from .gguf_vocabulary import vocabulary_metadata
from .gguf_writer import TYPES, OutputTensor, flat_rows, write_gguf

FORMS = {"gguf": TYPES, "hf": tuple(DTYPES), "compressed-tensors": tuple(PACKED), "onnx": ()}
DEFAULTS = {"gguf": "F16", "hf": "BF16", "compressed-tensors": "int4", "onnx": ""}
# Relative error of the rows that are read back, by type of the file.
_BOUNDS = {"F32": 1e-6, "F16": 1e-2, "BF16": 1e-2, "Q8_0": 2e-2, "Q4_0": 0.3, "Q4_1": 0.3}
_CHECKED_ROWS = 8


def export_model(
    source: str, form: str, output: Path, *, kind: str = "", replace: bool = False
) -> list[Finding]:
    """Write the model of `source` to `output`: a file for gguf, else a folder.

    `kind`: type of the matrices, one of `FORMS[form]`; its default is F16 (gguf), BF16 (hf) or int4. Raises
    `UsageError` for an unknown form or type, `NotUsableError` where the form has no place for the model, `BusyError`
    where `output` exists and `replace` is false.
    """
    if form not in FORMS:
        raise unknown("--to", form, FORMS)
    kind = kind or DEFAULTS[form]
    if kind and kind not in FORMS[form]:
        raise unknown(f"--type of {form}", kind, FORMS[form])
    if output.exists() and not replace:
        raise BusyError("the output exists", where=str(output), hint="Choose another path, or give --force")
    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=".export-") as work:
        made = Path(work) / output.name
        if form == "onnx":
            found = _onnx(Path(source), made)
        else:
            loaded = sources.load(Plan(source=source, data="random"))
            found = _gguf(loaded, made, kind) if form == "gguf" else _folder(loaded, made, kind)
        if output.is_dir() and not output.is_symlink():
            shutil.rmtree(output)
        os.replace(made, output)
    return found


def _config(loaded: LoadedModel) -> dict[str, Any]:
    if "config.json" not in loaded.files:
        raise NotUsableError(
            f"a source of kind {loaded.kind} is not exported to other formats",
            hint="Give a Hugging Face folder or a GGUF file",
        )
    return dict(read_json(loaded.files["config.json"]))


def _reader(loaded: LoadedModel) -> WeightReader:
    if loaded.reader is None:
        raise NotUsableError(f"a source of kind {loaded.kind} has no weights to export")
    return loaded.reader


def _full_config(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(folder, local_files_only=True).to_dict())


def _gguf(loaded: LoadedModel, path: Path, kind: str) -> list[Finding]:
    _config(loaded)
    folder = loaded.files["config.json"].parent
    if loaded.task != "text-generation":
        raise NotUsableError(
            f"GGUF files hold language models, the task of this one is {loaded.task}", hint="Use --to hf"
        )
    config, reader = _full_config(folder), _reader(loaded)
    _, architecture = architecture_for(str(config["model_type"]))
    metadata = model_metadata(config, path.stem)
    tensors = output_tensors(reader, config, architecture, kind)
    if (factors := llama3_factors(config)) is not None:
        tensors["rope_freqs.weight"] = OutputTensor(
            "F32", (len(factors),), flat_rows(torch.tensor([factors]))
        )
    metadata |= vocabulary_metadata(folder, tensors["token_embd.weight"].shape[0])
    write_gguf(path, metadata, tensors)
    again = open_gguf(path)
    check_settings(config, _full_config(again.folder))
    _check_rows(reader, again.reader, _kinds(path))
    why = f"{metadata['general.architecture']}, matrices in {kind}; read back and compared"
    return [Finding("export", "GGUF", path.stat().st_size / 1e6, "MB", why)]


def _kinds(path: Path) -> set[str]:
    return {tensor.type.name for tensor in read_gguf_header(path).tensors.values()}


def _check_rows(reader: WeightReader, again: WeightReader, kinds: set[str]) -> None:
    """Raise `InferError` where first rows of a tensor come back otherwise than its type rounds them."""
    bound = max(_BOUNDS[kind] for kind in kinds)
    held = set(reader.names())
    for name in again.names():
        if name not in held or not reader.shape(name):
            continue
        wanted = reader.rows(name, 0, _CHECKED_ROWS).float()
        found = again.rows(name, 0, _CHECKED_ROWS).float()
        error = float((found.reshape(wanted.shape) - wanted).norm() / wanted.norm().clamp_min(1e-20))
        if not error <= bound and float(wanted.norm()) > 0:
            raise InferError(
                f"{name!r} comes back with relative error {error:.2g}, expected at most {bound:g}"
            )


def _folder(loaded: LoadedModel, folder: Path, kind: str) -> list[Finding]:
    config = _config(loaded)
    files: Mapping[str, Path] = loaded.files
    count = write_folder(folder, _hub_reader(loaded), config, files, kind)
    size = sum(path.stat().st_size for path in folder.iterdir())
    why = f"{count} weights packed to {kind}" if count else f"weights in {kind}"
    if kind in PACKED and not count:
        raise NotUsableError(f"no Linear layer of this model has whole groups of columns for {kind}")
    return [Finding("export", "folder", size / 1e6, "MB", why)]


def _hub_reader(loaded: LoadedModel) -> WeightReader:
    """Return the reader of the checkpoint's own names, before those of transformers' modules."""
    inner: Any = loaded.reader.inner if isinstance(loaded.reader, FiniteReader) else loaded.reader
    inner = inner.inner if isinstance(inner, ConvertedReader) else inner
    return FiniteReader(inner)


def _onnx(artifact: Path, folder: Path) -> list[Finding]:
    """Copy the ONNX graph of an artifact that ONNX Runtime runs."""
    if not artifact.is_dir() or not (artifact / store.MANIFEST).is_file():
        raise UsageError(
            "--to onnx takes an artifact",
            where=str(artifact),
            hint="Make one: infer optimize SOURCE --backend ort",
        )
    manifest = store.read_manifest(artifact)
    if manifest.backend != "ort":
        raise NotUsableError(
            f"the artifact is compiled for {manifest.backend}, and only ort has an ONNX graph",
            where=str(artifact),
            hint="Make one: infer optimize SOURCE --backend ort",
        )
    shutil.copytree(artifact / "compiled", folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return [Finding("export", "ONNX", size / 1e6, "MB", "the graph and weights that ONNX Runtime runs")]
