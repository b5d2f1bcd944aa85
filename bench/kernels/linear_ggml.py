"""llama.cpp's matrix product for q4_0 weights, called in the library that llama-cpp-python carries.

A graph of MUL_MAT nodes on ggml's CPU backend, whose threads stay between calls. Weights lie in the buffer type
that llama.cpp itself would choose on this CPU ("CPU_REPACK", rows interleaved by eight) or in the plain one.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.shared.timing import Side

F32, Q4_0 = 0, 2  # of enum ggml_type
BLOCK_WEIGHTS, BLOCK_BYTES = 32, 18  # of a q4_0 block: a float16 scale and 16 bytes of codes
MAX_NODES = 1024

_SIGNATURES: dict[str, tuple[Any, ...]] = {  # name → result, arguments
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_quantize_chunk": (
        c_size_t, c_int, POINTER(c_float), c_void_p, c_int64, c_int64, c_int64, c_void_p
    ),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_reg": (c_void_p,),
    "ggml_backend_cpu_buffer_type": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_cpu_set_threadpool": (None, c_void_p, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_free": (None, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_free": (None, c_void_p),
    "ggml_log_set": (None, c_void_p, c_void_p),
}  # fmt: skip


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _ThreadpoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


@cache
def ggml_library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "lib"
    for name in ("ggml-base", "ggml-cpu", "ggml"):
        library = ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.ggml_init.restype, library.ggml_init.argtypes = c_void_p, (InitParams,)
    library.ggml_threadpool_params_default.restype = _ThreadpoolParams
    library.ggml_threadpool_params_default.argtypes = (c_int,)
    library.ggml_threadpool_new.restype = c_void_p
    library.ggml_threadpool_new.argtypes = (POINTER(_ThreadpoolParams),)
    library.ggml_log_set(ctypes.cast(_quiet, c_void_p), None)
    return library


@ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
def _quiet(level: int, text: bytes, data: int) -> None:
    """Drop ggml's log, a line for every repacked tensor."""


@cache
def shared_backend(threads: int) -> int:
    """Return one CPU backend whose threads poll as llama.cpp's own do; kept until the process ends."""
    ggml = ggml_library()
    backend = ggml.ggml_backend_cpu_init()
    pool = ggml.ggml_threadpool_params_default(threads)
    ggml.ggml_backend_cpu_set_n_threads(backend, threads)
    ggml.ggml_backend_cpu_set_threadpool(backend, ggml.ggml_threadpool_new(ctypes.byref(pool)))
    return int(backend)


def repacking_buffer_type() -> int | None:
    """Return the buffer type whose weights are interleaved for this CPU, or None."""
    ggml = ggml_library()
    registry = ggml.ggml_backend_cpu_reg()
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    kinds = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(ggml.ggml_backend_reg_dev_get(registry, 0))
    index = 0
    while kinds and kinds[index]:
        if ggml.ggml_backend_buft_name(kinds[index]) == b"CPU_REPACK":
            return int(kinds[index])
        index += 1
    return None


def sides(weight: Tensor, x: Tensor, copies: int) -> list[Side]:
    """Return q4_0 of weight float32 [N, K] times x float32 [M, K]: plain, and repacked where this CPU has that."""
    kinds = {"llama.cpp q4_0 plain": ggml_library().ggml_backend_cpu_buffer_type()}
    repacking = repacking_buffer_type()
    if repacking is not None and weight.shape[0] % 8 == 0:
        kinds["llama.cpp q4_0"] = repacking
    return [_Product(name, kind, weight, x, copies).side() for name, kind in kinds.items()]


class _Product:
    """A graph of `copies` products and the memory under it; square weights follow each other as layers do."""

    def __init__(self, name: str, kind: int, weight: Tensor, x: Tensor, copies: int) -> None:
        ggml = ggml_library()
        self.name, self.copies, self.shape = name, copies, (x.shape[0], weight.shape[0])
        room = ggml.ggml_tensor_overhead() * (2 * copies + 8) + ggml.ggml_graph_overhead_custom(
            MAX_NODES, False
        )
        weights, rest = (ggml.ggml_init(InitParams(room, None, True)) for _ in range(2))
        rows, columns = weight.shape
        packed = [ggml.ggml_new_tensor_2d(weights, Q4_0, columns, rows) for _ in range(copies)]
        given = ggml.ggml_new_tensor_2d(rest, F32, columns, x.shape[0])
        self.outputs = [ggml.ggml_mul_mat(rest, packed[0], given)]
        for one in packed[1:]:
            self.outputs.append(ggml.ggml_mul_mat(rest, one, self.outputs[-1] if rows == columns else given))
        self.graph = ggml.ggml_new_graph_custom(rest, MAX_NODES, False)
        for output in self.outputs:
            ggml.ggml_build_forward_expand(self.graph, output)
        buffers = [
            ggml.ggml_backend_alloc_ctx_tensors_from_buft(weights, kind),
            ggml.ggml_backend_alloc_ctx_tensors_from_buft(rest, ggml.ggml_backend_cpu_buffer_type()),
        ]
        self._owned = (buffers, (weights, rest))
        codes = (ctypes.c_uint8 * (rows * columns // BLOCK_WEIGHTS * BLOCK_BYTES))()
        dense, given_rows = weight.contiguous(), x.contiguous()
        source = ctypes.cast(dense.data_ptr(), POINTER(c_float))
        ggml.ggml_quantize_chunk(Q4_0, source, codes, 0, rows, columns, None)
        for one in packed:
            ggml.ggml_backend_tensor_set(one, codes, 0, len(codes))
        ggml.ggml_backend_tensor_set(given, given_rows.data_ptr(), 0, given_rows.nbytes)
        self._compute, self._on = ggml.ggml_backend_graph_compute, shared_backend(torch.get_num_threads())

    def run(self) -> None:
        status = self._compute(self._on, self.graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute: status {status}")

    def output(self) -> Tensor:
        self.run()
        result = torch.empty(self.shape)
        ggml_library().ggml_backend_tensor_get(self.outputs[0], result.data_ptr(), 0, result.nbytes)
        return result

    def side(self) -> Side:
        return Side(self.name, self.run, self.output, self.copies)

    def __del__(self) -> None:
        ggml, (buffers, contexts) = ggml_library(), self._owned
        for buffer in buffers:
            ggml.ggml_backend_buffer_free(buffer)
        for context in contexts:
            ggml.ggml_free(context)
