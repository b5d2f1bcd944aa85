"""External data of ONNX files: plain files in the model's folder, each tensor within one of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import SourceError, UnsafeSourceError
from ...sanitize import shortened

MAX_DEPTH = 16
MAX_NAME = 80  # characters of a name that a message shows


def check_external(model: Any, path: Path, *, hard_links: bool = False) -> int:
    """Check that every external tensor lies in a plain file in the model's folder, linked once; return their number.

    `hard_links` allows files that are linked elsewhere too, for those whose content is known. ONNX's own path checks
    were got around five times, and a hard link passes ONNX Runtime's.
    """
    count, sizes = 0, dict[str, int]()
    for tensor in tensors_of(model.graph):
        if tensor.data_location != 1:
            continue
        count += 1
        fields = {entry.key: entry.value for entry in tensor.external_data}
        location = fields.get("location", "")
        if location not in sizes:
            sizes[location] = _file_size(tensor.name, location, path, hard_links)
        _check_span(tensor.name, fields, sizes[location], path)
    return count


def external_files(model: Any) -> set[str]:
    """Return the names of the files that hold tensors of a model."""
    return {
        entry.value
        for tensor in tensors_of(model.graph)
        if tensor.data_location == 1
        for entry in tensor.external_data
        if entry.key == "location"
    }


def _file_size(name: str, location: str, path: Path, hard_links: bool) -> int:
    """Return the bytes of a tensor's external file; raise `SourceError` unless it is a plain one in the folder."""
    target, shown = path.parent / location, _shown(location)
    if not location or Path(location).is_absolute() or ".." in Path(location).parts or "\\" in location:
        raise _unsafe(path, f"the data of {name!r} points outside the model's folder: {shown}")
    try:
        info = os.lstat(target)
    except (OSError, ValueError) as error:  # a NUL in the name, which no file can have
        raise SourceError(
            f"the data of {_shown(name)} is missing: {shown}",
            where=str(path),
            hint="Copy it into the model's folder",
        ) from error
    if not stat.S_ISREG(info.st_mode) or target.parent.resolve() not in (
        path.parent.resolve(),
        *_below(target, path),
    ):
        raise _unsafe(path, f"the data of {name!r} is not a plain file: {shown}")
    if info.st_nlink != 1 and not hard_links:
        raise _unsafe(path, f"the data of {name!r} is a hard link to a file elsewhere: {shown}")
    return info.st_size


def _check_span(name: str, fields: dict[str, str], size: int, path: Path) -> None:
    offset, length = _number(fields.get("offset", "0")), _number(fields.get("length", "0"))
    for field, value in (("offset", offset), ("length", length)):
        if value < 0:
            raise SourceError(
                f"expected a number of bytes as the {field} of {_shown(name)}, got {_shown(fields[field])}",
                where=str(path),
                hint="Export it again",
            )
    if offset + length > size:
        raise SourceError(
            f"{_shown(name)} needs bytes {offset} to {offset + length}, {_shown(fields['location'])} has {size}",
            where=str(path),
            hint="Copy the file of its data again",
        )


def _below(target: Path, path: Path) -> list[Path]:
    """List the folders between the model and its data; empty when one of them is a link."""
    root, parents = path.parent.resolve(), []
    folder = target.parent
    while folder != path.parent and not folder.is_symlink():
        parents.append(folder.resolve())
        folder = folder.parent
    return [p for p in parents if root in p.parents] if folder == path.parent else []


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


def tensors_of(graph: Any, depth: int = 0) -> Iterator[Any]:
    """Yield every tensor of a graph: initializers, sparse ones, attributes, subgraphs."""
    if depth > MAX_DEPTH:
        raise SourceError(
            f"expected at most {MAX_DEPTH} subgraphs within each other, the ONNX model has more"
        )
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                yield from tensors_of(inner, depth + 1) if inner.ByteSize() else ()


def _unsafe(path: Path, message: str) -> UnsafeSourceError:
    return UnsafeSourceError(
        message, where=str(path), hint="Keep the weights in plain files beside the model"
    )


def _shown(name: str) -> str:
    return repr(shortened(name, MAX_NAME))
