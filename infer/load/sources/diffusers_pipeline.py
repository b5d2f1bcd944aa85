"""Folders of diffusers, by their JSON files alone: a pipeline, and a model of one."""

from __future__ import annotations

import re
from pathlib import Path

from ...regular_files import MAX_JSON, read_json, read_regular

DENOISERS = (
    "UNet2DModel",
    "UNet2DConditionModel",
    "DiTTransformer2DModel",
    "PixArtTransformer2DModel",
    "SD3Transformer2DModel",
)
AUTOENCODER = "AutoencoderKL"
TEXT_ENCODERS = ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel")
OPENED = (*DENOISERS, AUTOENCODER, *TEXT_ENCODERS)
CLASS = re.compile(r'"_class_name"\s*:\s*"(\w+)"')


def describe_pipeline(folder: Path) -> tuple[str, str]:
    """Return the name of a pipeline of diffusers, and a hint with the command for each of its models."""
    entries = read_json(folder / "model_index.json")
    parts = {
        name: str(entry[1])
        for name, entry in entries.items()
        if isinstance(entry, list) and len(entry) == 2 and (folder / name / "config.json").is_file()
    }
    known = [f"infer optimize {folder / name} ({kind})" for name, kind in parts.items() if kind in OPENED]
    others = [f"{name} ({kind})" for name, kind in parts.items() if kind not in OPENED]
    named = f"a diffusers pipeline of several models ({entries.get('_class_name', 'no class')})"
    hint = "Optimize one of them: " + ("; ".join(known) or "each is a folder with a config.json of its own")
    return named, hint + (f". Not opened: {', '.join(others)}" if others else "")


def diffusers_class(config: Path) -> str | None:
    """Return the class of a model of diffusers, or of a text encoder within a pipeline; None for other folders."""
    text = read_regular(config, MAX_JSON).decode(errors="replace")
    if named := CLASS.search(text):
        return named[1]
    if (config.parent.parent / "model_index.json").is_file():
        return next(
            (name for name in TEXT_ENCODERS if re.search(rf'"architectures"\s*:\s*\[\s*"{name}"', text)), None
        )
    return None
