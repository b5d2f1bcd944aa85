"""Checkpoints of several modalities open as their language tower, which answers text as the whole model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer import Plan, load
from infer.errors import SourceError
from infer.llm.step.probe import probe
from infer.load.model_patches.vlm_language_model import has_tower, language_tower
from infer.weights import in_memory
from tests.support.tiny_decoders import GROUPED, VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
SIGHT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
TEXT = {**GROUPED, "head_dim": 16}
SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"sliding_window": 8}, {}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral"}),
    "qwen3_5": ({"layer_types": ["full_attention"] * 2}, {}),
    "smolvlm": ({"model_type": "llama"}, {}),
    "qwen2_vl": (SECTIONS, {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
    "qwen2_5_vl": (SECTIONS, {"depth": 1, "num_heads": 2, "out_hidden_size": 64}),
    "qwen3_vl_moe": (
        {**SECTIONS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
}


def saved(name: str, folder: Path, sizes: tuple[dict[str, Any], dict[str, Any]] | None = None) -> Any:
    import transformers

    text, sight = sizes or CASES[name]
    config = transformers.AutoConfig.for_model(
        name, text_config={**TEXT, **text}, vision_config={**SIGHT, **sight}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_the_language_tower_gives_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
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
    assert probe(loaded.module.model).layers == 2


def test_a_folder_with_the_sizes_of_its_tower_beside_the_images_opens(tmp_path: Path) -> None:
    model = saved("qwen2_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    sections = text.pop("rope_parameters")["mrope_section"]
    text |= {"model_type": "qwen2_vl", "rope_theta": 10000.0}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": sections}}
    (tmp_path / "config.json").write_text(json.dumps({**text, **config}))
    tensors = load_file(tmp_path / "model.safetensors")
    names = {
        name: name.replace("model.visual.", "visual.").replace("language_model.", "") for name in tensors
    }
    save_file({names[name]: value for name, value in tensors.items()}, tmp_path / "model.safetensors")
    loaded = load.load(Plan(source=str(tmp_path), data="random"))
    load.fill(loaded)
    ids = torch.randint(3, VOCABULARY, (2, 20))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(loaded.module(ids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("glm4v", "no causal language model for the language tower, a glm4v_text"),
        ("paligemma", "the language tower, a gemma, attends in both directions within the prompt"),
    ],
)
def test_a_tower_that_is_no_causal_model_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    sight = (
        {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
        if name == "glm4v"
        else {"model_type": "siglip_vision_model"}
    )
    saved(name, tmp_path, ({"model_type": "gemma"} if name == "paligemma" else {}, sight))
    with pytest.raises(SourceError, match=message):
        load.load(Plan(source=str(tmp_path), data="random"))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.text_model."])
def test_every_prefix_of_a_tower_is_known(prefix: str) -> None:
    given = {
        f"{prefix}norm.weight": torch.ones(2),
        "lm_head.weight": torch.ones(1),
        "model.vision_tower.x": torch.ones(1),
    }
    tower = language_tower(in_memory(given))
    assert sorted(tower.weights) == ["lm_head.weight", "model.norm.weight"]
    assert torch.equal(tower.weights["model.norm.weight"].read(), torch.ones(2))
    assert tower.left == ["model.vision_tower.x"]
    assert "vision_tower" in tower.finding("X").why


def test_encoder_decoders_have_no_language_tower() -> None:
    config = {"text_config": {}, "is_encoder_decoder": True}
    assert not has_tower(config, "XForConditionalGeneration")
    assert has_tower(json.loads('{"text_config": {}}'), "XForConditionalGeneration")
