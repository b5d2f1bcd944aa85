"""nn.TransformerEncoder and nn.MultiheadAttention: quantized, packed, and still the float model's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from infer import compress, kernels
from infer.compress.assign.layer_calls import count_calls
from infer.compress.assign.partial_forward import Replay
from infer.compress.calibration.input_statistics import calibrate
from infer.fidelity.worst_layers import worst_layers
from infer.graph import capture
from infer.kernels import cpu
from infer.kernels.passes import prepack
from infer.library_errors import quiet
from infer.plan import Plan
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


class Masked(nn.Module):
    """Between its layers torch's encoder hands on nested tensors where a mask hides places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(64, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=mask == 0).mean(1))


def masked_rows() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 7, 64), "mask": (torch.arange(7) < torch.tensor([[7], [3], [1], [5]])).long()}


@torch.no_grad()
def test_calibration_reaches_the_layers_of_an_encoder_with_a_mask() -> None:
    model, rows = Masked().eval(), masked_rows()
    before = torch.backends.mha.get_fastpath_enabled()
    stats = calibrate(model, [rows])
    assert {"encoder.layers.0.linear1", "encoder.layers.1.linear2", "head"} <= stats.keys()
    assert torch.backends.mha.get_fastpath_enabled() == before
    weighed = calibrate(model, [rows], hessian=True, outputs=("out",))
    assert weighed["encoder.layers.1.linear1"].hessian_rows > 0


@torch.no_grad()
def test_layers_of_a_masked_encoder_are_counted_replayed_and_compared() -> None:
    model, rows = Masked().eval(), masked_rows()
    layers = [model.encoder.layers[0].linear1, model.encoder.layers[1].linear2]
    assert len(count_calls(model, layers, [rows])) == 2
    replay = Replay(model, layers, rows)
    assert torch.equal(replay.run(layers[1:])[0], replay.outputs[0])
    small = copy.deepcopy(model)
    compress.quantize_model(small, Plan(source="x", quant="nf4"))
    assert worst_layers(model, small, rows)[0].error > 0
