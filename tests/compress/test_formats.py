"""Formats: error on known distributions, size, exactness of the clustering, what is refused and with which words."""

from __future__ import annotations

import itertools
import re
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from infer import compress, plugins
from infer.compress.calibration.input_statistics import calibrate
from infer.compress.calibration.layer_statistics import BINS, LayerStats
from infer.compress.formats import int8, nf4
from infer.compress.kmeans import optimal_centres
from infer.errors import SourceError, UsageError
from infer.plan import Plan

FORMATS = [
    *("fp16", "int8", "int8:weight", "nf4", "nf4:16", "int4", "fp4"),
    *("cluster:2", "cluster:3", "cluster", "cluster:6"),
]
TABLES = ["nf4", "int4", "fp4"]


def plan(name: str) -> Plan:
    return Plan(source="model.pt", quant=name)


def module(name: str) -> ModuleType:
    return plugins.get("infer.compress.formats", plan(name).quant_name)


def gaussian(rows: int = 64, columns: int = 512) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def student(rows: int = 64, columns: int = 512) -> Tensor:
    torch.manual_seed(2)
    return torch.distributions.StudentT(5.0).sample((rows, columns))


def relative(weight: Tensor, got: Tensor) -> float:
    return float((weight - got).norm() / weight.norm())


def error(name: str, weight: Tensor) -> float:
    return relative(weight, module(name).dequantize(module(name).quantize(weight, None, plan(name))))


def nf4_absmax(weight: Tensor) -> Tensor:
    """Quantize by absolute-maximum scales in full float, the usual method."""
    table = torch.tensor(nf4.TABLE)
    grouped = weight.reshape(weight.shape[0], -1, 64)
    scale = grouped.abs().amax(-1, keepdim=True)
    code = (grouped[..., None] / scale[..., None] - table).abs().argmin(-1)
    return (table[code] * scale).reshape(weight.shape)


@pytest.mark.parametrize("make", [gaussian, student])
def test_nf4_scale_search_beats_absmax_by_five_percent(make) -> None:
    weight = make()
    usual = relative(weight, nf4_absmax(weight))
    assert 0.08 < usual < 0.12
    assert error("nf4", weight) < 0.95 * usual


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("make", [gaussian, student])
def test_a_scale_for_each_16_weights_takes_a_seventh_off_the_error(name: str, make) -> None:
    weight = make()
    assert error(f"{name}:16", weight) < 6 / 7 * error(name, weight)
    tensors = module(name).quantize(weight, None, plan(f"{name}:16"))
    assert tensors["scale"].shape == (64, 512 // 16)
    assert tensors["codes"].shape == (64, 512 // 2)


def test_nf4_scale_search_is_within_half_a_percent_of_exhaustive_search() -> None:
    weight = gaussian(8, 256)
    tensors = nf4.quantize(weight, None, plan("nf4"))
    table, grouped = torch.tensor(nf4.TABLE), weight.reshape(8, 4, 64)
    least = torch.full((8, 4), torch.inf)
    for level in range(-127, 128):
        scale = (level / 127 * tensors["super_scale"])[:, None, None]
        fitted = table[(grouped[..., None] - scale[..., None] * table).abs().argmin(-1)] * scale
        least = torch.minimum(least, (grouped - fitted).square().sum(-1))
    found = (weight - nf4.dequantize(tensors)).square().sum()
    assert least.sum() <= found * (1 + 1e-5)
    assert found <= least.sum() * 1.005


def test_nf4_uses_negative_scales_and_keeps_zero_exact() -> None:
    weight = gaussian()
    weight[3] = 0
    weight[4, 64:128] = 0
    tensors = nf4.quantize(weight, None, plan("nf4"))
    assert (tensors["scale"] < 0).float().mean() > 0.2
    assert torch.equal(nf4.dequantize(tensors)[3], torch.zeros(512))
    assert torch.equal(nf4.dequantize(tensors)[4, 64:128], torch.zeros(64))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e30])
