"""Every weight is counted: the share that is quantized is said, and one below a tenth is refused unless asked for."""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from infer import Plan, compress
from infer.cli import main
from infer.compress import QuantizationResult
from infer.coverage import Coverage, enforce
from infer.errors import GateError

PLAN = Plan(source="model.pt", quant="int8")


class Mixing(nn.Module):
    """Most of its weights are in a parameter that its forward uses directly."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.mixing = nn.Parameter(torch.randn(width, 1024) / 8)
        self.norm = nn.LayerNorm(1024)
        self.last = nn.Linear(1024, 3)
        self.register_buffer("table", torch.randn(8, 8))
        self.register_buffer("mask", torch.ones(64, 64).tril())
        self.register_buffer("positions", torch.randn(32, 8), persistent=False)
        self.register_buffer("steps", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x) @ self.mixing))


FILE = """
    import torch
    from torch import nn

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.mixing = nn.Parameter(torch.randn(64, 1024) / 8)
            self.last = nn.Linear(1024, 3)

        def forward(self, x):
            return self.last(self.first(x) @ self.mixing)

    def build():
        torch.manual_seed(0)
        return Mixing()
"""


def cover(model: nn.Module, plan: Plan = PLAN, **formats: str) -> tuple[Coverage, QuantizationResult]:
    found = compress.quantize_model(model, plan, formats=formats)
    reasons = dict(found.refused)
    asked = {name for name, format in formats.items() if format == "float"}
    return compress.cover(model, reasons, asked), found


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "mixing.py").write_text(textwrap.dedent(FILE))
    return f"{tmp_path / 'mixing.py'}:build"


def test_every_weight_counts_once_and_what_stays_float_has_a_reason() -> None:
    model = Mixing()
    total = sum(p.numel() for p in model.parameters()) + model.table.numel()
    coverage, _ = cover(model)
    assert coverage.total_values == total
    assert coverage.formats == {"int8": 64 * 64}
    assert coverage.left["Mixing"].values == 64 * 1024 + 64
    assert "uses its parameters directly" in coverage.left["Mixing"].reason
    assert "there is too little to gain" not in coverage.left["LayerNorm"].reason
    assert coverage.left["LayerNorm"].reason == "vectors are applied in float"
    assert coverage.left["bias"].values == 64
    assert coverage.left["Linear"].values == 3 * 1024 + 3


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(150, 128), nn.Linear(128, 150, bias=False)
            self.head.weight = self.embed.weight
            self.free, self.same = nn.Bilinear(8, 8, 16), nn.Bilinear(8, 8, 16)
            self.same.weight = self.free.weight

    coverage, _ = cover(Tied())
    assert coverage.formats == {"int8": 150 * 128}
    assert coverage.left["Bilinear"].values == 16 * 64 + 2 * 16
    assert coverage.total_values == 150 * 128 + 16 * 64 + 2 * 16


def test_the_share_is_reported_by_values_and_by_bytes() -> None:
    coverage = Coverage()
    coverage.add_quantized("int8", 9_400, 18_800)  # float16
    coverage.add_left("LSTM", 600, 2_400, "no quantized form")
    assert coverage.verdict() == "94 % of the weights are int8"
    first, second = coverage.findings()
    assert (first.what, first.value) == ("share quantized", 0.94)
    assert "9.4 k of 10 k values, 89 % of their bytes" in first.why
    assert (second.what, second.value, second.why) == ("stays float: LSTM", 600, "no quantized form")
    coverage.add_quantized("nf4", 10_000, 40_000)
    assert coverage.verdict() == "97 % of the weights are quantized (50 % nf4, 47 % int8)"


def test_shares_are_never_rounded_to_all_or_nothing() -> None:
    coverage = Coverage()
    coverage.add_quantized("int8", 999_999, 4)
    coverage.add_left("bias", 1, 4, "is added in float")
    assert coverage.verdict() == "99.99 % of the weights are int8"
    few = Coverage({"int8": 1}, 4)
    few.add_left("LSTM", 10**6, 4, "no quantized form")
    assert few.verdict() == "0.01 % of the weights are int8"


def test_quantizing_under_a_tenth_is_refused_with_the_float_layers() -> None:
    coverage, _ = cover(Mixing())
    assert coverage.share < 0.1
    with pytest.raises(GateError, match="only 5.5 % of the weights are int8") as caught:
        enforce(coverage, PLAN)
    assert "Mixing: 65.6 k weights stay float" in str(caught.value)
    assert "--allow-partial" in caught.value.hint
    enforce(coverage, PLAN.with_(allow_partial=True))
    enforce(coverage, PLAN.with_(quant="none"))


def test_layers_that_the_user_keeps_float_are_no_reason_to_refuse() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2048), nn.Linear(2048, 64))
    coverage, _ = cover(model, **{"1": "float", "2": "float"})
    assert coverage.share < 0.1
    assert coverage.left["Linear"].pinned == 2 * 64 * 2048 + 2048 + 64
    enforce(coverage, PLAN)


def test_all_layers_kept_float_by_a_budget_are_no_reason_to_refuse() -> None:
    coverage = Coverage()
    coverage.add_left("Linear", 1000, 4000, "by --bits 32", pinned=True)
    assert coverage.refusal() is None
    assert coverage.verdict() == "0 % of the weights are quantized"


@pytest.mark.parametrize("given", [[], ["--allow-partial"]], ids=["unasked", "asked"])
def test_the_command_line_refuses_a_small_share_unless_asked(
    source: str, tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.infer"
    words = ["optimize", source, "-o", str(target), "--quant", "int8", "--backend", "eager", "--trust-code"]
    code = main(
        [
            *words,
            "--allow-slower",
            "--batch",
            "1",
            "--input",
            "x=float32[batch,64]",
            "--data",
            "random",
            *given,
        ]
    )
    said = capsys.readouterr()
    assert (code, target.exists()) == ((0, True) if given else (4, False)), said.err
    if given:
        manifest = msgspec.json.decode((target / "manifest.json").read_bytes())
        assert "5.6 % of the weights are int8" in manifest["verdict"]
        assert "; 5.6 % of the weights are int8" in said.out
        found = {f["what"]: f for f in manifest["findings"]}
        assert found["share quantized"]["value"] == pytest.approx(4096 / 72_771, rel=1e-6)
        assert found["stays float: Mixing"]["value"] == 64 * 1024
        report = msgspec.json.decode((target / "report.json").read_bytes())
        assert "--allow-partial" in report["command"]
    else:
        assert "only 5.6 % of the weights are int8" in said.err
