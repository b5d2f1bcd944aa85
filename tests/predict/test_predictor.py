"""A Predictor gives what the model gives, names what is wrong with an input, refuses what is damaged or foreign."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from infer import InferError, Plan, Predictor, optimize
from infer.errors import ArtifactError, InputError, UnsafeSourceError, UsageError

RECIPE = """
import torch
from torch import nn

INPUTS = {"x": "float32[batch,64]", "bias": "float32[batch]"}
OUTPUTS = ("y",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, x, bias):
        return self.b(torch.relu(self.a(x))) + bias[:, None]


def build():
    torch.manual_seed(0)
    return Model().eval()


def example_inputs():
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(16, 64, generator=generator), "bias": torch.randn(16, generator=generator)}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with recipe.py and model.pt of a two-input model."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "recipe.py").write_text(RECIPE)
    space: dict[str, object] = {}
    exec(RECIPE, space)  # noqa: S102
    torch.save(space["build"]().state_dict(), folder / "model.pt")
    return folder


@pytest.fixture(scope="module")
def made(recipe: Path) -> Path:
    plan = Plan(
        source=str(recipe / "model.pt"), model=f"{recipe}/recipe.py:build", backend="eager", max_batch=32
    )
    return optimize(plan, recipe / "model.infer").path


@pytest.fixture
def predictor(made: Path) -> Predictor:
    with Predictor.load(made) as opened:
        yield opened


def model(recipe: Path) -> torch.nn.Module:
    space: dict[str, object] = {}
    exec((recipe / "recipe.py").read_text(), space)  # noqa: S102
    return space["build"]()


@pytest.mark.parametrize("rows", [1, 3, 32, 33, 100])
def test_predictor_outputs_equal_the_model(predictor: Predictor, recipe: Path, rows: int) -> None:
    x, bias = torch.randn(rows, 64), torch.randn(rows)
    with torch.no_grad():
        expected = model(recipe)(x, bias)
    answer = predictor.predict({"x": x.numpy(), "bias": bias.numpy()})
    assert isinstance(answer["y"], np.ndarray)
    np.testing.assert_allclose(answer["y"], expected, rtol=1e-5, atol=1e-6)


def test_torch_inputs_give_torch_outputs(predictor: Predictor) -> None:
    assert isinstance(predictor.predict({"x": torch.zeros(2, 64), "bias": torch.zeros(2)})["y"], torch.Tensor)


