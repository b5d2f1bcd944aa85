"""Fused programs of encoders and plain networks: whole layers, full attention, and operators left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from infer.compress import Stats, calibrate, quantize_model
from infer.kernels import cpu
from infer.kernels.cpu import build as compiling
from infer.kernels.passes import prepack
from infer.plan import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers and the exporter have many to give
    pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler"),
]
WIDTH, HEADS = 128, 2
ROWS, TOKENS = Dim("rows", min=1, max=64), Dim("tokens", min=1, max=600)


class Layer(nn.Module):
    """A transformer layer, normed before or after."""

    def __init__(self, *, before: bool, causal: bool = False, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.before, self.causal, self.kv_heads = before, causal, kv_heads
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * size) for heads in (HEADS, kv_heads, kv_heads))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 192), nn.Linear(192, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def attended(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal, enable_gqa=self.kv_heads != HEADS
        )
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.before:
            x = x + self.attended(self.first(x), mask)
            return x + self.down(F.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]
        x = self.first(x + self.attended(x, mask))
        return self.second(x + self.down(F.silu(self.up(x))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    def __init__(self, mask: str, **layer: Any) -> None:
        super().__init__()
        self.mask = mask
        self.layers = nn.ModuleList([Layer(**{"before": False, **layer}) for _ in range(2)])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Attend over x float32 [rows, tokens, width], real bool [rows, tokens] -> float32 [rows, tokens, width]."""
        mask: Tensor | None = None
        if self.mask in ("keys", "expanded"):
            mask = real[:, None, None, :]
        if self.mask == "expanded":
            mask = mask.expand(-1, HEADS, real.shape[1], -1)  # type: ignore[union-attr]
        if self.mask == "square":
            mask = real[:, None, None, :] & real[:, None, :, None]
        if self.mask == "float":
            mask = torch.where(real, 0.0, -1e9)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return x


def inputs(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + tokens)
    real = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    return torch.randn(rows, tokens, WIDTH, generator=generator), real


def exported(
    model: nn.Module, quant: str = "int8", stats: Mapping[str, Stats] | None = None
) -> ExportedProgram:
    quantize_model(model.eval(), Plan(source="test", quant=quant), stats=stats)
    with torch.no_grad():
        return torch.export.export(
            model, inputs(3, 17), dynamic_shapes=({0: ROWS, 1: TOKENS}, {0: ROWS, 1: TOKENS}), strict=False
        )


def targets(program: ExportedProgram) -> Counter[str]:
    return Counter(str(n.target) for n in program.graph.nodes if n.op == "call_function")


