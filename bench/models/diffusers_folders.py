"""Tiny pipeline of diffusers for the checkpoints table, and the models of it that open one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from infer.load import fill, load
from infer.plan import Plan
from infer.run.float_graph import float_graph

CLOSE = 1e-4  # relative, of a captured model against diffusers' own forward
BLOCKS: dict[str, Any] = {
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "sample_size": 16,
}


def write_pipeline(folder: Path) -> Path:
    """Write a pipeline of a denoiser, an autoencoder and a text encoder, with random weights."""
    index = '{"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "PNDMScheduler"]'
    for name, (library, kind, model) in _models().items():
        model.save_pretrained(folder / name)
        index += f', "{name}": ["{library}", "{kind}"]'
    (folder / "model_index.json").write_text(index + "}")
    return folder


def open_model(folder: Path, name: str) -> str:
    """Open one model of the pipeline, and compare its captured form with the library's own forward."""
    _, kind, model = _models()[name]
    loaded = load(Plan(source=str(folder / name), data="random"))
    fill(loaded)
    program = float_graph(loaded).program
    assert program is not None, "not captured"
    inputs = _inputs(name)
    with torch.no_grad():
        found = program.module(check_guards=False)(**inputs)
        expected = model.decode(inputs["latents"]) if name == "vae" else model(**inputs)
    got = found[0] if isinstance(found, (tuple, list)) else found
    error = float((got - expected[0]).norm() / expected[0].norm())
    assert error < CLOSE, f"{error:.1e} from {kind}'s own outputs"
    return kind


def _models() -> dict[str, tuple[str, str, Any]]:
    """Build the models: name of the folder → library, class, model."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        **BLOCKS,
        attention_head_dim=4,
        cross_attention_dim=32,
        down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
        up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
    )
    vae = AutoencoderKL(
        **BLOCKS, down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = CLIPTextModel(CLIPTextConfig(**sizes, vocab_size=64))
    made: dict[str, tuple[str, nn.Module]] = {
        "unet": ("diffusers", unet),
        "vae": ("diffusers", vae),
        "text_encoder": ("transformers", text),
    }
    return {name: (library, type(model).__name__, model.eval()) for name, (library, model) in made.items()}


def _inputs(name: str) -> dict[str, torch.Tensor]:
    if name == "text_encoder":
        return {"input_ids": torch.tensor([[5, 9, 7, 40]])}
    if name == "vae":
        return {"latents": torch.randn(2, 4, 8, 8)}
    states = torch.randn(2, 5, 32)
    return {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.ones(2)} | {
        "encoder_hidden_states": states
    }
