"""A layer of experts by llama.cpp: gate, up and down projections as `MUL_MAT_ID` of q4_0 weights, in ggml's own graph.

Weights are random codes with one scale, laid out as llama.cpp itself lays them out on this CPU. The weighted sum over
the experts of a token is left out, in its favour.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.kernels import linear_ggml as ggml

I32 = 26  # of enum ggml_type
SCALE = 1 / 64
NODES = 16


def missing() -> str | None:
    """Return the reason why llama.cpp can't be measured, or None."""
    return ggml.missing()


class GgmlExperts:
    """Layer of experts of sizes hidden → intermediate → hidden, for tokens that ask for `top_k` of them each."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, sequences: int) -> None:
        library = _library()
        self._top_k, self._sizes = top_k, (sequences, top_k, hidden)
        room = library.ggml_tensor_overhead() * 32 + library.ggml_graph_overhead_custom(NODES, False)
        weights, rest = (library.ggml_init(ggml.InitParams(room, None, True)) for _ in range(2))
        shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        matrices = [
            library.ggml_new_tensor_3d(weights, ggml.Q4_0, columns, rows, experts) for rows, columns in shapes
        ]
        self._x = library.ggml_new_tensor_3d(rest, ggml.F32, hidden, 1, sequences)
        self._chosen = library.ggml_new_tensor_2d(rest, I32, top_k, sequences)
        gate, up = (library.ggml_mul_mat_id(rest, one, self._x, self._chosen) for one in matrices[:2])
        between = library.ggml_swiglu_split(rest, gate, up)
        self._output = library.ggml_mul_mat_id(rest, matrices[2], between, self._chosen)
        self._graph = library.ggml_new_graph_custom(rest, NODES, False)
        library.ggml_build_forward_expand(self._graph, self._output)
        plain = library.ggml_backend_cpu_buffer_type()
        library.ggml_backend_alloc_ctx_tensors_from_buft(weights, ggml.repacking_buffer_type() or plain)
        library.ggml_backend_alloc_ctx_tensors_from_buft(rest, plain)
        self._first = list[Tensor]()  # the first experts of each matrix, float32 [top_k, rows, columns]
        for one, (rows, columns) in zip(matrices, shapes, strict=True):
            codes = _codes(experts * rows, columns)
            library.ggml_backend_tensor_set(one, codes.ctypes.data, 0, codes.nbytes)
            first = codes[: top_k * rows * columns // ggml.BLOCK_WEIGHTS]
            self._first.append(_dequantized(first).reshape(top_k, rows, columns))
        self._backend = ggml.shared_backend(torch.get_num_threads())
        self._library = library

    def set_input(self, x: Tensor) -> None:
        """Set the tokens, float32 [sequences, hidden]."""
        self._library.ggml_backend_tensor_set(self._x, x.contiguous().data_ptr(), 0, x.nbytes)

    def run(self, chosen: Tensor) -> None:
        """Compute the layer for the experts int32 [sequences * top_k] of the tokens."""
        self._library.ggml_backend_tensor_set(self._chosen, chosen.data_ptr(), 0, chosen.nbytes)
        if (status := self._library.ggml_backend_graph_compute(self._backend, self._graph)) != 0:
            raise RuntimeError(f"ggml_backend_graph_compute: status {status}")

    def output(self) -> Tensor:
        """Return the outputs of the last run, float32 [sequences, top_k, hidden]."""
        found = torch.empty(self._sizes)
        self._library.ggml_backend_tensor_get(self._output, found.data_ptr(), 0, found.nbytes)
        return found

    def error(self, x: Tensor) -> float:
        """Return the relative error of the first experts on tokens x, against float32 products of equal codes."""
        self.set_input(x)
        self.run(torch.arange(self._top_k).repeat(len(x)).int())
        gate, up, down = self._first
        each = [(F.silu(x @ gate[i].T) * (x @ up[i].T)) @ down[i].T for i in range(self._top_k)]
        expected = torch.stack(each, 1)
        return float((self.output() - expected).norm() / expected.norm())


def _codes(rows: int, columns: int) -> np.ndarray:
    """Return blocks of q4_0 as uint8 [rows * columns / 32, 18]."""
    codes = np.random.default_rng(0).integers(
        0, 256, (rows * columns // ggml.BLOCK_WEIGHTS, ggml.BLOCK_BYTES), np.uint8
    )
    codes[:, :2] = np.frombuffer(np.float16(SCALE).tobytes(), np.uint8)
    return codes


def _dequantized(codes: np.ndarray) -> Tensor:
    nibbles = np.concatenate([codes[:, 2:] & 15, codes[:, 2:] >> 4], 1).astype(np.float32)
    return torch.from_numpy((nibbles - 8) * np.float32(SCALE))


def _library() -> ctypes.CDLL:
    library: Any = ggml.ggml_library()
    for name, given in {
        "ggml_new_tensor_3d": (c_void_p, c_int, *[ctypes.c_int64] * 3),
        "ggml_mul_mat_id": (c_void_p,) * 4,
        "ggml_swiglu_split": (c_void_p,) * 3,
    }.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c_void_p, given
    return library  # type: ignore[no-any-return]
