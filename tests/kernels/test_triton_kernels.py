"""The Triton kernels against the portable reference, on odd shapes: on a GPU, or in Triton's interpreter on the CPU.

`TRITON_INTERPRET` counts when kernels are defined, so without a GPU the tests marked `on_device` run in a second
process (test_triton_interpreter.py). In this one the kernels are compiled for two GPUs that needn't be here.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from infer.kernels import gpu
from infer.kernels.ops import bitpack
from infer.kernels.ops.coded_weight import CodedWeight
from tests.support.triton_compile import (
    CUDA,
    DEVICE,
    INTERPRETED,
    assembly,
    assert_near,
    in_turns,
    on_device,
    on_host,
)

triton = pytest.importorskip("triton", reason="triton is not installed")
from infer.kernels.gpu import (  # noqa: E402
    embedding,
    epilogue,
    kernel_thresholds,
    linear_codes,
)
from infer.kernels.gpu.int8 import int8_gemm, int8_gemv, int8_quantize, linear_int8, w8a16_gemv  # noqa: E402
from infer.kernels.gpu.lut import lut_decode, lut_gemm, lut_gemv  # noqa: E402

# cuBLAS asks for it under the deterministic mode that the tests run in.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
OPS = torch.ops.infer

ROWS = (1, 2, 3, 7, 16, 17, 33, 130)
if CUDA:
    SHAPES = [(m, n, k) for m in ROWS for n, k in ((1, 64), (33, 192), (70, 1088), (4097, 4160))]
    INT8_SHAPES = [(m, n, k) for m in ROWS for n, k in ((1, 1), (33, 63), (70, 1100), (4099, 4097))]
else:
    SHAPES = [(1, 33, 64), (3, 5, 320), (9, 2, 64)]
    INT8_SHAPES = [(1, 1, 1), (2, 9, 200), (7, 70, 63), (17, 33, 33), (130, 3, 128)]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Bits of a code, and how many weights share a scale.
FORMS = [*((bits, 64) for bits in bitpack.BITS), (4, 16)]
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def lut_weights(rows: int, columns: int, bits: int, group: int = 64) -> CodedWeight:
    tables = -(-rows // bitpack.TABLE_ROWS) if bits != 4 else 1
    generator = torch.Generator().manual_seed(rows * columns + bits)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    table = torch.rand(tables, 2**bits, generator=generator).mul(2).sub(1).sort(1).values
    scale = torch.randint(-127, 128, (rows, columns // group), dtype=torch.int8, generator=generator)
    row_scale = torch.rand(rows, generator=generator) + 0.1
    made = (t.to(DEVICE) for t in (bitpack.pack(codes, bits), scale, table))
    return CodedWeight(*made, super_scale=row_scale.to(DEVICE))


def int8_weights(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
    scale, bias = torch.rand(rows, generator=generator) * 0.01 + 0.001, torch.randn(rows, generator=generator)
    return codes.to(DEVICE), scale.to(DEVICE), bias.to(DEVICE)


def reference(name: str, *args: Tensor | None) -> Tensor:
    """Compute the portable operator on the CPU."""
    return getattr(OPS, name)(*(None if a is None else a.cpu() for a in args)).to(DEVICE)


@on_device
@pytest.mark.parametrize(("form", "shape"), in_turns(FORMS, SHAPES), ids=str)
def test_lut_products_of_few_rows_have_exact_weights(
    form: tuple[int, int], shape: tuple[int, int, int]
) -> None:
    (bits, group), (m, n, k) = form, shape
    weights, dtype = lut_weights(n, k, bits, group), DTYPES[m % 3]
    x, bias = torch.randn(m, k, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE)
    want = reference("linear_codes", x.float(), *weights, bias)
    assert_near(lut_gemv.linear(x, weights, bias), want, CLOSE[dtype])
    if not INTERPRETED or bits in (2, 4):
        assert_near(lut_gemv.linear(x, weights, split=2), want - bias, CLOSE[dtype])


@on_device
@pytest.mark.parametrize(
    ("form", "shape"), in_turns(FORMS, SHAPES if CUDA else [(17, 66, 128), (130, 3, 64)]), ids=str
)
def test_tiles_round_the_table_only(form: tuple[int, int], shape: tuple[int, int, int]) -> None:
    (bits, group), (m, n, k) = form, shape
    # The interpreter multiplies the bits of bfloat16, not its values.
    for dtype in (torch.float16, torch.bfloat16)[: 2 if CUDA else 1]:
        weights = lut_weights(n, k, bits, group)
        x, bias = torch.randn(m, k, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE)
        rounded = weights._replace(table=weights.table.to(dtype).float())
        want = reference("linear_codes", x.float(), *rounded, bias)
        assert_near(lut_gemm.linear(x, weights, bias), want, CLOSE[dtype])
        assert_near(lut_gemm.linear(x, weights, bias, split=3), want, CLOSE[dtype])


@on_device
@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_decode_and_embedding_equal_the_reference(bits: int, group: int) -> None:
    weights = lut_weights(70, 320, bits, group)
    want = reference("embedding_codes", torch.arange(70), *weights)
    torch.testing.assert_close(lut_decode.decode(weights, torch.float32), want, rtol=1e-6, atol=1e-7)
    assert_near(lut_decode.decode(weights, torch.float16), want, 1e-3)
    for dtype in (torch.int64, torch.int32):
        ids = torch.tensor([[69, 0], [33, 31]], device=DEVICE, dtype=dtype)
        torch.testing.assert_close(embedding.embedding_codes(ids, *weights), want[ids], rtol=1e-6, atol=1e-7)
    assert embedding.embedding_codes(ids[:0], *weights).shape == (0, 2, 320)


@on_device
def test_embedding_int8_equals_the_reference() -> None:
    codes, scale, _ = int8_weights(50, 1033)
    ids = torch.tensor([[0, 49, 7]], device=DEVICE)
    assert torch.equal(
        embedding.embedding_int8(ids, codes, scale), reference("embedding_int8", ids, codes, scale)
    )
    assert embedding.embedding_int8(ids, codes, scale.half()).dtype == torch.float16
    with pytest.raises(RuntimeError):  # on CUDA it is an assertion of the device, which can't be caught
        embedding.embedding_int8(torch.tensor([50]), codes.cpu(), scale.cpu())


@on_device
@pytest.mark.parametrize("shape", INT8_SHAPES, ids=str)
def test_int8_products_are_bit_equal(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    codes, scale, bias = int8_weights(n, k)
    x, step = torch.randn(m, k, device=DEVICE), torch.tensor(0.015, device=DEVICE)
    for added in (None, bias):
        assert torch.equal(
            linear_int8.linear_int8(x, codes, scale, added), reference("linear_int8", x, codes, scale, added)
        )
    assert torch.equal(
        linear_int8.linear_int8_static(x, codes, scale, step, bias),
        reference("linear_int8_static", x, codes, scale, step, bias),
    )
    q = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=DEVICE)
    sums = (q.cpu().long() @ codes.cpu().long().T).to(DEVICE, torch.int32)
    for split in (None, 2):
        assert torch.equal(int8_gemm.products(q, codes, split).sum(0, dtype=torch.int32), sums)
        if int8_gemv.usable(q, codes):
            assert torch.equal(int8_gemv.linear(q, codes, split).sum(0, dtype=torch.int32), sums)
    for dtype in (torch.float32, torch.float16):
        want = reference("linear_int8_weight", x.to(dtype).float(), codes, scale, bias)
        assert_near(linear_int8.linear_int8_weight(x.to(dtype), codes, scale, bias), want, CLOSE[dtype])


@on_device
@pytest.mark.parametrize("shape", [(1, 33, 64), (3, 5, 320), (4, 70, 1096)], ids=str)
def test_int8_weights_of_few_rows_are_exact(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    codes, scale, bias = int8_weights(n, k)
    codes[0, :2] = torch.tensor([127, -128], device=DEVICE)
    for dtype in DTYPES if CUDA else DTYPES[:2]:
        x = torch.randn(m, k, device=DEVICE).to(dtype)
        want = reference("linear_int8_weight", x.float(), codes, scale, bias)
        assert_near(w8a16_gemv.linear(x, codes, scale, bias), want, CLOSE[dtype])
        assert_near(w8a16_gemv.linear(x, codes, scale, split=2), want - bias, CLOSE[dtype])
    assert not w8a16_gemv.usable(x[:, :7])
    assert not w8a16_gemv.usable(x.repeat(2, 1)[:5] if m > 2 else x[:0])


@on_device
def test_the_largest_int8_sums_are_exact() -> None:
    q = torch.full((1, 4100), -127, dtype=torch.int8, device=DEVICE)
    codes = torch.full((2, 4100), 127, dtype=torch.int8, device=DEVICE)
    for sums in (int8_gemv.linear(q, codes), int8_gemm.products(q, codes)):
        assert sums.sum(0).tolist() == [[-4100 * 127 * 127] * 2]


@on_device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy computes for the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_affects_its_row_only_and_a_zero_row_gives_the_bias(value: float) -> None:
    x = torch.randn(4, 128, device=DEVICE)
    x[1, 7], x[2] = value, 0
    codes, scale, bias = int8_weights(5, 128)
    outputs = [
        linear_int8.linear_int8(x, codes, scale, bias),
        linear_int8.linear_int8_weight(x, codes, scale, bias),
        lut_gemv.linear(x, lut_weights(5, 128, 4), bias),
    ]
    for y in outputs:
        assert not y[1].isfinite().any()
        assert y[[0, 3]].isfinite().all()
        assert torch.equal(y[2], bias)


@on_device
def test_the_operator_takes_any_leading_sizes_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, bias = lut_weights(6, 128, 4), torch.randn(6, device=DEVICE)
    x = torch.randn(2, 128, 3, device=DEVICE).transpose(1, 2)
    want = reference("linear_codes", x, *weights, bias)
    assert_near(linear_codes.linear_codes(x, *weights, bias), want, 1e-5)
    assert linear_codes.linear_codes(x[:0], *weights, bias).shape == (0, 3, 6)
    assert linear_codes.linear_codes(x.double(), *weights, bias).dtype == torch.float64
    limits = ((100, 100, 1e-3), (1, 100, 1e-3), (1, 1, 1e-3))
    for tiles, library, tolerance in limits:  # few rows, tiles, library
        monkeypatch.setattr(
            kernel_thresholds, "of", lambda *_, a=tiles, b=library: kernel_thresholds.Crossover(a, b)
        )
        assert_near(linear_codes.linear_codes(x.half(), *weights, bias), want, tolerance)
    monkeypatch.setattr(linear_codes, "MOST_WEIGHTS", 32 * 128)
    wide = lut_weights(70, 128, 3)
    y = linear_codes.multiply_decoded(x[0], wide)
    assert_near(y, reference("linear_codes", x[0], *wide), 1e-4)


def test_estimated_crossovers_rise_with_the_bandwidth() -> None:
    slow, fast = (kernel_thresholds.estimate("lut4", bandwidth, peak=8e14) for bandwidth in (1e12, 4e12))
    assert 16 < fast.library <= slow.library < kernel_thresholds.NEVER
    assert kernel_thresholds._first([3.0] * 11, [2.0] * 11) == kernel_thresholds.NEVER
    assert kernel_thresholds._first([1.0] * 11, [2.0] * 11) == 1
    assert kernel_thresholds._first([3.0, 3.0] + [1.0] * 9, [2.0] * 11) == kernel_thresholds.ROWS[2]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Collect launches that were not made: (kernel, arguments, options)."""
    launches: list[tuple] = []
    modules = (
        embedding,
        epilogue,
        int8_quantize,
        int8_gemv,
        int8_gemm,
        w8a16_gemv,
        lut_decode,
        lut_gemv,
        lut_gemm,
    )
    for module in modules:
        monkeypatch.setattr(
            module, "launch", lambda kernel, _, *args, **options: launches.append((kernel, args, options))
        )
    return launches


