"""Outputs of an ONNX model as tensors: those of scikit-learn's converter are sequences of maps and texts.

ZipMap turns the tensor of probabilities [rows, classes] into a list of dictionaries; the tensor itself is taken in its
place. An output of another kind, such as the label as a text, is left out.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import NotUsableError
from ...paths import OwnedFolder
from ...spec import DTYPES

if TYPE_CHECKING:
    import onnx

QUANTIZED = frozenset(
    """
    QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul QLinearAdd QLinearMul QGemm
    QLinearSigmoid QLinearGlobalAveragePool MatMulInteger ConvInteger MatMulIntegerToFloat DynamicQuantizeMatMul
    MatMulNBits GatherBlockQuantized QAttention QEmbedLayerNormalization
    """.split()  # noqa: SIM905 - a word is an operator
)


def quantized_nodes(model: onnx.ModelProto) -> Counter[str]:
    """Count the operators of a model that was quantized before."""
    return Counter(node.op_type for node in model.graph.node if node.op_type in QUANTIZED)


def keep_tensors(model: onnx.ModelProto, where: str) -> list[str]:
    """Change the outputs to tensors, in place; return a sentence for each that was changed or left out.

    Raises `NotUsableError` where no tensor is left.
    """
    from onnx import TensorProto, helper

    makers = {name: node for node in model.graph.node for name in node.output}
    kept, said = [], []
    for value in model.graph.output:
        maker = makers.get(value.name)
        if _is_tensor(value):
            kept.append(value)
        elif maker is not None and maker.op_type == "ZipMap":
            labels = [
                item.decode(errors="replace") if isinstance(item, bytes) else str(item)
                for attribute in maker.attribute
                for item in (*attribute.strings, *attribute.ints)
            ]
            name = maker.input[0]
            kept.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, len(labels)]))
            shown = ", ".join(labels[:8]) + (" …" if labels[8:] else "")
            said.append(f"{value.name!r}, a sequence of maps, is the tensor {name!r}: columns {shown}")
        else:
            said.append(f"left output {value.name!r}: it is {_kind(value)}, not a tensor of numbers")
    if not kept:
        raise NotUsableError(
            f"no output of the model is a tensor of numbers: {'; '.join(said)}",
            where=where,
            hint="Export it with its probabilities or scores as a tensor (skl2onnx: options={'zipmap': False})",
        )
    if said:
        held = {value.name for value in kept}
        zipped = [n for n in model.graph.node if n.op_type == "ZipMap" and n.input[0] in held]
        for node in zipped:
            model.graph.node.remove(node)
        del model.graph.output[:]
        model.graph.output.extend(kept)
    return said


def write(model: onnx.ModelProto, source: Path) -> OwnedFolder:
    """Write a changed model, with its external data, under its own name to a temporary folder, which is returned."""
    import onnx

    directory = OwnedFolder("infer-onnx-")
    path = directory.path / source.name
    onnx.load_external_data_for_model(model, str(source.parent))
    large = model.ByteSize() > 1 << 30
    onnx.save(model, str(path), save_as_external_data=large)
    return directory


def _is_tensor(value: onnx.ValueInfoProto) -> bool:
    from onnx import helper

    if not value.type.HasField("tensor_type"):
        return False
    return str(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)) in DTYPES


def _kind(value: onnx.ValueInfoProto) -> str:
    from onnx import TensorProto

    kind = value.type.WhichOneof("value") or "nothing"
    if kind != "tensor_type":
        return "a " + kind.removesuffix("_type").replace("_", " ")
    return f"of dtype {TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()}"
