"""A model with state layers goes through the whole pipeline: compressed, lowered, judged, published, generating."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer import Predictor
from infer.errors import NotUsableError
from infer.predict.open_artifact import generation_shape
from tests.support.llm_artifacts import tiny
from tests.support.tiny_decoders import build
from tests.support.tiny_hybrids import STATEFUL

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
PROMPT = [5, 9, 100, 31, 7, 250, 12]


def generate(path: Path, prompt: list[int], count: int = 12) -> list[int]:
    with Predictor.load(path) as predictor:
        (found,) = predictor.generate([prompt], max_tokens=count, temperature=0, ignore_eos=True)
    return list(found.token_ids)


def test_a_float_state_space_artifact_generates_as_transformers(tmp_path: Path) -> None:
    sizes = STATEFUL["lfm2"]
    path = tiny(tmp_path, name="lfm2", sizes=sizes)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        given = build("lfm2", sizes=sizes).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    assert generate(path, PROMPT) == given[0, len(PROMPT) :].tolist()
    with Predictor.load(path) as predictor:
        shape = generation_shape(predictor.manifest)
    assert shape is not None
    assert (shape.state_layers, shape.state_bytes) == (1, 4 * 64 * 2)


@pytest.mark.parametrize("quant", ["int8:weight", "nf4"])
def test_projections_of_a_state_layer_are_quantized(tmp_path: Path, quant: str) -> None:
    path = tiny(tmp_path, name="lfm2", sizes=STATEFUL["lfm2"], quant=quant, max_error=0.5)
    with Predictor.load(path) as predictor:
        chosen = {layer.name: layer.format for layer in predictor.manifest.layers}
    assert chosen["model.model.layers.1.conv.in_proj"] != "float"
    assert len(generate(path, PROMPT)) == 12


def test_a_model_without_attention_is_published_and_generates(tmp_path: Path) -> None:
    path = tiny(
        tmp_path, name="mamba2", sizes=STATEFUL["mamba2"], quant="int8:weight", max_error=0.5, task="generate"
    )
    assert len(generate(path, PROMPT)) == 12


def test_onnx_runtime_refuses_state_layers(tmp_path: Path) -> None:
    with pytest.raises(NotUsableError, match="layers with state of their own have no ONNX form here"):
        tiny(tmp_path, name="lfm2", sizes=STATEFUL["lfm2"], backend="ort", task="generate")
