"""ONNX sources: copied into an artifact with their external data, or quantized to int8."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ... import rows as rows_of
from ...coverage import Coverage
from ...errors import NotUsableError
from ...graph.program import Graph, OnnxGraph
from ...graph.typical_inputs import typical_inputs
from ...load.sources.onnx_external_data import check_external, external_files
from ...load.sources.onnx_file import quantized_nodes
from ...plan import Plan
from ...spec import BATCH
from ..export import IR_VERSION_CAP, save
from ..rewrite import DOMAIN, GraphBuilder, RewriteResult, drop_unused
from . import FORMATS, FP16, INT8, OPTION, WEIGHTS, source_weights, static_int8, weight_effects

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..rewrite import Rewriter

OLDEST_OPSET = 11  # of the operators that int8 layers are written with
FEW_ROWS = 8  # of a call that tries a weight
SMALLEST_WEIGHT = 16  # rows and columns below which int8 gains nothing


def copy(source: Path, path: Path) -> None:
    """Copy a model, its external data files beside it under the names it uses.

    Files of old exporters list their weights as inputs too, so that a caller may replace them, and ONNX Runtime leaves
    out the optimizations that depend on them; an artifact does not take them as inputs. Other files stay byte by byte.
    Raises `SourceError` when a name points outside the model's folder or the file is absent.
    """
    import onnx

    path.parent.mkdir(parents=True, exist_ok=True)
    model = onnx.load(str(source), load_external_data=False)
    check_external(model, source, hard_links=True)
    for name in sorted(external_files(model)):
        place = path.parent / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, place)
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    if len(inputs) == len(model.graph.input):
        shutil.copyfile(source, path)
        return
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, source_weights.SEPARATE_IR_VERSION)
    onnx.save(model, str(path))


def already_quantized(source: Path) -> str:
    """Name the operators of a model that was quantized before, `12 QuantizeLinear, 8 QLinearConv`; else ""."""
    import onnx

    nodes = quantized_nodes(onnx.load(str(source), load_external_data=False))
    return ", ".join(f"{count} {name}" for name, count in nodes.most_common(4))


def refusal(graph: Graph, plan: Plan, formats: Sequence[str] = FORMATS) -> str | None:
    """Return why the plan's format or dtype can't be given to a file whose graph stays, or None."""
    if plan.quant not in ("none", *formats):
        return f"an ONNX source takes --quant {', '.join(formats)} or none, not {plan.quant}: its layers are lowered"
    if plan.quant != "none" and isinstance(graph, OnnxGraph) and (nodes := already_quantized(graph.path)):
        return f"the model is quantized already ({nodes}): --quant none keeps it as it is"
    if plan.dtype not in ("float32", "auto"):
        return f"an ONNX source keeps its own dtype; --dtype {plan.dtype} needs the PyTorch model"
    return None


def weight_format(plan: Plan) -> str:
    """Return the format of a file's weights: the backend option `weights`, else the plan's format."""
    return plan.backend_options.get(OPTION, plan.quant_name)


def more_exact(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return the options with which the weights of a file would lose less, the smallest first; see `Lowered`."""
    if plan.quant not in ("int8", "int8:weight") or OPTION in plan.backend_options:
        return ()
    return tuple((OPTION, value) for value in WEIGHTS.values[1:])


