"""CLIP and SigLIP: whole, or one tower by --key, with the features that transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.errors import UsageError
from infer.load import fill, load
from infer.plan import Plan

transformers = pytest.importorskip("transformers")
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**TINY, "vocab_size": 64, "max_position_embeddings": 16, "pad_token_id": 1, "eos_token_id": 63}
VISION = {**TINY, "image_size": 32, "patch_size": 16}


def both(name: str, folder: Path) -> Any:
    """Save a tiny model of two towers."""
    torch.manual_seed(0)
    sizes = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 24}
    config = transformers.AutoConfig.for_model(name, **sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def pooled(found: Any) -> torch.Tensor:
    """Return the features, which older versions of transformers give as a tensor."""
    return found if isinstance(found, torch.Tensor) else found.pooler_output


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_tower_gives_the_features_of_the_whole_model(name: str, tmp_path: Path) -> None:
    model = both(name, tmp_path)
    images = torch.randn(2, 3, 32, 32)
    ids = torch.tensor([[5, 6, 7, 63], [9, 63, 1, 1]])
    mask = (ids != 1).long()
    padded = torch.nn.functional.pad(ids, (0, 12), value=1)  # as SigLIP was trained
    with torch.no_grad():
        texts = {"input_ids": padded} if name == "siglip" else {"input_ids": ids, "attention_mask": mask}
        wanted = {
            "vision_model": pooled(model.get_image_features(pixel_values=images)),
            "text_model": pooled(model.get_text_features(**texts)),
        }
        given = {"vision_model": (images,), "text_model": (ids, mask)}
        for key, task in (("vision_model", "image-embedding"), ("text_model", "embedding")):
            loaded = load(Plan(source=str(tmp_path), key=key, data="random"))
            fill(loaded)
            assert (loaded.task, loaded.outputs) == (task, ("embedding",))
            assert loaded.module is not None
            torch.testing.assert_close(loaded.module(*given[key]), wanted[key])


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_both_towers_compare_images_with_texts(name: str, tmp_path: Path) -> None:
    model = both(name, tmp_path)
    loaded = load(Plan(source=str(tmp_path), data="random"))
    fill(loaded)
    assert loaded.module is not None
    assert loaded.task == "zero-shot-image-classification"
    assert any("--key text_model or --key vision_model" in finding.why for finding in loaded.findings)
    images, ids = torch.randn(3, 3, 32, 32), torch.tensor([[5, 6, 7, 63], [9, 63, 1, 1]])
    padded = torch.nn.functional.pad(ids, (0, 12), value=1)
    texts = (
        {"input_ids": padded} if name == "siglip" else {"input_ids": ids, "attention_mask": (ids != 1).long()}
    )
    with torch.no_grad():
        wanted = model(pixel_values=images, **texts)
        found = loaded.module(images, ids, (ids != 1).long())
    for got, want in zip(
        found, (wanted.logits_per_image, wanted.image_embeds, wanted.text_embeds), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_an_unknown_tower_is_refused(tmp_path: Path) -> None:
    both("clip", tmp_path)
    with pytest.raises(UsageError, match=r"no tower 'audio' of CLIPModel; known: text_model, vision_model"):
        load(Plan(source=str(tmp_path), key="audio", data="random"))


def test_a_key_of_a_model_without_towers_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(**TINY, vocab_size=32)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no tower 'encoder' of BertModel, which has no towers"):
        load(Plan(source=str(tmp_path), key="encoder", data="random"))
