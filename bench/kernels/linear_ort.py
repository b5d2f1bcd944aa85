"""ONNX Runtime's quantized products: one ONNX model whose nodes are the copies of one weight.

`MatMulNBits` with 4 bits, blocks of 64 as ours and accuracy_level 4 (int8 activations); `DynamicQuantizeMatMul`
with weights signed where the CPU has VNNI and unsigned elsewhere, one scale per column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.shared.timing import Side
from infer import device as hardware
from infer.distribution import install

BLOCK = 64


def missing() -> str | None:
    """Return the reason why ONNX Runtime cannot be measured, or None."""
    from importlib.util import find_spec

    absent = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    return f"{absent[0]} is not installed ({install('ort')})" if absent else None


def int4(weight: Tensor, x: Tensor, copies: int) -> Side:
    """Return MatMulNBits: weight float32 [N, K] in blocks of 64 columns, symmetric (zero point 8)."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // BLOCK, BLOCK).numpy()
    scale = np.abs(blocks).max(-1, keepdims=True) / 7
    codes = (np.clip(np.rint(blocks / scale), -8, 7) + 8).astype(np.uint8)
    tensors = {"B": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": scale[..., 0].astype(np.float32)}
    attributes = {"K": columns, "N": rows, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
    return _side("ORT MatMulNBits", "MatMulNBits", tensors, attributes, x, rows, copies)


def int8(weight: Tensor, x: Tensor, copies: int) -> Side:
    """Return DynamicQuantizeMatMul: symmetric weights, one scale per output, activations by tensor."""
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8).t().contiguous().numpy()
    signed = hardware.has_vnni()
    if not signed:
        codes = codes.view(np.uint8) ^ np.uint8(128)
    zero = np.full(weight.shape[0], 0 if signed else 128, codes.dtype)
    tensors = {"B": codes, "b_scale": scale.numpy(), "b_zero_point": zero}
    name = f"ORT DynamicQuantizeMatMul {'U8S8' if signed else 'U8U8'}"
    return _side(name, "DynamicQuantizeMatMul", tensors, {}, x, weight.shape[0], copies)


def _side(
    name: str,
    op: str,
    tensors: dict[str, np.ndarray],
    attributes: dict[str, Any],
    x: Tensor,
    rows: int,
    copies: int,
) -> Side:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    model = _model(op, tensors, attributes, x.shape[1], rows, copies)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    given = onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())
    outputs = [np.empty((x.shape[0], rows), np.float32) for _ in range(copies)]
    binding.bind_ortvalue_input("x", given)
    for index, output in enumerate(outputs):
        binding.bind_ortvalue_output(f"y{index}", onnxruntime.OrtValue.ortvalue_from_numpy(output))

    def run() -> None:
        session.run_with_iobinding(binding)

    def output() -> Tensor:
        run()
        return torch.from_numpy(binding.get_outputs()[0].numpy())

    return Side(name, run, output, copies)


def _model(
    op: str, tensors: dict[str, np.ndarray], attributes: dict[str, Any], columns: int, rows: int, copies: int
) -> bytes:
    """Build x [batch, columns] → y0, y1, … [batch, rows], a com.microsoft node for each copy of the weight.

    From the second on, copies hold their codes rotated: ONNX Runtime merges nodes whose initializers are equal.
    """
    from onnx import TensorProto, helper, numpy_helper

    nodes, initializers, outputs = [], [], []
    for copy in range(copies):
        names = [f"{name}{copy}" for name in tensors]
        initializers += [
            numpy_helper.from_array(np.roll(array, copy), name)
            for name, array in zip(names, tensors.values(), strict=True)
        ]
        nodes.append(helper.make_node(op, ["x", *names], [f"y{copy}"], domain="com.microsoft", **attributes))
        outputs.append(helper.make_tensor_value_info(f"y{copy}", TensorProto.FLOAT, ["batch", rows]))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", columns])
    graph = helper.make_graph(nodes, op, [given], outputs, initializers)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return bytes(model.SerializeToString())
