"""OpenVINO IR: a graph as XML and its weights beside it in a file .bin; inputs and outputs are read from the XML.

Nothing of it is run here, and the package openvino is not needed. The sizes of an IR have no names, but for those that
are fixed: which are rows is found by trying, as for an ONNX file without names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from ...errors import NotUsableError, SourceError
from ...plan import Plan
from ...regular_files import read_regular
from ...spec import Finding, TensorSpec, keyword
from ..loaded_model import LoadedModel
from .file_signature import model_of_file

MAX_XML = 1 << 28  # bytes; a graph of 10,000 layers takes some 10 MB
DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64", "i8": "int8", "u8": "uint8",
    "i16": "int16", "i32": "int32", "i64": "int64", "boolean": "bool",
}  # fmt: skip
PORT_TYPES = {
    "FP32": "f32",
    "FP16": "f16",
    "BF16": "bf16",
    "FP64": "f64",
    "BOOL": "boolean",
}  # and I64 for i64
STATES = ("ReadValue", "Assign")
COMPRESSED = ("i8", "u8", "i4", "u4", "u2", "u3", "u6", "nf4", "f4e2m1", "f8e4m3", "f8e5m2")  # stored codes
AGAINST_ITSELF = (
    "gated against itself: OpenVINO, which alone runs an IR, runs both the reference and the artifact"
)
FROM_MODEL = "Give the model that it was converted from (PyTorch, safetensors, ONNX)"


@dataclass(frozen=True)
class _Port:
    """An output of a layer: its names as a tensor, its element type and its shape, -1 for a size of any number."""

    names: tuple[str, ...]
    precision: str
    shape: tuple[int, ...]


class _Layers:
    """Layers of an IR by number, and the output that each of their inputs comes from."""

    def __init__(self, root: ElementTree.Element) -> None:
        self.by_id = {layer.get("id", ""): layer for layer in root.iterfind("layers/layer")}
        self._origins = {
            edge.get("to-layer", ""): (edge.get("from-layer", ""), edge.get("from-port", ""))
            for edge in root.iterfind("edges/edge")
            if self._type(edge.get("to-layer", "")) == "Result"
        }

    def _type(self, number: str) -> str:
        layer = self.by_id.get(number)
        return "" if layer is None else layer.get("type", "")

    def of_type(self, kind: str) -> Iterator[ElementTree.Element]:
        return (layer for layer in self.by_id.values() if layer.get("type") == kind)

    def origin(self, result: ElementTree.Element) -> _Port:
        """Return the port whose value a result is."""
        number, port = self._origins[result.get("id", "")]
        found = self.by_id[number].find(f"output/port[@id='{port}']")
        if found is None:
            raise KeyError(f"port {port} of layer {number}")
        return _port(found)


def _port(port: ElementTree.Element) -> _Port:
    parts = re.split(r"(?<!\\),", port.get("names", ""))
    shape = tuple(int(dim.text or "-1") for dim in port.iterfind("dim"))
    precision = port.get("precision", "")
    names = tuple(name.replace("\\,", ",") for name in parts if name)
    return _Port(names, PORT_TYPES.get(precision, precision.lower()), shape)


def load_openvino(plan: Plan) -> LoadedModel:
    """Load an IR; `module` is None, `file` the path of its XML, `meta["outputs"]` the output specs.

    Raises `SourceError` for a damaged file or one without its weights, `NotUsableError` for one that keeps state of its
    own or has tensors of types that are not known.
    """
    path = Path(plan.source)
    root = _parsed(path)
    layers = _Layers(root)
    types = Counter(layer.get("type", "") for layer in root.iter("layer"))
    _refuse_state(types, path)
    weights = path.with_suffix(".bin")
    _check_weights(root, weights)
    try:
        declared = tuple(_input(layer, path) for layer in layers.of_type("Parameter"))
        results = [layers.origin(layer) for layer in layers.of_type("Result")]
    except (KeyError, ValueError) as error:
        raise SourceError(f"the graph of the IR is damaged: {error}", where=str(path)) from error
    if not declared or not results:
        what = "inputs" if not declared else "outputs"
        raise SourceError(f"the IR has no {what}", where=str(path), hint="Is it the right file?")
    names = _output_names(results)
    outputs = tuple(_spec(name, port, path) for name, port in zip(names, results, strict=True))
    size = weights.stat().st_size if weights.is_file() else 0
    codes = Counter(
        kind
        for data in root.iterfind(".//layer[@type='Const']/data")
        if (kind := data.get("element_type", "")) in COMPRESSED and _numbers(data.get("size")) > 64
    )
    return replace(
        model_of_file(plan, "openvino", path, declared, outputs, ()),
        limitations=(AGAINST_ITSELF,),
        findings=tuple(_findings(root, types, codes, size)),
        weight_bytes=path.stat().st_size + size,
    )


def _parsed(path: Path) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(read_regular(path, MAX_XML))
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise SourceError(f"the XML of the IR is damaged: {error}", where=str(path)) from error
    version = _numbers(root.get("version"))
    if version < 10:
        raise NotUsableError(
            f"the IR is of version {version}, and OpenVINO reads those from 10 on",
            where=str(path),
            hint=FROM_MODEL,
        )
    return root


def _refuse_state(types: Mapping[str, int], path: Path) -> None:
    count = types[STATES[0]]
    if any(types[kind] for kind in STATES):
        raise NotUsableError(
            f"the IR keeps state from call to call ({count} ReadValue), as the KV cache of a language model, and an "
            "artifact of tensors answers each call by itself",
            where=str(path),
            hint="Give the model that it was converted from: infer optimize FOLDER of its safetensors, or ORG/NAME",
        )


def _check_weights(root: ElementTree.Element, path: Path) -> None:
    """Raise `SourceError` where the file of the weights is absent, or ends before what the graph reads."""
    needed = max(
        (
            _numbers(d.get("offset")) + _numbers(d.get("size"))
            for d in root.iterfind(".//layer[@type='Const']/data")
        ),
        default=0,
    )
    if not needed:
        return
    if not path.is_file():
        raise SourceError(
            f"the weights of the IR are absent: there is no {path.name} beside its XML",
            where=str(path),
            hint="Copy both files of the model into one folder",
        )
    if (have := path.stat().st_size) < needed:
        raise SourceError(
            f"the weights of the IR are cut off: expected at least {needed} bytes, got {have}",
            where=str(path),
            hint="The download or copy was cut off: fetch it again",
        )


def _numbers(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _input(layer: ElementTree.Element, path: Path) -> TensorSpec:
    data, port = layer.find("data"), layer.find("output/port")
    if data is None or port is None:
        raise KeyError(f"layer {layer.get('id')} is an input without data or port")
    text = data.get("shape", "")
    name = _name(_port(port).names) or layer.get("name", "")
    if "..." in text:
        raise NotUsableError(
            f"input {name!r} has any number of axes",
            where=str(path),
            hint="Convert the model again with its shapes",
        )
    sizes = [part.strip() for part in text.split(",") if part.strip()]
    shape = tuple(int(size) if size.isdecimal() else -1 for size in sizes)
    return _spec(name, _Port((), data.get("element_type", ""), shape), path)


def _spec(name: str, port: _Port, path: Path) -> TensorSpec:
    """Return the spec of a tensor; sizes of any number are named by position."""
    if port.precision not in DTYPES:
        raise NotUsableError(
            f"{name!r} is of type {port.precision or 'unknown'}",
            where=str(path),
            hint=f"Known: {', '.join(sorted(set(DTYPES.values())))}",
        )
    shape = tuple(size if size > 0 else f"{keyword(name)}_{axis}" for axis, size in enumerate(port.shape))
    return TensorSpec(name, DTYPES[port.precision], shape)


def _name(names: tuple[str, ...]) -> str:
    """Return the name of a tensor that has several: numbers are those of a tracer."""
    return next((name for name in names if not name.isdecimal()), next(iter(names), ""))


def _output_names(results: list[_Port]) -> list[str]:
    """Name each output, those without a name by number."""
    numbered = ["output"] if len(results) == 1 else [f"output_{index}" for index in range(len(results))]
    named = [_name(port.names) or number for port, number in zip(results, numbered, strict=True)]
    twice = {name for name, count in Counter(named).items() if count > 1}
    return [number if name in twice else name for name, number in zip(named, numbered, strict=True)]


def _findings(
    root: ElementTree.Element, types: Counter[str], codes: Counter[str], size: int
) -> Iterator[Finding]:
    written = root.find("rt_info/Runtime_version")
    maker = "" if written is None else f", written by OpenVINO {written.get('value', '')[:40]}"
    yield Finding("load", "IR", int(root.get("version", "0")), why=f"{types.total()} layers{maker}")
    yield Finding("load", "weights", size / 1e6, "MB", "read by OpenVINO from the .bin")
    if fakes := types["FakeQuantize"]:
        yield Finding("load", "quantized already", fakes, "nodes", f"{fakes} FakeQuantize: kept as they are")
    if codes:
        named = ", ".join(f"{count} {kind}" for kind, count in codes.most_common(4))
        yield Finding("load", "quantized already", codes.total(), "weights", f"{named}: kept as they are")