@pytest.mark.parametrize("name", ["int8", "nf4", "nf4:16", "int4", "fp4", "cluster:3"])
def test_the_relative_error_does_not_depend_on_weight_magnitude(name: str, magnitude: float) -> None:
    weight = gaussian(64, 128)
    scaled = module(name).dequantize(module(name).quantize(weight * magnitude, None, plan(name))).double()
    got = ((scaled - weight.double() * magnitude).norm() / (weight.double() * magnitude).norm()).item()
    assert got == pytest.approx(error(name, weight), rel=0.02)


def test_bits_per_weight_include_scales_and_tables() -> None:
    weight = gaussian(64, 256)
    bounds = {
        "nf4": 4.3,
        "int4": 4.3,
        "fp4": 4.3,
        "nf4:16": 4.67,
        "int4:16": 4.67,
        "fp4:16": 4.67,
        "cluster": 4.55,
        "cluster:2": 2.35,
        "cluster:3": 3.4,
        "cluster:6": 6.55,
        "int8": 8.13,
        "fp16": 16.13,
    }
    for name, bound in bounds.items():
        bits = compress.bits_per_weight(module(name).quantize(weight, None, plan(name)), weight.numel())
        assert bound - 0.5 < bits <= bound, name


@pytest.mark.parametrize("magnitude", [1e-38, 1e-9, 1.0, 7e4, 3e38])
def test_fp16_keeps_eleven_bits_in_channels_of_any_magnitude(magnitude: float) -> None:
    weight = gaussian().clamp(-1, 1)
    weight[0] *= magnitude
    got = module("fp16").dequantize(module("fp16").quantize(weight, None, plan("fp16")))
    assert bool(
        ((got - weight).abs() <= 2.0**-11 * weight.abs() + 2.0**-24 * weight.abs().amax(1, True)).all()
    )


@pytest.mark.parametrize("make", [gaussian, student])
def test_more_bits_less_error_and_clusters_beat_a_uniform_grid(make) -> None:
    weight = make()
    errors = [error(f"cluster:{bits}", weight) for bits in (2, 3, 4, 6)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2] > 4 * errors[3]
    assert errors[3] > 2 * error("int8", gaussian())
    grouped = weight.reshape(64, -1, 64)
    step = grouped.abs().amax(-1, keepdim=True) / 7
    uniform = (grouped / step).round() * step
    assert errors[2] < 0.8 * relative(weight, uniform.reshape(weight.shape))
    assert errors[2] < error("nf4", weight)


def squared_error(mass: Tensor, value: Tensor, edges: tuple[int, ...]) -> float:
    total = 0.0
    for start, stop in itertools.pairwise(edges):
        part, at = mass[start:stop], value[start:stop]
        if part.sum() > 0:
            total += float((part * (at - (part * at).sum() / part.sum()).square()).sum())
    return total


@pytest.mark.parametrize(("num_clusters", "num_bins"), [(1, 16), (2, 32), (3, 16), (5, 8), (8, 4)])
def test_clustering_is_the_optimum_found_by_brute_force(num_clusters: int, num_bins: int) -> None:
    mass = torch.rand(4, num_bins, dtype=torch.float64) * (torch.rand(4, num_bins) > 0.3)
    value = torch.randn(4, num_bins, dtype=torch.float64).sort(1).values
    centres = optimal_centres(mass, mass * value, num_clusters)
    assert centres.shape == (4, num_clusters)
    assert torch.equal(centres, centres.sort(1).values)
    for b in range(4):
        cuts = itertools.combinations_with_replacement(range(num_bins + 1), num_clusters - 1)
        least = min(squared_error(mass[b], value[b], (0, *cut, num_bins)) for cut in cuts)
        got = float((mass[b] * (value[b][:, None] - centres[b]).square().amin(1)).sum())
        assert got == pytest.approx(least, abs=1e-12)


