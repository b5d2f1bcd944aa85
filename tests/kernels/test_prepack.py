"""The pass that puts packed native operators in place of portable ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer import kernels, plugins
from infer.compress.formats import cluster, int8, nf4
from infer.graph import capture, storage
from infer.kernels import cpu
from infer.kernels.cpu import build
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.ops.linear_packed import int8_twin, lut4_twin, rounded_table
from infer.kernels.passes import prepack
from infer.plan import Plan
from infer.spec import TensorSpec

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
PLAN = Plan(source="test", quant="nf4")


class Packed(nn.Module):
    """A layer of packed tensors, as the quantization walk leaves it."""

    def __init__(self, tensors: Mapping[str, Tensor], linear: Any, bias: Tensor | None = None) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_buffer(name, value)
        self.register_buffer("bias", bias)
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        tensors = {name: value for name, value in self.named_buffers() if name != "bias"}
        return self._linear(x, tensors, self.bias)


def nf4_layer(rows: int, columns: int, bias: bool = False, quant: str = "nf4") -> Packed:
    tensors = nf4.quantize(torch.randn(rows, columns), None, PLAN.with_(quant=quant))
    return Packed(tensors, nf4.linear, torch.randn(rows) if bias else None)


def int8_layer(rows: int, columns: int, bias: bool = False) -> Packed:
    tensors = int8.quantize(torch.randn(rows, columns), None, PLAN.with_(quant="int8"))
    return Packed(tensors, int8.linear, torch.randn(rows) if bias else None)


def exported(model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},))


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("quant", ["nf4", "nf4:16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (16, 64), (33, 192), (100, 128)])
def test_prepacked_nf4_layers_equal_the_reference(rows: int, columns: int, bias: bool, quant: str) -> None:
    layer, x = nf4_layer(rows, columns, bias, quant), torch.randn(5, columns)
    program = prepack.packed(exported(layer, x))
    assert targets(program) == ["infer.linear_lut4_packed.default"]
    weight = CodedWeight.of(dict(layer.named_buffers()))
    assert relative(program.module()(x), lut4_twin(x, weight, layer.bias)) < 1e-5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 64), (33, 50), (100, 127)])
def test_prepacked_int8_layers_equal_the_reference(rows: int, columns: int, bias: bool) -> None:
    layer, x = int8_layer(rows, columns, bias), torch.randn(5, columns).clamp_min(-0.2)
    program = prepack.packed(exported(layer, x))
    assert relative(program.module()(x), int8_twin(x, layer.codes, layer.scale, layer.bias)) < 1e-6


@pytest.mark.parametrize("bits", ["2", "3", "4"])
def test_codebooks_of_32_rows_are_packed_with_their_rows(bits: str) -> None:
    tensors = cluster.quantize(torch.randn(70, 128), None, PLAN.with_(quant=f"cluster:{bits}"))
    layer, x = Packed(tensors, cluster.linear), torch.randn(3, 128)
    got = prepack.packed(exported(layer, x)).module()(x)
    assert relative(got, layer(x)) < 0.02


class Siblings(nn.Module):
    """Three layers that read the same input, as q, k and v do, and one that doesn't."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = make(40, 64, True), make(24, 64), make(24, 64, True)
        self.o = make(10, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.q(x), self.k(x)], -1)
        return joined * self.v(x)[..., :1], self.o(joined)


@pytest.mark.parametrize("make", [nf4_layer, int8_layer])
def test_layers_with_the_same_input_become_one_call(make: Any) -> None:
    model, x = Siblings(make), torch.randn(2, 7, 64)
    program = prepack.packed(exported(model, x))
    assert sum("packed" in target for target in targets(program)) == 2
    for rows in (1, 3):
        x = torch.randn(rows, 7, 64)
        for got, expected in zip(program.module()(x), model(x), strict=True):
            assert got.shape == expected.shape
            assert relative(got, expected) < 0.03


def test_groups_of_64_and_of_16_do_not_become_one_call() -> None:
    model, x = Siblings(nf4_layer), torch.randn(2, 7, 64)
    model.k = nf4_layer(24, 64, quant="nf4:16")
    program = prepack.packed(exported(model, x))
    assert sum("packed" in target for target in targets(program)) == 3
    for got, expected in zip(program.module()(x), model(x), strict=True):
        assert relative(got, expected) < 0.03


def test_a_half_precision_graph_keeps_its_dtype() -> None:
    layer, x = nf4_layer(32, 64), torch.randn(4, 64, dtype=torch.bfloat16)
    got = prepack.packed(exported(layer, x)).module()(x)
    assert got.dtype == torch.bfloat16
    assert relative(got.float(), layer(x.float())) < 0.03


def test_weights_shared_with_an_embedding_stay_portable() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nf4_layer(48, 64)

        def forward(self, ids: Tensor) -> Tensor:
            tensors = {name: value for name, value in self.head.named_buffers() if name != "bias"}
            return self.head(nf4.embedding(ids, tensors))

    model, ids = Tied(), torch.tensor([[0, 47], [3, 3]])
    program = prepack.packed(exported(model, ids))
    assert "head.codes" in program.state_dict
    assert relative(program.module()(ids), model(ids)) < 0.03


def test_prepacking_leaves_the_given_program_unchanged() -> None:
    layer, x = nf4_layer(16, 64), torch.randn(2, 64)
    program = exported(layer, x)
    before = targets(program), list(program.state_dict)
    prepack.packed(program)
    assert (targets(program), list(program.state_dict)) == before


