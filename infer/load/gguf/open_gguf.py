"""Opening of a GGUF file as a Hugging Face folder would be opened: settings and tokenizer in a folder, weights read
where they are.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...distribution import install
from ...errors import NotUsableError, SourceError
from ...paths import OwnedFolder
from ...spec import Finding
from ...weights import Checkpoint
from .header import GgufHeader, read_gguf_header
from .model import architecture_of, model_settings, stored_tensors
from .reader import open_tensors, shard_paths
from .tokenizer import build_tokenizer, end_token_ids, has_no_vocabulary


@dataclass
class GgufSource:
    """A GGUF file as a folder of transformers and its weights.

    `folder` holds config.json, generation_config.json and, where the file has a vocabulary, the tokenizer's files; it
    is removed with `directory`.
    """

    folder: Path
    weights: Checkpoint
    num_bytes: int  # of the tensors, as stored
    finding: Finding
    stored_as: str  # the types of its tensors where some hold codes, else empty
    directory: OwnedFolder


def describe_gguf(path: Path) -> str:
    """Describe a GGUF file by its header; raise `SourceError` where that is damaged."""
    header = read_gguf_header(path)
    name = header.metadata.get("general.architecture")
    return f"a GGUF file, {name}: {len(header.tensors)} tensors of {_types(header)}"


def open_gguf(path: Path) -> GgufSource:
    """Open a GGUF file, or the first of a split one with all its parts.

    Raises `SourceError` for damage, an unknown architecture, setting, tensor type or tokenizer, and `NotUsableError`
    without transformers.
    """
    header = _joined(path)
    prefix, layout = architecture_of(header, path)
    for package in ("transformers", "tokenizers"):
        if find_spec(package) is None:
            raise NotUsableError(f"a GGUF file needs the package {package}", hint=install("hf"))
    config = model_settings(header, prefix, layout, path)
    stored = stored_tensors(header, layout, config, path)
    tokenizer: Any = None
    settings: dict[str, Any] = {}
    if not has_no_vocabulary(header.metadata):
        tokenizer, settings = build_tokenizer(header.metadata, path)
        _check_vocabulary(tokenizer, config, path)
    special = _special_ids(header, tokenizer, settings)
    directory = OwnedFolder("infer-gguf-")
    folder = directory.path
    _write(folder / "config.json", config | special)
    _write(folder / "generation_config.json", special)
    if tokenizer is not None:
        _write(folder / "tokenizer_config.json", settings)
        tokenizer.save(str(folder / "tokenizer.json"))
    count = sum(tensor.num_bytes for tensor in header.tensors.values())
    why = f"{header.metadata['general.architecture']}; {_types(header)}; fidelity is measured against these weights"
    quantized = any(tensor.type.holds_codes for tensor in header.tensors.values())
    found = Finding("load", "GGUF", count / 1e6, "MB", why)
    return GgufSource(
        folder, open_tensors(stored), count, found, _types(header) if quantized else "", directory
    )


def _special_ids(header: GgufHeader, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens; None where the file has none: transformers' defaults are another model's."""
    ends = end_token_ids(header.metadata)
    special: dict[str, Any] = {
        f"{name}_token_id": tokenizer.token_to_id(settings[f"{name}_token"])
        if f"{name}_token" in settings
        else None
        for name in ("bos", "pad")
    }
    return special | {"eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def _types(header: GgufHeader) -> str:
    """Return the types of the tensors, by bytes: "Q4_K 80 %, Q6_K 20 %"; those below half a percent are left out."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.type.name] += tensor.num_bytes
    total = sum(sizes.values())
    shares = [(name, 100 * size / total) for name, size in sizes.most_common()]
    return ", ".join(f"{name} {share:.0f} %" for name, share in shares if share >= 0.5) or "nothing"


def _check_vocabulary(tokenizer: Any, config: dict[str, Any], path: Path) -> None:
    tokens, rows = tokenizer.get_vocab_size(), config["vocab_size"]
    if tokens > rows:
        raise SourceError(
            f"the vocabulary has {tokens} tokens and token_embd.weight {rows} rows", where=str(path)
        )


def _joined(path: Path) -> GgufHeader:
    """Read the header, with the tensors of all parts of a split model."""
    first = read_gguf_header(path)
    count, number = first.metadata.get("split.count", 0), first.metadata.get("split.no", 0)
    if not isinstance(count, int) or count < 2:
        return first
    paths = shard_paths(path, count, number) if isinstance(number, int) else []
    missing = [one.name for one in paths if not one.is_file()]
    if not paths or missing or number != 0:
        what = f"lacks {missing[0]!r} beside it" if missing else f"is part {number} of {count}"
        raise SourceError(
            f"the split GGUF model {what}",
            where=str(path),
            hint="Give the first part, NAME-00001-of-0000N.gguf, with all others beside it",
        )
    tensors = dict(first.tensors)
    for other in paths[1:]:
        part = read_gguf_header(other).tensors
        if twice := sorted(part.keys() & tensors.keys()):
            raise SourceError(f"tensor {twice[0]!r} is in two parts", where=str(other))
        tensors |= part
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise SourceError(
            f"expected {expected} tensors in {count} parts, got {len(tensors)}", where=str(path)
        )
    return GgufHeader(first.metadata, tensors)
