"""ONNX models: checked, inputs and outputs read from the graph.

Outputs of scikit-learn's converter are sequences of maps and texts. ZipMap turns the tensor of probabilities [rows,
classes] into a list of dictionaries; the tensor itself is taken in its place. An output of another kind, such as the
label as a text, is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...distribution import install
from ...errors import NotUsableError, SourceError
from ...library_errors import first_sentence
from ...paths import OwnedFolder
from ...plan import Plan
from ...spec import BATCH, DTYPES, Finding, TensorSpec, keyword
from ..loaded_model import LoadedModel
from .file_signature import model_of_file
from .onnx_external_data import check_external, external_files

BATCHES = ("batch", "batch_size", "batchsize", "batch_dim", "bs")  # names of the batch axis
_UNNAMED = re.compile(
    r"unk__\d+|-?\d+|\W*"
)  # what exporters call a size without a name: "unk__12", "-1", "?"


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
        raise NotUsableError("an ONNX source needs the package onnx", hint=install("ort"))
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
    """Load an ONNX file; `module` is None, `file` the path, `meta["outputs"]` the output specs.

    Where outputs are no tensors, `file` is a changed copy that lives as long as the loaded model.
    """
    path = Path(plan.source)
    model, num_external = _read_checked(path)
    changes = keep_tensors(model, str(path))
    changed = _written(model, path) if changes else None
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_spec(value, path) for value in model.graph.input if value.name not in weights)
    _refuse_decoder([spec.name for spec in inputs], path)
    if not inputs:
        raise SourceError(
            "the ONNX model has no inputs: its outputs are constants",
            where=str(path),
            hint="Is it the right file?",
        )
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    why = f"{len(model.graph.node)} nodes, {len(weights)} weights, {num_external} in external files"
    findings = [Finding("load", "opset", opset, why=why)]
    findings += [Finding("load", "outputs", "tensors only", why=text) for text in changes]
    nodes = quantized_nodes(model)
    if nodes:
        named = ", ".join(f"{count} {name}" for name, count in nodes.most_common(4))
        findings.append(
            Finding("load", "quantized already", nodes.total(), "nodes", f"{named}: kept as they are")
        )
    outputs = tuple(_spec(value, path) for value in model.graph.output)
    file = path if changed is None else changed.path / path.name
    loaded = model_of_file(plan, "onnx", file, inputs, outputs, _named_sizes(model))
    return replace(
        loaded,
        directory=changed,
        meta={**loaded.meta, "opset": opset, "quantized": bool(nodes)},
        findings=tuple(findings),
        weight_bytes=_bytes_on_disk(model, path),
    )


def _refuse_decoder(inputs: Sequence[str], path: Path) -> None:
    """Raise `NotUsableError` for a decoder of Optimum's: its mask is as long as its KV cache and its tokens."""
    cache = [name for name in inputs if name.startswith("past_key_values.")]
    if cache and {"input_ids", "attention_mask"} <= set(inputs):
        raise NotUsableError(
            f"the ONNX model is a decoder whose KV cache is inputs ({cache[0]} and {len(cache) - 1} more); infer "
            "generates with models of torch, over a cache of its own",
            where=str(path),
            hint="Give the model that it was exported from: its safetensors, or ORG/NAME",
        )


def _bytes_on_disk(model: Any, path: Path) -> int:
    """Return the size of the file and of the external ones that its tensors name, which were checked."""
    return sum((path.parent / name).stat().st_size for name in (path.name, *external_files(model)))


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
    if dtype == "object":
        raise NotUsableError(
            f"expected inputs of numbers, {value.name!r} is of dtype string",
            where=str(path),
            hint="Convert the steps behind the encoders of texts alone (of scikit-learn: pipeline[-1]), and give the "
            "model what the encoders return",
        )
    if dtype not in DTYPES:
        raise NotUsableError(
            f"{value.name!r} is of dtype {dtype}", where=str(path), hint=f"Known: {', '.join(DTYPES)}"
        )
    shape: list[int | str] = []
    for axis, dim in enumerate(tensor.shape.dim):
        fixed = dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None
        named = "" if _UNNAMED.fullmatch(dim.dim_param) else re.sub(r"\W", "_", dim.dim_param)
        named = BATCH if named.lower() in BATCHES else named
        shape.append(fixed or named or f"{keyword(value.name)}_{axis}")
    return TensorSpec(value.name, dtype, tuple(shape))


def _named_sizes(model: Any) -> set[str]:
    """Return the symbolic sizes of inputs that the file gives a name."""
    return {
        re.sub(r"\W", "_", dim.dim_param)
        for value in model.graph.input
        for dim in value.type.tensor_type.shape.dim
        if not _UNNAMED.fullmatch(dim.dim_param)
    }


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
    kept, sentences = [], []
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
            sentences.append(f"{value.name!r}, a sequence of maps, is the tensor {name!r}: columns {shown}")
        else:
            sentences.append(f"left output {value.name!r}: it is {_kind(value)}, not a tensor of numbers")
    if not kept:
        raise NotUsableError(
            f"no output of the model is a tensor of numbers: {'; '.join(sentences)}",
            where=where,
            hint="Export it with its probabilities or scores as a tensor (skl2onnx: options={'zipmap': False})",
        )
    if sentences:
        held = {value.name for value in kept}
        zipped = [n for n in model.graph.node if n.op_type == "ZipMap" and n.input[0] in held]
        for node in zipped:
            model.graph.node.remove(node)
        del model.graph.output[:]
        model.graph.output.extend(kept)
    return sentences


def _written(model: onnx.ModelProto, source: Path) -> OwnedFolder:
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
