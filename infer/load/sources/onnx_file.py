"""ONNX models: checked, external data confined to the folder, inputs and outputs read from the graph."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import NotUsableError, SourceError, UnsafeSourceError, UsageError
from ...library_errors import first_sentence
from ...plan import Plan
from ...sanitize import shortened
from ...spec import BATCH, DTYPES, Finding, TensorSpec, keyword
from ..loaded_model import LoadedModel
from . import onnx_outputs

MAX_DEPTH = 16
BATCHES = ("batch", "batch_size", "batchsize", "batch_dim", "bs")  # names of the batch axis
MAX_NAME = 80  # characters of a name that a message shows
_UNNAMED = re.compile(
    r"unk__\d+|-?\d+|\W*"
)  # what exporters call a size without a name: "unk__12", "-1", "?"
Specs = tuple[TensorSpec, ...]


def _invalid(model: Any, path: Path, error: Exception) -> SourceError:
    """Return why the checker of the package onnx refuses a model: made for a newer one, or damaged."""
    import onnx

    newest = int(onnx.IR_VERSION)
    if model.ir_version > newest:
        return SourceError(
            f"the ONNX model has IR version {model.ir_version}, onnx {onnx.__version__} reads up to {newest}",
            where=str(path),
            hint="Upgrade onnx and onnxruntime, or export the model again for an older opset",
        )
    return SourceError(
        f"the ONNX model is not valid: {first_sentence(error)}", where=str(path), hint="Export it again"
    )


def _read_checked(path: Path) -> tuple[Any, int]:
    """Parse a file that onnx's checker accepts; return it and the number of its tensors in external files."""
    if find_spec("onnx") is None:
        raise NotUsableError("an ONNX source needs the package onnx", hint="pip install 'infer[ort]'")
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise SourceError(
            f"the ONNX model can't be parsed: {first_sentence(error)}", where=str(path)
        ) from error
    num_external = check_external(model, path)
    try:
        onnx.checker.check_model(path)
    except onnx.checker.ValidationError as error:
        raise _invalid(model, path, error) from error
    return model, num_external


def load_onnx(plan: Plan) -> LoadedModel:
    """Load an ONNX file; `module` is None, `onnx` the path, `meta["outputs"]` the output specs.

    Where outputs are no tensors, `onnx` is a changed copy that lives as long as the loaded model.
    """
    path = Path(plan.source)
    model, num_external = _read_checked(path)
    said = onnx_outputs.keep_tensors(model, str(path))
    changed = onnx_outputs.write(model, path) if said else None
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_spec(value, path) for value in model.graph.input if value.name not in weights)
    if not inputs:
        raise SourceError(
            "the ONNX model has no inputs: its outputs are constants",
            where=str(path),
            hint="Is it the right file?",
        )
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    why = f"{len(model.graph.node)} nodes, {len(weights)} weights, {num_external} in external files"
    findings = [Finding("load", "opset", opset, why=why)]
    findings += [Finding("load", "outputs", "tensors only", why=text) for text in said]
    nodes = onnx_outputs.quantized_nodes(model)
    if nodes:
        named = ", ".join(f"{count} {name}" for name, count in nodes.most_common(4))
        findings.append(
            Finding("load", "quantized already", nodes.total(), "nodes", f"{named}: kept as they are")
        )
    outputs = tuple(_spec(value, path) for value in model.graph.output)
    inputs = _overridden(plan, inputs)
    own = {text.partition("=")[0] for text in plan.inputs}
    loose, loose_outputs, uncertain = (
        inputs,
        outputs,
        _uncertain([spec for spec in inputs if spec.name not in own], model),
    )
    inputs, outputs = _with_batch(inputs, outputs, uncertain)
    return LoadedModel(
        kind="onnx",
        module=None,
        checkpoint=None,
        inputs=inputs,
        loose=loose,
        loose_outputs=loose_outputs,
        uncertain=uncertain,
        samples={},
        samples_from="",
        outputs=tuple(spec.name for spec in outputs),
        onnx=path if changed is None else changed.path / path.name,
        directory=changed,
        meta={"outputs": outputs, "opset": opset, "quantized": bool(nodes)},
        findings=tuple(findings),
        weight_bytes=_bytes_on_disk(model, path),
    )


def _bytes_on_disk(model: Any, path: Path) -> int:
    """Return the size of the file and of the external ones that its tensors name, which were checked."""
    entries = (
        entry for one in _tensors(model.graph) if one.data_location == 1 for entry in one.external_data
    )
    beside = {path.parent / entry.value for entry in entries if entry.key == "location"}
    return path.stat().st_size + sum(one.stat().st_size for one in beside)


