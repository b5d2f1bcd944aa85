"""Values that rounding inside the original decides are not judged; others at the same inputs are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime")

import infer  # noqa: E402
from backends import ort  # noqa: E402
from infer import Plan  # noqa: E402
from infer.errors import GateError  # noqa: E402
from infer.run import stages  # noqa: E402


def network(*, norms: bool) -> nn.Module:
    """Return convolutions, whose outputs at zeros are constants: of those a norm leaves rounding alone, made large."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16, 16, 16):
        norm = nn.InstanceNorm2d(16, affine=True) if norms else nn.Identity()
        layers += [nn.Conv2d(channels, 16, 3, padding=1), norm, nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 4, 1)).eval()


def plan_of(folder: Path, *, norms: bool) -> Plan:
    torch.save(network(norms=norms), folder / "model.pt")
    return Plan(
        source=str(folder / "model.pt"),
        inputs=("input=float32[batch,3,16,16]",),
        trust_code=True,
        backend="ort",
        batches=(),
        allow_slower=True,
    )


def at_zeros(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Plant a fault that shows at inputs of zero alone."""
    exact = ort.open

    def faulty(folder: Path, device: str) -> Any:
        runner = exact(folder, device)
        run = runner.run

        def changed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            zero = not any(bool(value.any()) for value in inputs.values())
            return {name: change(value) if zero else value for name, value in run(inputs).items()}

        runner.run = changed
        return runner

    monkeypatch.setattr(ort, "open", faulty)


def test_a_norm_of_constants_does_not_refuse_a_model(tmp_path: Path) -> None:
    made = stages.optimize(plan_of(tmp_path, norms=True), tmp_path / "model.infer")
    zeros = [row for row in made.report.fidelity if row.subject == "values of zero"]
    assert zeros
    assert all("beyond what rounding does in the original" in row.why for row in zeros)


@pytest.mark.parametrize(
    ("norms", "change"),
    [
        (False, lambda value: value * 1.1),
        (True, lambda value: value * 100.0),
        (True, lambda value: value * float("nan")),
    ],
    ids=["steady", "large", "nan"],
)
def test_a_fault_at_zeros_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norms: bool, change: Callable[[Tensor], Tensor]
) -> None:
    at_zeros(monkeypatch, change)
    with pytest.raises(GateError, match="values of zero"):
        stages.optimize(plan_of(tmp_path, norms=norms), tmp_path / "model.infer")


def test_the_weights_of_a_judged_module_stay_to_the_bit() -> None:
    model = network(norms=True)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan, 1e-45]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    infer.compile(model, torch.randn(2, 3, 16, 16), backend="ort", allow_slower=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value.view(torch.int32), before[name].view(torch.int32)), name


@pytest.mark.parametrize("factor", [1.0, 1.1], ids=["right", "planted"])
def test_a_file_whose_sizes_follow_from_constants_is_judged_at_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    onnx = pytest.importorskip("onnx")
    text = (
        '<ir_version: 9, opset_import: ["" : 17]> g (float[batch, 3, 10, 10] x) => (float[batch, 4, h, w] y)'
        "<float[4] scales = {1.0, 1.0, 1.7, 2.0}, float[4, 3, 3, 3] k, float[4] b = {0.3, 0.7, -0.2, 1.1}> {"
        "c = Conv(x, k, b)\n r = Relu(c)\n y = Resize(r, , scales) }"
    )
    model = onnx.parser.parse_model(text)
    kernels = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0)).numpy()
    model.graph.initializer.append(onnx.numpy_helper.from_array(kernels, "k"))
    onnx.save(model, str(tmp_path / "m.onnx"))
    at_zeros(monkeypatch, lambda value: value * factor)
    plan = Plan(source=str(tmp_path / "m.onnx"), backend="ort", batches=(), allow_slower=True)
    if factor == 1.0:
        stages.optimize(plan, tmp_path / "model.infer")
        return
    with pytest.raises(GateError, match="values of zero"):
        stages.optimize(plan, tmp_path / "model.infer")