def test_six_bit_codes_compute_as_int8_rows() -> None:
    tensors = cluster.quantize(torch.randn(32, 64), None, PLAN.with_(quant="cluster:6"))
    layer, x = Packed(tensors, cluster.linear), torch.randn(2, 64)
    program = prepack.packed(exported(layer, x))
    assert targets(program) == ["infer.linear_int8_packed.default"]
    assert relative(program.module()(x), layer(x)) < 0.02


class Balanced(nn.Module):
    """Three layers that read one input, the third with a balance of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(int8_layer(rows, 50, True) for rows in (33, 16, 5))
        shared, other = torch.rand(2, 50) + 0.1
        for layer, multiplier in zip(self.layers, (shared, shared.clone(), other), strict=True):
            layer.register_buffer("x_multiplier", multiplier)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def test_equally_balanced_layers_become_one_call_without_a_product_before() -> None:
    model, x = Balanced(), torch.randn(3, 50)
    program = prepack.packed(exported(model, x), fuse_layers=False)
    found = [target for target in targets(program) if "slice" not in target]
    assert found == ["infer.linear_int8_balanced_packed.default"] * 2
    for layer, y in zip(model.layers, program.module()(x), strict=True):
        assert relative(y, int8_twin(x * layer.x_multiplier, layer.codes, layer.scale, layer.bias)) < 1e-6


def test_balanced_layers_are_chained() -> None:
    model = nn.Sequential(
        nn.LayerNorm(50), int8_layer(64, 50), int8_layer(64, 64), nn.GELU(), int8_layer(20, 64)
    )
    for layer in (model[1], model[2], model[4]):
        layer.register_buffer("x_multiplier", torch.rand(layer.codes.shape[1]) + 0.1)
    x = torch.randn(7, 50)
    program = exported(model, x)
    whole, single = prepack.packed(program), prepack.packed(program, fuse_layers=False)
    assert targets(whole) == ["infer.chain.default"]
    with torch.no_grad():
        assert relative(whole.module()(x), single.module()(x)) < 1e-5


def test_a_product_with_another_reader_is_not_fused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = int8_layer(16, 64)
            self.register_buffer("by", torch.rand(64) + 0.1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * self.by
            return self.layer(y), y

    model, x = Both(), torch.randn(3, 64)
    first, second = prepack.packed(exported(model, x)).module()(x)
    assert relative(first, int8_twin(x * model.by, model.layer.codes, model.layer.scale)) < 1e-6
    assert torch.equal(second, x * model.by)


@pytest.mark.parametrize("make", [nf4_layer, int8_layer])
def test_a_prepacked_layer_takes_an_empty_batch(make: Any) -> None:
    program = torch.export.export(make(20, 64).eval(), (torch.empty(0, 64),))
    assert prepack.packed(program).module()(torch.empty(0, 64)).shape == (0, 20)


@pytest.mark.parametrize("make", [nf4_layer, int8_layer])
def test_strided_rows_are_read_correctly(make: Any) -> None:
    layer = make(20, 64)
    module = prepack.packed(exported(layer, torch.randn(2, 64))).module()
    wide = torch.randn(6, 128)
    assert torch.equal(module(wide[::2, ::2]), module(wide[::2, ::2].contiguous()))


def test_a_wrong_input_width_is_refused_with_its_value() -> None:
    packed = cpu.pack_int8(torch.ones(4, 8, dtype=torch.int8), torch.ones(4))
    with pytest.raises(RuntimeError, match="expected x with 8 columns, got 9"):
        torch.ops.infer.linear_int8_packed(torch.ones(1, 9), *packed, None, None, 4, 8)


def test_a_uniform_table_is_exact_in_int8() -> None:
    table = torch.arange(-8, 8)[None] / 8
    rounded, factor = rounded_table(table)
    torch.testing.assert_close(rounded.float() * factor[:, None] / 127, table, rtol=1e-6, atol=0)


def test_kernels_are_built_where_a_compiler_exists() -> None:
    assert cpu.why_not() is None


def test_every_native_operator_has_a_c_declaration() -> None:
    for op, (declaration,) in kernels.c_functions().items():
        name, _, arguments = declaration.partition("(")
        assert name.endswith(f"aoti_torch_cpu_{op._schema.name.split('::')[1]}")
        assert "AtenTensorHandle" in arguments


@pytest.mark.slow
def test_operands_that_the_compiler_writes_into_its_code_have_their_values(tmp_path: Path) -> None:
    """Vectors of up to eight numbers become literals when a graph is lowered, before anything is packed."""
    tensors = int8.quantize(torch.randn(5, 64), None, PLAN.with_(quant="int8"))
    static = tensors | {"x_scale": torch.tensor(0.02)}
    model = nn.Sequential(nf4_layer(64, 64, True), Packed(static, int8.linear, torch.randn(5)))
    x = torch.randn(3, 64)
    spec = TensorSpec("input", "float32", ("batch", 64))
    graph = capture.capture(model.eval(), (spec,), {"input": x})
    inductor = plugins.get("backends", "inductor")
    storage.save(graph, tmp_path)
    inductor.lower(graph, PLAN.with_(backend="inductor", device="cpu"), tmp_path)
    runner = inductor.open(tmp_path, "cpu")
    assert relative(runner.run({"input": x})["output"], model(x)) < 0.03
