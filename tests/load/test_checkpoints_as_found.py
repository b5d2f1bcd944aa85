"""Checkpoints as they lie around: no architectures, base encoder-decoders, NumPy archives, kohya's LoRA files."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infer import Plan, load
from infer.errors import SourceError, UsageError

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip
BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64, "decoder_start_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}


def saved(folder: Path, name: str, sizes: dict[str, Any], *, unnamed: bool = True) -> Path:
    """Save a tiny model of transformers, without the name of its class in config.json."""
    import transformers

    found = getattr(transformers, name)
    found(found.config_class(**sizes)).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if unnamed:
        del config["architectures"]
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "sizes", "task"),
    [
        ("BertModel", SIZES, "embedding"),
        ("BertForMaskedLM", SIZES, "fill-mask"),
        ("BertForSequenceClassification", SIZES, "classification"),
        ("BertForTokenClassification", SIZES, "token-classification"),
        ("BertForQuestionAnswering", SIZES, "question-answering"),
        ("LlamaForCausalLM", SIZES, "text-generation"),
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}, "text-generation"),
        ("BartForConditionalGeneration", BART, "text-generation"),
        ("ViTForImageClassification", IMAGES, "image-classification"),
    ],
)
def test_a_configuration_without_architectures_opens_by_its_tensors(
    name: str, sizes: dict[str, Any], task: str, tmp_path: Path
) -> None:
    loaded = load.load(Plan(source=str(saved(tmp_path, name, sizes)), data="random"))
    assert loaded.task == task
    if name != "GPT2LMHeadModel":
        assert any(found.what == "architecture" and found.value == name for found in loaded.findings)


def test_tensors_that_fit_no_class_are_refused_with_the_line_to_add(tmp_path: Path) -> None:
    source = saved(tmp_path, "BertModel", SIZES)
    save_file({"other": torch.zeros(2)}, source / "model.safetensors")
    with pytest.raises(SourceError, match="names no architectures, and its tensors fit none of") as caught:
        load.load(Plan(source=str(source), data="random"))
    assert '"architectures": ["BertFor' in str(caught.value)


@pytest.mark.parametrize(("name", "whole"), [("BartModel", "BartForConditionalGeneration")])
def test_a_base_encoder_decoder_generates_by_its_embedding(name: str, whole: str, tmp_path: Path) -> None:
    loaded = load.load(Plan(source=str(saved(tmp_path, name, BART, unnamed=False)), data="random"))
    assert loaded.task == "text-generation"
    assert any(found.what == "class" and found.value == whole for found in loaded.findings)
    load.fill(loaded)
    model: Any = loaded.module.model  # type: ignore[union-attr]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not model.final_logits_bias.any()


def test_weights_of_a_numpy_archive_equal_those_of_a_state_dict(tmp_path: Path) -> None:
    code = "import torch\n\ndef build():\n    return torch.nn.Linear(4, 2)\n"
    (tmp_path / "net.py").write_text(
        code + "\ndef example_inputs():\n    return {'input': torch.ones(2, 4)}\n"
    )
    layer = torch.nn.Linear(4, 2)
    arrays = {name: value.detach().numpy() for name, value in layer.state_dict().items()}
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "weights.npz", **arrays)
        loaded = load.load(
            Plan(
                source=str(tmp_path / "weights.npz"),
                model=f"{tmp_path / 'net.py'}:build",
                inputs=("input=float32[batch,4]",),
            )
        )
        assert torch.equal(loaded.checkpoint["weight"].read(), layer.weight)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="--data"):
        load.load(Plan(source=str(tmp_path / "weights.npz")))


@pytest.mark.parametrize(
    "array", [np.array([{}], dtype=object), np.array(["text"])], ids=["objects", "texts"]
)
def test_an_archive_of_other_than_numbers_is_refused(array: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", a=array)
    with pytest.raises(SourceError, match=r"pickle|no numbers"):
        load.load(Plan(source=str(tmp_path / "weights.npz"), model="net.py:build"))


def test_an_archive_that_expands_without_bound_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "weights.npz", a=np.zeros(1 << 22, np.uint8))
    with pytest.raises(SourceError, match="expands to"):
        load.load(Plan(source=str(tmp_path / "weights.npz"), model="net.py:build"))


def test_a_lora_file_of_kohya_is_named_with_the_way_out(tmp_path: Path) -> None:
    stem = "lora_unet_down_blocks_0_attentions_0_proj_in"
    tensors = {f"{stem}.lora_down.weight": torch.zeros(4, 8), f"{stem}.lora_up.weight": torch.zeros(8, 4)}
    save_file({**tensors, f"{stem}.alpha": torch.tensor(4.0)}, tmp_path / "style.safetensors")
    with pytest.raises(SourceError, match="a LoRA file of kohya") as caught:
        load.load(Plan(source=str(tmp_path / "style.safetensors")))
    assert "fuse_lora" in str(caught.value)


def test_models_of_a_vector_for_each_token_say_what_is_missing(tmp_path: Path) -> None:
    import transformers

    saved(tmp_path, "BertModel", SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    with pytest.raises(SourceError, match="expected the projection 'linear.weight' of a ColBERT"):
        load.load(Plan(source=str(tmp_path), data="random"))
    folder = tmp_path / "gliner"
    folder.mkdir()
    (folder / "gliner_config.json").write_text("{}")
    with pytest.raises(SourceError, match="a GLiNER model.*ONNX"):
        load.load(Plan(source=str(folder), data="random"))
    assert hasattr(transformers, "ColPaliForRetrieval")


@pytest.mark.parametrize("kind", ["vocab.txt", "merges.txt"])
def test_a_folder_without_tokenizer_json_has_its_vocabulary_converted(kind: str, tmp_path: Path) -> None:
    from infer.llm.text.tokenizer import LLMTokenizer

    name = "BertModel" if kind == "vocab.txt" else "RobertaModel"
    saved(tmp_path, name, {**SIZES, "max_position_embeddings": 40}, unnamed=False)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##s"]
    if kind == "vocab.txt":
        (tmp_path / kind).write_text("\n".join(words))
    else:
        pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "h", "i", "hi"]
        (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
        (tmp_path / kind).write_text("#version: 0.2\nh i\n")
    loaded = load.load(Plan(source=str(tmp_path), data="random"))
    tokenizer = LLMTokenizer(loaded.files["tokenizer.json"])
    wanted = [2, 5, 6, 3] if kind == "vocab.txt" else [0, 7, 2]
    assert tokenizer.encode("hellos" if kind == "vocab.txt" else "hi") == wanted
    assert any(found.what == "tokenizer" and found.value == "tokenizer.json" for found in loaded.findings)
    folder = loaded.files["tokenizer.json"].parent
    del loaded
    gc.collect()
    assert not folder.exists(), "it is removed with the model"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Wav2Vec2BertForXVector", "frames,160"),
        ("SeamlessM4TForSpeechToText", "frames,160"),
        ("WhisperModel", "80,frames"),
        ("Qwen2AudioForConditionalGeneration", "bands,frames"),
        ("ASTModel", "1024,128"),
    ],
)
def test_an_example_of_features_has_the_order_that_the_model_reads(name: str, sizes: str) -> None:
    import transformers

    from infer.load.heads.tensors import example_inputs

    found = getattr(transformers, name)
    specs, _ = example_inputs(found, found.config_class())
    features = next(spec for spec in specs if spec.name in ("input_features", "input_values"))
    assert ",".join(map(str, features.shape[1:])) == sizes


def test_a_conformer_of_stacked_frames_names_the_width_it_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "GraniteSpeech5ForCTC"):
        pytest.skip("this version of transformers has no GraniteSpeech5ForCTC")
    kind = transformers.GraniteSpeech5ForCTC
    config = kind.config_class()
    encoder = config.encoder_config
    for key, value in {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_layers": 1,
        "num_attention_heads": 2,
    }.items():
        if hasattr(encoder, key):
            setattr(encoder, key, value)
    from infer.load.heads.sound_wrappers import frame_width

    with torch.device("meta"):
        model = kind(config)
    assert frame_width(model) == 4 * encoder.num_mel_bins
