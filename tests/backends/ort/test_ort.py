"""The backend ort by its contract: lowered, opened, run, compared with the program it came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends import ort
from backends.ort import integer_or_float
from infer import device, latency
from infer.errors import NotUsableError
from infer.graph.program import OnnxGraph
from infer.plan import Plan
from infer.spec import Finding
from tests.support.onnx_models import Int8Conv, Int8Linear, Lut, graph, lowered, relative_error

pytestmark = pytest.mark.skipif(ort.missing() is not None, reason=ort.missing() or "")


def plan(**changes: Any) -> Plan:
    return Plan(source="x", backend="ort", device="cpu", dtype="float32").with_(**changes)


def through(
    module: nn.Module, text: str, x: torch.Tensor, folder: Path, **changes: Any
) -> tuple[float, list[Finding]]:
    """Relative error of the runner against the program, and the findings."""
    made = lowered(module, text, x, folder)
    findings = ort.lower(made, plan(**changes), folder).findings
    runner = ort.open(folder, "cpu")
    got = runner.run({made.inputs[0].name: x})
    runner.close()
    want = made.callable()(**{made.inputs[0].name: x})
    assert list(got) == [spec.name for spec in made.outputs]
    return max(relative_error(a, b) for a, b in zip(got.values(), want, strict=True)), findings


def finding_of(findings: list[Finding], what: str) -> Finding:
    return next(finding for finding in findings if finding.what == what)


def test_a_float_model_gives_the_same_numbers_at_other_sizes(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))
    made = lowered(module, "input=float32[batch,time,8]", torch.randn(2, 3, 8), tmp_path)
    findings = ort.lower(made, plan(), tmp_path).findings
    runner = ort.open(tmp_path, "cpu")
    for rows, time in ((1, 1), (5, 7), (64, 2)):
        x = torch.randn(rows, time, 8)
        torch.testing.assert_close(runner.run({"input": x})["output"], made.callable()(input=x)[0])
    assert finding_of(findings, "ort opset").value == 20
    assert finding_of(findings, "ort model").unit == "B"


def test_memory_of_unusually_large_calls_is_given_back(tmp_path: Path) -> None:
    made = lowered(nn.Linear(8, 16), "input=float32[batch,8]", torch.randn(2, 8), tmp_path)
    ort.lower(made, plan(), tmp_path)
    runner = ort.open(tmp_path, "cpu")
    shrinks: list[bool] = []
    session = runner._session

    class Watched:
        def run(self, names: list[str], arrays: dict[str, np.ndarray], options: Any) -> Any:
            shrinks.append(options is not None)
            return session.run(names, arrays, options)

    runner._session = Watched()
    for rows in (2, 2, 2, 64, 2, 64, 64, 2, 2):
        runner.run({"input": torch.zeros(rows, 8)})
    assert shrinks == [False, False, False, True, False, True, True, False, False]


def test_results_of_one_call_survive_the_next(tmp_path: Path) -> None:
    made = lowered(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4), tmp_path)
    ort.lower(made, plan(), tmp_path)
    runner = ort.open(tmp_path, "cpu")
    first = runner.run({"input": torch.ones(2, 4)})["output"]
    kept = first.clone()
    runner.run({"input": torch.full((40, 4), 7.0)})
    torch.testing.assert_close(first, kept, rtol=0, atol=0)


def test_strided_and_integer_inputs_are_taken(tmp_path: Path) -> None:
    made = lowered(
        nn.Embedding(10, 4), "input=int64[batch,time]", torch.zeros(2, 3, dtype=torch.int64), tmp_path
    )
    ort.lower(made, plan(), tmp_path)
    ids = torch.arange(6).reshape(3, 2).T
    got = ort.open(tmp_path, "cpu").run({"input": ids})["output"]
    torch.testing.assert_close(got, made.callable()(input=ids)[0])


@pytest.fixture
def integers_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let integer products be faster than decoded weights."""
    monkeypatch.setattr(integer_or_float, "_compare", lambda *_: (True, Finding("", "", 0)))


@pytest.mark.usefixtures("integers_win")
def test_findings_name_the_int8_form_and_why(tmp_path: Path) -> None:
    error, findings = through(
        nn.Sequential(Int8Linear(torch.randn(64, 64))),
        "input=float32[batch,64]",
        torch.randn(3, 64),
        tmp_path,
        quant="int8",
    )
    form = finding_of(findings, "ort layers as dynamic int8, a scale per token")
    assert form.value == 1
    assert "weights signed" in form.why if device.has_vnni() else "saturate" in form.why
    assert error < 1e-5