def check_external(model: Any, path: Path, *, hard_links: bool = False) -> int:
    """Check that every external tensor lies in a plain file in the model's folder, linked once; return their number.

    `hard_links` allows files that are linked elsewhere too, for those whose content is known. ONNX's own path checks
    were got around five times, and a hard link passes ONNX Runtime's.
    """
    count, sizes = 0, dict[str, int]()
    for tensor in _tensors(model.graph):
        if tensor.data_location != 1:
            continue
        count += 1
        fields = {entry.key: entry.value for entry in tensor.external_data}
        location = fields.get("location", "")
        if location not in sizes:
            sizes[location] = _file_size(tensor.name, location, path, hard_links)
        _check_span(tensor.name, fields, sizes[location], path)
    return count


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


def _tensors(graph: Any, depth: int = 0) -> Iterator[Any]:
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
                yield from _tensors(inner, depth + 1) if inner.ByteSize() else ()


def _spec(value: Any, path: Path) -> TensorSpec:
    """Return the spec of a graph value; symbolic sizes keep their names, unknown ones are named by position."""
    from onnx import helper

    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise NotUsableError(
            f"expected tensors as inputs, {value.name!r} is a sequence, a map or an optional",
            where=str(path),
            hint="Export the model again with tensors only",
        )
    dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if dtype not in DTYPES:
        raise NotUsableError(
            f"{value.name!r} is of dtype {'string' if dtype == 'object' else dtype}",
            where=str(path),
            hint=f"Known: {', '.join(DTYPES)}",
        )
    shape: list[int | str] = []
    for axis, dim in enumerate(tensor.shape.dim):
        fixed = dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None
        named = "" if _UNNAMED.fullmatch(dim.dim_param) else re.sub(r"\W", "_", dim.dim_param)
        named = BATCH if named.lower() in BATCHES else named
        shape.append(fixed or named or f"{keyword(value.name)}_{axis}")
    return TensorSpec(value.name, dtype, tuple(shape))


def _uncertain(inputs: list[TensorSpec], model: Any) -> frozenset[str]:
    """Return the symbolic sizes of inputs that may be the batch: those without a name, and named ones in front."""
    named = {
        re.sub(r"\W", "_", dim.dim_param)
        for value in model.graph.input
        for dim in value.type.tensor_type.shape.dim
        if not _UNNAMED.fullmatch(dim.dim_param)
    }
    sure = any(spec.batched for spec in inputs)
    return frozenset(
        size
        for spec in inputs
        for axis, size in enumerate(spec.shape)
        if isinstance(size, str) and size != BATCH and (size not in named or (axis == 0 and not sure))
    )


def _with_batch(inputs: Specs, outputs: Specs, uncertain: frozenset[str]) -> tuple[Specs, Specs]:
    """Call the first sizes of inputs that nothing else is known of "batch", until they are tried.

    Of outputs those of the same name, and where they have none all.
    """
    named = {str(spec.shape[0]) for spec in inputs if spec.shape and spec.shape[0] in uncertain}
    own = {f"{spec.keyword}_0" for spec in inputs} & named
    first = own or (named if len(named) == 1 else set())

    def renamed(spec: TensorSpec, own: set[str]) -> TensorSpec:
        shape = tuple(BATCH if size in first | own else size for size in spec.shape)
        return TensorSpec(spec.name, spec.dtype, shape)

    given = tuple(renamed(spec, set()) for spec in inputs)
    nameless = {spec.name: {f"{spec.keyword}_0"} for spec in outputs}
    return given, tuple(renamed(spec, set(nameless[spec.name])) for spec in outputs)


def _overridden(plan: Plan, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    given = {spec.name: spec for spec in map(TensorSpec.parse, plan.inputs)}
    foreign = set(given) - {spec.name for spec in inputs}
    if foreign:
        known = ", ".join(spec.name for spec in inputs)
        raise UsageError(
            f"the graph has no input {sorted(foreign)[0]!r}", where="--input", hint=f"Known: {known}"
        )
    return tuple(given.get(spec.name, spec) for spec in inputs)


def _unsafe(path: Path, message: str) -> UnsafeSourceError:
    return UnsafeSourceError(
        message, where=str(path), hint="Keep the weights in plain files beside the model"
    )


def _shown(name: str) -> str:
    return repr(shortened(name, MAX_NAME))
