"""Recognition of files that are no source: models of other tools, data, pictures, archives.

The tables are in `foreign_signatures`. Content decides first, the suffix only where the bytes are ambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..sources.diffusers_pipeline import describe_pipeline
from .foreign_signatures import (
    ADAPTER,
    AOTI,
    DATA,
    FLAX,
    FOLDERS,
    MAGIC,
    OPENVINO_WEIGHTS,
    ORIGINAL,
    OTHER_ADAPTER,
    RIGHT_FILE,
    SUFFIXES,
    TEXTS,
    TORCH_PACKAGE,
    ZIPS,
    ForeignKind,
)
from .identify_protobuf import foreign_protobuf


def foreign_binary(head: bytes) -> ForeignKind | None:
    """Recognise another tool's file by its magic bytes."""
    return next(((what, hint) for at, magic, what, hint in MAGIC if head.startswith(magic, at)), None)


def foreign_text(text: str) -> ForeignKind | None:
    """Recognise a text file of a known kind by its beginning."""
    flags, begin = re.IGNORECASE | re.DOTALL, _without_prolog(text)
    found = next(((what, hint) for begins, what, hint in TEXTS if re.match(begins, begin, flags)), None)
    return found or (("an XML file", RIGHT_FILE) if text.startswith("<?xml") else None)


def _without_prolog(text: str) -> str:
    """Strip the XML declaration and the comments that follow it."""
    for opens, closes in (("<?xml", "?>"), *[("<!--", "-->")] * 20):
        if text.startswith(opens):
            text = text.partition(closes)[2].lstrip()
    return text


def foreign_zip(names: Iterable[str]) -> ForeignKind | None:
    """Recognise a zip archive by its member names."""
    held = set(names)
    inside = [name.partition("/")[2] for name in held]
    if any(n.startswith("data/aotinductor/") for n in inside) and not any(
        n.startswith("models/") for n in inside
    ):
        return AOTI
    if ".data/extern_modules" in inside:
        return TORCH_PACKAGE
    return next(((what, hint) for name, what, hint in ZIPS if name in held), None)


def foreign_folder(path: Path) -> ForeignKind | None:
    """Recognise another tool's model folder by the files in it."""
    if (path / "model_index.json").is_file():
        return describe_pipeline(path)
    if _is_other_adapter(path / "adapter_config.json"):
        return OTHER_ADAPTER
    return next(((what, hint) for name, what, hint in FOLDERS if any(path.glob(name))), None)


def _is_other_adapter(config: Path) -> bool:
    """Return True for the configuration of an adapter that PEFT names, and that is no LoRA."""
    if not config.is_file():
        return False
    found = re.search(rb'"peft_type"\s*:\s*"(\w+)"', config.read_bytes()[:65536])
    return found is not None and found[1] != b"LORA"


def foreign_weights(folder: Path) -> ForeignKind | None:
    """Recognise a folder whose safetensors are an adapter only."""
    names = {path.name for path in folder.glob("*.safetensors")}
    if (folder / "adapter_config.json").is_file() and names <= {"adapter_model.safetensors"}:
        return ADAPTER
    return None


def foreign_pickle(head: bytes) -> ForeignKind | None:
    """Recognise a pickle by the library whose classes it names first."""
    for library in (b"sklearn", b"xgboost", b"lightgbm", b"catboost"):
        if library in head:
            hint = "It was not opened. skl2onnx and onnxmltools convert such models to ONNX"
            return f"a pickled {library.decode()} model", hint
    if b"joblib" in head:
        return "a pickle written by joblib", "It was not opened. " + ORIGINAL
    return ("a pickled pandas table, which is data", DATA) if b"pandas" in head else None


def foreign_by_name(path: Path) -> ForeignKind | None:
    """Recognise files whose bytes are ambiguous: other protobufs, OpenVINO weights, known suffixes."""
    if path.suffix == ".bin" and path.with_suffix(".xml").is_file():
        return OPENVINO_WEIGHTS
    return foreign_protobuf(path) or SUFFIXES.get(path.suffix.lower()) or _msgpack(path)


def _msgpack(path: Path) -> ForeignKind | None:
    """Recognise a msgpack map whose first key is a short text, as Flax writes its parameters."""
    with path.open("rb") as file:
        head = file.read(64)
    found = re.match(rb"[\x81-\x8f](?P<length>[\xa1-\xbf])(?P<key>[A-Za-z_][\w.]*)", head)
    whole = found is not None and len(found["key"]) >= found["length"][0] - 0xA0
    binary = any(byte > 126 for byte in head[1:])
    return FLAX if whole and binary else None
