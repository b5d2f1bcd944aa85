"""int8 convolutions on bytes: the native kernels against their twins, and the pass against the unfused graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infer import compress
from infer.kernels import cpu
from infer.kernels.cpu import build
from infer.kernels.ops import conv2d_packed as twins
from infer.kernels.passes import prepack
from infer.plan import Plan

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
INF = float("inf")
STATIC = Plan(source="test", quant="int8:static")
WINDOWS = [
    ((1, 1), (1, 1), (1, 1)),
    ((3, 3), (1, 1), (1, 1)),
    ((3, 5), (2, 1), (1, 1)),
    ((3, 3), (2, 2), (2, 2)),
    ((5, 5), (1, 2), (1, 3)),
    ((7, 7), (2, 2), (1, 1)),
]


ISAS = ["avx512_vnni", "avx2", "scalar"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = cpu.isa()
    if request.param not in cpu.isas():
        pytest.skip(f"this CPU has no {request.param}")
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(best)


@pytest.fixture
def isas() -> Iterator[list[str]]:
    """Return the instruction sets of this CPU, for references slower than every kernel together."""
    best = cpu.isa()
    yield [name for name in ISAS if name in cpu.isas()]
    cpu.use_isa(best)


def same_on(isas: list[str], kernel: Callable[..., Tensor], args: tuple[Any, ...], expected: Tensor) -> None:
    for name in isas:
        cpu.use_isa(name)
        assert torch.equal(kernel(*args), expected), name


def image(batch: int, channels: int, zero: int, border: int, size: tuple[int, int] = (15, 13)) -> Tensor:
    x = torch.randn(batch, channels, *size)
    return twins.image_twin(x, 0.02, zero, int(zero > 0), border, twins.stored_channels(channels))[0]


def operands(channels: int, features: int, kernel: tuple[int, int], zero: int) -> tuple[Tensor, ...]:
    codes = torch.randint(-127, 128, (features, channels, *kernel), dtype=torch.int8)
    weight, start = twins.pack(codes, zero, twins.stored_channels(channels))
    terms = channels * kernel[0] * kernel[1]
    return weight, start, torch.rand(len(start)) * 0.002 / terms**0.5, torch.randn(len(start)) * 5 + 60


@pytest.mark.parametrize(("kernel", "stride", "dilation"), WINDOWS)
@pytest.mark.parametrize("channels", [1, 3, 17, 64])
def test_a_native_convolution_is_bit_equal_to_the_reference(
    isas: list[str], channels: int, kernel: Any, stride: Any, dilation: Any
) -> None:
    window = [*kernel, *stride, kernel[0] // 2, kernel[1] // 2, *dilation]
    for index, (batch, features) in enumerate(itertools.product((0, 1, 3), (1, 33, 70))):
        zero, border = 128 * (index % 2), max(window[4:6]) + index % 3
        x, packed = image(batch, channels, zero, border), operands(channels, features, kernel, zero)
        size = [
            (n + 2 * window[4 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
            for i, n in ((0, 15), (1, 13))
        ]
        other = torch.randint(0, 256, (batch, size[0] + 2, size[1] + 2, len(packed[1])), dtype=torch.uint8)
        residual = other if index % 2 else None
        args = (x, *packed, residual, 0.3, 0.0, 255.0, features, window, [border, 1, index % 2], 7)
        same_on(isas, torch.ops.infer.conv2d_int8_packed, args, twins.twin(*args))
        args = (x, *packed, residual, 0.3, -INF, INF, features, window, [border, 1, 0], torch.zeros(batch))
        same_on(isas, torch.ops.infer.conv2d_int8_packed_float, args, twins.float_twin(*args))


def test_the_largest_convolution_sums_do_not_saturate(isa: str) -> None:
    x = torch.full((1, 3, 3, 64), 255, dtype=torch.uint8)
    codes = torch.full((16, 64, 3, 3), 127, dtype=torch.int8)
    weight, start = twins.pack(codes, 0, 64)
    one, none = torch.ones(16), torch.zeros(16)
    y = torch.ops.infer.conv2d_int8_packed_float(
        *(
            x,
            weight,
            start,
            one,
            none,
            None,
            0.0,
            -INF,
            INF,
            16,
            [3, 3, 1, 1, 0, 0, 1, 1],
            [0, 0, 0],
            torch.zeros(1),
        )
    )
    assert torch.equal(y, torch.full((1, 1, 1, 16), 255.0 * 127 * 64 * 9))


@pytest.mark.parametrize("channels", [1, 3, 17, 64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_image_quantization_equals_the_reference(
    isa: str, channels: int, layout: torch.memory_format
) -> None:
    x = torch.randn(3, channels, 5, 70).contiguous(memory_format=layout)
    x[1, 0, 2, 3], x[2, 0, 0, 0], x[2, 0, 0, 1] = torch.nan, INF, -INF
    for zero in (0, 128):
        args = (x, 0.02, zero, int(zero > 0), 2, twins.stored_channels(channels))
        got, expected = torch.ops.infer.conv2d_int8_image(*args), twins.image_twin(*args)
        assert torch.equal(got[0], expected[0])
        assert got[1].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "window", [[3, 3, 2, 2, 1, 1, 1, 1], [2, 2, 2, 2, 0, 0, 1, 1], [3, 1, 1, 2, 1, 0, 2, 1]]
)
def test_native_max_pool_equals_the_reference(isa: str, window: list[int]) -> None:
    args = (image(2, 17, 128, 2), window, [2, 0, 1], 128)
    assert torch.equal(torch.ops.infer.conv2d_int8_max_pool(*args), twins.max_pool_twin(*args))


@pytest.mark.parametrize(("rows", "channels"), [(1, 1), (16, 3), (33, 17), (130, 64)])
def test_convolution_weights_are_packed_as_by_the_reference(rows: int, channels: int) -> None:
    codes = torch.randint(-127, 128, (rows, channels, 3, 2), dtype=torch.int8)
    stored = twins.stored_channels(channels)
    weight, start = twins.pack(codes, 128, stored)
    expected = twins.pack_twin(codes, 128, stored)
    assert torch.equal(weight, expected[0])
    assert torch.equal(start, expected[1])
    assert torch.equal(twins.unpack(weight, (3, 2))[:rows, :channels], codes)


class Block(nn.Module):
    """Every way into and out of a chain: pool, residual, a convolution that is only added, clamp, GELU, a group."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 5, 2, 2, bias=False), nn.BatchNorm2d(64)
        self.one, self.two = nn.Conv2d(64, 72, 1), nn.Conv2d(72, 80, 3, 1, 1)
        self.short, self.three = nn.Conv2d(64, 80, 1), nn.Conv2d(80, 80, 3, 1, 2, 2)
        self.four, self.grouped = nn.Conv2d(80, 80, 1), nn.Conv2d(80, 80, 3, groups=2)
        self.last = nn.Conv2d(80, 65, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x)), inplace=True), 3, 2, 1)
        x = F.relu(self.two(F.relu6(self.one(x))) + self.short(x))
        x = F.relu(x + self.three(x))
        return self.last(F.relu(self.grouped(F.gelu(self.four(x))) + 1))


