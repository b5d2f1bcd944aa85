"""4-bit layers in the order of tensor-core fragments: packing, pass, kernel in the interpreter, PTX, machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infer.kernels.gpu import fragment_packing, launch
from infer.kernels.ops import bitpack, linear_lut4_fragments
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.passes import fragment_fusion
from tests.support import ptx_elementwise
from tests.support.triton_compile import CUDA, DEVICE, assert_near, compiled, on_device, on_host

triton = pytest.importorskip("triton", reason="triton is not installed")
from infer.kernels.gpu.lut import fragment_decode, fragment_gemm  # noqa: E402
from infer.kernels.gpu.lut import linear_lut4_fragments as gpu_linear  # noqa: E402

OPS = torch.ops.infer
HALVES = {torch.bfloat16: "bf16", torch.float16: "f16"}
CASES = [
    *(
        ("uniform", (1, 33, 64)),
        ("table", (9, 130, 320)),
        ("uniform", (40, 16, 64)),
        ("tables", (17, 70, 128)),
    ),
    *([(form, (70, 3, 320)) for form in ("uniform", "table", "tables")] if CUDA else []),
]
PARTS = ("codes", "scale", "table", "super_scale")
FORMS = {"uniform": 1, "table": 1, "tables": None}  # number of tables, None: one for 32 rows


def weights(rows: int, columns: int, form: str) -> CodedWeight:
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    tables = FORMS[form] or -(-rows // bitpack.TABLE_ROWS)
    table = torch.rand(tables, 16, generator=generator).mul(2).sub(1).sort(1).values
    if form == "uniform":
        table = (torch.arange(16.0)[None] - 8) / 8
    scale = torch.randint(-127, 128, (rows, columns // 64), dtype=torch.int8, generator=generator)
    row_scale = torch.rand(rows, generator=generator) + 0.1
    return CodedWeight(bitpack.pack(codes, 4), scale, table, super_scale=row_scale)


@on_host
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (70, 320), (130, 256)])
def test_fragment_packing_keeps_the_weight(form: str, rows: int, columns: int) -> None:
    portable = weights(rows, columns, form)
    uniform = linear_lut4_fragments.uniform_zero(portable.table) is not None
    assert uniform == (form == "uniform")
    x, bias = torch.randn(3, columns), torch.randn(rows)
    packed = linear_lut4_fragments.pack(portable, uniform)
    got = OPS.linear_lut4_fragments(x, *packed, bias, rows, uniform)
    assert_near(got, OPS.linear_codes(x, *portable, bias), 1e-6)
    assert packed[0].shape[0] * 16 == -(-rows // 128) * 128
    assert not packed[3].transpose(0, 1).reshape(packed[3].shape[1], -1)[rows:].any()


@on_host
def test_only_tables_with_an_integer_zero_are_uniform() -> None:
    steps = torch.arange(16.0)[None]
    assert linear_lut4_fragments.uniform_zero((steps - 7) * 0.3) == [7]
    assert linear_lut4_fragments.uniform_zero((steps - 7.5) * 0.3) is None
    assert linear_lut4_fragments.uniform_zero(steps * 0) is None
    assert linear_lut4_fragments.uniform_zero(torch.cat([steps, steps**2])) is None


@on_host
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", ["uniform", "table"])
def test_the_assembly_decodes_every_code_at_every_place(form: str, dtype: torch.dtype, scaled: bool) -> None:
    uniform, half = form == "uniform", HALVES[dtype]
    table = weights(32, 64, form).table
    zeros = linear_lut4_fragments.uniform_zero(table)
    first = 0 if dtype == torch.bfloat16 else 9
    planes = linear_lut4_fragments.planes_of(table, zeros)[0, first : first + 9].tolist()
    entries = torch.arange(16.0) - 8 if uniform else table[0]
    made = fragment_decode.uniform_assembly if uniform else fragment_decode.table_assembly
    scales = torch.tensor([3.0, -127.0], dtype=dtype)
    words = [int(s) & 0xFFFF for s in scales.view(torch.int16)]
    operands = [planes[8]] if uniform else planes[:8]
    operands += [word | word << 16 for word in words] if scaled else []
    for shift in range(16):
        codes = [(shift + 5 * j) % 16 for j in range(8)]
        word = sum(
            code << place for code, place in zip(codes, linear_lut4_fragments.places(uniform), strict=True)
        )
        bits = ptx_elementwise.run(made(half, scaled), [word, *operands], 8)
        got = torch.tensor(bits).to(torch.int16).view(dtype)
        want = entries[codes].to(dtype)
        assert torch.equal(got, want * scales[[0, 0, 1, 1] * 2] if scaled else want)


GROUPWISE = [  # group, type of the scales, a minimum, a table of integers; rows, features, columns
    ((128, torch.float16, True, True), (3, 33, 384)),
    ((64, torch.float32, False, False), (1, 16, 128)),
    ((192, torch.bfloat16, True, False), (40, 130, 192)),
]
Groupwise = tuple[int, torch.dtype, bool, bool]


def groupwise_weights(form: Groupwise, rows: int, columns: int) -> CodedWeight:
    """Return a weight whose minimum is float32, as the loaders have it."""
    group, dtype, has_minimum, integers = form
    codes, table, _, _ = weights(rows, columns, "table").lut_tensors()
    generator = torch.Generator().manual_seed(rows + group)
    scale, minimum = torch.randn(2, rows, columns // group, generator=generator)
    table = torch.arange(16.0)[None] - 8 if integers else table
    return CodedWeight(codes, scale.to(dtype), table, minimum if has_minimum else None)


@on_device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy computes for the interpreter
@pytest.mark.parametrize(("form", "shape"), GROUPWISE, ids=str)
def test_groupwise_layers_keep_their_scales_and_minima(form: Groupwise, shape: tuple[int, int, int]) -> None:
    rows, features, columns = shape
    given = groupwise_weights(form, features, columns)
    table, minimum = given.table, given.minimum
    bias = torch.randn(features)
    assert linear_lut4_fragments.is_integers(table) == form[3]
    packed = [t.to(DEVICE) for t in linear_lut4_fragments.pack(given, form[3])]
    minima = None if minimum is None else linear_lut4_fragments.pack_factors(minimum).to(DEVICE)
    x = torch.randn(rows, columns).half()
    want = OPS.linear_codes(x.float(), *given, bias)
    portable = OPS.linear_lut4_fragments(
        x.float(),
        *(t.cpu() for t in packed),
        bias,
        features,
        form[3],
        None if minima is None else minima.cpu(),
    )
    assert_near(portable, want, 1e-6)
    operands = (packed[0], *packed[2:])
    for split in (1, 2):
        got = fragment_gemm.linear(x.to(DEVICE), *operands, bias.to(DEVICE), features, form[3], split, minima)
        assert_near(got.cpu(), want, 1e-3)
    weight = gpu_linear.decode_weight(*operands, features, columns, form[3], torch.float16, minima)
    assert_near(x.float() @ weight.cpu().float().T + bias, want, 1e-3)
    x[0, 0] = float("nan")
    y = fragment_gemm.linear(x.to(DEVICE), *operands, None, features, form[3], minimum=minima)
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()


@on_device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy computes for the interpreter
@pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
def test_fragment_gemm_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, form: str, shape: tuple[int, int, int]
) -> None:
    rows, features, columns = shape
    portable = weights(features, columns, form)
    uniform = form == "uniform"
    packed = [t.to(DEVICE) for t in linear_lut4_fragments.pack(portable, uniform)]
    bias = torch.randn(features)
    for dtype in HALVES if CUDA else (torch.float16,):  # the interpreter multiplies the bits of bfloat16
        x = torch.randn(rows, columns).to(dtype)
        want = OPS.linear_codes(x.float(), *portable, bias)
        tolerance = 1e-3 if dtype == torch.float16 else 8e-3
        operands = (x.to(DEVICE), packed[0], *packed[2:])
        for split in (1, 2):
            got = fragment_gemm.linear(*operands, bias.to(DEVICE), features, uniform, split)
            assert_near(got.cpu(), want, tolerance)
            assert not launch.tickets(operands[0], 1).any()
        with monkeypatch.context() as patch:  # as where a compiler traces
            patch.setattr(fragment_gemm, "tickets", lambda *_: None)
            again = fragment_gemm.linear(*operands, bias.to(DEVICE), features, uniform, 2)
        assert torch.equal(again, got)
        weight = gpu_linear.decode_weight(packed[0], *packed[2:], features, columns, uniform, dtype)
        assert_near(x.float() @ weight.cpu().float().T + bias, want, tolerance)
    bad = x.clone()
    bad[0, 0] = float("nan")
    y = fragment_gemm.linear(bad.to(DEVICE), packed[0], *packed[2:], None, features, uniform)
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()


class _Block(torch.nn.Module):
    """Three layers of one input, one of them with a bias, and a fourth behind them."""

    def __init__(self) -> None:
        super().__init__()
        for i, (rows, columns) in enumerate(((70, 128), (33, 128), (130, 128), (64, 130 - 130 % 64))):
            weight = weights(rows, columns, "table")
            for name in PARTS:
                self.register_buffer(f"{name}_{i}", getattr(weight, name))
        self.register_buffer("bias", torch.randn(33))

    def layer(self, x: Tensor, i: int, bias: Tensor | None = None) -> Tensor:
        weight = CodedWeight.of({name: getattr(self, f"{name}_{i}") for name in PARTS})
        return OPS.linear_codes(x, *weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layer(x, 0), self.layer(x, 1, self.bias), self.layer(x, 2)
        joined = torch.cat([first, second, third[..., :25]], -1)
        return self.layer(joined, 3) / x.shape[-2]  # a size is a node of the program


@on_host
def test_fragment_layers_of_one_input_become_one_call() -> None:
    x = torch.randn(2, 5, 128).bfloat16()
    program = torch.export.export(_Block(), (x,), dynamic_shapes=({1: torch.export.Dim("tokens", min=2)},))
    planned, packings = fragment_fusion.plan_fragments(program)
    assert [len(packing.layers) for packing in packings] == [3, 1]
    assert packings[0].starts == [0, 128, 256, 512]
    assert not [name for name in planned.state_dict if name.startswith(("codes", "table", "scale"))]
    for packing in packings:
        made = fragment_packing.pack([packing], program.state_dict)
        for part, (shape, dtype) in packing.shapes.items():
            tensor = made[f"{packing.name}_{part}"]
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    packed = fragment_fusion.packed(program)
    calls = [n for n in packed.graph.nodes if "linear_" in str(n.target)]
    assert [str(n.target) for n in calls] == ["infer.linear_lut4_fragments.default"] * 2
    assert_near(packed.module()(x), program.module()(x), 8e-3)
    assert fragment_fusion.findings(packings)[0].value == 4


class _Checkpoint(torch.nn.Module):
    """Layers of one input on a checkpoint's codes: two alike, one of smaller groups, one of other scales."""

    FORMS: tuple[Groupwise, ...] = (
        (128, torch.float16, True, True), (128, torch.float16, True, True),
        (64, torch.float16, True, True), (128, torch.float32, False, True),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        for i, (form, rows) in enumerate(zip(self.FORMS, (70, 33, 20, 16), strict=True)):
            parts = groupwise_weights(form, rows, 256)
            for name, value in parts._asdict().items():
                if value is not None:
                    self.register_buffer(f"{name}_{i}", value)

    def forward(self, x: Tensor) -> list[Tensor]:
        held = [{n[:-2]: t for n, t in self.named_buffers() if n.endswith(f"_{i}")} for i in range(4)]
        return [OPS.linear_codes(x, *CodedWeight.of(layer)) for layer in held]


@on_host
def test_layers_of_a_checkpoint_are_packed_by_their_groups() -> None:
    x = torch.randn(5, 256).bfloat16()
    program = torch.export.export(_Checkpoint(), (x,))
    planned, packings = fragment_fusion.plan_fragments(program)
    assert [(len(p.layers), p.group, p.factors, p.minima, p.uniform) for p in packings] == [
        (2, 128, "float16", "float32", True),
        (1, 64, "float16", "float32", True),
        (1, 128, "float32", None, True),
    ]
    made = fragment_packing.pack(packings, program.state_dict)
    for packing in packings:
        for part, (shape, dtype) in packing.shapes.items():
            tensor = made.pop(f"{packing.name}_{part}")
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    assert not made
    assert not [n for n in planned.graph.nodes if "linear_codes" in str(n.target)]
    results = fragment_fusion.packed(program).module()(x)
    for got, want in zip(results, program.module()(x), strict=True):
        assert_near(got, want, 8e-3)


@on_host
def test_layers_fragment_gemm_cannot_run_are_unchanged() -> None:
    program = torch.export.export(_Block(), (torch.randn(2, 128),))  # float32: no tensor cores
    planned, packings = fragment_fusion.plan_fragments(program)
    assert not packings
    assert sum(str(n.target) == "infer.linear_codes.default" for n in planned.graph.nodes) == 4


@on_host
@pytest.mark.parametrize(("capability", "rows"), [(80, 64), (90, 4)])
def test_weights_reach_the_tensor_cores_from_registers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, rows: int
) -> None:
    """Check machine code: words arrive by asynchronous copies and 16-byte loads; no half word is stored in the loop."""
    launches: list[tuple] = []
    monkeypatch.setattr(
        fragment_gemm, "launch", lambda kernel, _, *args, **options: launches.append((kernel, args, options))
    )
    packed = linear_lut4_fragments.pack(weights(256, 1024, "table"), False)
    fragment_gemm.linear(
        torch.empty(rows, 1024, dtype=torch.bfloat16), packed[0], *packed[2:], None, 256, False, 1
    )
    kernel = compiled(launches[0], capability)
    (tmp_path / "a.cubin").write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    code = subprocess.run(
        [tool, "-c", tmp_path / "a.cubin"], capture_output=True, text=True, check=True
    ).stdout
    last = max(match.start() for match in re.finditer(r"H\w*MMA", code))
    assert "LDGSTS.E.BYPASS.128" in code
    assert "LDS.128" in code[:last]
    assert not re.search(r"STS\.U16|SHFL", code[:last])
    assert code.count("PRMT") > 100
