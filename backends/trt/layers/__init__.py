"""Quantized layers for TensorRT's parser.

dynamic      refused: activations must be calibrated
static       QuantizeLinear, DequantizeLinear, MatMul
weight-only  DequantizeLinear, MatMul
tables       DequantizeLinear of int4: see `linear`
embeddings   packed rows: see `embeddings`
float8       QuantizeLinear, DequantizeLinear, MatMul
conv2d       QuantizeLinear, DequantizeLinear, Conv
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infer.onnx.decompositions import RUNTIMES, TABLE_EMBEDDING, TABLE_LINEAR, Reader
from infer.onnx.layers.operands import Weights
from infer.onnx.rewrite import rewrite

from . import linear
from .convolutions import conv
from .embeddings import embedding

if TYPE_CHECKING:
    from infer.onnx.rewrite import Rewriter, Rule

PARSER = Reader(RUNTIMES.nodes | {"embedding_int8", "linear_fp8"}, any_embedding=True, plain_masks=False)


def rewriter(weights: Weights = "blocks") -> Rewriter:
    """Return what rewrites the nodes of the domain `infer`.

    With `weights` "float" those that would only stay packed are decoded.
    """
    rules: dict[str, Rule] = {
        "linear_int8": linear.dynamic_int8,
        "linear_int8_static": linear.static_int8,
        "linear_int8_weight": partial(linear.int8_linear, weights=weights),
        "linear_fp8_static": linear.float8_linear,
        TABLE_LINEAR: partial(linear.linear, weights=weights),
        TABLE_EMBEDDING: partial(embedding, weights=weights),
        "embedding_int8": partial(embedding, weights=weights),
        "conv2d_int8": partial(conv, weights=weights),
        "conv2d_int8_weight": partial(conv, weights=weights),
        "conv2d_int8_static": partial(conv, weights=weights),
    }
    return partial(rewrite, rules=rules)
