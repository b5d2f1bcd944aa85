"""nn.TransformerEncoder and nn.MultiheadAttention: quantized, packed, and still the float model's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from infer import compress, kernels
from infer.graph import capture
from infer.kernels import cpu
from infer.kernels.passes import prepack
from infer.plan import Plan
from infer.silence_logs import quiet
from infer.spec import TensorSpec

SPEC = (TensorSpec("x", "float32", ("batch", 7, 64)),)


class Encoder(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **options)  # type: ignore[arg-type]
        self.encoder, self.head = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(64, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_a_quantized_encoder_runs_on_packed_kernels(options: dict[str, object]) -> None:
    if reason := cpu.why_not():
        pytest.skip(reason)
    model = Encoder(**options).eval()
    small = copy.deepcopy(model)
    compress.quantize_model(small, Plan(source="x", quant="int8"))
    x = torch.randn(8, 7, 64)
    graph = capture.capture(small, SPEC, {"x": x})
    programs = [graph.exported, prepack.packed(graph.exported)]
    with quiet(), torch.no_grad():
        planned, _ = prepack.plan_packing(graph.exported)
        planned.run_decompositions(kernels.decompositions())  # as inductor lowers it
    for rows in (1, 3, 8):
        with torch.no_grad():
            expected = model(x[:rows])
            for program in programs:
                got = program.module()(x=x[:rows])
                assert float((got - expected).norm() / expected.norm()) < 0.03
