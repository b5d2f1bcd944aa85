"""Identification of a source by its content, never by its suffix; nothing in it is run."""

from __future__ import annotations

import codecs
import io
from dataclasses import dataclass
from pathlib import Path

from ...errors import SourceError, UsageError
from ...regular_files import MAX_JSON, is_there, read_regular
from ..sentence_transformers.modules_json import transformer_folder
from ..sources.diffusers_pipeline import diffusers_class
from ..weights.pickle_scan import MAX_PICKLE, code_among, globals_of
from ..weights.safetensors_file import read_header
from ..weights.torch_zip import TorchZip, zip_names
from .foreign_archives import foreign_archive
from .foreign_formats import (
    foreign_binary,
    foreign_by_name,
    foreign_folder,
    foreign_pickle,
    foreign_text,
    foreign_weights,
    foreign_zip,
)
from .foreign_signatures import KOHYA, ForeignKind
from .identify_protobuf import looks_like_onnx
from .source_names import PICKLED_WEIGHTS, folder_hint, is_library_name, is_user_module, missing_hint

STATE_DICTS = ("state-dict", "legacy-state-dict", "safetensors", "npz")
# torch.save before 1.6 begins with the pickled number 0x1950a86a20f9469cfc6c.
LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
HEAD = 4096
KOHYA_PREFIXES = ("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_transformer_")
# Ends of names in every zip that torch writes, and in those of NumPy.
TORCH_OR_NUMPY = (".pkl", "archive_format", "serialized_exported_program.json", ".npy")
# Eight bytes of text, read as the header length of safetensors, are far above this.
MAX_LENGTH = 1 << 48


@dataclass(frozen=True)
class Identified:
    """Kind of a source; `code`: opening it would run what it holds; `globals`: names that a pickle refers to."""

    kind: str
    says: str
    code: bool = False
    globals: tuple[str, ...] = ()


def identify(path: Path) -> Identified:
    """Identify a file, a folder or `file.py:factory`; raise `SourceError` naming what an unsupported one is."""
    if is_library_name(str(path)):
        return Identified("library", "a model that a library builds by its name")
    if is_user_module(str(path)):
        return Identified("recipe", f"a function that builds the model, {path}")
    if not is_there(path):
        if path.is_symlink():
            raise SourceError(
                "a link to a file that is not there", where=str(path), hint="Download the file itself"
            )
        raise SourceError("there is no such file or folder", where=str(path), hint=missing_hint(str(path)))
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise SourceError("expected a file or a folder, got a device or a pipe", where=str(path))
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except PermissionError as error:
        raise SourceError(
            "it may not be read by this user", where=str(path), hint="Check its permissions"
        ) from error
    return _file(path, head)


def _folder(path: Path) -> Identified:
    inner = transformer_folder(path)
    config, weights = (inner / "config.json").is_file(), any(inner.glob("*.safetensors"))
    if weights and (foreign := foreign_weights(inner)):
        raise _wrong(path, foreign)
    pickled = any((inner / name).is_file() for name in PICKLED_WEIGHTS)
    if config and (weights or pickled or any(inner.glob("*.bin"))):
        named = diffusers_class(inner / "config.json")
        if named is not None:
            return Identified("diffusers", f"a model of a diffusers pipeline, {named}")
    if config and (weights or pickled) and _is_timm(inner / "config.json"):
        return Identified("timm", "a folder of timm: config.json and weights")
    if config and weights:
        return Identified("huggingface", "a Hugging Face folder: config.json and safetensors")
    if config and pickled:
        return Identified("huggingface", "a Hugging Face folder: config.json and pytorch_model.bin")
    held = ", ".join(sorted(item.name for item in path.iterdir())[:6]) or "nothing"
    if (path / "manifest.json").is_file():
        hint = "It is an artifact already: infer serve, infer inspect"
        raise SourceError(f"a folder without config.json: it holds {held}", where=str(path), hint=hint)
    if foreign := foreign_folder(path):
        raise _wrong(path, foreign)
    if config:
        raise SourceError(
            f"a folder with config.json but without model.safetensors or pytorch_model.bin: it holds {held}",
            where=str(path),
        )
    if weights:
        raise SourceError(
            f"a folder with safetensors but no config.json: it holds {held}",
            where=str(path),
            hint="Give the .safetensors file itself with --model file.py:factory",
        )
    raise SourceError(
        f"a folder without config.json: it holds {held}",
        where=str(path),
        hint="A Hugging Face folder holds config.json and model.safetensors",
    )


