"""Our packed products as sides of the comparison, and the slow reference that checks them.

Rivals run the copies of a weight as one graph. Copies of a square 4-bit weight are layers that follow each other, in
llama.cpp's graph and in ours, which is chained and compiled as `infer optimize` compiles a model. All others of ours
are called one by one from Python. Packed weights lie where opening an artifact puts them, in large pages.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor
from torch import Tensor, nn

from bench.shared.timing import Side
from infer import kernels, plugins
from infer.kernels import cpu
from infer.kernels.cpu.large_pages import LargePages
from infer.kernels.ops import bitpack, linear_packed
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.passes.fused_program import partition
from infer.library_errors import quiet
from infer.plan import Plan

EXACT = 1e-5  # relative: what the order of float32 additions may change


@dataclass(frozen=True)
class Ours:
    """One packed layer: the side to time, its error against the slow reference, the bytes of one copy."""

    side: Side
    twin: Callable[[], Tensor]
    num_bytes: int


def missing() -> str | None:
    """Return the reason why the native kernels cannot be measured, or None."""
    return cpu.why_not()


def lut4(weight: Tensor, x: Tensor, copies: int) -> Ours:
    """Return nf4 with scales of 64 columns: weight float32 [N, K], x float32 [M, K]."""
    portable = _nf4(weight)
    packed = _laid(cpu.pack_lut4(portable), copies)
    op, features = torch.ops.infer.linear_lut4_packed.default, weight.shape[0]
    twin, num_bytes = (lambda: linear_packed.lut4_twin(x, portable)), _bytes(packed[0])
    if copies > 1 and weight.shape[0] == weight.shape[1]:
        graph = _compiled(_Layers(packed, features), x)
        return Ours(
            Side("ours", lambda: graph(x), lambda: op(x, *packed[0], None, features), copies), twin, num_bytes
        )

    def run() -> None:
        for one in packed:
            op(x, *one, None, features)

    return Ours(Side("ours", run, lambda: op(x, *packed[0], None, features), copies), twin, num_bytes)


def _laid(packed: tuple[Tensor, ...], copies: int) -> list[tuple[Tensor, ...]]:
    """Return copies of a packed weight, laid out as `packed.pack` lays the layers of a model."""
    memory = LargePages()
    return [tuple(memory.keep([part.clone()]) for part in packed) for _ in range(copies)]


class _Layers(nn.Module):
    """Copies of one square 4-bit weight as layers, one after the other."""

    def __init__(self, packed: Sequence[tuple[Tensor, ...]], features: int) -> None:
        super().__init__()
        self.count, self.features = len(packed), features
        for copy, tensors in enumerate(packed):
            for part, tensor in enumerate(tensors):
                self.register_buffer(f"part_{copy}_{part}", tensor)

    def forward(self, x: Tensor) -> Tensor:
        op = torch.ops.infer.linear_lut4_packed.default
        for copy in range(self.count):
            x = op(x, *(getattr(self, f"part_{copy}_{part}") for part in range(4)), None, self.features)
        return x


def _compiled(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Compile chained layers by AOTInductor, whose code calls the kernels' C functions; weights stay where they lie."""
    program = partition.fuse_layers(torch.export.export(module, (x,)))
    settings = {
        "aot_inductor.custom_ops_to_c_shims": kernels.c_functions(),
        "aot_inductor.package_constants_in_so": False,
    }
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = str(Path(folder) / "copies.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=settings)
        model = torch._inductor.aoti_load_package(path)
    weights = dict(module.named_buffers())
    wanted = {name: weights[name] for name in model.get_constant_fqns()}
    model.load_constants(wanted, check_full_update=True, user_managed=True)
    return model


@functools.lru_cache(maxsize=1)
def _nf4(weight: Tensor) -> CodedWeight:
    """Quantize once for all batch sizes (tensors are hashed by identity)."""
    parts = plugins.get("infer.compress.formats", "nf4").quantize(weight, None, Plan(source="", quant="nf4"))
    return CodedWeight.of(parts)


def int8(weight: Tensor, x: Tensor, copies: int) -> Ours:
    """Return W8A8: a scale per output, an asymmetric grid per row of x."""
    scale = weight.abs().amax(1) / bitpack.LEVELS
    codes = (weight / scale[:, None]).round().to(torch.int8)
    packed = _laid(cpu.pack_int8(codes, scale), copies)
    op, (features, columns) = torch.ops.infer.linear_int8_packed.default, weight.shape

    def run() -> None:
        for one in packed:
            op(x, *one, None, None, features, columns)

    return Ours(
        Side("ours", run, lambda: op(x, *packed[0], None, None, features, columns), copies),
        lambda: linear_packed.int8_twin(x, codes, scale),
        _bytes(packed[0]),
    )


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def relative(y: Tensor, exact: Tensor) -> float:
    """Return the root mean square error of y over the root mean square of exact."""
    return float((y.double() - exact.double()).norm() / exact.double().norm())