def test_a_list_of_requests_is_answered_in_order(predictor: Predictor) -> None:
    requests = [
        {"x": np.random.randn(n, 64).astype("float32"), "bias": np.zeros(n, "float32")} for n in (1, 3, 2)
    ]
    answers = predictor.predict(requests)
    assert [len(a["y"]) for a in answers] == [1, 3, 2]
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_allclose(answer["y"], predictor.predict(request)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (
            {"x": np.zeros((2, 64), "float32")},
            r"missing input 'bias' float32 \[batch\] - at request.inputs\[1\]",
        ),
        (
            {"x": np.zeros((2, 64)), "bias": np.zeros(2, "float32")},
            r"expected input 'x' float32 \[batch, 64\], got float64 \[2, 64\] - at request.inputs\[0\]",
        ),
        (
            {"x": np.zeros((2, 63), "float32"), "bias": np.zeros(2, "float32")},
            r"expected input 'x' float32 \[batch, 64\], got float32 \[2, 63\]",
        ),
        (
            {"x": np.zeros((2, 64), "float32"), "bias": np.zeros(3, "float32")},
            r"expected input 'bias' float32 \[batch\] with batch=2, got float32 \[3\]",
        ),
        (
            {"x": np.zeros((0, 64), "float32"), "bias": np.zeros(0, "float32")},
            "expected batch between 1 and 32, got 0",
        ),
        ({"x": 1, "bias": 2, "z": 3}, "no input named 'z'; expected 'x' float32"),
    ],
)
def test_an_invalid_input_is_named_in_the_error(predictor: Predictor, request_: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        predictor.predict(request_)


def test_a_bare_array_for_two_inputs_is_refused(predictor: Predictor) -> None:
    with pytest.raises(InputError, match="expected a mapping with 'x' float32"):
        predictor.predict(np.zeros((2, 64), "float32"))


def test_nan_in_one_row_stays_in_that_row(predictor: Predictor) -> None:
    x = np.random.randn(4, 64).astype("float32")
    clean = predictor.predict({"x": x, "bias": np.zeros(4, "float32")})["y"]
    x[2] = np.nan
    dirty = predictor.predict({"x": x, "bias": np.zeros(4, "float32")})["y"]
    np.testing.assert_allclose(dirty[[0, 1, 3]], clean[[0, 1, 3]], rtol=1e-6)
    assert np.isnan(dirty[2]).all()


def test_concurrent_threads_get_their_own_outputs(predictor: Predictor) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        x = np.full((1, 64), number, "float32")
        expected = predictor.predict({"x": x, "bias": np.zeros(1, "float32")})["y"]
        for _ in range(20):
            if not np.allclose(predictor.predict({"x": x, "bias": np.zeros(1, "float32")})["y"], expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_a_predictor_describes_inputs_outputs_and_report(predictor: Predictor) -> None:
    assert [str(s) for s in predictor.inputs] == ["'x' float32 [batch, 64]", "'bias' float32 [batch]"]
    assert [str(s) for s in predictor.outputs] == ["'y' float32 [batch, 8]"]
    assert predictor.name == "model"
    assert predictor.report["verdict"]
    predictor.warmup()


def test_a_closed_predictor_raises_a_usage_error(made: Path) -> None:
    predictor = Predictor.load(made)
    predictor.close()
    with pytest.raises(UsageError, match="closed"):
        predictor.predict({"x": np.zeros((1, 64), "float32"), "bias": np.zeros(1, "float32")})


def test_text_for_a_tensor_model_is_refused(predictor: Predictor) -> None:
    with pytest.raises(UsageError, match="takes tensors, not text"):
        predictor.tokenize(["hello"])


def test_wrong_golden_outputs_are_detected_on_opening(made: Path, tmp_path: Path) -> None:
    from infer.artifact import store

    copy = tmp_path / "model.infer"
    with store.stage(copy, replace=False) as folder:
        shutil.copytree(made, folder, dirs_exist_ok=True)
        manifest = store.read_manifest(folder)
        (folder / "manifest.json").unlink()
        (folder / "manifest.sig").unlink()
        weights = bytearray((folder / "weights/model.safetensors").read_bytes())
        weights[-2000:] = bytes(2000)
        (folder / "weights/model.safetensors").write_bytes(weights)
        store.publish(folder, copy, manifest)
    with pytest.raises(ArtifactError, match="self-test failed"):
        Predictor.load(copy)


def test_an_artifact_with_code_of_another_user_needs_trust(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFER_CONFIG", str(tmp_path))
    with pytest.raises(UnsafeSourceError, match="holds code"):
        Predictor.load(made)
    Predictor.load(made, trust_code=True).close()


def test_an_artifact_of_another_machine_is_lowered_again(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import backends.eager as eager

    monkeypatch.setattr(eager, "target", lambda device: {"isa": "another"})
    with Predictor.load(made) as predictor:
        assert "isa None → another" in predictor.notes[0].why
        assert predictor.predict({"x": np.zeros((1, 64), "float32"), "bias": np.zeros(1, "float32")})[
            "y"
        ].shape == (1, 8)


def test_the_cache_of_lowered_graphs_is_keyed_by_artifact(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import backends.eager as eager

    monkeypatch.setattr(eager, "target", lambda device: {"isa": "a third"})
    inputs = {"x": np.ones((1, 64), "float32"), "bias": np.zeros(1, "float32")}
    for name in ("first.infer", "second.infer"):
        shutil.copytree(made, tmp_path / name)
        with Predictor.load(tmp_path / name) as predictor:
            answer = predictor.predict(inputs)["y"]
            place = Path(str(predictor.notes[0].value))
        assert (place / "graph.pt2").resolve() == tmp_path / name / "graph.pt2"
        shutil.rmtree(tmp_path / name)
    assert answer.shape == (1, 8)


def test_a_folder_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InferError, match="not an artifact of infer"):
        Predictor.load(tmp_path)
