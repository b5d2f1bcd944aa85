"""Signedness of int8 weights in a written model, as the machine at hand needs it.

A model made on a CPU with VNNI has signed weights; without VNNI they would saturate, and with it unsigned ones
are slower. Both forms hold the same numbers, so an artifact that moves is converted when it is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infer import paths
from infer.load.sources.onnx_external_data import check_external
from infer.onnx.export import save
from infer.onnx.rewrite import drop_unused

from .layers.int8 import FORM_KEY, Signs, flipped

if TYPE_CHECKING:
    import onnx_ir as ir


def form_of(path: Path) -> str:
    """Read the signs from the model's metadata; empty for models without int8 layers."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    check_external(model, path, hard_links=True)
    return {entry.key: entry.value for entry in model.metadata_props}.get(FORM_KEY, "")


def adapt_signedness(path: Path, signs: Signs) -> Path:
    """Return `path` when its weights suit `signs`, else a converted copy in the user's cache."""
    form = form_of(path)
    if form in ("", signs):
        return path
    place = paths.cache("signs") / f"{_digest(path)}-{signs}" / path.name
    if not place.exists():
        import onnx_ir as ir

        model = ir.load(str(path))
        flip(model)
        model.metadata_props[FORM_KEY] = signs
        save(model, place)
    return place


def flip(model: ir.Model) -> None:
    """Flip the signedness of every int8 weight of an integer product, with its zero point, in place."""
    for node in model.graph:
        if node.op_type == "MatMulInteger":
            _flip_input(model.graph, node, 1)
            _flip_input(model.graph, node, 3)
        elif node.op_type == "Conv" and _is_quantized(node.inputs[0]) and _is_quantized(node.inputs[1]):
            quantizer: Any = node.inputs[1].producer()  # type: ignore[union-attr]
            _flip_input(model.graph, quantizer, 0)
            _flip_input(model.graph, quantizer, 2)
    drop_unused(model.graph)


def _is_quantized(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    return node is not None and node.op_type == "DequantizeLinear"


def _flip_input(graph: ir.Graph, node: ir.Node, index: int) -> None:
    import onnx_ir as ir

    value = node.inputs[index]
    if value is None or value.const_value is None:
        return
    name = f"{value.name}/flipped"
    if name not in graph.initializers:
        array = np.ascontiguousarray(flipped(value.const_value.numpy()))
        tensor = ir.tensor(array, name=name)
        graph.register_initializer(ir.val(name, tensor.dtype, list(array.shape), const_value=tensor))
    node.replace_input_with(index, graph.initializers[name])


def _digest(path: Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    for file in (path, path.with_name(path.name + ".data")):
        if file.exists():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
