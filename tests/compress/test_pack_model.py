"""The walk: ties, blocks read from a checkpoint, what it must not touch, and graphs of the result."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from infer import compress, kernels
from infer.compress import QuantizationResult
from infer.compress.conv_layers import QuantizedConv
from infer.compress.packed_layers import QuantizedEmbedding, QuantizedLinear
from infer.compress.packing import row_source
from infer.errors import NotUsableError, SourceError, UsageError
from infer.graph import capture
from infer.plan import Plan
from infer.results import LayerResult
from infer.weights import Weight, in_memory

FORMATS = ["fp16", "int8", "int8:weight", "int8:static", "nf4", "cluster:2", "cluster:3"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(150, 128, padding_idx=0)
        self.inner = nn.Sequential(nn.Linear(128, 192), nn.ReLU(), nn.Linear(192, 128), nn.LayerNorm(128))
        self.head = nn.Linear(128, 150, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(ids)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(150, 128), nn.Linear(128, 150, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).tanh())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, stride=2, padding=1)
        self.second = nn.Conv2d(64, 64, 3, padding="same", bias=False)
        self.classify = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.second(self.first(x).relu()).relu().mean((2, 3)))


def plan(name: str) -> Plan:
    return Plan(source="model.pt", quant=name)


def shrink(
    model: nn.Module, name: str, batches: list[dict[str, Tensor]] | None = None, **named
) -> QuantizationResult:
    stats = compress.calibrate(model, batches) if batches and compress.needs_stats(plan(name)) else None
    return compress.quantize_model(model, plan(name), stats=stats, **named)


def layer(found: QuantizationResult, name: str) -> LayerResult:
    return next(one for one in found.layers if one.name == name)


def relative(want: Tensor, got: Tensor) -> float:
    return float((want - got).detach().norm() / want.detach().norm())


@pytest.mark.parametrize("name", FORMATS)
def test_a_tied_model_stays_tied_and_close(name: str) -> None:
    model, ids = Tied().eval(), torch.randint(0, 150, (4, 9))
    want = model(ids)
    found = shrink(model, name, [{"ids": ids}])
    assert isinstance(model.embed, QuantizedEmbedding)
    assert isinstance(model.head, QuantizedLinear)
    assert model.head.packed is model.embed.packed
    assert layer(found, "head").tied_to == "embed"
    limits = {"cluster:2": 0.8, "cluster:3": 0.4, "nf4": 0.25}
    assert 0 < relative(want, model(ids)) < limits.get(name, 0.03)
    saved = model.state_dict()
    heads = [key for key in saved if key.startswith("head.packed.")]
    assert heads
    assert all(saved[key].data_ptr() == saved[key.replace("head", "embed")].data_ptr() for key in heads)
    own = sum(t.nbytes for t in {t.data_ptr(): t for k, t in saved.items() if ".packed." in k}.values())
    times = 1.9 if name == "fp16" else 3
    assert found.totals.bytes_after == own < found.totals.bytes_before / times


def test_changing_dtype_keeps_ties_and_scales() -> None:
    model, ids = Tied().eval(), torch.randint(0, 150, (4, 9))
    shrink(model, "nf4")
    want, scale = model(ids), model.head.packed.super_scale.clone()
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half(ids).dtype == half.embed.weight.dtype == torch.bfloat16
    assert half.head.packed is half.embed.packed
    assert torch.equal(half.head.packed.super_scale, scale)
    assert relative(want, half(ids).float()) < 0.02


def test_a_convolution_takes_batched_and_unbatched_images() -> None:
    model, x = Images().eval(), torch.randn(4, 3, 16, 16)
    for name in ("fp16", "int8", "int8:weight", "int8:static", "cluster:6"):
        small = copy.deepcopy(model)
        found = shrink(small, name, [{"x": x}])
        assert isinstance(small.second, QuantizedConv)
        refused = "27 columns" if name == "cluster:6" else "1728 values"
        assert refused in found.refused["first"]
        assert relative(model.second.weight, small.second.weight) < 0.03
        assert relative(model(x), small(x)) < 0.02
        middle = model.first(x).relu()
        assert relative(small.second(middle)[1], small.second(middle[1])) < 0.02


def counted(tensors: dict[str, Tensor], asked: list[tuple[str, int]]) -> dict[str, Weight]:
    """Return a checkpoint that notes what was read and how many rows."""

    def counting(name: str, weight: Weight) -> Weight:
        def rows(start: int, stop: int) -> Tensor:
            asked.append((name, stop - start))
            return weight.rows(start, stop)

        return replace(weight, read_rows=rows)

    return {name: counting(name, weight) for name, weight in in_memory(tensors).items()}


@pytest.mark.parametrize("name", ["int8", "nf4", "cluster:3"])
@pytest.mark.parametrize("block", [20 * 128, 70 * 128, 1 << 22])
def test_reading_blocks_from_a_checkpoint_equals_quantizing_in_memory(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = Tied().eval(), torch.randint(0, 150, (2, 3))
    tensors = {
        key.replace("inner", "mlp"): t for key, t in model.state_dict().items() if not key.startswith("head")
    }
    skeleton = copy.deepcopy(model).to("meta")
    skeleton.head.weight = skeleton.embed.weight
    shrink(model, name)
    monkeypatch.setattr(row_source, "BLOCK", block)
    asked: list[tuple[str, int]] = []
    checkpoint, done = counted(tensors, asked), []
    renames = {key: key.replace("inner", "mlp") for key in skeleton.state_dict() if "inner" in key}
    shrink(skeleton, name, checkpoint=checkpoint, renames=renames, progress=lambda *step: done.append(step))
    assert done == [(0, 3, "embed"), (1, 3, "inner.0"), (2, 3, "inner.2"), (3, 3, "")]
    assert {name for name, _ in asked} == {"embed.weight", "mlp.0.weight", "mlp.2.weight"}
    assert max(rows for _, rows in asked) <= max(block // 128, 20 if name != "cluster:3" else 32)
    assert skeleton.inner[0].bias.is_meta
    assert skeleton.inner[3].weight.is_meta
    for key, tensor in model.state_dict().items():
        if ".packed." in key:
            assert torch.equal(skeleton.state_dict()[key], tensor), key
    left = {k: v for k, v in model.state_dict().items() if ".packed." not in k}
    skeleton.load_state_dict(left, strict=False, assign=True)
    assert torch.equal(skeleton(ids), model(ids))


def endless(start: int, stop: int) -> Tensor:
    """Make rows of a weight far larger than what may be in memory."""
    return torch.randn(stop - start, 1024, dtype=torch.bfloat16)


def test_a_large_weight_is_never_whole_in_float(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_source, "BLOCK", 1 << 18)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 4096))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for out in torch.utils._pytree.tree_leaves(result):
                if isinstance(out, Tensor) and not out.is_meta:
                    largest = max(largest, out.untyped_storage().nbytes())
            return result

    with Watch():
        found = compress.quantize_model(
            model, plan("nf4"), checkpoint={"0.weight": Weight(torch.bfloat16, (4096, 1024), endless)}
        )
    packed = 4096 * 1024 // 2
    assert largest == packed < 4096 * 1024 * 4 / 6
    assert found.totals.num_weights == 4096 * 1024
    assert found.totals.bytes_before == 4096 * 1024 * 2
    assert layer(found, "0").weight_error == pytest.approx(0.083, abs=0.002)


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = Tied()
    with torch.no_grad():
        model.inner[2].weight[100, 5] = torch.inf
    with pytest.raises(SourceError, match=r"1 NaN or infinite values.*'inner.2.weight'"):
        shrink(model, "int8")
    with pytest.raises(SourceError, match="no tensor 'embed.weight'"):
        shrink(Tied().to("meta"), "int8", checkpoint=in_memory({"other": torch.zeros(1)}))


def test_static_int8_needs_data_that_reaches_every_layer() -> None:
    with pytest.raises(UsageError, match="--data"):
        shrink(Tied(), "int8:static")
    model = nn.ModuleDict({"used": nn.Linear(64, 64), "unused": nn.Linear(64, 64)})
    model.forward = lambda x: model["used"](x)
    found = shrink(model, "int8:static", [{"x": torch.randn(8, 64)}])
    assert found.refused["unused"] == "no calibration input reached it"
    assert isinstance(model["used"], QuantizedLinear)


def test_static_int8_shrinks_an_embedding_that_is_not_tied() -> None:
    model = nn.Sequential(nn.Embedding(150, 64), nn.Linear(64, 64)).eval()
    ids = torch.randint(0, 150, (4, 7))
    expected = model(ids)
    shrink(model, "int8:static", [{"input": ids}])
    assert isinstance(model[0], QuantizedEmbedding)
    assert "x_scale" not in model[0].packed.tensors()
    assert "x_scale" in model[1].packed.tensors()
    assert (model(ids) - expected).norm() < 0.05 * expected.norm()


class Odd(nn.Module):
    """One of each layer that must be left alone, beside one that need not."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(128, 128)
        self.attention = nn.MultiheadAttention(128, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))
        self.hooked = nn.Linear(128, 128)
        self.hooked.register_forward_pre_hook(lambda module, args: None)
        self.own = type("Own", (nn.Linear,), {"forward": lambda self, x: x})(128, 128)
        self.narrow = nn.Embedding(128, 100)
        self.bound = nn.Linear(128, 128)
        self.other = nn.Module()
        self.other.register_parameter("shared", self.bound.weight)


