"""The ONNX graph of an artifact as a folder that Optimum opens: `model.onnx`, config.json, the tokenizer's files.

Names of inputs and outputs are those of transformers, which Optimum's classes read too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..artifact import store
from ..artifact.manifest import Manifest
from ..errors import NotUsableError, UsageError
from ..load.carried_files import files_in
from ..spec import Finding
from .artifact_source import is_artifact

MAKE_ONE = "Make one: infer optimize SOURCE --backend ort"
# Of `ORTModelFor…`, by task, and the outputs that the class reads.
CLASSES = {
    "classification": ("SequenceClassification", ("logits",)),
    "token-classification": ("TokenClassification", ("logits",)),
    "question-answering": ("QuestionAnswering", ("start_logits", "end_logits")),
    "fill-mask": ("MaskedLM", ("logits",)),
    "tensors": ("FeatureExtraction", ("last_hidden_state",)),
    "image-classification": ("ImageClassification", ("logits",)),
    "image-segmentation": ("SemanticSegmentation", ("logits",)),
    "audio-classification": ("AudioClassification", ("logits",)),
    "audio-frame-classification": ("AudioFrameClassification", ("logits",)),
    "automatic-speech-recognition": ("CTC", ("logits",)),
}
CUSTOM = "CustomTasks"  # any tensors, by their names


def write_onnx_folder(artifact: Path, folder: Path) -> list[Finding]:
    """Copy the graph that ONNX Runtime runs of an artifact, and the files that describe the model.

    Raises `UsageError` for a source that is no artifact, `NotUsableError` for one of another backend.
    """
    if not is_artifact(artifact):
        raise UsageError(
            "expected an artifact for --to onnx, got another source", where=str(artifact), hint=MAKE_ONE
        )
    manifest = store.read_manifest(artifact)
    if manifest.backend != "ort":
        raise NotUsableError(
            f"the artifact is compiled for {manifest.backend}, and only ort has an ONNX graph",
            where=str(artifact),
            hint=MAKE_ONE,
        )
    store.verify(artifact, manifest)
    shutil.copytree(artifact / "compiled", folder)
    opens = optimum_class(manifest) if (artifact / "config.json").is_file() else ""
    if opens:
        for name, path in files_in(artifact).items():
            shutil.copyfile(path, folder / name)
    size = sum(path.stat().st_size for path in folder.iterdir())
    found = [Finding("export", "ONNX", size / 1e6, "MB", "the graph and weights that ONNX Runtime runs")]
    if opens:
        how = f"from optimum.onnxruntime import {opens}; {opens}.from_pretrained({str(folder.name)!r})"
        found.append(Finding("export", "opens with", opens, why=how))
    return found


def optimum_class(manifest: Manifest) -> str:
    """Return the class of Optimum that opens an artifact's graph; "" for a step over a paged cache, which none does."""
    if "generation" in manifest.meta:
        return ""
    ending, reads = CLASSES.get(manifest.task, (CUSTOM, ()))
    given = {spec.name for spec in manifest.outputs}
    return f"ORTModelFor{ending if given.issuperset(reads) else CUSTOM}"
