"""Heads of encoder-decoders that run once, models of spectrograms, and what a folder's class must read and give."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infer.errors import SourceError
from infer.graph.program import TorchGraph
from infer.load import fill, load
from infer.plan import Plan
from infer.run.float_graph import float_graph
from tests.support.random_heads import save_head

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
END = 2
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": END, "decoder_start_token_id": END}
BART: dict[str, Any] = {
    **SPECIAL, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64,
    "max_position_embeddings": 32, "num_labels": 3, "forced_eos_token_id": END, "num_beams": 4,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 48, "vocab_size": 64, "eos_token_id": END,
    "decoder_start_token_id": 0, "num_labels": 3,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    **BART, "num_mel_bins": 16, "max_source_positions": 24, "classifier_proj_size": 16, "max_target_positions": 16,
}  # fmt: skip
SOUND: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 24,
    "feature_projection_input_dim": 160, "pad_token_id": 0,
}  # fmt: skip


saved = partial(save_head, std=0.3)


@pytest.mark.parametrize(
    ("config", "head", "sizes"),
    [
        ("bart", "BartForSequenceClassification", BART),
        ("bart", "BartForQuestionAnswering", {**BART, "num_labels": 2}),
        ("t5", "T5ForSequenceClassification", T5),
    ],
)
def test_an_encoder_decoder_with_a_head_gives_the_outputs_of_transformers(
    config: str, head: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    model = saved(config, head, sizes, tmp_path)
    loaded = load(Plan(source=str(tmp_path), data="random", max_length=16))
    fill(loaded)
    assert loaded.limitations == ()  # settings of a generation do not apply
    graph = float_graph(loaded)
    for length in (2, 11):
        ids = torch.randint(3, 64, (2, length))
        ids[:, -1] = END
        mask = torch.ones_like(ids)
        if length > 2:
            ids[1, 5], ids[1, 6:], mask[1, 6:] = END, 1, 0
        got = graph.run({"input_ids": ids, "attention_mask": mask})
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask)
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "head", "sizes", "task"),
    [
        ("whisper", "WhisperForAudioClassification", WHISPER, "audio-classification"),
        ("wav2vec2-bert", "Wav2Vec2BertForCTC", SOUND, "automatic-speech-recognition"),
    ],
)
def test_a_model_of_a_spectrogram_gives_the_outputs_of_transformers(
    config: str, head: str, sizes: dict[str, Any], task: str, tmp_path: Path
) -> None:
    model = saved(config, head, sizes, tmp_path)
    loaded = load(Plan(source=str(tmp_path), data="random"))
    fill(loaded)
    assert (loaded.task, loaded.limitations) == (task, ())
    graph = float_graph(loaded)
    assert isinstance(graph, TorchGraph)
    assert graph.fixed == ""
    given = {"input_features": torch.randn(2, 16, 48)}
    if "attention_mask" in graph.samples:
        mask = (torch.arange(37) < torch.tensor([[37], [20]])).long()
        given = {"input_features": torch.randn(2, 37, 160), "attention_mask": mask}
    with torch.no_grad():
        expected = model(**given).logits
    torch.testing.assert_close(graph.run(given)["logits"], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"architectures": ["VitsModel"], "model_type": "vits"},
            "VitsModel makes sound; infer has no task whose output is sound",
        ),
        ({"architectures": ["SamModel"], "model_type": "sam"}, "SamModel takes pixel_values, input_points"),
        (
            {"architectures": ["DecisionTransformerModel"], "model_type": "decision_transformer"},
            "DecisionTransformerModel takes states, actions",
        ),
        (
            {
                "architectures": ["LayoutLMModel"],
                "model_type": "layoutlm",
                "hidden_size": 32,
            },
            "LayoutLMModel takes input_ids, bbox",
        ),
        (
            {
                "architectures": ["Speech2TextForConditionalGeneration"],
                "model_type": "speech_to_text",
                "is_encoder_decoder": True,
            },
            "Speech2TextForConditionalGeneration takes input_features",
        ),
        (
            {
                "architectures": ["MusicgenMelodyForConditionalGeneration"],
                "model_type": "musicgen_melody",
                "is_encoder_decoder": True,
                "text_encoder": {"model_type": "t5"},
                "audio_encoder": {"model_type": "encodec"},
                "decoder": {"model_type": "musicgen_melody_decoder"},
            },
            "MusicgenMelodyForConditionalGeneration makes sound",
        ),
        (
            {"architectures": ["VideoMAEForVideo"], "model_type": "videomae"},
            "no task for the head of VideoMAEForVideo",
        ),
    ],
)
def test_a_refusal_names_what_the_model_reads_or_gives(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=said):
        load(Plan(source=str(tmp_path), data="random"))