def _is_timm(config: Path) -> bool:
    """Return true for timm's config.json, which names one `architecture`; transformers' has `architectures`."""
    text = read_regular(config, MAX_JSON)
    return b'"architecture"' in text and b'"architectures"' not in text and b'"model_type"' not in text


def _file(path: Path, head: bytes) -> Identified:
    if not head:
        raise SourceError(
            "the file is empty (0 bytes)", where=str(path), hint="The download or save failed: do it again"
        )
    # First of all: its first bytes are a length, and may be those of a pickle (0x280) or of zlib (0x178).
    if int.from_bytes(head[:8], "little") < MAX_LENGTH and head[8:9] == b"{":
        tensors, _ = read_header(path)
        if tensors and all(name.startswith(KOHYA_PREFIXES) for name in tensors):
            raise _wrong(path, KOHYA)
        return Identified("safetensors", f"a safetensors file of {len(tensors)} tensors")
    if head[:4] == b"PK\x03\x04" or head[:4] == b"PK\x05\x06":
        return _zip(path)
    if head[:4] == b"GGUF":
        from ..gguf import describe_gguf

        return Identified("gguf", describe_gguf(path))
    if foreign := foreign_archive(path, head) or foreign_binary(head):
        raise _wrong(path, foreign)
    if head[:1] == b"\x80":
        return _pickle(path, head)
    if path.name.endswith(".safetensors.index.json"):
        return Identified("safetensors", "the index of safetensors in shards")
    if looks_like_onnx(path):
        return Identified("onnx", "an ONNX model")
    raise _text_or_unknown(path, head)


def _wrong(path: Path, found: ForeignKind, hint: str = "") -> SourceError:
    says, usual = found
    return SourceError(f"expected a model, got {says}", where=str(path), hint=hint or usual)


def _zip(path: Path) -> Identified:
    names = zip_names(path)
    if foreign := foreign_zip(names):
        raise _wrong(path, foreign)
    if not any(name.endswith(TORCH_OR_NUMPY) for name in names):
        some = ", ".join(names[:4]) or "nothing"
        raise _wrong(path, (f"a zip that holds {some}", "Unpack it first"))
    file = TorchZip(path, allow_compressed=("code/", "extra/"))
    if any(name.endswith(".npy") for name in file.names()):
        return Identified("npz", "arrays in a NumPy archive (.npz)")
    if file.under("code") and file.has("constants.pkl"):
        return Identified("torchscript", "a TorchScript archive", code=True)
    if file.has("archive_format") or file.under("models") or file.bare("serialized_exported_program.json"):
        return Identified("exported", "an exported program (.pt2)", code=True)
    if not file.has("data.pkl"):
        some = ", ".join(file.names()[:4]) or "nothing"
        raise SourceError(
            f"expected a model, got a zip that holds {some}", where=str(path), hint="Unpack it first"
        )
    code = code_among(globals_of(io.BytesIO(file.read("data.pkl", MAX_PICKLE)), str(path)))
    if code:
        return Identified("module", "pickled objects, not only tensors", True, tuple(code))
    return Identified("state-dict", "a state dict written by torch.save")


def _pickle(path: Path, head: bytes) -> Identified:
    if LEGACY_MAGIC not in head[:32]:
        # joblib writes arrays between the opcodes, so that its pickles can't be listed whole.
        if foreign := foreign_pickle(head):
            raise _wrong(path, foreign)
        with path.open("rb") as file:
            names = globals_of(file, str(path))
        named = f" that names {', '.join(names[:8])}" if names else ""
        raise SourceError(
            f"expected a file written by torch.save, got a plain Python pickle{named}",
            where=str(path),
            hint="It was not opened. Save model.state_dict() by torch.save and give --model file.py:factory",
        )
    with path.open("rb") as file:
        # The magic number, the protocol and the system's sizes come first, each a pickle of its own.
        code = code_among(globals_of(file, str(path), pickles=4))
    if code:
        return Identified(
            "legacy-module", "pickled objects in the format of torch before 1.6", True, tuple(code)
        )
    return Identified("legacy-state-dict", "a state dict in the format of torch before 1.6")


def _text_or_unknown(path: Path, head: bytes) -> SourceError | UsageError:
    if foreign := foreign_by_name(path):
        return _wrong(path, foreign)
    text = _text(head)
    if text is None:
        return SourceError(
            f"not a model in any format known here; it begins with {head[:8].hex(' ')}",
            where=str(path),
            hint="Known: .pt (state dict), .pt2, safetensors, ONNX, GGUF, a Hugging Face folder",
        )
    if path.suffix == ".py":
        return UsageError(
            f"{path.name} is a Python file", hint=f"Name the function that builds the model: {path}:build"
        )
    if foreign := foreign_text(text):
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
