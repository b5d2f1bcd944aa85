"""Models of diffusers pipelines open one by one, and compute what diffusers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infer import Plan, load
from infer.errors import SourceError, UsageError
from infer.load.identification.identify import identify
from infer.run.float_graph import float_graph

pytestmark = pytest.mark.filterwarnings("ignore")  # diffusers and transformers have many to give
BLOCKS: dict[str, Any] = {
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "sample_size": 16,
}
UNET = {
    **BLOCKS, "attention_head_dim": 4, "cross_attention_dim": 12,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip
XL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 34,
}
DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 1, "sample_size": 8}
VAE = {**BLOCKS, "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "UNet": ("UNet2DConditionModel", UNET),
    "UNet of SDXL": ("UNet2DConditionModel", {**UNET, **XL}),
    "UNet without text": (
        "UNet2DModel",
        {
            **BLOCKS,
            "down_block_types": ["DownBlock2D"] * 2,
            "up_block_types": ["UpBlock2D"] * 2,
            "attention_head_dim": 4,
        },
    ),
    "DiT": ("DiTTransformer2DModel", {**DIT, "num_embeds_ada_norm": 10, "norm_num_groups": 4}),
    "PixArt": ("PixArtTransformer2DModel", {**DIT, "cross_attention_dim": 16, "caption_channels": 12}),
    "SD3": (
        "SD3Transformer2DModel",
        {
            **DIT,
            "joint_attention_dim": 12,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 10,
            "pos_embed_max_size": 8,
        },
    ),
}


def saved(kind: str, config: dict[str, Any], folder: Path) -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def opened(folder: Path, **options: Any) -> load.LoadedModel:
    loaded = load.load(Plan(source=str(folder), data="random", **options))
    load.fill(loaded)
    return loaded


def run(loaded: load.LoadedModel, inputs: dict[str, Tensor]) -> Any:
    """Run the captured program."""
    program = float_graph(loaded).program
    assert program is not None
    with torch.no_grad():
        return program.module(check_guards=False)(**inputs)


def drawn(loaded: load.LoadedModel) -> dict[str, Tensor]:
    sizes = {"batch": 3, "seq": 5}
    shapes = {spec.name: [sizes.get(size, size) for size in spec.shape] for spec in loaded.inputs}  # type: ignore[call-overload]
    whole = {spec.name for spec in loaded.inputs if spec.dtype == "int64"}
    return {n: torch.ones(s, dtype=torch.int64) if n in whole else torch.randn(s) for n, s in shapes.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_denoiser_computes_what_diffusers_computes(case: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    model = saved(kind, config, tmp_path)
    loaded = opened(tmp_path)
    inputs = drawn(loaded)
    given: dict[str, Any] = dict(inputs)
    if "text_embeds" in given:
        given["added_cond_kwargs"] = {name: given.pop(name) for name in ("text_embeds", "time_ids")}
    if kind.startswith("PixArt"):
        given["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    with torch.no_grad():
        expected = model(**given).sample
    torch.testing.assert_close(run(loaded, inputs), expected, rtol=1e-4, atol=1e-4)
    assert loaded.outputs == ("sample",)


@pytest.mark.parametrize("old", [False, True], ids=["names of today", "old names of attention"])
def test_an_autoencoder_opens_as_its_decoder_or_encoder(old: bool, tmp_path: Path) -> None:
    model = saved("AutoencoderKL", VAE, tmp_path)
    if old:
        path = tmp_path / "diffusion_pytorch_model.safetensors"
        pairs = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        tensors = load_file(path)
        for new, was in pairs.items():
            tensors = {name.replace(f".{new}.", f".{was}."): value for name, value in tensors.items()}
        save_file(tensors, path)
    latents, images = torch.randn(2, 4, 8, 8), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        pixels, moments = model.decode(latents).sample, model.encode(images).latent_dist.parameters
    torch.testing.assert_close(run(opened(tmp_path), {"latents": latents}), pixels, rtol=1e-4, atol=1e-4)
    found = run(opened(tmp_path, key="encoder"), {"sample": images})
    torch.testing.assert_close(found, moments, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="AutoencoderKL has no part 'ema'"):
        opened(tmp_path, key="ema")


@pytest.mark.parametrize("kind", ["CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"])
def test_a_text_encoder_of_a_pipeline_gives_hidden_states(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "model_index.json").write_text("{}")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    made = getattr(transformers, kind)
    model = made(made.config_class(**(t5 if kind.startswith("T5") else {**sizes, "vocab_size": 64}))).eval()
    model.save_pretrained(tmp_path / "text_encoder")
    loaded = opened(tmp_path / "text_encoder")
    ids = torch.randint(3, 60, (2, 9))
    inputs = {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if kind.startswith("T5") else {})
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True)
    found = run(loaded, inputs)
    values = dict(zip(loaded.outputs, found if isinstance(found, tuple | list) else [found], strict=True))
    torch.testing.assert_close(values["last_hidden_state"], expected.last_hidden_state, rtol=1e-4, atol=1e-4)
    if not kind.startswith("T5"):
        pooled = expected.text_embeds if "Projection" in kind else expected.pooler_output
        torch.testing.assert_close(values["pooled"], pooled, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            values["penultimate_hidden_state"], expected.hidden_states[-2], rtol=1e-4, atol=1e-4
        )


def test_a_pipeline_names_the_command_for_each_of_its_models(tmp_path: Path) -> None:
    index = {
        "_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"],
        "text_encoder": ["transformers", "CLIPTextModel"], "safety_checker": ["x", "SafetyChecker"],
        "scheduler": ["diffusers", "PNDMScheduler"],
    }  # fmt: skip
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for name in ("unet", "text_encoder", "safety_checker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(SourceError) as caught:
        identify(tmp_path)
    said = str(caught.value)
    assert "a diffusers pipeline of several models (StableDiffusionPipeline)" in said
    assert (
        f"infer optimize {tmp_path}/unet (UNet2DConditionModel); infer optimize {tmp_path}/text_encoder"
        in said
    )
    assert said.endswith("Not opened: safety_checker (SafetyChecker)")


def test_a_class_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    save_file({"a": torch.ones(2)}, tmp_path / "diffusion_pytorch_model.safetensors")
    assert identify(tmp_path).kind == "diffusers"
    with pytest.raises(
        SourceError, match=r"a model of diffusers \(FluxTransformer2DModel\).*--model file.py:build"
    ):
        opened(tmp_path)
