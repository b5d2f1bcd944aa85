"""Quantized layers and attention in operators of ONNX Runtime.

    dynamic      QuantizeLinear per token, MatMulInteger
    static       QuantizeLinear, MatMulInteger
    weight-only  MatMul of weights decoded once
    tables       MatMulNBits: see `table_layers`
    conv2d       QLinearConv where scales are known, else float
    attention    scattered and gathered pages: see `paged_attention`
    float8       decomposed before

`ort-u8u8` stores weights unsigned with zero point 128: without VNNI, x86's 8-bit product of unsigned by signed
saturates at 16 bits and gives wrong sums (13.7 % error where 0.01 % is ideal).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from infer.onnx.decompositions import TABLE_EMBEDDING, TABLE_LINEAR
from infer.onnx.layers import paged_attention_node
from infer.onnx.layers.operands import Weights, float_product, inputs
from infer.onnx.rewrite import GraphBuilder, RewriteResult, drop_unused, rewrite

from . import int8, table_layers
from .int8 import FORM_KEY, Signs

if TYPE_CHECKING:
    import onnx_ir as ir

    from infer.onnx.rewrite import Rewriter, Rule

# Layers that ONNX Runtime can also compute with decoded weights; UNIFORM ones it always multiplies as integers.
INTEGERS = (int8.DYNAMIC, int8.STATIC, int8.STATIC_CONV, table_layers.BLOCKS)


def rewriter(signs: Signs, weights: Weights = "blocks") -> Rewriter:
    """Return what rewrites the nodes of the domain `infer` in a model.

    `weights`: ONNX Runtime computes with codes ("blocks"), or with weights that it decodes once ("float").
    """
    convolution = partial(int8.conv, signs=signs, weights=weights)
    rules: dict[str, Rule] = {
        "linear_int8": partial(int8.dynamic, signs=signs, weights=weights),
        "linear_int8_static": partial(int8.static, signs=signs, weights=weights),
        "linear_int8_weight": lambda emit: float_product(emit, *inputs(emit, 4)),
        TABLE_LINEAR: partial(table_layers.linear, weights=weights),
        TABLE_EMBEDDING: table_layers.embedding,
        "conv2d_int8": convolution,
        "conv2d_int8_weight": convolution,
        "conv2d_int8_static": convolution,
        paged_attention_node.WRITTEN: _written,
    }
    return partial(_rewritten, rules=rules, signs=signs)


def _rewritten(model: ir.Model, rules: Mapping[str, Rule], signs: Signs) -> RewriteResult:
    attention = [node for node in model.graph if node.op_type == paged_attention_node.NAME]
    if attention:
        from . import paged_attention

        done = rewrite(model, {**rules, paged_attention_node.NAME: paged_attention.attend})
        paged_attention.finish(model, attention)
        drop_unused(model.graph)
    else:
        done = rewrite(model, rules)
    if done.forms:
        model.metadata_props[FORM_KEY] = signs
    return done


def integer_layers(done: RewriteResult) -> int:
    """Count the layers written as integer products that could also be computed with decoded weights."""
    return sum(done.forms[form] for form in INTEGERS)


def _written(emit: GraphBuilder) -> tuple[ir.Value, str]:
    return emit("Identity", emit.node.inputs[0]), ""