def slow_gain(mass: Tensor, moment: Tensor, num_clusters: int) -> float:
    """Solve the dynamic programme over every pair of cuts; return the error saved against the centre 0."""
    masses, moments = (torch.cat([torch.zeros(1, dtype=torch.float64), t.cumsum(0)]) for t in (mass, moment))
    inside = masses[None] - masses[:, None]
    gain = torch.where(inside > 0, (moments[None] - moments[:, None]).square() / inside.clamp_min(1e-300), 0)
    gain = gain.masked_fill(torch.ones_like(gain).tril(-1).bool(), -torch.inf)
    best = gain[0]
    for _ in range(num_clusters - 1):
        best = (best[:, None] + gain).amax(0)
    return float(best[-1])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("empty", [0.0, 0.5])
def test_clustering_of_many_bins_equals_the_search_over_all_cuts(batch: int, empty: float) -> None:
    value = torch.linspace(-1, 1, 128, dtype=torch.float64)
    mass = torch.rand(batch, 128, dtype=torch.float64) * torch.exp(-4 * value.square())
    mass *= torch.rand(batch, 128) >= empty
    centres = optimal_centres(mass, mass * value, 8)
    for b in range(batch):
        left = (mass[b] * (value[:, None] - centres[b]).square().amin(1)).sum()
        saved = float((mass[b] * value.square()).sum() - left)
        assert saved == pytest.approx(slow_gain(mass[b], mass[b] * value, 8), rel=1e-12)


def test_clustering_of_few_distinct_values_is_exact() -> None:
    values = torch.tensor([-1.0, -0.25, 0.25, 1.0])  # the sign of a scale leaves them the same
    weight = values[torch.randint(0, 4, (64, 128))]
    assert error("cluster:2", weight) < 0.01


@pytest.mark.parametrize("name", ["int8", "nf4", "nf4:16", "int4", "fp4", "cluster:2", "cluster:3"])
@pytest.mark.parametrize("rows", [1, 3, 63, 65, 100])
def test_quantizing_by_blocks_of_rows_equals_the_whole(name: str, rows: int) -> None:
    weight, way = gaussian(rows, 128), module(name)
    whole = way.quantize(weight, None, plan(name))
    blocks = [way.quantize(part, None, plan(name)) for part in weight.split(way.ROWS)]
    joined = compress.join(way, blocks)
    assert joined.keys() == whole.keys()
    for key, tensor in whole.items():
        assert torch.equal(joined[key], tensor), key
    assert relative(weight, way.dequantize(whole)) < 0.4


@pytest.mark.parametrize("name", FORMATS)
def test_the_operator_computes_with_the_weight_that_is_decoded(name: str) -> None:
    weight, way = gaussian(65, 128), module(name)
    tensors, x, bias = way.quantize(weight, None, plan(name)), torch.randn(3, 128), torch.randn(65)
    want = nn.functional.linear(x, way.dequantize(tensors), bias)
    got = way.linear(x, tensors, bias)
    assert relative(want, got) < (0.02 if name == "int8" else 1e-5)
    ids = torch.tensor([0, 64, 3])
    torch.testing.assert_close(way.embedding(ids, tensors), way.dequantize(tensors)[ids])


def test_importance_moves_error_to_columns_that_matter_less() -> None:
    weight, importance = gaussian(64, 256), torch.ones(256)
    importance[::4] = 100
    stats = LayerStats(torch.ones(()), importance.double(), 1, torch.zeros(BINS), 0.0)
    for name in ("nf4", "cluster"):
        way = module(name)
        plain = (weight - way.dequantize(way.quantize(weight, None, plan(name)))).square() * importance
        aware = (weight - way.dequantize(way.quantize(weight, stats, plan(name)))).square() * importance
        assert aware.sum() < 0.9 * plain.sum()


