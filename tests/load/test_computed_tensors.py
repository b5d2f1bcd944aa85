"""Tensors that Marian's checkpoints lack are computed, as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.load import fill, load
from infer.plan import Plan
from tests.support.llm_artifacts import bytes_as_tokens

transformers = pytest.importorskip("transformers")


def saved(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=264, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    transformers.MarianMTModel(config).save_pretrained(folder)
    bytes_as_tokens(folder)
    return folder


def assert_logits_equal_those_of_transformers(folder: Path) -> None:
    original = transformers.MarianMTModel.from_pretrained(folder).eval()
    loaded = load(Plan(source=str(folder), data="random"))
    fill(loaded)
    source, target = torch.arange(3, 14)[None], torch.arange(20, 25)[None]
    with torch.inference_mode():
        want = original(input_ids=source, decoder_input_ids=target).logits
        assert loaded.module is not None
        torch.testing.assert_close(loaded.module(source, target), want)


def test_positions_that_a_checkpoint_lacks_are_computed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "marian")
    assert not [name for name in load_file(folder / "model.safetensors") if "embed_positions" in name]
    assert_logits_equal_those_of_transformers(folder)


def test_a_bias_of_logits_that_a_checkpoint_lacks_is_zero(tmp_path: Path) -> None:
    folder = saved(tmp_path / "marian")
    tensors = load_file(folder / "model.safetensors")
    assert not tensors.pop("final_logits_bias").any()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert_logits_equal_those_of_transformers(folder)
