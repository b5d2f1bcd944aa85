"""Layers of table indices in ONNX Runtime: equal to the reference in every form, packed in the file, never a trap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from backends.ort.layers import rewriter, table_layers  # noqa: E402
from infer.compress.formats import int4  # noqa: E402
from infer.kernels.ops import bitpack, linear_packed  # noqa: E402
from infer.kernels.ops.coded_weight import CodedWeight  # noqa: E402
from infer.onnx import export as exporter  # noqa: E402
from infer.onnx import ort_session  # noqa: E402
from infer.onnx.layers.operands import Weights, uniform_step  # noqa: E402
from tests.support.onnx_models import OPS, Lut, graph, relative_error  # noqa: E402


class Layer(nn.Module):
    """A weight float [N, K] on the int4 grid; half of the scales negative. The best grid is not the point here."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        rows, columns = weight.shape
        groups = weight.reshape(rows, columns // bitpack.GROUP, bitpack.GROUP)
        self.register_buffer("super_scale", groups.abs().amax((1, 2)) * 8 / 7)
        sign = torch.where(torch.arange(columns // bitpack.GROUP) % 2 == 0, 1, -1)
        share = groups.abs().amax(2) * 8 / 7 / self.super_scale[:, None]
        self.register_buffer("scale", ((share * 127).ceil() * sign).to(torch.int8))
        step = self.scale.float() / 127 * self.super_scale[:, None] / 8
        codes = ((groups / step[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8)
        self.register_buffer("codes", bitpack.pack(codes.reshape(rows, columns), 4))
        self.register_buffer("table", torch.tensor([int4.TABLE]))
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = CodedWeight(self.codes, self.scale, self.table, super_scale=self.super_scale)
        return OPS.linear_codes(x, *weight, self.bias)


def run(
    module: nn.Module, x: torch.Tensor, folder: Path, weights: Weights = "blocks"
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Output of ONNX Runtime, that of the reference, and the operators that ran."""
    path, made = folder / "model.onnx", graph(module, f"input=float32[batch,{x.shape[-1]}]", x)
    exporter.export(made, path, rewriter("ort-u8u8", weights))
    got = ort_session.open_session(path, "cpu").run(None, {"input": x.numpy()})[0]
    return torch.from_numpy(got), made.callable()(input=x)[0], ort_session.count_executed_ops(path, "cpu")


@pytest.mark.parametrize(("columns", "rows"), [(64, 1), (128, 80), (192, 33)])
def test_int4_is_one_node_that_computes_with_the_codes(tmp_path: Path, columns: int, rows: int) -> None:
    layer = Layer(torch.randn(rows, columns), torch.randn(rows))
    got, want, nodes = run(nn.Sequential(layer), torch.randn(5, columns), tmp_path)
    assert relative_error(got, want) < 0.01
    assert nodes == {"MatMulNBits": 1, "Add": 1} or nodes == {"MatMulNBits": 1}


@pytest.mark.parametrize(
    ("bits", "count", "group"), [(2, 1, 64), (3, 3, 64), (4, 1, 64), (4, 3, 64), (6, 3, 64), (4, 1, 16)]
)
def test_non_uniform_tables_have_two_onnx_forms(tmp_path: Path, bits: int, count: int, group: int) -> None:
    layers, x = nn.Sequential(Lut(128, 80, bits, count, group)), torch.randn(5, 128)
    got, want, nodes = run(layers, x, tmp_path / "blocks")
    assert relative_error(got, want) < 0.012
    assert nodes == {"MatMulNBits": 1}
    got, want, nodes = run(layers, x, tmp_path / "float", "float")
    assert relative_error(got, want) < 1e-6
    assert nodes == {"MatMul": 1}


def test_eight_bit_blocks_are_the_numbers_of_the_native_kernels(tmp_path: Path) -> None:
    layer, x = Lut(256, 48, 4, 2), torch.randn(7, 256)
    got, _, _ = run(nn.Sequential(layer), x, tmp_path)
    twin = linear_packed.lut4_twin(x, layer.coded())
    assert relative_error(got, twin) < 1e-5


@pytest.mark.parametrize("same_sign", [True, False])
def test_products_of_one_sign_do_not_saturate(tmp_path: Path, same_sign: bool) -> None:
    """The last two rows of the saturation table: sums far above 16 bits."""
    x = torch.rand(16, 256) + (1.0 if same_sign else 0.0)
    layer = Layer(torch.rand(64, 256) + 0.5 if same_sign else torch.rand(64, 256) * 2 - 1)
    got, want, _ = run(nn.Sequential(layer), x, tmp_path / "int4")
    assert relative_error(got, want) < 0.01
    largest = Lut(256, 64)
    largest.table = torch.linspace(0.5 if same_sign else -1, 1, 16)[None]
    got, want, _ = run(nn.Sequential(largest), x, tmp_path / "table")
    assert relative_error(got, want) < 0.01


def test_every_block_product_has_integer_activations(tmp_path: Path) -> None:
    """Without accuracy_level 4 a product of 8 bits takes 80 times as long, and MatMulBnb4 decodes at every call."""
    layers = nn.Sequential(Layer(torch.randn(128, 128)), Lut(128, 64), Lut(64, 64, 6, 2))
    run(layers, torch.randn(2, 128), tmp_path)
    nodes = [
        n for n in onnx.load(str(tmp_path / "model.onnx")).graph.node if n.domain == table_layers.MICROSOFT
    ]
    assert [n.op_type for n in nodes] == ["MatMulNBits"] * 3
    levels = [{a.name: a.i for a in n.attribute}["accuracy_level"] for n in nodes]
    assert levels == [4, 4, 4]


def test_int4_with_a_scale_for_each_16_weights_is_one_node(tmp_path: Path) -> None:
    layer, x = Lut(192, 33, group=16), torch.randn(5, 192)
    layer.table = torch.tensor([int4.TABLE])
    got, want, nodes = run(nn.Sequential(layer), x, tmp_path)
    assert relative_error(got, want) < 0.01
    assert nodes == {"MatMulNBits": 1}


@pytest.mark.parametrize(("dtype", "group"), [(torch.int32, 64), (torch.int64, 64), (torch.int64, 16)])
def test_rows_of_an_int4_embedding_are_exact(tmp_path: Path, dtype: torch.dtype, group: int) -> None:
    layer, ids = Lut(128, 64, group=group), torch.tensor([[0, 63, 5], [5, 1, 2]], dtype=dtype)
    layer.table = torch.tensor([int4.TABLE])
    path, made = (
        tmp_path / "model.onnx",
        graph(nn.Sequential(layer), f"input={str(dtype)[6:]}[batch,time]", ids),
    )
    exporter.export(made, path, rewriter("ort-u8u8"))
    assert ort_session.count_executed_ops(path, "cpu") == {"GatherBlockQuantized": 1}
    got = ort_session.open_session(path, "cpu").run(None, {"input": ids.numpy()})[0]
    assert relative_error(torch.from_numpy(got), made.callable()(input=ids)[0]) < 1e-6


def test_files_hold_codes_and_int8_scales(tmp_path: Path) -> None:
    layers = nn.Sequential(Layer(torch.randn(512, 512)), Lut(512, 512, 3, 16))
    run(layers, torch.randn(2, 512), tmp_path)
    packed = sum(tensor.numel() * tensor.element_size() for tensor in layers.buffers())
    assert exporter.folder_bytes(tmp_path / "model.onnx") < packed * 1.15


def test_uniform_tables_are_recognized() -> None:
    exact = torch.tensor([int4.TABLE]).numpy()
    assert uniform_step(exact) == pytest.approx(1 / 8)
    assert uniform_step(exact * 3) == pytest.approx(3 / 8)
    assert uniform_step(-exact) is None
    assert uniform_step(exact[:, :8]) is None
    assert uniform_step(torch.zeros(1, 16).numpy()) is None
