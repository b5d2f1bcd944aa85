"""Models of transformers that no task fits: functions of tensors, heads of pre-trainings, encoders, towers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infer.errors import SourceError, UsageError
from infer.load import fill, load
from infer.plan import Plan
from infer.run.float_graph import float_graph
from tests.support.random_heads import save_head

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
TEXT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": 64, "num_labels": 3,
    "decoder_start_token_id": 0,
}  # fmt: skip
SOUND: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "conv_dim": [16] * 7,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "codevector_dim": 16, "proj_codevector_dim": 16,
}  # fmt: skip
IDS = torch.tensor([[5, 9, 17, 3], [8, 2, 0, 0]])
MASK = (IDS != 0).long()


def save(config: str, head: str, sizes: dict[str, Any], folder: Path) -> Any:
    return save_head(config, head, sizes, folder, std=0.2)


def opened(folder: Path, **options: Any) -> Any:
    found = load(Plan(source=str(folder), data="random", **options))
    fill(found)
    return found


def run(loaded: Any, **inputs: torch.Tensor) -> Any:
    with torch.no_grad():
        return loaded.module(**inputs)


def test_a_model_without_a_task_runs_on_the_tensors_that_input_names(tmp_path: Path) -> None:
    sizes = {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16, "keypoint_decoder_dim": 65,
             "descriptor_decoder_dim": 16}  # fmt: skip
    model = save("superpoint", "SuperPointForKeypointDetection", sizes, tmp_path)
    loaded = opened(tmp_path, inputs=("pixel_values=float32[2,3,32,32]",))
    assert loaded.task == "tensors"
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
    found = run(loaded, pixel_values=images)
    assert {"keypoints", "scores", "descriptors"} <= set(found)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


def test_inputs_that_follow_from_the_configuration_need_no_option(tmp_path: Path) -> None:
    model = save("electra", "ElectraForPreTraining", {**TEXT, "embedding_size": 32}, tmp_path)
    loaded = opened(tmp_path)
    assert [spec.format() for spec in loaded.inputs] == [
        "input_ids=int64[batch,seq]", "attention_mask=int64[batch,seq]"
    ]  # fmt: skip
    graph = float_graph(loaded)
    assert [spec.name for spec in graph.outputs] == ["logits"]
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(run(loaded, input_ids=IDS, attention_mask=MASK)["logits"], expected)


def test_a_refusal_without_a_task_gives_inputs_that_can_be_parsed(tmp_path: Path) -> None:
    from infer.spec import TensorSpec

    for name, kind, wanted in (
        ("BlipForImageTextRetrieval", "blip", {"pixel_values", "input_ids"}),
        ("EncodecModel", "encodec", {"input_values"}),
    ):
        config = {"architectures": [name], "model_type": kind}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
        with pytest.raises(SourceError, match="function of tensors") as refusal:
            load(Plan(source=str(tmp_path), data="random"))
        given = [TensorSpec.parse(text) for text in re.findall(r"--input '([^']+)'", str(refusal.value))]
        assert {spec.name for spec in given} == wanted


def test_an_input_that_a_model_does_not_take_is_refused_with_its_own(tmp_path: Path) -> None:
    save("electra", "ElectraForPreTraining", {**TEXT, "embedding_size": 32}, tmp_path)
    with pytest.raises(UsageError, match="no input named 'pixels'.*input_ids"):
        load(Plan(source=str(tmp_path), data="random", inputs=("pixels=float32[batch,3]",)))


def test_the_model_of_a_pretraining_fills_masks(tmp_path: Path) -> None:
    model = save("bert", "BertForPreTraining", TEXT, tmp_path)
    loaded = opened(tmp_path)
    assert loaded.task == "fill-mask"
    assert "BertForMaskedLM" in str([finding.value for finding in loaded.findings])
    types = torch.zeros_like(IDS)
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK).prediction_logits
    found = run(loaded, input_ids=IDS, attention_mask=MASK, token_type_ids=types)
    torch.testing.assert_close(found, expected)


def test_the_model_of_a_pretraining_of_sound_gives_vectors(tmp_path: Path) -> None:
    model = save("wav2vec2", "Wav2Vec2ForPreTraining", SOUND, tmp_path)
    loaded = opened(tmp_path)
    assert loaded.task == "audio-embedding"
    sound = torch.randn(2, 4000)
    with torch.no_grad():
        expected = model.wav2vec2(sound).last_hidden_state.mean(1)
    torch.testing.assert_close(run(loaded, input_values=sound), expected)


def test_a_masked_autoencoder_embeds_all_patches_of_an_image(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
              "image_size": 32, "patch_size": 8, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
              "decoder_num_attention_heads": 2, "decoder_intermediate_size": 16}  # fmt: skip
    model = save("vit_mae", "ViTMAEForPreTraining", vision, tmp_path)
    model.config.mask_ratio = 0.0
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model.vit(images).last_hidden_state[
            :, 0
        ]  # in a random order, of which the class token knows nothing
    torch.testing.assert_close(run(opened(tmp_path), pixel_values=images), expected)


@pytest.mark.parametrize("sentence", [False, True], ids=["alone", "sentence-transformers"])
@pytest.mark.parametrize("name", ["T5EncoderModel", "MT5EncoderModel"])
def test_an_encoder_of_an_encoder_decoder_is_an_embedder(name: str, sentence: bool, tmp_path: Path) -> None:
    model = save(name.removesuffix("EncoderModel").lower(), name, T5, tmp_path)
    if sentence:
        modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                   for i, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling")))]  # fmt: skip
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    loaded = opened(tmp_path)
    assert loaded.task == "embedding"
    with torch.no_grad():
        hidden = model(IDS, attention_mask=MASK).last_hidden_state
    expected = (hidden * MASK[..., None]).sum(1) / MASK.sum(1, keepdim=True)
    expected = expected if sentence else torch.nn.functional.normalize(expected)
    torch.testing.assert_close(run(loaded, input_ids=IDS, attention_mask=MASK), expected)


def test_a_token_classifier_over_an_encoder_alone_takes_no_decoder(tmp_path: Path) -> None:
    model = save("t5", "T5ForTokenClassification", T5, tmp_path)
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK).logits
    loaded = opened(tmp_path)
    assert loaded.task == "token-classification"
    torch.testing.assert_close(run(loaded, input_ids=IDS, attention_mask=MASK), expected)


def test_towers_without_classes_of_their_own_compare_images_with_texts(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
              "image_size": 32, "patch_size": 16}  # fmt: skip
    model = save("chinese_clip", "ChineseCLIPModel", {"text_config": TEXT, "vision_config": vision}, tmp_path)
    loaded = opened(tmp_path)
    assert loaded.task == "zero-shot-image-classification"
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK, pixel_values=images).logits_per_image
    logits, *_ = run(loaded, pixel_values=images, input_ids=IDS, attention_mask=MASK)
    torch.testing.assert_close(logits, expected)


def test_cells_of_a_table_are_no_question_answering(tmp_path: Path) -> None:
    sizes = {**TEXT, "type_vocab_sizes": [3, 8, 8, 2, 2, 8, 10]}
    model = save("tapas", "TapasForQuestionAnswering", sizes, tmp_path)
    with pytest.raises(SourceError, match="start_logits and end_logits.*function of tensors.*token_type_ids"):
        load(Plan(source=str(tmp_path), data="random"))
    names = (
        "input_ids=int64[batch,seq]",
        "attention_mask=int64[batch,seq]",
        "token_type_ids=int64[batch,seq,7]",
    )
    types = torch.zeros(2, 4, 7, dtype=torch.int64)
    found = run(opened(tmp_path, inputs=names), input_ids=IDS, attention_mask=MASK, token_type_ids=types)
    with torch.no_grad():
        torch.testing.assert_close(found["logits"], model(IDS, MASK, types).logits)