def test_float_convolutions_of_an_int8_model_are_named(tmp_path: Path) -> None:
    error, findings = through(
        nn.Sequential(Int8Conv(3, 16)), "input=float32[batch,3,8,8]", torch.randn(2, 3, 8, 8), tmp_path
    )
    left = finding_of(findings, "ort layers in float")
    assert left.value == 1
    assert left.why.startswith("packed on disk, float32 in memory after load")
    assert error < 0.02


def test_table_layers_stay_packed_on_disk_and_the_choice_is_reported(tmp_path: Path) -> None:
    formats = ((4, 1), (4, 16), (3, 16), (6, 16))
    layers = nn.Sequential(*(Lut(512, 512, bits, tables) for bits, tables in formats))
    error, findings = through(layers, "input=float32[batch,512]", torch.randn(3, 512), tmp_path, quant="nf4")
    packed = sum(tensor.numel() * tensor.element_size() for tensor in layers.buffers())
    assert finding_of(findings, "ort model").value < packed * 1.15
    choice = finding_of(findings, "ort quantized layers")
    assert "of decoded weights, and change the outputs by" in choice.why
    if choice.value == integer_or_float.INTEGER:
        assert finding_of(findings, "ort layers as 8-bit blocks, activations in int8").value == 4
        assert 1e-4 < error < integer_or_float.MAX_DIFFERENCE
    else:
        assert finding_of(findings, "ort layers in float").value == 4
        assert error < 1e-4


@pytest.mark.parametrize(
    ("ratio", "loss", "form"),
    [(0.5, 0.0, "integer"), (0.5, 0.5, "float32"), (2.0, 0.0, "float32"), (0.99, 0.0, "float32")],
)
def test_table_layers_take_blocks_when_faster_and_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, loss: float, form: str
) -> None:
    def paired(a: Callable[[], object], b: Callable[[], object], **options: Any) -> latency.Paired:
        sides = [latency.summarize([ratio]), latency.summarize([1.0])]
        return latency.Paired(ratio, ratio, ratio, latency.verdict(ratio, ratio), 1, *sides)

    monkeypatch.setattr(integer_or_float.latency, "paired", paired)
    monkeypatch.setattr(integer_or_float, "_difference", lambda got, want: loss)
    _, findings = through(
        nn.Sequential(Lut(128, 64)), "input=float32[batch,128]", torch.randn(3, 128), tmp_path, quant="nf4"
    )
    assert str(finding_of(findings, "ort quantized layers").value).startswith(form)


@pytest.mark.parametrize(("kind", "faster"), [("", True), ("", False), ("_static", False), ("_weight", True)])
def test_int8_layers_are_float_products_where_those_are_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, faster: bool
) -> None:
    monkeypatch.setattr(integer_or_float, "_compare", lambda *_: (faster, Finding("", "", 0)))
    weight, x = torch.randn(512, 512), torch.randn(3, 512)
    layer = nn.Sequential(Int8Linear(weight, kind, torch.randn(512)))
    error, findings = through(layer, "input=float32[batch,512]", x, tmp_path, quant="int8")
    in_float = kind == "_weight" or not faster
    assert any(one.what == "ort layers in float" for one in findings) is in_float
    assert finding_of(findings, "ort model").value < 512 * 512 * 1.1
    want = torch.nn.functional.linear(x, weight, layer[0].bias)
    got = ort.open(tmp_path, "cpu").run({"input": x})["output"]
    nodes = ort.ort_session.count_executed_ops(tmp_path / ort.MODEL, "cpu")
    assert (nodes["MatMulInteger"] + nodes["MatMulIntegerToFloat"] == 0) is in_float
    assert nodes["Cast"] == 0 or not in_float  # decoded when the session is created
    assert relative_error(got, want) < (0.01 if in_float else 0.02)
    assert error < (0.02 if in_float and kind != "_weight" else 1e-4)


def test_an_embedding_of_codes_is_gathered_before_it_is_decoded(tmp_path: Path) -> None:
    ids = torch.randint(0, 512, (3, 5))
    error, _ = through(nn.Sequential(Lut(256, 512)), "input=int64[batch,time]", ids, tmp_path, quant="nf4")
    assert error == 0


