"""Zip files as `torch.save` writes them: stored, unique names; checked before torch opens them."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import SourceError, UnsafeSourceError
from .file_blocks import BLOCK_BYTES, FileBlocks

MAX_MEMBERS = 10_000
LOCAL_HEADER = 30


@dataclass(frozen=True)
class Member:
    """Stored file of a zip: offset of its bytes, their number, and CRC-32."""

    name: str
    offset: int
    num_bytes: int
    crc: int


class TorchZip:
    """Checked table of contents; `root` is the one folder that holds every member.

    Members that begin with one of `allow_compressed` (below the root) may be compressed, as source code is.
    """

    def __init__(self, path: Path, allow_compressed: tuple[str, ...] = ()) -> None:
        self.path = path
        self.blocks = FileBlocks(path)
        infos = _contents(path)
        _check_names(infos, path)
        packed = [i.filename for i in infos if i.compress_type and not _within(i.filename, allow_compressed)]
        if packed and not any(i.filename.endswith(".npy") for i in infos):
            raise _unsafe(
                path, f"expected stored members, got {packed[0]!r} compressed: torch.save never compresses"
            )
        self._infos = {info.filename: info for info in infos}
        self.root = infos[0].filename.partition("/")[0] if infos else ""
        self.members = {
            info.filename.partition("/")[2]: self._member(info) for info in infos if not info.compress_type
        }

    def has(self, name: str) -> bool:
        return f"{self.root}/{name}" in self._infos

    def under(self, folder: str) -> bool:
        return any(name.startswith(f"{self.root}/{folder}/") for name in self._infos)

    def names(self) -> list[str]:
        """List every member with its folder."""
        return list(self._infos)

    def bare(self, name: str) -> bool:
        """Return true if a member of exactly this name lies outside any folder."""
        return name in self._infos

    def read(self, name: str, limit: int) -> bytes:
        """Read a whole member; raise `SourceError` when it is larger than `limit` bytes."""
        member = self.members.get(name)
        if member is None:
            raise SourceError(
                f"the zip holds no {name!r}",
                where=str(self.path),
                hint="The file is damaged: save or copy it again",
            )
        if member.num_bytes > limit:
            raise SourceError(
                f"{name!r} is {member.num_bytes} bytes; expected at most {limit}", where=str(self.path)
            )
        data = bytearray(member.num_bytes)
        self.blocks.read_into(memoryview(data), member.offset)
        return bytes(data)

    def verify(self) -> None:
        """Check every stored member against its CRC-32, streamed; raise `SourceError` naming a damaged one.

        Nothing else in the format notices a flipped bit: torch.load returns wrong numbers in silence.
        """
        buffer = bytearray(BLOCK_BYTES)
        for member in self.members.values():
            crc, done = 0, 0
            while done < member.num_bytes:
                view = memoryview(buffer)[: min(BLOCK_BYTES, member.num_bytes - done)]
                self.blocks.read_into(view, member.offset + done)
                crc = zlib.crc32(view, crc)
                done += len(view)
            if crc != member.crc:
                raise SourceError(
                    f"expected CRC {member.crc:08x} for {member.name!r}, got {crc:08x}: the file is damaged",
                    where=str(self.path),
                    hint="A bit was flipped in storage or transfer: copy it again",
                )

    def _member(self, info: zipfile.ZipInfo) -> Member:
        header = bytearray(LOCAL_HEADER)
        self.blocks.read_into(memoryview(header), info.header_offset)
        if header[:4] != b"PK\x03\x04":
            raise SourceError(f"no zip entry at the place of {info.filename!r}", where=str(self.path))
        skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        offset = info.header_offset + LOCAL_HEADER + skip
        if info.file_size != info.compress_size or offset + info.file_size > self.blocks.size():
            raise SourceError(
                f"expected {info.file_size} bytes for {info.filename!r}, the file ends before",
                where=str(self.path),
            )
        return Member(info.filename, offset, info.file_size, info.CRC)


def zip_names(path: Path) -> list[str]:
    """List all members, compressed or not; raise `SourceError` for a truncated zip."""
    return [info.filename for info in _contents(path)]


def _contents(path: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as file:
            return file.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        raise SourceError(
            f"a truncated zip: it has no table of contents at its end, after {path.stat().st_size} bytes",
            where=str(path),
            hint="The download or copy was cut off: fetch it again",
        ) from error


def _check_names(infos: list[zipfile.ZipInfo], path: Path) -> None:
    if len(infos) > MAX_MEMBERS:
        raise _unsafe(path, f"expected at most {MAX_MEMBERS} members, got {len(infos)}")
    seen: set[str] = set()
    for info in infos:
        name = info.orig_filename
        if name in seen or info.filename in seen:
            raise _unsafe(path, f"duplicate member {name!r}")
        seen |= {name, info.filename}
        if ".." in PurePosixPath(name).parts or name.startswith("/") or "\\" in name or "\0" in name:
            raise _unsafe(path, f"member name {name!r} points outside the file")


def _within(name: str, folders: tuple[str, ...]) -> bool:
    return name.partition("/")[2].startswith(folders) if folders else False


def _unsafe(path: Path, message: str) -> UnsafeSourceError:
    return UnsafeSourceError(
        message, where=str(path), hint="Such a file can't come from torch.save: don't trust it, save it again"
    )
