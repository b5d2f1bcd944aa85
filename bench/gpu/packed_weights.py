"""Layers of known models with random packed weights for `quantized_linear.py`, and their exact products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from infer.kernels.gpu import kernel_thresholds, linear_codes
from infer.kernels.gpu.int8 import int8_gemm, int8_gemv
from infer.kernels.gpu.int8 import linear_int8 as int8
from infer.kernels.gpu.lut import lut_gemm, lut_gemv
from infer.kernels.ops import bitpack, linear_int8, linear_lut4_fragments
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.ops.linear_fp8 import to_float8

OPS = torch.ops.infer
# [out_features, in_features] of Llama 3.2 1B, Llama 3.1 8B and 70B
LAYERS = {
    "1B query": (2048, 2048),
    "1B up": (8192, 2048),
    "1B down": (2048, 8192),
    "1B head": (128256, 2048),
    "8B key": (1024, 4096),
    "8B query": (4096, 4096),
    "8B up": (14336, 4096),
    "8B down": (4096, 14336),
    "8B head": (128256, 4096),
    "70B query": (8192, 8192),
    "70B up": (28672, 8192),
    "70B down": (8192, 28672),
}
USUAL = (
    "lut4_fragments",
    "int4_fragments",
    "lut4",
    "int8",
    "int8_weight",
    "fp8",
)  # measured on every layer; the others on one


@dataclass(frozen=True)
class Weight:
    """A packed weight on the GPU; `op(x, *tensors, bias)` multiplies by it."""

    op: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]
    exact: Callable[[Tensor], Tensor]  # float64 [M, K] → [M, N], by definition

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.op(x, *self.tensors, bias)

    def copy(self) -> Weight:
        return replace(self, tensors=tuple(None if t is None else t.clone() for t in self.tensors))


def _coded(bits: int, n: int, k: int) -> CodedWeight:
    tables = -(-n // bitpack.TABLE_ROWS) if bits != 4 else 1
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device="cuda")
    table = torch.rand(tables, 2**bits, device="cuda").mul(2).sub(1).sort(1).values
    scale = torch.randint(-127, 128, (n, k // 64), dtype=torch.int8, device="cuda")
    return CodedWeight(codes, scale, table, super_scale=torch.rand(n, device="cuda") + 0.1)


def _lut(bits: int, n: int, k: int) -> Weight:
    weight = _coded(bits, n, k)
    return Weight(OPS.linear_codes, weight, lambda x: x @ weight.decode().double().t())


def _fragments(uniform: bool, n: int, k: int) -> Weight:
    portable = _coded(4, n, k)
    if uniform:
        portable = portable._replace(table=(torch.arange(16.0, device="cuda")[None] - 8) / 8)
    weight = portable.decode()

    def run(x: Tensor, *operands: Tensor | None) -> Tensor:
        return OPS.linear_lut4_fragments(x, *operands, n, uniform)

    packed = linear_lut4_fragments.pack(portable, uniform)
    return Weight(run, packed, lambda x: x @ weight.double().t())


def _int8(kind: str, n: int, k: int) -> Weight:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    scale = torch.rand(n, device="cuda") * 0.01 + 0.001

    def exact(x: Tensor) -> Tensor:
        if kind == "int8":
            step = linear_int8.row_step(x.float())
            x = linear_int8.to_grid(x.float(), step).double() * step
        return x @ codes.double().t() * scale

    return Weight(OPS.linear_int8 if kind == "int8" else OPS.linear_int8_weight, (codes, scale), exact)


def _fp8(n: int, k: int) -> Weight:
    codes, step = to_float8(torch.randn(n, k, device="cuda"))
    scale = step[:, 0].contiguous()

    def exact(x: Tensor) -> Tensor:
        q, steps = to_float8(x.float())
        return q.double() @ codes.double().t() * steps * scale

    return Weight(OPS.linear_fp8, (codes, scale), exact)


# Kind → relative error that is allowed beside the rounding of x's type, and how a weight is made. Tensor-core paths
# round the table or the weight to 8 (bfloat16) or 11 bits; the library's float8 product gives bfloat16.
KINDS: dict[str, tuple[float, Callable[[int, int], Weight]]] = {
    "lut4_fragments": (1e-5, partial(_fragments, False)),
    "int4_fragments": (1e-5, partial(_fragments, True)),
    "lut4": (1e-5, lambda n, k: _lut(4, n, k)),
    "int8": (1e-5, lambda n, k: _int8("int8", n, k)),
    "int8_weight": (1e-5, lambda n, k: _int8("int8_weight", n, k)),
    "fp8": (4e-3, _fp8),
    "lut2": (1e-5, lambda n, k: _lut(2, n, k)),
    "lut3": (1e-5, lambda n, k: _lut(3, n, k)),
    "lut6": (1e-5, lambda n, k: _lut(6, n, k)),
}


def crossover_of(kind: str, n: int = 8192, k: int = 8192) -> kernel_thresholds.Crossover:
    """Measure the three paths of `lut4` or `int8` on one layer, and keep where they cross for this GPU."""
    if kind == "int8":
        operand, dtype = KINDS[kind][1](n, k).tensors[0], torch.int8
        paths = {"rows": int8_gemv.linear, "tiles": int8_gemm.products, "library": int8.library}
    else:
        operand, dtype = _coded(int(kind.removeprefix("lut")), n, k), torch.bfloat16
        paths = {"rows": lut_gemv.linear, "tiles": lut_gemm.linear, "library": linear_codes.multiply_decoded}

    def call(path: Callable[..., Tensor], rows: int) -> Callable[[], Tensor]:
        x = torch.randn(rows, k, device="cuda").to(dtype)
        return lambda: path(x, operand)

    device = torch.device("cuda", torch.cuda.current_device())
    return kernel_thresholds.measure(
        kind, device, {name: partial(call, path) for name, path in paths.items()}
    )