@pytest.mark.usefixtures("integers_win")
def test_an_artifact_moves_between_cpus_with_and_without_vnni(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 64)
    made = lowered(nn.Sequential(Int8Linear(torch.randn(64, 64))), "input=float32[batch,64]", x, tmp_path)
    seen = []
    here = (True, False) if device.has_vnni() else (False,)  # signed weights saturate without it
    for written in (True, False):
        monkeypatch.setattr(device, "has_vnni", lambda value=written: value)
        ort.lower(made, plan(quant="int8"), tmp_path)
        for opened in here:
            monkeypatch.setattr(device, "has_vnni", lambda value=opened: value)
            seen.append(ort.open(tmp_path, "cpu").run({"input": x})["output"])
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], rtol=0, atol=0)


REFUSALS: list[tuple[dict[str, Any], str | None]] = [
    ({"dtype": "bfloat16"}, "no bfloat16 kernels for CPU"),
    ({"dtype": "float16"}, None),
    ({"device": "cuda"}, "has no CUDA"),
    ({}, None),
]


@pytest.mark.parametrize(("changes", "words"), REFUSALS)
def test_onnx_runtime_refusals_have_a_reason(changes: dict[str, Any], words: str | None) -> None:
    made = graph(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4))
    reason = ort.refuses(made, plan(**changes))
    assert (words in reason) if words and reason else reason is words


def test_an_onnx_source_takes_int8_and_fp16_and_nothing_else(tmp_path: Path) -> None:
    made = graph(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4))
    onnx = pytest.importorskip("onnx")
    empty = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
    onnx.save(empty, str(tmp_path / "m.onnx"))
    foreign = OnnxGraph(made.inputs, made.outputs, made.samples, made.sizes, path=tmp_path / "m.onnx")
    assert ort.refuses(foreign, plan(quant="int8")) is None
    assert ort.refuses(foreign, plan(quant="int8:static")) is None
    assert ort.refuses(foreign, plan(quant="fp16")) is None
    assert "takes --quant int8, int8:weight, fp16, int8:static or none, not nf4" in str(
        ort.refuses(foreign, plan(quant="nf4"))
    )
    assert "keeps its own dtype" in str(ort.refuses(foreign, plan(dtype="float16")))


def test_an_operator_onnx_runtime_lacks_is_refused_by_name(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from infer.onnx import ort_session

    text = """<ir_version: 10, opset_import: ["" : 22]>
    agraph (bfloat16[batch, 3, 8, 8] x, bfloat16[4, 3, 3, 3] w) => (bfloat16[a, b, c, d] y) { y = Conv(x, w) }"""
    onnx.save(onnx.parser.parse_model(text), str(tmp_path / "m.onnx"))
    with pytest.raises(NotUsableError, match=r"ONNX Runtime refuses the model: .*Conv"):
        ort_session.open_session(tmp_path / "m.onnx", "cpu")


def test_importing_the_backend_needs_no_onnx(run_python: Callable[[str], str]) -> None:
    code = """
import sys
for name in ('onnx', 'onnxruntime', 'onnxscript', 'onnx_ir', 'tensorrt'):
    sys.modules[name] = None
from backends import ort, trt
print('imported')
"""
    assert run_python(code).strip() == "imported"


def test_integers_that_lose_too_much_are_decoded_before_int8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value of each row is a thousand times the others, so that a step of its row leaves them nothing."""
    from infer import optimize

    monkeypatch.setattr(integer_or_float, "_compare", lambda *_: (True, Finding("", "", 0)))
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        torch.manual_seed(0)\n"
        "        self.layer = nn.Linear(128, 128)\n        self.layer.weight.data[:, 0] = 0\n\n"
        "    def forward(self, x):\n        return self.layer(x)\n\ndef build():\n    return Net()\n"
    )
    x = torch.randn(64, 128)
    x[:, 0] *= 1e4
    np.savez(tmp_path / "x.npz", x=x.numpy())
    made = optimize(
        Plan(
            source=f"{tmp_path / 'net.py'}:build", trust_code=True, data=str(tmp_path / "x.npz"), quant="int8",
            backend="ort", batches=(), device="cpu", allow_slower=True,
        ),
        tmp_path / "net.infer",
    )  # fmt: skip
    assert made.manifest.plan.backend_options == {"products": "float"}
    assert any(line.startswith("ort runs with products float: otherwise, ") for line in made.manifest.verdict)