def test_static_step_clips_outliers_only_when_that_is_better() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    even, one = torch.rand(4096, 64) * 2 - 1, torch.randn(4096, 64)
    one[0, 0] = 40.0
    for data, low, high in ((even, 0.95, 1.001), (one, 5.0, 30.0)):
        stats = calibrate(model, [{"input": part} for part in data.split(512)])["0"]
        assert low <= float(stats.clip) <= high
        assert float(stats.absmax) == float(data.abs().max())
        assert stats.num_rows == 4096
        torch.testing.assert_close(stats.square_mean, data.square().mean(0))
        assert float(stats.histogram.sum()) == data.numel()
        steps = [data.abs().max() / 127, int8.step(stats)]
        grids = [(data / step).round().clamp(-127, 127) * step for step in steps]
        assert relative(data, grids[1]) <= relative(data, grids[0]) * 1.02


def test_calibration_names_the_layer_with_nan_and_requires_data() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(SourceError, match="NaN or infinity at the input of '0'"):
        calibrate(model, [{"input": torch.full((2, 4), torch.nan)}])
    with pytest.raises(UsageError, match="--data"):
        calibrate(model, [])
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nf4:8", r"no option of --quant nf4 named '8'. Known: 16"),
        (
            "int8:wieght",
            r"no option of --quant int8 named 'wieght'. Known: weight, static. Did you mean weight\?",
        ),
        ("cluster:5", r"no option of --quant cluster named '5'. Known: 2, 3, 4, 6"),
        ("cluster:8", r"cluster:8 gains nothing over int8"),
        (
            "int9",
            r"no quantizer named 'int9'. Known: cluster, fp16, fp4, .*int8, keep, nf4. Did you mean int8\?",
        ),
    ],
)
def test_unknown_names_and_options_list_the_known(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compress.get(plan(name))


def refusal(layer: nn.Module, name: str) -> str | None:
    return module(name).refuses(layer, plan(name))


def test_nf4_rejects_rows_not_divisible_by_block() -> None:
    assert refusal(nn.Linear(100, 80), "nf4") == "weight has 100 columns; nf4 blocks are 64 wide"
    assert refusal(nn.Linear(100, 80), "cluster") == "weight has 100 columns; cluster blocks are 64 wide"
    assert refusal(nn.Linear(80, 128), "nf4:16") == "weight has 80 columns; nf4:16 takes them in blocks of 64"
    assert refusal(nn.Linear(128, 80), "nf4") is None
    assert refusal(nn.Linear(100, 80), "int8") is None


@pytest.mark.parametrize(
    ("layer", "name", "reason"),
    [
        (nn.Linear(64, 63), "nf4", "weight has 4032 values; below 4096"),
        (nn.Linear(64, 63), "int8", "weight has 4032 values; below 4096"),
        (nn.Conv2d(64, 64, 3, padding_mode="circular"), "cluster", "padding_mode='circular'"),
        (nn.Conv2d(64, 64, 2, padding="same"), "cluster", r"padding='same' of an even kernel \(2, 2\)"),
        (nn.Conv2d(3, 64, 7), "cluster", "weight has 147 columns; cluster blocks are 64 wide"),
        (nn.Conv2d(64, 64, 3), "nf4", "nf4 shrinks Linear and Embedding layers, not Conv2d"),
        (nn.Conv2d(512, 512, 3, groups=512), "int8", "groups=512 leave 9 products for each output"),
        (nn.Conv2d(64, 64, 3, padding=1, padding_mode="circular"), "int8", "padding_mode='circular'"),
        (nn.Conv2d(64, 64, 2, padding="same"), "int8", r"padding='same' of an even kernel \(2, 2\)"),
        (nn.Embedding(100, 64, max_norm=1.0), "nf4", "max_norm=1.0 rescales"),
        (nn.Embedding(100, 64, max_norm=1.0), "int8", "max_norm=1.0 rescales"),
    ],
)
def test_refusals_of_formats_name_the_size_that_does_not_fit(
    layer: nn.Module, name: str, reason: str
) -> None:
    assert re.match(reason, refusal(layer, name) or "accepted")
