"""Operators that onnxruntime fuses into the domain com.microsoft, imported: equal to onnxruntime node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import helper  # noqa: E402

from infer.load import onnx_program  # noqa: E402

Array = np.ndarray
RNG = np.random.default_rng(0)


def f(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def i(high: int, *shape: int) -> Array:
    return RNG.integers(0, high, shape)


def q(*shape: int) -> Array:
    return RNG.integers(0, 255, shape).astype(np.uint8)


S, Z = np.float32, np.uint8
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
# Operator, and which case of it → inputs (None: absent), attributes, outputs
CASES: dict[str, tuple[list[Any], dict[str, Any], tuple[str, ...]]] = {
    "FusedMatMul": ([f(2, 3, 4), f(2, 5, 4)], {"transB": 1, "alpha": 0.5}, ("o0",)),
    "Gelu": ([f(2, 5)], {}, ("o0",)),
    "FastGelu": ([f(2, 5), f(5)], {}, ("o0",)),
    "BiasGelu": ([f(2, 5), f(5)], {}, ("o0",)),
    "QuickGelu": ([f(2, 5)], {"alpha": 1.7}, ("o0",)),
    "SkipLayerNormalization": (
        [f(2, 3, 8), f(2, 3, 8), f(8), f(8), f(8)],
        {"epsilon": 1e-5},
        ("o0", "", "", "o3"),
    ),
    "SkipSimplifiedLayerNormalization": ([f(2, 3, 8), f(2, 3, 8), f(8)], {"epsilon": 1e-5}, ("o0",)),
    "EmbedLayerNormalization": (
        [
            i(9, 2, 4).astype(np.int32),
            i(2, 2, 4).astype(np.int32),
            f(9, 8),
            f(16, 8),
            f(2, 8),
            f(8),
            f(8),
            MASK,
        ],
        {"epsilon": 1e-5},
        ("o0", "o1"),
    ),
    "Attention": ([f(2, 4, 8), f(8, 24), f(24)], {"num_heads": 2}, ("o0",)),
    "Attention mask": ([f(2, 4, 8), f(8, 24), f(24), MASK], {"num_heads": 2}, ("o0",)),
    "Attention uni": ([f(2, 4, 8), f(8, 24), f(24)], {"num_heads": 2, "unidirectional": 1}, ("o0",)),
    "Attention len": ([f(2, 4, 8), f(8, 24), f(24), np.array([3, 2], np.int32)], {"num_heads": 2}, ("o0",)),
    "MultiHeadAttention": ([f(2, 4, 8), f(2, 5, 8), f(2, 5, 8), f(24)], {"num_heads": 2}, ("o0",)),
    "MultiHeadAttention mask": (
        [f(2, 4, 8), f(2, 5, 8), f(2, 5, 8), f(24), np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)],
        {"num_heads": 2},
        ("o0",),
    ),
    "MultiHeadAttention bias": (
        [f(2, 4, 8), f(2, 5, 8), f(2, 5, 8), None, None, f(1, 2, 4, 5)],
        {"num_heads": 2},
        ("o0",),
    ),
    "RotaryEmbedding": (
        [f(2, 4, 16), np.array([[0, 1, 2, 3], [4, 5, 6, 7]]), f(10, 4), f(10, 4)],
        {"num_heads": 2},
        ("o0",),
    ),
    "RotaryEmbedding i": ([f(2, 2, 4, 8), np.array([3]), f(10, 4), f(10, 4)], {"interleaved": 1}, ("o0",)),
    "MatMulNBits": (
        [f(2, 32), q(6, 2, 8), f(12)],
        {"K": 32, "N": 6, "bits": 4, "block_size": 16, "accuracy_level": 1},
        ("o0",),
    ),
    "MatMulNBits z": (
        [f(2, 48), q(6, 2, 16), f(12), q(6, 1)],
        {"K": 48, "N": 6, "bits": 4, "block_size": 32},
        ("o0",),
    ),
    "MatMulNBits 8": (
        [f(2, 32), q(6, 2, 16), f(12)],
        {"K": 32, "N": 6, "bits": 8, "block_size": 16},
        ("o0",),
    ),
    "FusedConv": (
        [f(1, 2, 5, 5), f(3, 2, 3, 3), f(3)],
        {"activation": "Relu", "kernel_shape": [3, 3]},
        ("o0",),
    ),
    "FusedGemm": ([f(2, 4), f(4, 3), f(3)], {"activation": "Sigmoid"}, ("o0",)),
    "QLinearAdd": ([q(2, 5), S(0.02), Z(120), q(2, 5), S(0.03), Z(3), S(0.04), Z(70)], {}, ("o0",)),
    "QLinearMul": ([q(2, 5), S(0.02), Z(120), q(2, 5), S(0.03), Z(3), S(0.04), Z(70)], {}, ("o0",)),
    "QLinearSigmoid": ([q(2, 5), S(0.02), Z(120), S(0.004), Z(0)], {}, ("o0",)),
    "QLinearLeakyRelu": ([q(2, 5), S(0.02), Z(120), S(0.02), Z(20)], {"alpha": 0.1}, ("o0",)),
    "QLinearGlobalAveragePool": ([q(1, 3, 4, 4), S(0.02), Z(120), S(0.01), Z(100)], {}, ("o0",)),
    "QLinearConcat": (
        [S(0.05), Z(100), q(2, 5), S(0.02), Z(120), q(2, 3), S(0.03), Z(3)],
        {"axis": 1},
        ("o0",),
    ),
    "MatMulIntegerToFloat": (
        [q(2, 4), q(4, 3), S(0.02), f(3), Z(120), np.full(3, 7, np.uint8), f(3)],
        {},
        ("o0",),
    ),
    "DynamicQuantizeMatMul": ([f(2, 4), q(4, 3), f(3), np.full(3, 7, np.uint8), f(3)], {}, ("o0",)),
    "SimplifiedLayerNormalization": (
        [f(2, 3, 8), f(8)],
        {"axis": -1, "epsilon": 1e-5, "stash_type": 1},
        ("o0",),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fused_operator_equals_onnxruntime(case: str) -> None:
    given, attributes, outputs = CASES[case]
    op = case.partition(" ")[0]
    names = ["" if value is None else f"i{place}" for place, value in enumerate(given)]
    inputs = {name: np.asarray(value) for name, value in zip(names, given, strict=True) if name}
    domain = "" if op == "SimplifiedLayerNormalization" else "com.microsoft"
    node = helper.make_node(op, names, outputs, domain=domain, **attributes)
    specs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in inputs.items()
    ]
    made = [helper.make_empty_tensor_value_info(name) for name in outputs if name]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", specs, made), opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    want = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)
    got = onnx_program.from_proto(model, Path())(**{n: torch.from_numpy(v) for n, v in inputs.items()})
    for expected, mine in zip(want, got, strict=True):
        assert expected.dtype == mine.numpy().dtype
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(mine.numpy(), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_matmulnbits_become_a_linear_layer(bits: int) -> None:
    codes, scales = q(6, 2, 16 * bits // 8), f(12)
    attributes = {"K": 32, "N": 6, "bits": bits, "block_size": 16}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 6])],
        [onnx.numpy_helper.from_array(codes, "w"), onnx.numpy_helper.from_array(scales, "s")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    program, x = onnx_program.from_proto(model, Path()), f(3, 32)
    assert [type(m).__name__ for m in program.children()] == ["Linear"]
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(program(x=torch.from_numpy(x))[0].numpy(), want, rtol=1e-4, atol=1e-4)
