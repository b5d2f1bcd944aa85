"""Tiny configurations of models that write text about an image, for the models table and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.models.checks import write_byte_tokenizer

VOCABULARY, END, SIDE = 259, 2, 32
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END}
VIT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": SIDE,
    "patch_size": 8,
}  # fmt: skip
SWIN: dict[str, Any] = {
    "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "image_size": SIDE, "patch_size": 4, "window_size": 2,
}  # fmt: skip
BART: dict[str, Any] = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
}  # fmt: skip
BERT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
}  # fmt: skip
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4}
# Model → encoder, its sizes, decoder and its sizes, as people publish them.
PAIRS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "trocr": ("ViTConfig", VIT, "TrOCRConfig", {**BART, "cross_attention_hidden_size": 64}),
    "trocr-small": (
        "DeiTConfig",
        VIT,
        "TrOCRConfig",
        {
            **BART, "cross_attention_hidden_size": 64, "use_learned_position_embeddings": False,
            "layernorm_embedding": True,
        },
    ),
    "donut": ("DonutSwinConfig", SWIN, "MBartConfig", {**BART, "scale_embedding": True, "add_final_layer_norm": True}),
    "vit-gpt2": ("ViTConfig", VIT, "GPT2Config", GPT2),
    "swin-bert": ("SwinConfig", SWIN, "BertConfig", BERT),
    "beit-roberta": ("BeitConfig", VIT, "XLMRobertaConfig", BERT),
}  # fmt: skip
WITH_QUESTION = ("blip-vqa", "florence2")  # whose encoder reads tokens beside the image
NAMES = (*PAIRS, "blip", *WITH_QUESTION)
QUESTION = [70, 75, 80, 75, 90]  # token ids
FLORENCE: dict[str, Any] = {
    "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
    "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4],
    "window_size": 4, "projection_dim": 64,
}  # fmt: skip
IMAGE_TOKEN = 258


def build(name: str) -> nn.Module:
    """Make a model whose weights are large enough that its answers differ from image to image."""
    import transformers

    torch.manual_seed(0)
    if name == "florence2":
        return scaled(_florence2(), 4.0)
    if name.startswith("blip"):
        text = {
            **BERT,
            **IDS,
            "vocab_size": VOCABULARY,
            "encoder_hidden_size": 64,
            "max_position_embeddings": 96,
        }
        text |= {"is_decoder": True, "sep_token_id": END, "eos_token_id": 5}
        config: Any = transformers.BlipConfig(text_config=text, vision_config=VIT)
        kind = "BlipForQuestionAnswering" if name == "blip-vqa" else "BlipForConditionalGeneration"
        return scaled(getattr(transformers, kind)(config), 4.0 if name == "blip-vqa" else 1.5)
    encoder, images, decoder, sizes = PAIRS[name]
    own = {**IDS, **sizes, "vocab_size": VOCABULARY, "is_decoder": True, "add_cross_attention": True}
    own |= {"max_position_embeddings": 96, "is_encoder_decoder": False, "decoder_start_token_id": END}
    own |= {"forced_eos_token_id": None}
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        getattr(transformers, encoder)(**images), getattr(transformers, decoder)(**own)
    )
    for key, value in {**IDS, "decoder_start_token_id": END, "tie_word_embeddings": False}.items():
        setattr(config, key, value)
    return scaled(transformers.VisionEncoderDecoderModel(config))


def _florence2() -> nn.Module:
    import transformers

    text = {**BART, **IDS, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "vocab_size": VOCABULARY}
    text |= {"model_type": "bart", "max_position_embeddings": 96, "decoder_start_token_id": END}
    text |= {"forced_eos_token_id": None, "forced_bos_token_id": None, "is_encoder_decoder": True}
    config = transformers.Florence2Config(
        vision_config=FLORENCE, text_config=text, image_token_id=IMAGE_TOKEN, **IDS
    )
    return transformers.Florence2ForConditionalGeneration(config)


def scaled(model: nn.Module, spread: float = 1.5) -> nn.Module:
    """Draw the matrices of a model, by the width that each of them reads."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5 * spread)
    return model.eval()


def save(model: nn.Module, source: Path) -> Path:
    """Save a model with a tokenizer of a token for each byte and a processor of images."""
    import transformers

    model.save_pretrained(source)  # type: ignore[operator]
    write_byte_tokenizer(source)
    transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(source)
    return source


def greedy(
    model: Any,
    pixels: torch.Tensor,
    count: int,
    prompt: list[int] | None = None,
    question: list[int] | None = None,
) -> list[int]:
    """Return the greedy tokens of transformers' `generate` after those that the decoder begins with.

    `prompt`: with which the decoder begins; `question`: tokens that the encoder reads beside the image.
    """
    given: dict[str, Any] = {"pixel_values": pixels}
    if prompt is not None:
        given["decoder_input_ids"] = torch.tensor([prompt])
    with torch.no_grad():
        if question is not None:
            images = []
            if hasattr(model.config, "image_token_id"):
                rows = model.get_image_features(pixels).pooler_output.shape[1]
                images = [model.config.image_token_id] * rows
            given["input_ids"] = torch.tensor([images + question])
        out = model.generate(**given, max_new_tokens=count, do_sample=False, num_beams=1)
    return [int(token) for token in out[0][1 if prompt is None else len(prompt) :]]
