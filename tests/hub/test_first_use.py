"""Names where an artifact is asked for: optimized at the first use, opened from the caches later, also offline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from huggingface_hub import constants
from onnx import TensorProto, helper

from infer import Predictor
from infer.artifact import artifact_of_source
from infer.artifact.artifact_of_source import artifact_of
from infer.cli import main
from infer.errors import SourceError, UsageError
from infer.plan import Plan
from tests.support.local_hub import LocalHub

X = np.array([[-1.0, 0.0, 2.0, 3.0]], "float32")


def relu() -> bytes:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer(source: str) -> list[float]:
    with Predictor.load(source) as predictor:
        return [float(value) for value in predictor.predict({"x": X})["y"][0]]


SECOND_START = """
import sys
import infer.cli.serve, infer.serve.server
from infer.artifact.artifact_of_source import artifact_of
from infer.plan import Plan
print(artifact_of(Plan(source="org/relu")), "torch" in sys.modules)
"""


def refuse(plan: Plan, output: Path, shown: bool) -> None:
    raise AssertionError("the artifact is in the cache")


def test_a_name_is_optimized_once_and_opened_from_the_caches_later(
    run_python, hub: LocalHub, user_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hub.repository("org/relu", {"onnx/model.onnx": relu(), "config.json": b"{}"})
    assert answer("org/relu") == [0, 0, 2, 3]
    first = artifact_of(Plan(source="org/relu"))
    manifest = json.loads((first / "manifest.json").read_text())
    commit = made.refs["main"]
    assert (manifest["name"], manifest["plan"]["source"]) == ("relu", f"org/relu@{commit}")
    assert any(f["what"] == "revision" and f["value"] == commit for f in manifest["findings"])
    assert run_python(SECOND_START).strip() == f"{first} False"
    with monkeypatch.context() as patch:
        patch.setattr(artifact_of_source, "_make", refuse)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert answer("org/relu") == [0, 0, 2, 3]
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.down = True
        assert answer("org/relu") == [0, 0, 2, 3]
        hub.down = False
        made.commit({"onnx/model.onnx": relu(), "config.json": b"changed"})
        with pytest.raises(AssertionError):  # another commit is another source
            artifact_of(Plan(source="org/relu"))
    published = tmp_path / "published"
    shutil.copytree(first, published)
    hub.repository("org/ready", published)
    with pytest.raises(UsageError, match="is an artifact, made with its own options - at --quant"):
        artifact_of(Plan(source="org/ready", quant="int8"))
    assert answer("org/ready") == [0, 0, 2, 3]
    assert not any(path.is_symlink() for path in artifact_of(Plan(source="org/ready")).iterdir())


def test_what_optimizing_a_name_raises_is_raised_here(hub: LocalHub, user_cache: Path) -> None:
    hub.repository("org/broken", {"model.onnx": b"no model"})
    with pytest.raises(SourceError, match="expected a model, got text that begins 'no model'"):
        artifact_of(Plan(source="org/broken"))
    assert not list((user_cache / "artifacts").glob("*/*.infer"))


def test_optimize_takes_a_name_and_keeps_it(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.repository("org/relu").commit({"model.onnx": relu()}, tag="v1")
    monkeypatch.chdir(tmp_path)
    assert main(["optimize", "org/relu@v1", "--batch", "1", "--allow-slower"]) == 0
    manifest = json.loads((tmp_path / "relu.infer/manifest.json").read_text())
    assert manifest["plan"]["source"] == "org/relu@v1"
    found = next(finding for finding in manifest["findings"] if finding["what"] == "revision")
    assert (found["value"], found["why"].split(":")[0]) == (commit, "org/relu of the Hub at v1")
    assert main(["inspect", "org/relu@v1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["kind"], facts["commit"], facts["downloaded"]) == ("repository of the Hub", commit, True)


def test_options_of_a_source_beside_an_artifact_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.infer").mkdir()
    (tmp_path / "m.infer/manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="--backend"):
        artifact_of(Plan(source=str(tmp_path / "m.infer"), backend="eager"))