def run(program: ExportedProgram, *given: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = program.module()(*given)
    return result


def differences(step: ExportedProgram, *sizes: tuple[int, int]) -> list[float]:
    """Return relative differences of the fused program from single operators, at each size."""
    chained, plain = prepack.packed(step), prepack.packed(step, fuse_layers=False)
    found = []
    for size in sizes:
        x, real = inputs(*size)
        got, expected = run(chained, x, real), run(plain, x, real)
        assert got.shape == expected.shape
        found.append(float((got - expected).norm() / expected.norm()))
    return found


@pytest.mark.parametrize("mask", ["none", "keys", "expanded", "square", "float"])
def test_a_whole_encoder_is_one_call_and_equals_single_operators(mask: str) -> None:
    step = exported(Encoder(mask))
    found = targets(prepack.packed(step))
    assert found["infer.chain.default"] == 1
    assert not any(part in name for name in found for part in ("_packed", "layer_norm", "silu", "attention"))
    # 1 and 17 tokens are less than a block of keys, 130 more than one, 300 more than one tile of queries.
    apart = sorted(differences(step, (1, 1), (1, 17), (3, 130), (2, 300)))
    # A last bit more or less may change how one activation is rounded to int8.
    assert apart[1] < 1e-5
    assert apart[-1] < 0.01


def test_a_balanced_encoder_is_one_call_with_as_few_products() -> None:
    torch.manual_seed(0)
    model = Encoder("keys").eval()
    with torch.no_grad():  # a norm that makes a few columns large, as trained ones do
        for layer in model.layers:
            layer.first.weight[::32] *= 40
            layer.up.weight[:, ::32] /= 40
    stats = calibrate(model, [dict(zip(("x", "real"), inputs(4, 32 + i), strict=True)) for i in range(4)])
    step = exported(model, "int8", stats)
    balanced = [name for name in step.state_dict if name.endswith("x_multiplier")]
    assert len(balanced) >= 2
    chained = targets(prepack.packed(step))
    assert chained["infer.chain.default"] == 1
    assert not [name for name in chained if "packed" in name or "mul" in name]
    assert (
        sum(n for name, n in targets(prepack.packed(step, fuse_layers=False)).items() if "packed" in name)
        == 8
    )
    found = differences(step, (3, 17), (1, 1), (2, 40))
    assert max(found) < 0.02


@pytest.mark.parametrize("layer", [{"before": True}, {"causal": True}, {"kv_heads": 1}], ids=str)
def test_pre_norm_causal_and_grouped_head_layers_are_fused(layer: dict[str, Any]) -> None:
    step = exported(Encoder("none", **layer), quant="nf4")
    assert targets(prepack.packed(step))["infer.chain.default"] == 1
    assert max(differences(step, (1, 5), (2, 150))) < 0.01


def test_masked_and_nan_rows_do_not_affect_other_rows() -> None:
    program = prepack.packed(exported(Encoder("keys")))
    x, real = inputs(3, 9)
    expected = run(program, x, real)
    x, real = x.clone(), real.clone()
    x[1, 0], real[2] = float("nan"), False
    got = run(program, x, real)
    assert torch.equal(got[0], expected[0])
    assert got[1, 0].isnan().all()
    assert got[2].isfinite().all()


def test_an_encoder_row_is_bit_equal_for_any_batch_and_threads() -> None:
    program = prepack.packed(exported(Encoder("keys")))
    x, real = inputs(5, 130)
    threads, rows = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            rows += [run(program, x, real)[3], run(program, x[3:4], real[3:4])[0]]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2", "neon_dotprod"])
def test_fused_encoder_layers_are_equal_on_all_instruction_sets(isa: str) -> None:
    cpu.load()
    if isa not in cpu.isas():
        pytest.skip(f"no {isa} here")
    step, before = exported(Encoder("square")), cpu.isa()
    x, real = inputs(2, 140)
    results = []
    try:
        for name in ("scalar", isa):
            cpu.use_isa(name)
            results.append(run(prepack.packed(step), x, real))
    finally:
        cpu.use_isa(before)
    # Attention sums in another order; one activation may then be rounded to another int8.
    assert float((results[0] - results[1]).norm() / results[0].norm()) < 0.01


class Branches(nn.Module):
    """Two inputs of other sizes, a convolution's worth of reshaping between layers, and results that are read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64)
        )
        self.b = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64))
        self.c = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.a(x), self.b(x.mean(1))
        mixed = a.cumsum(1) + b.unsqueeze(1)
        return self.c(mixed) * real.unsqueeze(-1), a.softmax(-1), b


def test_only_other_row_counts_and_foreign_operators_split_a_fused_program() -> None:
    step = exported(Branches())
    chained, plain = prepack.packed(step), prepack.packed(step, fuse_layers=False)
    assert targets(chained)["infer.chain.default"] == 3
    for size in ((1, 1), (4, 11)):
        x, real = inputs(*size)
        with torch.no_grad():
            pairs = zip(chained.module()(x, real), plain.module()(x, real), strict=True)
        for got, expected in pairs:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_fused_programs_read_column_slices_of_other_results() -> None:
    # Values that leave a chain together come back as columns; the next chain reads them where they are.
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            y = self.norm(self.a(x))
            z = self.b(F.relu(y)).cumsum(1)
            return self.norm(self.c(F.relu(y + z)) + y)  # type: ignore[no-any-return]

    step = exported(Wide())
    assert targets(prepack.packed(step))["infer.chain.default"] == 2
    assert max(differences(step, (1, 1), (1, 6), (3, 1), (3, 8))) < 0.01


def test_a_fused_program_compiles_with_symbolic_sizes() -> None:
    from infer import kernels

    step = prepack.packed(exported(Encoder("square")))
    settings = {"aot_inductor.custom_ops_to_c_shims": kernels.c_functions()}
    path = torch._inductor.aoti_compile_and_package(step, inductor_configs=settings)
    compiled = torch._inductor.aoti_load_package(path)
    for size in ((1, 1), (1, 33), (4, 5)):
        torch.testing.assert_close(compiled(*inputs(*size)), run(step, *inputs(*size)))


def test_arguments_that_are_left_out_have_their_defaults() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            x = torch.layer_norm(self.a(x), [WIDTH], self.norm.weight, self.norm.bias)
            x = torch.layer_norm(torch.layer_norm(x, [WIDTH], self.norm.weight), [WIDTH])
            return torch.layer_norm(x, [WIDTH], bias=self.norm.bias, eps=0.5)

    step = exported(Norms())
    chained = prepack.packed(step)
    for node in chained.graph.nodes:
        assert node.op != "call_function" or "chain" in str(node.target)
    assert max(differences(step, (1, 1), (2, 5))) < 1e-5


class EveryOutput(nn.Module):
    """Gives back what every layer makes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(layers)])

    def forward(self, x: Tensor, real: Tensor) -> list[Tensor]:
        found = [x[..., :64] * 1.0]
        for layer in self.layers:
            found.append(F.relu(layer(found[-1])))
        return found[1:]


def test_a_fused_program_may_have_any_number_of_results() -> None:
    step = exported(EveryOutput(80))
    chained, plain = prepack.packed(step), prepack.packed(step, fuse_layers=False)
    assert targets(chained)["infer.chain.default"] == 1
    with torch.no_grad():
        got, expected = chained.module()(*inputs(2, 3)), plain.module()(*inputs(2, 3))
    assert len(got) == 80
    for one, other in zip(got, expected, strict=True):
        assert float((one - other).norm()) <= 1e-3 * float(other.norm()) + 1e-6