def quantized(model: nn.Module, x: Tensor) -> tuple[torch.export.ExportedProgram, Tensor]:
    """Return the static int8 model, batch norms folded, as a program; and what the float model gives."""
    rows = torch.export.Dim("rows", min=1, max=64)
    with torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=False)
        compress.fold_batch_norms(model, program)
        compress.quantize_model(model, STATIC, stats=compress.calibrate(model, [{"x": x}]))
        return torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=False), expected


@pytest.fixture(scope="module")
def block() -> tuple[torch.export.ExportedProgram, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Block().eval(), torch.randn(4, 3, 33, 29)
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2)
        return (*quantized(model, x), x)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().norm() / expected.detach().norm())


def test_a_fused_graph_is_as_near_to_the_float_model_as_the_unfused_one(block: Any) -> None:
    program, expected, x = block
    fused = prepack.packed(program)
    got, unfused = fused.module()(x), program.module()(x)
    assert relative(got, unfused) < 0.05
    assert relative(got, expected) < 1.1 * relative(unfused, expected)


def test_chained_convolutions_pass_int8_between_them(block: Any) -> None:
    names = [str(n.target) for n in prepack.packed(block[0]).graph.nodes if n.op == "call_function"]
    count = {
        name: names.count(f"infer.conv2d_int8_{name}.default")
        for name in ("image", "packed", "packed_float", "max_pool")
    }
    assert count == {"image": 2, "packed": 5, "packed_float": 2, "max_pool": 1}
    assert names.count("infer.conv2d_int8_static.default") == 1  # the grouped one


def test_nan_in_one_sample_affects_no_other_sample(block: Any) -> None:
    run, x = prepack.packed(block[0]).module(), block[2].clone()
    clean = run(x)
    x[1, 2, 3, 4] = torch.nan
    got = run(x)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


def test_convolutions_are_bit_equal_on_every_instruction_set(block: Any) -> None:
    best, results = cpu.isa(), []
    for name in cpu.isas():
        cpu.use_isa(name)
        try:
            results.append(prepack.packed(block[0]).module()(block[2]))
        finally:
            cpu.use_isa(best)
    assert all(torch.equal(result, results[0]) for result in results)


def test_folding_batch_norms_changes_roundings_only() -> None:
    model, x = Block().eval(), torch.randn(2, 3, 33, 29)
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,), strict=False)
        found = compress.fold_batch_norms(model, program)
        assert [finding.value for finding in found] == [1]
        assert type(model.norm) is nn.Identity
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(program.module()(x), expected)
