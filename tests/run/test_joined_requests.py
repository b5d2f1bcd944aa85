"""Requests share a batch only where the original's rows do not depend on each other, by every way to run them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from infer import InferError, Plan, Predictor, optimize
from infer.errors import InputError
from infer.serve.limits import ServeLimits
from tests.support.fake_predictors import live

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.kind = nn.Linear(16, 16), kind

    def forward(self, x):
        y = self.linear(x)
        if self.kind == "similar":
            y = F.normalize(y, dim=1)
            return y @ y.t()
        return y - y.mean(0) if self.kind == "centred" else y

def similar(): return Net("similar").eval()
def centred(): return Net("centred").eval()
def plain(): return Net("plain").eval()
"""
DEPENDS = "rows of a batch depend on each other: requests are not joined"
LARGEST = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("joined")
    (place / "nets.py").write_text(NETS)
    np.savez(place / "x.npz", x=np.random.default_rng(0).standard_normal((8, 16), np.float32))
    for kind in ("similar", "centred", "plain"):
        _optimize(place, f"{place}/nets.py:{kind}", kind)
    return place


def _optimize(folder: Path, source: str, name: str, **more: Any) -> Any:
    plan: dict[str, Any] = {
        **{"backend": "eager", "inputs": ("x=float32[batch,16]",), "data": f"{folder}/x.npz", "batches": ()},
        **{"max_batch": LARGEST, "allow_slower": True, **more},
    }
    return optimize(Plan(source=source, **plan), folder / f"{name}.infer", replace=True)


def _model(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    space: dict[str, Any] = {}
    exec(NETS, space)  # noqa: S102

    def answer(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(space[kind]()(torch.from_numpy(x)))

    return answer


def _rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 16), np.float32)


@pytest.mark.parametrize("kind", ["similar", "centred"])
def test_the_verdict_says_that_requests_are_not_joined(folder: Path, kind: str) -> None:
    head = json.loads((folder / f"{kind}.infer/manifest.json").read_text())
    report = json.loads((folder / f"{kind}.infer/report.json").read_text())
    assert head["joins"] == "none"
    assert len([line for line in head["verdict"] if line.startswith(DEPENDS)]) == 1
    assert any(line.startswith(DEPENDS) for line in report["limitations"])


def test_the_verdict_of_an_honest_model_says_nothing_of_rows(folder: Path) -> None:
    head = json.loads((folder / "plain.infer/manifest.json").read_text())
    assert head["joins"] == "padded"
    assert not any("joined" in line for line in head["verdict"])


@pytest.mark.parametrize("kind", ["similar", "centred", "plain"])
def test_a_list_of_requests_has_the_answers_of_each_alone(folder: Path, kind: str) -> None:
    requests, answer = [_rows(2, seed) for seed in range(3)], _model(kind)
    with Predictor.load(folder / f"{kind}.infer") as predictor:
        for request, found in zip(requests, predictor.predict(requests), strict=True):
            np.testing.assert_allclose(found, answer(request), atol=1e-5)


@pytest.mark.parametrize("kind", ["similar", "centred"])
def test_a_request_above_the_largest_batch_is_refused_whole(folder: Path, kind: str) -> None:
    with Predictor.load(folder / f"{kind}.infer") as predictor:
        with pytest.raises(InputError, match=f"between 1 and {LARGEST}, got 9.*never split"):
            predictor.predict(_rows(LARGEST + 1, 0))
        largest = _rows(LARGEST, 1)
        np.testing.assert_allclose(predictor.predict(largest), _model(kind)(largest), atol=1e-5)


def test_an_honest_model_takes_more_rows_than_the_largest_batch(folder: Path) -> None:
    with Predictor.load(folder / "plain.infer") as predictor:
        many = _rows(LARGEST * 2 + 1, 0)
        np.testing.assert_allclose(predictor.predict(many), _model("plain")(many), atol=1e-5)


def _ask(url: str, kind: str, x: np.ndarray) -> httpx.Response:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
    return httpx.post(f"{url}/v2/models/{kind}/infer", json={"inputs": [tensor]}, timeout=30)