@on_host
def test_few_rows_look_the_table_up_by_shuffles(captured: list[tuple]) -> None:
    """Check what makes the kernel fast: 128 codes of a lane are 128 shuffles, and the loop uses no memory."""
    lut_gemv.linear(torch.empty(1, 4096, dtype=torch.bfloat16), lut_weights(4096, 4096, 4), split=1)
    text = assembly(captured, 90)[0]
    assert 128 <= text.count("shfl.sync.idx") <= 132
    assert text.count("ld.global") < 60
    assert "atom" not in text
    assert "local" not in text


@on_host
def test_a_bias_is_added_after_a_rounding_of_its_own(captured: list[tuple]) -> None:
    """A compiler that embeds the kernel knows no option against fused multiply-adds: the kernel itself has none."""
    epilogue.finish(
        torch.zeros(2, 3, 8, dtype=torch.int32), torch.ones(3), torch.ones(8), torch.ones(8), DTYPES[0]
    )
    text = assembly(captured, 90)[0]
    assert "enable_fp_fusion" not in captured[0][2]
    assert text.count("mul.rn.f32") >= 2
    assert "fma" not in text


@on_host
def test_int8_weights_become_floats_without_conversions(captured: list[tuple]) -> None:
    weights = torch.zeros(64, 4096, dtype=torch.int8), torch.zeros(64)
    w8a16_gemv.linear(torch.empty(1, 4096, dtype=torch.bfloat16), *weights, split=1)
    text = assembly(captured, 90)[0]
    assert text.count("prmt.b32") >= 128
    assert "cvt.rn.f32" not in text
    assert "atom" not in text


