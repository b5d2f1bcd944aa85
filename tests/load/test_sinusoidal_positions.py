"""Marian's checkpoints hold no sinusoidal positions: they are computed, as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from infer.load import fill, load
from infer.plan import Plan
from tests.support.llm_artifacts import bytes_as_tokens

transformers = pytest.importorskip("transformers")


def test_positions_that_a_checkpoint_lacks_are_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=264, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path / "marian"
    transformers.MarianMTModel(config).save_pretrained(folder)
    bytes_as_tokens(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "embed_positions" in name]  # noqa: SIM118 - no mapping

    original = transformers.MarianMTModel.from_pretrained(folder).eval()
    loaded = load(Plan(source=str(folder), data="random"))
    fill(loaded)
    source, target = torch.arange(3, 14)[None], torch.arange(20, 25)[None]
    with torch.inference_mode():
        want = original(input_ids=source, decoder_input_ids=target).logits
        assert loaded.module is not None
        torch.testing.assert_close(loaded.module(source, target), want)