def test_clients_at_once_get_the_answers_of_their_own_rows(folder: Path) -> None:
    kinds = ["similar", "centred", "plain"]
    predictors = [Predictor.load(folder / f"{kind}.infer") for kind in kinds]
    asked = [(kind, _rows(1 + seed % 2, seed)) for kind in kinds for seed in range(8) for _ in range(2)]
    limits = ServeLimits(max_delay_us=20_000)
    with live(*predictors, limits=limits) as server, ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda one: _ask(server.url, *one), asked))
        too_many = _ask(server.url, "similar", _rows(LARGEST + 1, 0))
        config = httpx.get(f"{server.url}/v2/models/similar/config").json()
    sizes = dict[str, set[int]]()
    for (kind, x), reply in zip(asked, replies, strict=True):
        body, want = reply.json(), _model(kind)(x)
        found = body["outputs"][0]
        np.testing.assert_allclose(np.reshape(found["data"], found["shape"]), want, atol=1e-5)
        sizes.setdefault(kind, set()).add(body["parameters"]["batch_size"])
    assert max(sizes["plain"]) > 2, "an honest model's requests meet in one batch"
    assert sizes["similar"] == sizes["centred"] == {1}
    assert too_many.status_code == 400
    assert "never split" in too_many.text
    assert config["max_batch_size"] == 0


def test_a_worker_tells_its_server_which_requests_may_be_joined(folder: Path) -> None:
    with Predictor.load(folder / "similar.infer") as predictor:
        assert predictor.info.joins == "none"


def _onnx(place: Path, nodes: list[Any], output: tuple[int, list[int | str]], **weights: np.ndarray) -> Path:
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])
    made = helper.make_tensor_value_info("y", *output)
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", [given], [made], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, place)
    return place


def test_outputs_declared_by_row_that_hold_detections_are_not_cut(tmp_path: Path, folder: Path) -> None:
    shutil.copy(folder / "x.npz", tmp_path)
    nodes = [
        helper.make_node("ReduceSum", ["x", "axis"], ["sums"], keepdims=0),
        helper.make_node("Greater", ["sums", "zero"], ["found"]),
        helper.make_node("Compress", ["x", "found"], ["y"], axis=0),
    ]
    weights = {"axis": np.array([1]), "zero": np.array(0, np.float32)}
    source = _onnx(tmp_path / "nms.onnx", nodes, (TensorProto.FLOAT, ["batch", 16]), **weights)
    made = _optimize(tmp_path, str(source), "nms", backend="ort", inputs=())
    assert any(line.startswith(DEPENDS) and "rows for" in line for line in made.manifest.verdict)
    requests = [_rows(2, seed) for seed in range(6)]
    with Predictor.load(made.path) as predictor:
        for x, found in zip(requests, predictor.predict(requests), strict=True):
            np.testing.assert_array_equal(found, x[x.sum(1) > 0])


def test_a_file_that_quantizes_whole_batches_is_not_joined(tmp_path: Path, folder: Path) -> None:
    shutil.copy(folder / "x.npz", tmp_path)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "scale"], ["y"]),
    ]
    weight = np.random.default_rng(0).integers(-127, 127, (16, 16)).astype(np.int8)
    source = _onnx(tmp_path / "dynamic.onnx", nodes, (TensorProto.FLOAT, ["batch", 16]), w=weight)
    made = _optimize(tmp_path, str(source), "dynamic", backend="ort", inputs=())
    assert made.manifest.joins == "none"


def test_a_list_with_another_number_of_output_rows_is_refused(folder: Path) -> None:
    with Predictor.load(folder / "plain.infer") as predictor:
        run = predictor._runner.run
        predictor._runner.run = lambda inputs: {n: v[1:] for n, v in run(inputs).items()}
        with pytest.raises(InferError, match="expected 4 rows of output 'output'"):
            predictor.predict([_rows(2, 0), _rows(2, 1)])