@on_host
def test_int8_rows_use_dot_products_of_four(captured: list[tuple]) -> None:
    int8_gemv.linear(torch.zeros(1, 4096, dtype=torch.int8), torch.zeros(64, 4096, dtype=torch.int8), split=1)
    text = assembly(captured, 90)[0]
    assert text.count("dp4a") >= 16
    assert "atom" not in text


@on_host
@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async")])
def test_tiles_use_the_tensor_cores(captured: list[tuple], capability: int, instruction: str) -> None:
    x = torch.empty(64, 512, dtype=torch.bfloat16)
    lut_gemm.linear(x, lut_weights(64, 512, 4), split=1)
    lut_gemm.linear(x, lut_weights(64, 512, 4, 16), split=1)
    int8_gemm.products(x.to(torch.int8), torch.zeros(64, 512, dtype=torch.int8), split=1)
    assert all(instruction in text for text in assembly(captured, capability))


@on_host
@pytest.mark.parametrize("one", [False, True])  # Triton compiles a size of one into the kernel, as no tensor
def test_every_triton_kernel_compiles(captured: list[tuple], one: bool) -> None:
    m, n, k = (1, 1, 64) if one else (20, 70, 128)
    codes, scale, bias = int8_weights(n, 1 if one else 100)
    x, ids = torch.randn(m, k), torch.tensor([0])
    linear_int8.linear_int8(torch.randn(m, codes.shape[1]), codes, scale, bias)
    linear_int8.linear_int8_weight(torch.randn(m, codes.shape[1]).bfloat16(), codes, scale)
    int8_gemv.linear(torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8), split=1)
    for bits, group in ((3, 64), (4, 16), (4, 64)):
        weights = lut_weights(n, k, bits, group)
        lut_gemv.linear(x.half(), weights, bias, split=2)
        lut_gemm.linear(x.half(), weights, bias)
        lut_decode.decode(weights, torch.bfloat16)
        embedding.embedding_codes(ids, *weights)
    embedding.embedding_int8(ids, codes, scale)
    assert all(assembly(captured, 80))


