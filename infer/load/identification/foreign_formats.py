"""Sentences on files and folders that are no source: models of other tools, data, pictures, archives.

Content decides first, the suffix only where the bytes are ambiguous. The tables are in `foreign_signatures`; nothing is
unpacked to disk.
"""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO

from ...errors import SourceError, UsageError
from ...weights.pickle_scan import globals_of
from ...weights.safetensors_file import has_header
from ...weights.torch_zip import zip_names
from ..sentence_transformers.modules_json import transformer_folder
from ..sources.diffusers_pipeline import describe_pipeline
from .foreign_signatures import (
    ADAPTER,
    AOTI,
    CONVERTERS,
    DATA,
    FLAX,
    FOLDERS,
    KOHYA,
    LIBRARIES,
    MAGIC,
    NEMO,
    OLD_TORCH,
    OPENVINO_WEIGHTS,
    ORIGINAL,
    OTHER_ADAPTER,
    RIGHT_FILE,
    SUFFIXES,
    TEXTS,
    TORCH_PACKAGE,
    UNPACK,
    ZIPS,
    ForeignKind,
)
from .identify_protobuf import foreign_protobuf
from .source_names import folder_hint

HEAD = 4096
AOTI_FOLDER = "data/aotinductor/"
BLOCK = 512  # of a tar file
MAX_READ = 1 << 20
MAX_MEMBERS = 20
HINT = "Known: .pt (state dict), .pt2, safetensors, ONNX, OpenVINO IR, GGUF, a Hugging Face folder"


def refusal(path: Path, head: bytes) -> SourceError | UsageError:
    """Return the error that names what a file that begins with `head`, or a folder, is; it is no source."""
    if path.is_dir():
        return _folder(path)
    if not head:
        return SourceError(
            "the file is empty (0 bytes)", where=str(path), hint="The download or save failed: do it again"
        )
    if has_header(head):
        return _wrong(path, KOHYA)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip(path)
    if foreign := _archive(path, head) or _by_magic(head):
        return _wrong(path, foreign)
    if head[:1] == b"\x80":
        return _pickle(path, head)
    return _text_or_unknown(path, head)


def _wrong(path: Path, foreign: ForeignKind, hint: str = "") -> SourceError:
    says, usual = foreign
    return SourceError(f"expected a model, got {says}", where=str(path), hint=hint or usual)


def _folder(path: Path) -> SourceError:
    inner = transformer_folder(path)
    weights = {item.name for item in inner.glob("*.safetensors")}
    if weights == {"adapter_model.safetensors"} and (inner / "adapter_config.json").is_file():
        return _wrong(path, ADAPTER)
    held = ", ".join(sorted(item.name for item in path.iterdir())[:6]) or "nothing"
    if (path / "manifest.json").is_file():
        hint = "It is an artifact already: infer serve, infer inspect"
        return SourceError(f"a folder without config.json: it holds {held}", where=str(path), hint=hint)
    if foreign := _named_folder(path):
        return _wrong(path, foreign)
    if (inner / "config.json").is_file():
        return SourceError(
            f"a folder with config.json but without model.safetensors or pytorch_model.bin: it holds {held}",
            where=str(path),
        )
    if weights:
        return SourceError(
            f"a folder with safetensors but no config.json: it holds {held}",
            where=str(path),
            hint="Give the .safetensors file itself with --model file.py:factory",
        )
    return SourceError(
        f"a folder without config.json: it holds {held}",
        where=str(path),
        hint="A Hugging Face folder holds config.json and model.safetensors",
    )


def _zip(path: Path) -> SourceError:
    names = zip_names(path)
    foreign = _named_zip(names)
    return _wrong(path, foreign or (f"a zip that holds {', '.join(names[:4]) or 'nothing'}", UNPACK))


def _pickle(path: Path, head: bytes) -> SourceError:
    # joblib writes arrays between the opcodes, so that its pickles can't be listed whole.
    if foreign := _named_pickle(head):
        return _wrong(path, foreign)
    with path.open("rb") as file:
        names = globals_of(file, str(path))
    named = f" that names {', '.join(names[:8])}" if names else ""
    return SourceError(
        f"expected a file written by torch.save, got a plain Python pickle{named}",
        where=str(path),
        hint="It was not opened. Save model.state_dict() by torch.save and give --model file.py:factory",
    )


def _text_or_unknown(path: Path, head: bytes) -> SourceError | UsageError:
    if foreign := _by_name(path):
        return _wrong(path, foreign)
    text = _text(head)
    if text is None:
        return SourceError(
            f"not a model in any format known here; it begins with {head[:8].hex(' ')}",
            where=str(path),
            hint=HINT,
        )
    if path.suffix == ".py":
        return UsageError(
            f"{path.name} is a Python file", hint=f"Name the function that builds the model: {path}:build"
        )
    if foreign := _named_text(text):
        return _wrong(path, foreign, hint=folder_hint(path))
    line = text.splitlines()[0][:40] if text else ""
    return SourceError(
        f"expected a model, got text that begins {line!r}", where=str(path), hint="Is it the right file?"
    )


def _text(head: bytes) -> str | None:
    """Return the beginning of a text file (UTF-8, or UTF-16 with a byte order mark); None for binary data."""
    encoding = "utf-16" if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    try:
        # Not final: the head may end inside a character.
        text = codecs.getincrementaldecoder(encoding)().decode(head).strip()
    except UnicodeDecodeError:
        return None
    return None if any(ord(char) < 32 and char not in "\t\r\n\f" for char in text) else text


