"""Names of sources: `FILE.py:FACTORY`, `timm:NAME`, names of the hub, and the model folder that a file is part of."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import SourceError
from ...hub.choose_files import EXPORTS
from ...regular_files import read_json

# Of a config.json of transformers, timm and diffusers; others use that name for settings of their own.
MODEL_KEYS = frozenset(("model_type", "architectures", "architecture", "_class_name"))
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LIBRARY_NAME = re.compile(r"(timm|torchvision):([\w.\-]*)")


def is_user_module(text: str) -> bool:
    """Return true for `FILE.py:NAME`."""
    file, _, name = text.rpartition(":")
    return file.endswith(".py") and name.isidentifier()


def is_library_name(text: str) -> bool:
    """Return true for `timm:NAME` and `torchvision:NAME`."""
    return LIBRARY_NAME.fullmatch(text) is not None


def model_folder(path: Path) -> Path | None:
    """Return the folder of a file that is part of a Hugging Face model, with weights; None for a standalone file."""
    if path.suffix == ".py" or not _describes_model(path.parent):
        return None
    names = {path.name, *(item.name for item in path.parent.iterdir())}
    weights = any(name in PICKLED_WEIGHTS or name.endswith(".safetensors") for name in names)
    return path.parent if weights else None


def describing_folder(path: Path) -> Path | None:
    """Return the folder whose config.json describes a file: its own, or the one above `onnx/` or `openvino/`."""
    places = (path.parent, path.parent.parent) if path.parent.name in EXPORTS else (path.parent,)
    return next((folder for folder in places if _describes_model(folder)), None)


def _describes_model(folder: Path) -> bool:
    """Return true for a folder with the config.json of a model; others use that name for settings of their own."""
    config = folder / "config.json"
    if not config.is_file():
        return False
    try:
        return not MODEL_KEYS.isdisjoint(read_json(config))
    except SourceError:
        return False


def folder_hint(path: Path) -> str:
    folder = model_folder(path)
    return f"Give the folder it lies in: {folder}" if folder else ""


def whole_source(path: Path) -> Path:
    """Return the folder of a model for the index of its shards, which means all of them; else the path itself."""
    is_index = path.name.endswith((".safetensors.index.json", ".bin.index.json")) and path.is_file()
    return (model_folder(path) or path) if is_index else path
