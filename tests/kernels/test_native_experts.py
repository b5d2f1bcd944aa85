"""The native layers of experts: each row has the bits of the plain packed layer of its expert."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from infer import compress
from infer.kernels import cpu
from infer.kernels.cpu import build
from infer.kernels.expert_layers import ExpertLinear
from infer.kernels.ops import bitpack
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.passes import prepack
from infer.plan import Plan

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
OPS = torch.ops.infer
E = 4
SHAPES = [
    (1, 64),
    (16, 64),
    (40, 192),
    (333, 128),
]  # features, columns: blocks that are padded, and whole ones
ASKED = [(0, 2), (1, 1), (1, 2), (8, 2), (40, 3)]  # rows, experts of each


@pytest.fixture
def isas() -> Iterator[list[str]]:
    """Yield the instruction sets of this CPU; the best is in use again afterwards."""
    found = cpu.isas()
    yield found
    cpu.use_isa(found[0])


def drawn(rows: int, top_k: int, columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + top_k)
    x = torch.randn(rows, columns, generator=generator)
    if rows > 3:
        x[2], x[3, 0] = 0, torch.nan
    return x, torch.randint(0, E - 1, (rows * top_k,), generator=generator)


def each(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def alone(name: str, packed: list[tuple[Tensor, ...]], x: Tensor, expert: Tensor, *last: object) -> Tensor:
    """Compute each row by the plain packed layer of its expert."""
    op, top_k = getattr(OPS, f"linear_{name}_packed"), len(expert) // max(len(x), 1)
    rows = [op(x[i // top_k][None], *packed[int(e)], *last) for i, e in enumerate(expert)]
    return torch.cat(rows) if rows else torch.empty(0)


@pytest.mark.parametrize("group", [64, 16])
@pytest.mark.parametrize(("features", "columns"), SHAPES)
def test_lut4_experts_are_bit_equal_to_single_layers(
    isas: list[str], features: int, columns: int, group: int
) -> None:
    codes = torch.randint(0, 16, (E, features, columns), dtype=torch.uint8)
    scale = torch.randint(-127, 128, (E, features, columns // group), dtype=torch.int8)
    table, row_scale = torch.randn(1, 16), torch.rand(E, features)
    for isa in isas:
        cpu.use_isa(isa)
        packed = [
            cpu.pack_lut4(CodedWeight(bitpack.pack(codes[e], 4), scale[e], table, super_scale=row_scale[e]))
            for e in range(E)
        ]
        weight = each([(p[0], p[1], p[2], p[3]) for p in packed])
        for rows, top_k in ASKED:
            x, expert = drawn(rows, top_k, columns)
            got = OPS.linear_experts_lut4_packed(x, expert, *weight, features, top_k)
            expected = alone("lut4", packed, x, expert, None, features)
            assert same(got, expected.reshape(got.shape)), (isa, rows, top_k)


@pytest.mark.parametrize("weight_only", [False, True])
@pytest.mark.parametrize(("features", "columns"), [*SHAPES, (17, 7)])
def test_int8_experts_are_bit_equal_to_single_layers(
    isas: list[str], features: int, columns: int, weight_only: bool
) -> None:
    codes, scale = torch.randint(-127, 128, (E, features, columns), dtype=torch.int8), torch.rand(E, features)
    for isa in isas:
        cpu.use_isa(isa)
        packed = [cpu.pack_int8(codes[e], scale[e])[: 2 if weight_only else 3] for e in range(E)]
        weight = each(packed)
        name = "int8_weight" if weight_only else "int8"
        op = getattr(OPS, f"linear_experts_{name}_packed")
        last = (None,) if weight_only else (None, None)
        for rows, top_k in ASKED:
            x, expert = drawn(rows, top_k, columns)
            got = op(x, expert, *weight, features, columns, top_k)
            expected = alone(name, packed, x, expert, *last, features, columns)
            assert same(got, expected.reshape(got.shape)), (isa, rows, top_k)


def test_experts_are_bit_equal_for_any_thread_count() -> None:
    codes, scale = torch.randint(-127, 128, (E * 512, 1024), dtype=torch.int8), torch.rand(E * 512)
    weight = cpu.pack_int8(codes, scale)
    x, expert = drawn(40, 3, 1024)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(OPS.linear_experts_int8_packed(x, expert, *weight, 512, 1024, 3))
    finally:
        torch.set_num_threads(before)
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_an_expert_that_does_not_exist_is_refused() -> None:
    weight = cpu.pack_int8(torch.zeros(32, 8, dtype=torch.int8), torch.ones(32))
    for wrong in (-1, 2):
        with pytest.raises(RuntimeError, match=rf"expert {wrong} is not in 0\.\.1"):
            OPS.linear_experts_int8_packed(torch.ones(1, 8), torch.tensor([wrong]), *weight, 16, 8, 1)
    with pytest.raises(RuntimeError, match="expected int64 experts of 2 assignments, got 1"):
        OPS.linear_experts_int8_packed(torch.ones(1, 8), torch.tensor([0]), *weight, 16, 8, 2)


class Routed(nn.Module):
    """A router and one layer of four experts, of which every row takes two."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.router = nn.Linear(128, E)
        self.up = ExpertLinear(nn.Parameter(torch.randn(E, features, 128)), transposed=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x, self.router(x).topk(2, -1).indices.reshape(-1), 2)


@pytest.mark.parametrize("features", [96, 40])
@pytest.mark.parametrize(
    ("quant", "operator"),
    [
        ("nf4", "lut4"),
        ("nf4:16", "lut4"),
        ("int8", "int8"),
        ("int8:weight", "int8_weight"),
        ("cluster:3", "lut4"),
        ("cluster:6", "int8"),
    ],
)
def test_a_captured_program_calls_the_packed_experts(quant: str, operator: str, features: int) -> None:
    if quant.startswith("cluster") and features % 32:
        pytest.skip("refused: rows of two experts would share a table")
    torch.manual_seed(0)
    model, x = Routed(features).eval(), torch.randn(7, 128)
    compress.quantize_model(model, Plan(source="", quant=quant))
    rows = torch.export.Dim("rows", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
        made = prepack.packed(program)
        called = [str(node.target) for node in made.graph.nodes if node.op == "call_function"]
        assert f"infer.linear_experts_{operator}_packed.default" in called
        for given in (x, torch.randn(3, 128)):
            expected, got = model(given), made.module()(given)
            assert (got - expected).norm() / expected.norm() < 0.02
    assert prepack.findings(program)[0].value == 1
