"""A model is optimized, published and served by `python serve.py`: HTTP gives the Predictor's outputs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from infer import Plan, Predictor, optimize

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
import torch
from torch import nn

INPUTS = {"x": "float32[batch,16]"}
OUTPUTS = ("y",)


def build():
    torch.manual_seed(0)
    return Model().eval()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def example_inputs():
    return {"x": torch.randn(16, 16, generator=torch.Generator().manual_seed(1))}
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "recipe.py").write_text(RECIPE)
    space: dict[str, object] = {}
    exec(RECIPE, space)  # noqa: S102
    torch.save(space["build"]().state_dict(), folder / "small.pt")
    plan = Plan(
        source=str(folder / "small.pt"), model=f"{folder}/recipe.py:build", backend="eager", max_batch=8
    )
    return optimize(plan, folder / "small.infer").path


@pytest.fixture(scope="module")
def url(artifact: Path) -> Iterator[str]:
    command = [sys.executable, "serve.py", str(artifact), "--port", "0", "--drain", "5"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, env={**os.environ}, **pipes) as running:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(running.stdout.readline()))
        reader.start()
        reader.join(60)
        found = re.search(r"http://127\.0\.0\.1:\d+", "".join(lines))
        if not found:
            running.kill()
            pytest.fail(running.stderr.read())
        yield found[0]
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0, running.stderr.read()


def test_http_outputs_equal_predictor_outputs(artifact: Path, url: str) -> None:
    x = np.random.default_rng(0).standard_normal((20, 16)).astype(np.float32)
    given = {"name": "x", "datatype": "FP32", "shape": [20, 16], "data": x.tolist()}
    answer = httpx.post(f"{url}/v2/models/small/infer", json={"inputs": [given]}, timeout=30)
    assert answer.status_code == 200, answer.text
    with Predictor.load(artifact) as predictor:
        expected = np.concatenate([predictor.predict({"x": x[i : i + 8]})["y"] for i in (0, 8, 16)])
    got = np.array(answer.json()["outputs"][0]["data"], np.float32).reshape(20, 3)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_concurrent_clients_get_their_own_rows(artifact: Path, url: str) -> None:
    x = np.random.default_rng(1).standard_normal((24, 1, 16)).astype(np.float32)
    got: dict[int, list[float]] = {}

    def ask(index: int) -> None:
        given = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": x[index].tolist()}
        answer = httpx.post(f"{url}/v2/models/small/infer", json={"inputs": [given]}, timeout=30)
        got[index] = answer.json()["outputs"][0]["data"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Predictor.load(artifact) as predictor:
        for index in range(24):
            np.testing.assert_allclose(
                got[index], predictor.predict({"x": x[index]})["y"][0], rtol=1e-5, atol=1e-6
            )


def test_wrong_shape_returns_400_naming_expected_inputs(url: str) -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    answer = httpx.post(f"{url}/v2/models/small/infer", json={"inputs": [given]}, timeout=30)
    assert answer.status_code == 400
    assert "expected input 'x' float32 [batch, 16], got float32 [1, 3]" in answer.json()["error"]
    metadata = httpx.get(f"{url}/v2/models/small", timeout=30).json()
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert metadata["platform"] == "infer_eager"
