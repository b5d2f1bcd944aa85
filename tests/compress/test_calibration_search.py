"""Searches: the native form gives the bits of the slow one; calibration lowers the error of what a layer gives."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from infer import compress, plugins
from infer.compress import assign
from infer.compress.assign import CalibrationSet
from infer.compress.calibration import group_scales, input_rows, input_statistics
from infer.compress.calibration.gptq import factor, fit_with_feedback
from infer.compress.calibration.input_statistics import calibrate, hessian_width
from infer.compress.formats import cluster, fp4, int4
from infer.errors import NotUsableError, UsageError
from infer.kernels import cpu
from infer.plan import Plan
from infer.reporter import Reporter
from infer.spec import Finding, TensorSpec

FORMATS = ["nf4", "nf4:16", "int4", "fp4", "cluster:3", "cluster", "int8:weight"]


def module(name: str) -> ModuleType:
    return plugins.get("infer.compress.formats", name.partition(":")[0])


def fitted(name: str, weight: Tensor, stats: compress.Stats | None) -> Tensor:
    way = module(name)
    return way.dequantize(way.quantize(weight, stats, Plan(source="m.pt", quant=name)))


def correlated(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Draw layer-like inputs: a few directions dominate, columns differ in size."""
    make = torch.Generator().manual_seed(seed)
    few = torch.randn(rows, columns // 8, generator=make) @ torch.randn(columns // 8, columns, generator=make)
    sizes = torch.rand(columns, generator=make) * 3
    return (few / columns**0.5 + 0.1 * torch.randn(rows, columns, generator=make)) * sizes


@pytest.fixture
def every_isa():
    if reason := cpu.why_not():
        pytest.skip(reason)
    before = cpu.isa()
    yield cpu.isas()
    cpu.use_isa(before)


@pytest.mark.parametrize(("entries", "group"), [(4, 64), (8, 64), (16, 64), (64, 64), (16, 16)])
@pytest.mark.parametrize(("rows", "columns", "per_rows"), [(1, 64, False), (3, 128, True), (70, 320, True)])
def test_the_native_scale_search_is_bit_equal_to_the_reference(
    every_isa: list[str], entries: int, group: int, rows: int, columns: int, per_rows: bool
) -> None:
    torch.manual_seed(entries)
    weight = torch.randn(rows, columns) * torch.rand(rows, 1) * 10
    weight[-1, :64] = 0
    table = torch.randn(-(-rows // 32) if per_rows else 1, entries).sort(1).values
    table /= table.abs().amax(1, keepdim=True)
    for importance in (None, torch.rand(columns) ** 4):
        relative = group_scales.relative_importance(importance, columns)
        want = group_scales.fit_slowly(weight, table, relative, group)
        for name in every_isa:
            cpu.use_isa(name)
            got = group_scales.fit(weight, table, importance, group)
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), name


@pytest.mark.parametrize(("entries", "group"), [(4, 16), (16, 32)])
def test_the_native_search_refuses_other_groups(every_isa: list[str], entries: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {group} with tables of {entries}"):
        group_scales.fit(torch.randn(2, 64), torch.linspace(-1, 1, entries)[None], None, group)


def test_without_the_native_library_the_reference_search_is_used(monkeypatch) -> None:
    def gone(progress=None):
        raise NotUsableError("no library")

    weight, table = torch.randn(2, 64), torch.tensor([int4.TABLE])
    want = group_scales.fit(weight, table, None)
    monkeypatch.setattr(group_scales.native, "why_not", lambda: "no compiler")
    monkeypatch.setattr(cpu, "load", gone)
    assert all(torch.equal(a, b) for a, b in zip(want, group_scales.fit(weight, table, None), strict=True))


def test_tables_of_int4_and_fp4() -> None:
    assert tuple(k / 8 for k in range(-8, 8)) == int4.TABLE
    assert [round(value * 6, 6) for value in fp4.TABLE[8:]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert all(low == -high for low, high in zip(fp4.TABLE, reversed(fp4.TABLE), strict=True))
    grid = torch.tensor([[*range(-8, 8)]]).repeat(3, 4) * torch.tensor([[0.5], [-2.0], [1.0]])
    assert torch.equal(fitted("int4", grid, None), grid)


def output_error(x: Tensor, weight: Tensor, got: Tensor) -> float:
    return float((x @ (weight - got).T).norm() / (x @ weight.T).norm())


@pytest.mark.parametrize("name", FORMATS)
def test_gptq_cuts_a_layers_error_on_unseen_rows_by_a_quarter(name: str) -> None:
    layer = nn.Linear(256, 96)
    x, unseen = correlated(3072, 256).split([2048, 1024])
    batches = [{"input": part} for part in x.split(256)]
    diagonal = calibrate(nn.Sequential(layer), batches)["0"]
    strong = calibrate(nn.Sequential(layer), batches, hessian=True)["0"]
    weight = layer.weight.detach()
    errors = [output_error(unseen, weight, fitted(name, weight, s)) for s in (None, diagonal, strong)]
    assert errors[1] < 1.01 * errors[0]
    assert errors[2] < 0.75 * errors[0], errors


@pytest.mark.parametrize("name", ["nf4", "nf4:16", "cluster", "int8:weight"])
def test_gptq_by_blocks_of_rows_equals_gptq_of_the_whole(name: str) -> None:
    layer, way = nn.Linear(128, 65), module(name)
    stats = calibrate(nn.Sequential(layer), [{"input": correlated(64, 128)}], hessian=True)["0"]
    plan = Plan(source="m.pt", quant=name)
    whole = way.quantize(layer.weight.detach(), stats, plan)
    parts = [way.quantize(part, stats, plan) for part in layer.weight.detach().split(32)]
    for key, tensor in compress.join(way, parts).items():
        assert torch.equal(tensor, whole[key]), key


def test_gptq_takes_one_row_and_columns_without_input() -> None:
    layer = nn.Linear(128, 64)
    x = correlated(1, 128)
    x[:, ::2] = 0
    stats = calibrate(nn.Sequential(layer), [{"input": x}], hessian=True)["0"]
    weight = layer.weight.detach()
    assert bool(fitted("nf4", weight, stats).isfinite().all())
    assert output_error(x, weight, fitted("nf4", weight, stats)) < 0.05
    assert bool(factor(0, torch.zeros(4, 4)).upper.isfinite().all())


def test_gptq_does_not_change_a_weight_of_one_row() -> None:
    weight = torch.randn(1, 128)
    given, hessian = weight.clone(), correlated(64, 128).t() @ correlated(64, 128)
    fit_with_feedback(weight, torch.tensor([int4.TABLE]), None, [factor(0, hessian)])
    assert torch.equal(weight, given)


def test_hessians_beyond_memory_become_block_diagonal(monkeypatch) -> None:
    layer, x = nn.Linear(256, 64), correlated(512, 256)
    monkeypatch.setattr(input_statistics, "HESSIAN_BYTES", 256 * 64 * 4)
    assert hessian_width([layer]) == 64
    stats = calibrate(nn.Sequential(layer), [{"input": x}], hessian=True)["0"]
    assert [tuple(h.shape) for h in stats.hessians] == [(64, 64)] * 4
    torch.testing.assert_close(stats.hessians[1], x[:, 64:128].T @ x[:, 64:128], rtol=1e-4, atol=1e-3)
    weight = layer.weight.detach()
    assert output_error(x, weight, fitted("nf4", weight, stats)) < output_error(
        x, weight, fitted("nf4", weight, None)
    )


@pytest.mark.parametrize("padding", ["same", "valid", 1])
def test_hessian_of_a_convolution_is_that_of_its_patches(padding: str | int) -> None:
    layer, x = nn.Conv2d(8, 16, 3, padding=padding, dilation=2), torch.randn(2, 8, 9, 9)
    patches = input_rows.input_patches(layer, x)
    want = layer(x).permute(0, 2, 3, 1).reshape(-1, 16)
    got = patches @ layer.weight.detach().flatten(1).T + layer.bias
    torch.testing.assert_close(got, want)
    stats = calibrate(nn.Sequential(layer), [{"input": x}], hessian=True)["0"]
    torch.testing.assert_close(stats.hessians[0], patches.T @ patches)
    assert stats.importance(72).shape == (72,)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layer(x)


def test_masked_tokens_do_not_enter_calibration() -> None:
    x, mask = torch.randn(2, 3, 8), torch.tensor([[1, 1, 0], [1, 0, 0]])
    stats = calibrate(Masked(), [{"x": x, "attention_mask": mask}], hessian=True)["layer"]
    rows = x[mask.bool()]
    assert stats.num_rows == 3
    torch.testing.assert_close(stats.square_mean, rows.square().mean(0))
    torch.testing.assert_close(stats.hessians[0], rows.T @ rows)


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (33, 128), (64, 384)])
def test_native_codebooks_are_bit_equal_to_the_reference(
    every_isa: list[str], bits: int, rows: int, columns: int
) -> None:
    torch.manual_seed(bits)
    weight = torch.distributions.StudentT(5.0).sample((rows, columns))
    weight[0, :64] = 0
    for importance in (torch.ones(columns), torch.rand(columns) ** 4):
        assert torch.equal(
            cluster.learn(weight, bits, importance), cluster.learn_slowly(weight, bits, importance)
        )
    few = torch.tensor([-1.0, 0.5, 1.0])[torch.randint(0, 3, (rows, columns))]
    ones = torch.ones(columns)
    assert torch.equal(cluster.learn(few, bits, ones), cluster.learn_slowly(few, bits, ones))
    assert torch.equal(cluster.learn(few * 0, bits, ones), cluster.learn_slowly(few * 0, bits, ones))


def seen_by(calibrate: str, rows: int = 8, **asked) -> tuple[dict, Finding | None]:
    """Return the calibration statistics that a plan's quantizer receives, and the finding about them."""
    x = {"input": correlated(rows + 2, 64)}
    held, kept = {"input": x["input"][:2]}, {"input": x["input"][2:]} if rows else {}
    spec = (TensorSpec("input", "float32", ("batch", 64)),)
    model = asked.pop("model", nn.Sequential(nn.Linear(64, 64)))
    plan = Plan(source="m.pt", calibrate=calibrate, **{"quant": "nf4", **asked})
    said = Reporter()
    stats = assign.collect_statistics(plan, CalibrationSet(model, spec, ("y",), "tensors", held, kept), said)
    return dict(stats or {}), next((f for f in said.findings if f.what == "method"), None)


def test_calibration_is_automatic_when_calibration_rows_exist() -> None:
    stats, said = seen_by("auto")
    assert said is not None
    assert said.value == "guided"
    assert " s" in said.why
    assert stats["0"].factors(64)
    stats, said = seen_by("diagonal")
    assert said is not None
    assert said.value == "diagonal"
    assert not stats["0"].factors(64)
    for asked in (
        {"calibrate": "none"},
        {"calibrate": "auto", "rows": 0},
        {"calibrate": "auto", "data": "random"},
    ):
        stats, said = seen_by(**asked)
        assert not stats
        assert said is not None
        assert said.value == "none"
        assert said.why
    assert seen_by("none", quant="int8:static")[0]
    assert seen_by("auto", quant="none") == ({}, None)


def test_impossible_calibration_is_refused() -> None:
    with pytest.raises(NotUsableError, match="only when its weights are in memory"):
        seen_by("gptq", model=None)
    with pytest.raises(UsageError, match="no rows to calibrate with"):
        seen_by("gptq", rows=0)
    assert seen_by("auto", model=None)[0] == {}
