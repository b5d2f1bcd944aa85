"""Folder of a trained student: a Hugging Face folder like its teacher's, or weights for a file of the user's."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...load import LoadedModel
from ...load.sentence_transformers.sentence_folder import read_sentence_folder
from ..settings import WEIGHTS

NO_TEXT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".index.json")


def save_student(
    student: nn.Module, tensors: Mapping[str, Tensor], loaded: LoadedModel, source: str, output: Path
) -> None:
    """Write the student, with these `tensors` as its state dict, to the folder `output`, as infer optimize takes it.

    Weights are stored in the dtype of the teacher's configuration, float32 where it names none. Tokenizer, processor
    and the layers of a sentence encoder are the teacher's. A module of the user's is stored as `student.pt`.
    """
    if not hasattr(student, "save_pretrained"):
        output.mkdir(parents=True, exist_ok=True)
        torch.save(dict(tensors), output / WEIGHTS)
        return
    sentence = read_sentence_folder(Path(source)) if Path(source).is_dir() else None
    inner = output
    if sentence is not None:
        root = Path(source)
        inner = output / sentence.transformer.relative_to(root) if sentence.transformer != root else output
        _copy_beside(root, output, sentence.transformer)
    inner.mkdir(parents=True, exist_ok=True)
    for name, path in loaded.files.items():
        shutil.copyfile(path, inner / name)
    whole: Any = student
    dtype = getattr(whole.config, "dtype", None) or torch.float32
    stored = {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}
    with _quiet():
        whole.save_pretrained(inner, state_dict=stored, safe_serialization=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings and the progress bar of transformers."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _copy_beside(root: Path, output: Path, transformer: Path) -> None:
    """Copy small files of a folder, and the folders of its layers but the transformer's weights."""
    for path in sorted(root.rglob("*")):
        is_weight = path.name.endswith(NO_TEXT)
        if not path.is_file() or (is_weight and path.parent in (root, transformer)) or _hidden(path, root):
            continue
        if path.parent not in (root, transformer) and not _is_layer(path.parent, root):
            continue
        target = output / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _is_layer(folder: Path, root: Path) -> bool:
    """Return true for a folder that modules.json of a sentence encoder names."""
    listed = root / "modules.json"
    if not listed.is_file():
        return False
    names = {str(entry.get("path", "")) for entry in json.loads(listed.read_text())}
    return str(folder.relative_to(root)) in names
