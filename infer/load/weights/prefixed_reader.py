"""Reader over several checkpoints: each one's tensors under a prefix of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ...errors import SourceError
from . import MappableReader, WeightReader
from .file_blocks import FileExtent
from .stored_codes import StoredCodes, stored_codes


class PrefixedReader:
    """Tensors of several readers as one checkpoint, each name with the prefix of its reader.

    Raises `SourceError` when two readers give the same name.
    """

    def __init__(self, readers: Mapping[str, WeightReader] | Iterable[tuple[str, WeightReader]]) -> None:
        self._places: dict[str, tuple[WeightReader, str]] = {}
        for prefix, reader in readers.items() if isinstance(readers, Mapping) else readers:
            for name in reader.names():
                if prefix + name in self._places:
                    raise SourceError(
                        f"tensor {prefix + name!r} is in two checkpoints", hint="Leave one of the two out"
                    )
                self._places[prefix + name] = reader, name

    def names(self) -> list[str]:
        return list(self._places)

    def dtype(self, name: str) -> torch.dtype:
        reader, inner = self._places[name]
        return reader.dtype(inner)

    def shape(self, name: str) -> tuple[int, ...]:
        reader, inner = self._places[name]
        return reader.shape(inner)

    def read(self, name: str) -> Tensor:
        reader, inner = self._places[name]
        return reader.read(inner)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        reader, inner = self._places[name]
        return reader.rows(inner, start, stop)

    def extent(self, name: str) -> FileExtent | None:
        """Return the file extent of a tensor; None if its reader knows none."""
        reader, inner = self._places[name]
        return reader.extent(inner) if isinstance(reader, MappableReader) else None

    def codes(self, name: str) -> StoredCodes | None:
        reader, inner = self._places[name]
        return stored_codes(reader, inner)
