"""`infer export --to onnx` against Optimum's own classes, which live in an environment of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

from infer import optimize  # noqa: E402
from infer.export import export_model  # noqa: E402
from infer.plan import Plan  # noqa: E402
from tests.support import own_environment, tiny_heads  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
# optimum-onnx takes transformers before 4.58; of torch the build for CPUs that this project is tested with.
NEEDS = ("optimum-onnx==0.1.0", "onnxruntime==1.31.1", "torch==2.13.0", "pillow", "numpy")
CLIENT = """
import json, sys
import numpy as np
import optimum.onnxruntime as runtime
import torch

folder, kind, inputs, outputs = sys.argv[1:]
model = getattr(runtime, kind).from_pretrained(folder)
given = {name: torch.from_numpy(value) for name, value in np.load(inputs).items()}
answer = model(**given)
np.savez(outputs, **{name: value.numpy() for name, value in answer.items()})
print(json.dumps({"labels": model.config.id2label, "type": model.config.model_type}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return own_environment.interpreter("optimum-onnx-0.1.0", NEEDS)


def classifier(folder: Path) -> Any:
    return tiny_heads.bert(folder, "SequenceClassification", id2label=tiny_heads.LABELS)


def tagger(folder: Path) -> Any:
    return tiny_heads.bert(folder, "TokenClassification", id2label=tiny_heads.LABELS)


def images(folder: Path) -> Any:
    import transformers

    config = transformers.ViTConfig(
        **tiny_heads.SMALL, image_size=32, patch_size=8, id2label=tiny_heads.LABELS
    )
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return tiny_heads.save(transformers.ViTForImageClassification(config), folder)


def texts() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 9, 3, 0]])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "token_type_ids": torch.zeros_like(ids),
    }


def pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize(
    ("build", "features", "inputs", "kind"),
    [
        (classifier, False, texts, "ORTModelForSequenceClassification"),
        (tagger, False, texts, "ORTModelForTokenClassification"),
        (classifier, True, texts, "ORTModelForFeatureExtraction"),
        (images, False, pictures, "ORTModelForImageClassification"),
    ],
)
def test_optimum_opens_an_export_and_answers_the_same(
    tmp_path: Path,
    python: Path,
    build: Callable[[Path], Any],
    features: bool,
    inputs: Callable[[], dict[str, torch.Tensor]],
    kind: str,
) -> None:
    model, given = build(tmp_path / "model"), inputs()
    plan = Plan(source=str(tmp_path / "model"), backend="ort", batches=(), data="random")
    optimize(plan.with_(task="features") if features else plan, tmp_path / "m.infer")
    found = export_model(str(tmp_path / "m.infer"), "onnx", tmp_path / "exported")
    assert [finding.value for finding in found if finding.what == "opens with"] == [kind]
    np.savez(tmp_path / "inputs.npz", **{name: value.numpy() for name, value in given.items()})
    command = [str(python), "-c", CLIENT, str(tmp_path / "exported"), kind]
    command += [str(tmp_path / "inputs.npz"), str(tmp_path / "outputs.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["type"] == model.config.model_type
    assert list(said["labels"].values()) == list(tiny_heads.LABELS.values())
    reference = model.base_model if features else model
    with torch.no_grad():
        expected = reference(**given)
    answer = np.load(tmp_path / "outputs.npz")
    name = "last_hidden_state" if features else "logits"
    np.testing.assert_allclose(answer[name], expected[name].numpy(), rtol=1e-4, atol=1e-5)
