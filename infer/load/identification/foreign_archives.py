"""Recognition of what tar and gzip files hold, from their beginning; nothing is unpacked to disk."""

from __future__ import annotations

import zlib
from pathlib import Path

ForeignKind = tuple[str, str]
BLOCK = 512
MAX_READ = 1 << 20
MAX_MEMBERS = 20
UNPACK = "Unpack it first"
NEMO: ForeignKind = (
    "a NeMo model (.nemo)",
    "Unpack it (tar): its model_weights.ckpt is a state dict, for --model file.py:build; or export it to ONNX",
)
OLD_TORCH: ForeignKind = (
    "a tar file of torch before 0.1.10",
    "Open it with torch.load and save its state dict again",
)


def foreign_archive(path: Path, head: bytes) -> ForeignKind | None:
    """Name the model format in a tar or gzip file, or its contents; None for other files."""
    if head[257:262] == b"ustar":
        return _tar(_names(path), "a tar archive")
    if head[:2] != b"\x1f\x8b":
        return None
    with path.open("rb") as file:
        packed = file.read(MAX_READ)
    try:
        inner = zlib.decompressobj(wbits=31).decompress(packed, MAX_READ)
    except zlib.error:
        return ("a damaged gzip file", "The download or copy was cut off: fetch it again")
    if inner[257:262] == b"ustar":
        return _tar(_names_in(inner), "a gzip-compressed tar archive")
    if inner[:1] == b"\x80":
        named = next(
            (name for name in ("sklearn", "xgboost", "lightgbm") if name.encode() in inner[:4096]), ""
        )
        hint = "It was not opened. skl2onnx and onnxmltools convert such models to ONNX"
        return (f"a compressed pickle{f' of a {named} model' if named else ' (joblib writes such)'}", hint)
    return ("a gzip file", UNPACK)


def _tar(names: list[str], what: str) -> ForeignKind:
    held = {name.removeprefix("./") for name in names}
    if "model_config.yaml" in held and any(name.endswith((".ckpt", ".yaml")) for name in held):
        return NEMO
    if {"storages", "tensors"} <= held:
        return OLD_TORCH
    some = ", ".join(sorted(name for name in held if "PaxHeader" not in name)[:4])
    return (f"{what} that holds {some}" if some else what, UNPACK)


def _names(path: Path) -> list[str]:
    """List the first members of a tar file by its headers."""
    names, offset = list[str](), 0
    with path.open("rb") as file:
        while len(names) < MAX_MEMBERS:
            file.seek(offset)
            name, size = _header(file.read(BLOCK))
            if not name:
                break
            names.append(name)
            offset += BLOCK + -(-size // BLOCK) * BLOCK
    return names


def _names_in(data: bytes) -> list[str]:
    names, offset = list[str](), 0
    while len(names) < MAX_MEMBERS and offset < len(data):
        name, size = _header(data[offset : offset + BLOCK])
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
