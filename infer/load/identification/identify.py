"""Identification of a source by its content, never by its suffix; nothing in it is run."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import SourceError, UnsafeSourceError
from ...hub import missing_hint
from ...regular_files import MAX_JSON, is_there, read_regular
from ...weights.pickle_scan import MAX_PICKLE, code_among, globals_of
from ...weights.safetensors_file import has_header, read_header
from ...weights.torch_zip import TorchZip, zip_names
from .source_names import PICKLED_WEIGHTS, is_library_name, is_user_module

STATE_DICTS = ("state-dict", "legacy-state-dict", "safetensors", "npz")
# torch.save before 1.6 begins with the pickled number 0x1950a86a20f9469cfc6c.
LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
HEAD = 4096
KOHYA_PREFIXES = ("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_transformer_")
# Ends of names in every zip that torch writes, and in those of NumPy.
TORCH_OR_NUMPY = ("/data.pkl", "archive_format", "serialized_exported_program.json", ".npy")
AOTI_FOLDER = "data/aotinductor/"
# Of an IR: after a byte order mark, the declaration and comments.
OPENVINO = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*\?>\s*)?(<!--(?:(?!-->).)*-->\s*){0,20}<net\b[^>]*\bversion=", re.DOTALL
)


@dataclass(frozen=True)
class Identified:
    """Kind of a source; `code`: opening it would run what it holds; `globals`: names that a pickle refers to.

    `file`: of a folder, the one that is opened in its place.
    """

    kind: str
    says: str
    code: bool = False
    globals: tuple[str, ...] = ()
    file: Path | None = None

    def refused(self, where: str, hint: str) -> UnsafeSourceError:
        """Return the error that it is code, by the names that a pickle refers to."""
        named = f": {', '.join(self.globals[:8])}" if self.globals else ""
        return UnsafeSourceError(f"{self.says}; it is code{named}", where=where, hint=hint)


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
    known = _folder(path) if path.is_dir() else _file(path, _head(path))
    if known is not None:
        return known
    from .foreign_formats import refusal

    raise refusal(path, b"" if path.is_dir() else _head(path))


def _head(path: Path) -> bytes:
    if not path.is_file():
        raise SourceError("expected a file or a folder, got a device or a pipe", where=str(path))
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except PermissionError as error:
        raise SourceError(
            "it may not be read by this user", where=str(path), hint="Check its permissions"
        ) from error


def _folder(path: Path) -> Identified | None:
    from ..sentence_transformers.modules_json import transformer_folder
    from ..sources.diffusers_pipeline import diffusers_class

    inner = transformer_folder(path)
    names = {item.name for item in inner.iterdir()} if inner.is_dir() else set[str]()
    weights = {name for name in names if name.endswith(".safetensors")}
    if "adapter_config.json" in names and weights == {"adapter_model.safetensors"}:
        return None
    pickled = any((inner / name).is_file() for name in PICKLED_WEIGHTS)
    config = inner / "config.json"
    if config.is_file() and any(name.endswith((".safetensors", ".bin", ".index.json")) for name in names):
        named = diffusers_class(config)
        if named is not None:
            return Identified("diffusers", f"a model of a diffusers pipeline, {named}")
    if not (weights or pickled):
        return _exported(path)
    if not config.is_file():
        return None
    if _is_timm(config):
        return Identified("timm", "a folder of timm: config.json and weights")
    if weights:
        return Identified("huggingface", "a Hugging Face folder: config.json and safetensors")
    return Identified("huggingface", "a Hugging Face folder: config.json and pytorch_model.bin")


def _exported(folder: Path) -> Identified | None:
    """Identify a folder by the file that an exporter wrote into it."""
    from .exported_files import exported_file

    found = exported_file(folder)
    if found is None:
        return None
    known = _file(found.path, _head(found.path))
    return None if known is None else replace(known, says=found.says, file=found.path)


def _is_timm(config: Path) -> bool:
    """Return true for timm's config.json, which names one `architecture`; transformers' has `architectures`."""
    text = read_regular(config, MAX_JSON)
    return b'"architecture"' in text and b'"architectures"' not in text and b'"model_type"' not in text


def _file(path: Path, head: bytes) -> Identified | None:
    # First of all: its first bytes are a length, and may be those of a pickle (0x280) or of zlib (0x178).
    if has_header(head):
        tensors, _ = read_header(path)
        is_kohya = tensors and all(name.startswith(KOHYA_PREFIXES) for name in tensors)
        return (
            None if is_kohya else Identified("safetensors", f"a safetensors file of {len(tensors)} tensors")
        )
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip(path)
    if head[:4] == b"GGUF":
        from ..gguf.open_gguf import describe_gguf

        return Identified("gguf", describe_gguf(path))
    if head[:1] == b"\x80":
        return _pickle(path, head)
    if path.name.endswith(".safetensors.index.json") and head:
        return Identified("safetensors", "the index of safetensors in shards")
    if OPENVINO.match(head):
        return Identified("openvino", "an OpenVINO IR")
    from .identify_protobuf import looks_like_onnx

    return Identified("onnx", "an ONNX model") if head and looks_like_onnx(path) else None


def _zip(path: Path) -> Identified | None:
    names = zip_names(path)
    if not any(name.endswith(TORCH_OR_NUMPY) for name in names):
        return None
    inside = [name.partition("/")[2] for name in names]
    if any(name.startswith(AOTI_FOLDER) for name in inside) and not any(
        n.startswith("models/") for n in inside
    ):
        return None
    file = TorchZip(path, allow_compressed=("code/", "extra/"))
    if any(name.endswith(".npy") for name in file.names()):
        return Identified("npz", "arrays in a NumPy archive (.npz)")
    if file.under("code") and file.has("constants.pkl"):
        return Identified("torchscript", "a TorchScript archive", code=True)
    if file.has("archive_format") or file.under("models") or file.bare("serialized_exported_program.json"):
        return Identified("exported", "an exported program (.pt2)", code=True)
    if not file.has("data.pkl"):
        return None
    code = code_among(globals_of(io.BytesIO(file.read("data.pkl", MAX_PICKLE)), str(path)))
    if code:
        return Identified("module", "pickled objects, not only tensors", True, tuple(code))
    return Identified("state-dict", "a state dict written by torch.save")


def _pickle(path: Path, head: bytes) -> Identified | None:
    if LEGACY_MAGIC not in head[:32]:
        return None
    with path.open("rb") as file:
        # The magic number, the protocol and the system's sizes come first, each a pickle of its own.
        code = code_among(globals_of(file, str(path), pickles=4))
    if code:
        return Identified(
            "legacy-module", "pickled objects in the format of torch before 1.6", True, tuple(code)
        )
    return Identified("legacy-state-dict", "a state dict in the format of torch before 1.6")