def _by_magic(head: bytes) -> ForeignKind | None:
    """Recognise another tool's file by its magic bytes."""
    return next(((what, hint) for at, magic, what, hint in MAGIC if head.startswith(magic, at)), None)


def _named_text(text: str) -> ForeignKind | None:
    """Recognise a text file of a known kind by its beginning."""
    flags, begin = re.IGNORECASE | re.DOTALL, _without_prolog(text)
    kind = next(((what, hint) for begins, what, hint in TEXTS if re.match(begins, begin, flags)), None)
    return kind or (("an XML file", RIGHT_FILE) if text.startswith("<?xml") else None)


def _without_prolog(text: str) -> str:
    """Strip the XML declaration and the comments that follow it."""
    for opens, closes in (("<?xml", "?>"), *[("<!--", "-->")] * 20):
        if text.startswith(opens):
            text = text.partition(closes)[2].lstrip()
    return text


def _named_zip(names: Collection[str]) -> ForeignKind | None:
    """Recognise a zip archive by its member names."""
    if any(name.partition("/")[2].startswith(AOTI_FOLDER) for name in names):
        return AOTI
    if any(name.partition("/")[2] == ".data/extern_modules" for name in names):
        return TORCH_PACKAGE
    return next(((what, hint) for name, what, hint in ZIPS if name in names), None)


def _named_folder(path: Path) -> ForeignKind | None:
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
    named = re.search(rb'"peft_type"\s*:\s*"(\w+)"', config.read_bytes()[:65536])
    return named is not None and named[1] != b"LORA"


def _named_pickle(head: bytes) -> ForeignKind | None:
    """Recognise a pickle by the library whose classes it names first."""
    for library in LIBRARIES:
        if library.encode() in head:
            return f"a pickled {library} model", CONVERTERS
    if b"joblib" in head:
        return "a pickle written by joblib", "It was not opened. " + ORIGINAL
    return ("a pickled pandas table, which is data", DATA) if b"pandas" in head else None


def _by_name(path: Path) -> ForeignKind | None:
    """Recognise files whose bytes are ambiguous: other protobufs, OpenVINO weights, known suffixes."""
    if path.suffix == ".bin" and path.with_suffix(".xml").is_file():
        return OPENVINO_WEIGHTS
    return foreign_protobuf(path) or SUFFIXES.get(path.suffix.lower()) or _msgpack(path)


def _msgpack(path: Path) -> ForeignKind | None:
    """Recognise a msgpack map whose first key is a short text, as Flax writes its parameters."""
    with path.open("rb") as file:
        head = file.read(64)
    first_key = re.match(rb"[\x81-\x8f](?P<length>[\xa1-\xbf])(?P<key>[A-Za-z_][\w.]*)", head)
    whole = first_key is not None and len(first_key["key"]) >= first_key["length"][0] - 0xA0
    binary = any(byte > 126 for byte in head[1:])
    return FLAX if whole and binary else None


def _archive(path: Path, head: bytes) -> ForeignKind | None:
    """Name the model format in a tar or gzip file, or its contents; None for other files."""
    if head[257:262] == b"ustar":
        with path.open("rb") as file:
            return _tar(_members(file), "a tar archive")
    if head[:2] != b"\x1f\x8b":
        return None
    with path.open("rb") as file:
        packed = file.read(MAX_READ)
    try:
        inner = zlib.decompressobj(wbits=31).decompress(packed, MAX_READ)
    except zlib.error:
        return "a damaged gzip file", "The download or copy was cut off: fetch it again"
    if inner[257:262] == b"ustar":
        return _tar(_members(io.BytesIO(inner)), "a gzip-compressed tar archive")
    if inner[:1] == b"\x80":
        named = next((name for name in LIBRARIES if name.encode() in inner[:HEAD]), "")
        return (
            f"a compressed pickle{f' of a {named} model' if named else ' (joblib writes such)'}",
            CONVERTERS,
        )
    return "a gzip file", UNPACK


def _tar(names: list[str], what: str) -> ForeignKind:
    held = {name.removeprefix("./") for name in names}
    if "model_config.yaml" in held and any(name.endswith((".ckpt", ".yaml")) for name in held):
        return NEMO
    if {"storages", "tensors"} <= held:
        return OLD_TORCH
    some = ", ".join(sorted(name for name in held if "PaxHeader" not in name)[:4])
    return (f"{what} that holds {some}" if some else what, UNPACK)


def _members(file: IO[bytes]) -> list[str]:
    """List the first members of a tar file by its headers."""
    names, offset = list[str](), 0
    while len(names) < MAX_MEMBERS:
        file.seek(offset)
        name, size = _header(file.read(BLOCK))
        if not name:
            break
        names.append(name)
        offset += BLOCK + -(-size // BLOCK) * BLOCK
    return names


def _header(block: bytes) -> tuple[str, int]:
    """Return name and size of a member; an empty name at the end and in damaged headers."""
    digits = block[124:136].strip(b" \0")
    if len(block) < BLOCK or block[257:262] != b"ustar" or not digits.isdigit() or digits.strip(b"01234567"):
        return "", 0
    return block[:100].split(b"\0")[0].decode(errors="replace"), int(digits, 8)
