"""Checkpoints of several modalities open as their language tower, which answers text as the whole model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import Plan, llm, load
from infer.errors import SourceError
from infer.load.language_tower import TowerReader, has_tower
from infer.load.weights import DictReader
from tests.support.tiny_decoders import GROUPED, VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
SIGHT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
TEXT = {**GROUPED, "head_dim": 16}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"sliding_window": 8}, {}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral"}),
    "qwen3_5": ({"layer_types": ["full_attention"] * 2}, {}),
}


def saved(name: str, folder: Path) -> Any:
    import transformers

    text, sight = CASES.get(name, ({}, {}))
    config = transformers.AutoConfig.for_model(
        name, text_config={**TEXT, **text}, vision_config={**SIGHT, **sight}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_the_tower_answers_text_as_the_whole_model_does(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    loaded = load.load(Plan(source=str(tmp_path), data="random"))
    load.fill(loaded)
    ids = torch.randint(3, VOCABULARY, (2, 20))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(loaded.module(ids), expected, rtol=1e-5, atol=1e-5)
    found = next(finding for finding in loaded.findings if finding.what == "language tower")
    assert type(model).__name__ in found.why
    assert "vis" in found.why
    assert llm.probe(loaded.module.model).layers == 2


def test_a_tower_without_a_causal_model_is_refused_by_name(tmp_path: Path) -> None:
    saved("qwen2_5_vl", tmp_path)
    with pytest.raises(
        SourceError, match="no causal language model for the language tower, a qwen2_5_vl_text"
    ):
        load.load(Plan(source=str(tmp_path), data="random"))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.text_model."])
def test_every_prefix_of_a_tower_is_known(prefix: str) -> None:
    given = {
        f"{prefix}norm.weight": torch.ones(2),
        "lm_head.weight": torch.ones(1),
        "model.vision_tower.x": torch.ones(1),
    }
    reader = TowerReader(DictReader(given))
    assert sorted(reader.names()) == ["lm_head.weight", "model.norm.weight"]
    assert torch.equal(reader.read("model.norm.weight"), torch.ones(2))
    assert reader.left == ["model.vision_tower.x"]
    assert "vision_tower" in reader.finding("X").why


def test_encoder_decoders_have_no_language_tower() -> None:
    config = {"text_config": {}, "is_encoder_decoder": True}
    assert not has_tower(config, "XForConditionalGeneration")
    assert has_tower(json.loads('{"text_config": {}}'), "XForConditionalGeneration")
