"""Quantized layers for one target: `infer::linear_int8` and others of the exported model as ONNX operators.

    layer        ort-u8u8, ort-u8s8                             trt
    dynamic      QuantizeLinear per token, MatMulInteger        refused: activations must be calibrated
    static       QuantizeLinear, MatMulInteger                  QuantizeLinear, DequantizeLinear, MatMul
    weight-only  MatMul of weights decoded once                 DequantizeLinear, MatMul
    tables       see `table_layers.py`                          DequantizeLinear of int4, see `dequantize.py`
    embeddings   see `table_layers.py`                          packed rows, see `packed_rows.py`
    float8       decomposed before                              QuantizeLinear, DequantizeLinear, MatMul
    conv2d       QLinearConv where scales are known, else float QuantizeLinear, DequantizeLinear, Conv

`u8u8` stores weights unsigned with zero point 128: without VNNI, x86's 8-bit product of unsigned by signed
saturates at 16 bits and gives wrong sums (13.7 % error where 0.01 % is ideal).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import NotUsableError
from ..graph_builder import GraphBuilder, drop_unused
from . import (
    paged_attention_lowering,
    paged_attention_node,
    table_layers,
    trt_embeddings,
    trt_linear,
)
from .int8_conv import conv
from .int8_linear import Form, dynamic, static, weight_only
from .int8_operands import FORM_KEY, Target, Weights

if TYPE_CHECKING:
    import onnx_ir as ir

DOMAIN = "infer"
_RULES = {
    "linear_int8": dynamic,
    "linear_int8_static": static,
    "linear_int8_weight": weight_only,
}
_TRT_RULES = {
    "linear_lut": trt_linear.linear,
    "linear_int8_weight": trt_linear.int8_linear,
    "linear_fp8_static": trt_linear.float8_linear,
    "embedding_lut": trt_embeddings.embedding,
    "embedding_int8": trt_embeddings.embedding,
}

_IN_TWO_FORMS = ("linear_int8", "linear_int8_static", "conv2d_int8_static", "linear_lut")  # in ONNX Runtime


@dataclass
class RewriteResult:
    """Number of layers by written form, and names of the weights left in float.

    `integers`: layers written as integer products, which ONNX Runtime can also compute with decoded weights.
    """

    forms: Counter[str] = field(default_factory=Counter)
    in_float: list[str] = field(default_factory=list)
    integers: int = 0


def rewrite(
    model: ir.Model, target: Target, form: Form = "token", weights: Weights = "blocks"
) -> RewriteResult:
    """Rewrite every node of the domain `infer` for `target`, in place; other nodes stay.

    `weights` says whether ONNX Runtime computes with codes ("blocks") or with weights that it decodes once ("float"),
    and for TensorRT whether they stay packed or are decoded when the model is written.
    """
    done = RewriteResult()
    attention = [
        node for node in model.graph if node.domain == DOMAIN and node.op_type == paged_attention_node.NAME
    ]
    for node in list(model.graph):
        if node.domain != DOMAIN:
            continue
        emit = GraphBuilder(model.graph, node)
        if node.op_type == paged_attention_node.NAME:
            emit.replace(paged_attention_lowering.attend(emit))
            continue
        if node.op_type == paged_attention_node.WRITTEN:
            emit.replace(emit("Identity", node.inputs[0]))
            continue
        if target == "trt" and node.op_type in _TRT_RULES:
            output, taken = _TRT_RULES[node.op_type](emit, weights)
        elif node.op_type in _RULES:
            output, taken = _RULES[node.op_type](emit, target, form, weights)
        elif node.op_type == "linear_lut":
            output, taken = table_layers.linear(emit, target, weights)
        elif node.op_type == "embedding_lut":
            output, taken = table_layers.embedding(emit, target)
        elif node.op_type.startswith("conv2d_int8"):
            output, taken = conv(emit, target, weights)
        else:
            raise NotUsableError(
                f"infer::{node.op_type} has no ONNX form",
                where=str(node.name),
                hint="Use --backend inductor or eager",
            )
        emit.replace(output)
        done.forms[taken] += 1
        if "in float" in taken:
            done.in_float.append(str(emit.weight_name))
        elif target != "trt" and node.op_type in _IN_TWO_FORMS and taken != table_layers.UNIFORM:
            done.integers += 1
    if attention:
        paged_attention_lowering.finish(model, attention)
    drop_unused(model.graph)
    model.opset_imports.pop(DOMAIN, None)
    if done.forms:
        model.metadata_props[FORM_KEY] = target
    return done