def few_rows(graph: OnnxGraph) -> dict[str, Tensor]:
    """Return one small batch to try weights on: rows that judge nothing, where there are any."""
    low, high = graph.sizes.get(BATCH, (1, 1))
    step = graph.multiples.get(BATCH, 1)
    batch = max(min(FEW_ROWS, high) // step * step, low)
    samples = graph.calibration or graph.samples
    spread = torch.linspace(0, rows_of.count(graph.inputs, samples) - 1, batch).long()
    return typical_inputs(graph.inputs, rows_of.take(graph.inputs, samples, spread), graph.sizes, batch)


def input_ranges(source: Path, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the largest magnitude of each input of a product or 2-D convolution over calibration batches."""
    return static_int8.input_ranges(source, batches, copy)


def quantize(
    source: Path,
    path: Path,
    rewriter: Rewriter | None,
    ranges: Mapping[str, float] | None = None,
    format: str = INT8,
    rows: Mapping[str, Tensor] | None = None,
) -> tuple[RewriteResult, Coverage]:
    """Write the model with int8 weights for products and embeddings; other large weights are stored as int8.

    Of a file that is older than the operators of int8 layers all weights are stored, for ONNX Runtime, and so they are
    with `format` fp16, which has no operators; without a `rewriter` all but embeddings are. mixed and finer store those
    as fp16 that move the outputs for `rows` most.

    With `ranges` of inputs the products, and 2-D convolutions too, get stored scales of them (`int8:static`).
    `rewriter` writes the quantized products and convolutions.
    """
    import onnx_ir as ir

    ranges = ranges or {}
    model = ir.load(str(source))
    graph = model.graph
    is_old = model.opset_imports.get("", 0) < OLDEST_OPSET
    if is_old and ranges:
        _refuse_opset(model, source)
    stores_only = is_old or format == FP16
    stored = source_weights.find(model, format)
    if (reduction := weight_effects.REDUCTIONS.get(format)) is not None:
        if rows is None:
            raise ValueError(f"{format} weights are chosen on rows")
        stored.halved |= weight_effects.worst(source, rows, reduction)
    written = set(graph.initializers)
    embeddings, read = 0, dict[str, str]()
    for node in list(graph) if not stores_only else ():
        if ranges and static_int8.mark_conv(graph, node, ranges):
            continue
        if any(value is not None and value.name in stored.halved for value in node.inputs):
            continue
        if rewriter is not None and (weight := _weight(node)) is not None:
            name = "" if node.inputs[0] is None else str(node.inputs[0].name)
            read[_mark(graph, node, weight)] = name
        elif (table := _table(node)) is not None:
            emit = GraphBuilder(graph, node)
            emit.replace(source_weights.gather(emit, table))
            embeddings += 1
    model.opset_imports[DOMAIN] = 1
    static_int8.make_static(graph, ranges, read)
    done = RewriteResult() if rewriter is None else rewriter(model)
    written = set(graph.initializers) - written
    done.forms += Counter({"int8 embedding": embeddings} if embeddings else {})
    kept = {name: value for name, value in graph.initializers.items() if name not in written}
    if count := source_weights.store(graph, stored, kept):
        done.forms[f"{format} weights"] += count
    coverage = stored.count(graph, written)
    drop_unused(graph)
    if not coverage.quantized_values:
        reasons = "; ".join(f"{kind}: {left.reason}" for kind, left in list(coverage.left.items())[:3])
        raise NotUsableError(
            f"no weight of this model can be {format} ({reasons or 'it stores none'})",
            hint="Use --quant none",
        )
    model.ir_version = min(model.ir_version, max(IR_VERSION_CAP, 3))
    save(model, path)
    return done, coverage


def _refuse_opset(model: ir.Model, source: Path) -> None:
    raise NotUsableError(
        f"integer products need an ONNX source of opset {OLDEST_OPSET} or above, this one has "
        f"{model.opset_imports.get('', 0)}",
        where=str(source),
        hint="--backend ort --quant int8 stores its weights as int8; or export it again",
    )


def _weight(node: ir.Node) -> np.ndarray | None:
    """Return the weight [K, N] of a product with a stored float32 matrix, its factor included, else None."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    value = node.inputs[1]
    array = None if value is None else source_weights.weight_of(value)
    if array is None or array.ndim != 2 or min(array.shape) < SMALLEST_WEIGHT or not np.isfinite(array).all():
        return None
    if node.op_type == "MatMul":
        return array
    array = array.T if node.attributes.get_int("transB", 0) else array
    return array * np.float32(node.attributes.get_float("alpha", 1.0))


def _table(node: ir.Node) -> np.ndarray | None:
    """Return the rows of an embedding, else None."""
    value = node.inputs[0] if node.domain == "" and node.op_type == "Gather" else None
    if value is None or node.attributes.get_int("axis", 0) != 0:
        return None
    array = source_weights.weight_of(value)
    large = array is not None and array.ndim == 2 and array.size >= source_weights.SMALLEST
    return array if large and np.isfinite(array).all() else None  # type: ignore[arg-type]


def _mark(graph: ir.Graph, node: ir.Node, weight: np.ndarray) -> str:
    """Insert an `infer::linear_int8` node in place of a product; per output channel, absmax / 127. Return its name."""
    import onnx_ir as ir

    codes, scale = source_weights.quantized(np.ascontiguousarray(weight.T), 0)
    emit = GraphBuilder(graph, node)
    # A weight that is shared may be scaled, or turned, differently by each of its products.
    name = f"{emit.weight_name}/{emit.prefix}"
    x: Any = node.inputs[0]
    turned = node.attributes.get_int("transA", 0) if node.op_type == "Gemm" else 0
    if turned:
        x = emit("Transpose", x, perm=[1, 0])
    layer = [x, emit.constant(f"{name}/codes", codes), emit.constant(f"{name}/step", scale.reshape(-1))]
    bias = _bias(emit, node)
    output = ir.val(f"{emit.prefix}/int8")
    is_vector = bias is not None and bias.const_value is not None and bias.const_value.numpy().ndim == 1
    if is_vector and bias.const_value.numpy().size == len(codes):
        layer.append(bias)
        bias = None
    emit.nodes.append(
        ir.node("linear_int8", layer, domain=DOMAIN, outputs=[output], name=f"{emit.prefix}/linear")
    )
    emit.replace(output if bias is None else emit("Add", output, bias))
    return f"{emit.prefix}/linear"


def _bias(emit: GraphBuilder, node: ir.Node) -> Any:
    """Return the addend of a Gemm, multiplied by its beta."""
    bias: Any = node.inputs[2] if len(node.inputs) > 2 else None
    beta = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
    if bias is None or beta == 1.0:
        return bias
    if bias.const_value is None:
        return emit("Mul", bias, emit.scalar(beta))
    scaled = (bias.const_value.numpy() * np.float32(beta)).astype(np.float32)
    return emit.constant(f"{bias.name}/{emit.prefix}/beta", scaled)
