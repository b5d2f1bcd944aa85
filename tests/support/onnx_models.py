"""Small quantized models for the tests of the ONNX lowering, made of the `infer::` operators directly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from infer import device, kernels
from infer.graph import capture, storage
from infer.graph.program import Graph
from infer.kernels.ops.bitpack import pack
from infer.kernels.ops.coded_weight import CodedWeight
from infer.spec import TensorSpec

NAMES = kernels.names()
SATURATES = "ONNX Runtime's products of signed weights saturate on a CPU without VNNI"
# Signedness of the int8 weights that ONNX Runtime multiplies on this CPU without saturating.
ORT_TARGETS = [
    "ort-u8u8",
    pytest.param("ort-u8s8", marks=pytest.mark.skipif(not device.has_vnni(), reason=SATURATES)),
]
OPS = torch.ops.infer


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 codes in ±127 and one scale for each row."""
    scale = weight.flatten(1).abs().amax(1).clamp_min(1e-20) / 127
    return (weight / scale.view(-1, *[1] * (weight.dim() - 1))).round().to(torch.int8), scale


class Int8Linear(nn.Module):
    """`kind` is "", "_static" or "_weight"; `step` the activation scale of a static layer."""

    def __init__(
        self, weight: Tensor, kind: str = "", bias: Tensor | None = None, step: float = 0.03
    ) -> None:
        super().__init__()
        codes, scale = codes_of(weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.register_buffer("step", torch.tensor(step))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "_static":
            return OPS.linear_int8_static(x, self.codes, self.scale, self.step, self.bias)
        return getattr(OPS, f"linear_int8{self.kind}")(x, self.codes, self.scale, self.bias)


class Int8Conv(nn.Module):
    def __init__(self, into: int, out: int, kind: str = "", groups: int = 1, stride: int = 1) -> None:
        super().__init__()
        layer = nn.Conv2d(into, out, 3, groups=groups)
        codes, scale = codes_of(layer.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", layer.bias.detach())
        self.register_buffer("step", torch.tensor(0.03))
        self.kind, self.options = kind, ([stride, stride], [1, 1], [1, 1], groups)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "_static":
            return OPS.conv2d_int8_static(x, self.codes, self.scale, self.step, self.bias, *self.options)
        return getattr(OPS, f"conv2d_int8{self.kind}")(x, self.codes, self.scale, self.bias, *self.options)


class Lut(nn.Module):
    """Random codes of `bits` bits; as a linear layer, or as an embedding when it is given integers."""

    def __init__(self, columns: int, rows: int, bits: int = 4, tables: int = 1, group: int = 64) -> None:
        super().__init__()
        codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
        self.register_buffer("codes", pack(codes, bits))
        self.register_buffer("table", torch.randn(tables, 2**bits).sort(1).values)
        self.register_buffer("scale", torch.randint(1, 127, (rows, columns // group), dtype=torch.int8))
        self.register_buffer("super_scale", torch.rand(rows) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.coded()
        return OPS.linear_codes(x, *weight) if x.is_floating_point() else OPS.embedding_codes(x, *weight)

    def coded(self) -> CodedWeight:
        return CodedWeight(self.codes, self.scale, self.table, super_scale=self.super_scale)


def graph(module: nn.Module, text: str, sample: Tensor, **more: Tensor) -> Graph:
    """Capture `module` with inputs as `input=float32[batch,8]`, several joined by `;`."""
    specs = tuple(TensorSpec.parse(part) for part in text.split(";"))
    samples = {specs[0].name: sample, **more}
    return capture.capture(module.eval(), specs, samples, sizes={"batch": (1, 64), "time": (1, 512)})


def lowered(module: nn.Module, text: str, sample: Tensor, folder: Path) -> Graph:
    """Capture and lower, with the signature for runners written into `folder`."""
    made = graph(module, text, sample)
    storage.save(made, folder)
    return made


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())