TRACED = """
import torch
from infer.kernels import gpu
from infer.kernels.gpu import compile_inline, kernel_thresholds

class Layer(torch.nn.Module):
    def forward(self, x, codes, scale, table, super_scale):
        return torch.ops.infer.linear_codes(x, codes, scale, table, None, super_scale, None).relu()

def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]

def backend(module, inputs):
    def stop(graph, _):
        print(*targets(graph.graph))
        raise SystemExit
    return torch._dynamo.backends.common.aot_autograd(fw_compiler=stop)(module, inputs)

for _ in range(2):  # a torch with CUDA has registered it when `infer.kernels` was imported
    compile_inline.embed(["linear_codes"], gpu.function)
compile_inline._embeddable = lambda x: all(isinstance(size, int) for size in x.shape)  # not only on CUDA
kernel_thresholds.of = lambda *_: kernel_thresholds.Crossover(8, 128)
codes, scale = torch.zeros(64, 64, dtype=torch.uint8), torch.zeros(64, 2, dtype=torch.int8)
weights = codes, scale, torch.zeros(1, 16), torch.zeros(64)
program = torch.export.export(Layer(), (torch.zeros(1, 128), *weights))
print(*targets(program.run_decompositions(gpu.in_graph()).graph))
for rows in (1, 3):
    try:
        with torch.no_grad():
            torch.compile(Layer(), backend=backend, dynamic=rows > 1)(torch.zeros(rows, 128), *weights)
    except SystemExit:
        torch._dynamo.reset()
"""


@on_host
def test_compilers_see_the_kernel_where_the_number_of_rows_is_known(run_python) -> None:
    exported, compiled, symbolic = run_python(TRACED).strip().splitlines()[-3:]
    assert "triton" not in exported  # an exported program is portable: it keeps the operator, or plain torch
    assert "triton_kernel_wrapper_functional" in compiled
    assert "triton" not in symbolic
    assert "infer.linear_codes" in symbolic


GRIDS = """
import torch
from infer.kernels.gpu import epilogue, launch
grids = []
epilogue.launch = lambda kernel, grid, *args, **options: grids.append(grid)
epilogue.finish(torch.zeros(1, 70_000, 8), None, torch.ones(8), None, torch.float32)
print(*grids[0])
try:
    launch.launch(None, (1, 65_536), torch.zeros(1))
except RuntimeError as error:
    print(error)
"""


@on_host
def test_rows_lie_on_the_grid_axis_without_a_limit(run_python) -> None:
    grid, refused = run_python(GRIDS).strip().splitlines()[-2:]
    assert grid == "70000 1"
    assert refused == "a grid of [1, 65536] programs: CUDA takes 65535 on its second and third axis"


@on_host
def test_missing_gives_the_reason_without_a_gpu() -> None:
    if gpu.why_not() is None:
        pytest.skip("there is a GPU that can run the kernels")
    assert "GPU" in str(gpu.why_not()) or "CUDA" in str(gpu.why_not())