def test_layers_that_must_stay_float_are_refused_with_a_reason() -> None:
    model = Odd()
    found = shrink(model, "nf4")
    reasons = {
        "attention.out_proj": "nn.MultiheadAttention",
        "normed": "parametrized",
        "hooked": "forward hooks",
        "own": "Own has a forward of its own",
        "narrow": "100 columns",
        "bound": "its weight is also 'other.shared'",
    }
    for name, reason in reasons.items():
        assert reason in found.refused[name]
    assert [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)] == ["plain"]
    assert found.totals.num_layers == 1


def test_a_layer_tied_to_a_refused_one_stays_float() -> None:
    model = Tied()
    model.embed.max_norm = 1.0
    found = shrink(model, "int8")
    assert "tied to 'embed'" in found.refused["head"]
    assert model.head.weight is model.embed.weight


def test_a_layer_used_twice_is_quantized_once_everywhere() -> None:
    layer = nn.Linear(128, 128)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    found = shrink(model, "nf4")
    assert model[0] is model[2]
    assert isinstance(model[0], QuantizedLinear)
    assert found.totals.num_layers == 1


def test_a_model_with_nothing_to_quantize_is_reported() -> None:
    with pytest.raises(NotUsableError, match="refused 0: weight has 100 columns; nf4 blocks are 64 wide"):
        shrink(nn.Sequential(nn.Linear(100, 100)), "nf4")
    with pytest.raises(NotUsableError, match="no Linear, Embedding, Conv1d"):
        shrink(nn.Sequential(nn.ReLU()), "int8")
    with pytest.raises(NotUsableError, match="the model is this one layer"):
        shrink(nn.Linear(128, 128), "int8")


def test_fused_encoder_layers_take_the_path_that_calls_their_layers() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 2, 256, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 128)
    with torch.no_grad():
        want = model(x)
        shrink(model, "int8")
        calls = []
        model.layers[0].linear1.register_forward_hook(lambda *args: calls.append(1))
        got = model(x, src_key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    assert calls
    assert relative(want, got) < 0.02


def exported(model: nn.Module, sample: Tensor, axes: dict[int, Dim]) -> torch.export.ExportedProgram:
    with torch.no_grad(), capture.quiet():
        return torch.export.export(model, (sample,), dynamic_shapes=(axes,), strict=False)


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    with capture.quiet():
        return program.run_decompositions(kernels.decompositions())


@pytest.mark.parametrize("name", FORMATS)
def test_graphs_hold_one_op_a_layer_stay_packed_and_decompose(name: str) -> None:
    model, ids = Tied().eval(), torch.randint(0, 150, (3, 7))
    shrink(model, name, [{"ids": ids}])
    program = exported(model, ids, {0: Dim("batch", min=1, max=64), 1: Dim("time", min=1, max=64)})
    ops = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("infer.")]
    assert len(ops) == 4
    plain = decomposed(program)
    assert not [node for node in plain.graph.nodes if str(node.target).startswith("infer.")]
    packed = {key: t.dtype for key, t in plain.state_dict.items() if key.endswith("codes")}
    assert len(packed) == 4
    assert set(packed.values()) <= {torch.int8, torch.uint8, torch.float16}
    with torch.no_grad():
        for shape in ((1, 1), (5, 11)):
            other = torch.randint(0, 150, shape)
            assert relative(model(other), plain.module()(other)) < 1e-5


@pytest.mark.parametrize("name", ["fp16", "int8", "int8:static", "int8:weight"])
def test_graphs_of_quantized_convolutions_decompose(name: str) -> None:
    model, x = Images().eval(), torch.randn(3, 3, 12, 12)
    shrink(model, name, [{"x": x}])
    plain = decomposed(exported(model, x, {0: Dim("batch", min=1, max=64)}))
    assert not [node for node in plain.graph.nodes if str(node.target).startswith("infer.")]
    with torch.no_grad():
        assert relative(model(x[:1]), plain.module()(x[:1])) < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["int8:weight", "nf4", "cluster:3"])
def test_decomposed_graphs_run_in_onnx_runtime_and_stay_packed(name: str, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model, ids = Pair().eval(), torch.randint(0, 150, (3, 7))
    shrink(model, name)
    program = exported(model, ids, {0: Dim("batch", min=1, max=64), 1: Dim("time", min=1, max=64)})
    path = tmp_path / "model.onnx"
    plain = decomposed(program)
    torch.onnx.export(plain, (ids,), path, dynamo=True, opset_version=20, verbose=False, external_data=False)
    stored = onnx.load(path).graph.initializer
    codes = [tensor for tensor in stored if tensor.name.endswith("codes")]
    assert codes
    assert {tensor.data_type for tensor in codes} <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    assert not [
        t.name for t in stored if t.data_type == onnx.TensorProto.FLOAT and t.dims and max(t.dims) > 192
    ]
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    other = torch.randint(0, 150, (5, 11))
    got = session.run(None, {session.get_inputs()[0].name: other.numpy()})[0]
    with torch.no_grad():
        assert relative(model(other), torch.from_numpy(got)) < 1e-5
