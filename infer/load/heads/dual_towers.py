"""Models that compare texts with images (CLIP, SigLIP): whole, or one tower from the folder of the whole model.

A tower's tensors begin with `vision_model` or `text_model`, which is what `--key` names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ... import families
from ...errors import UsageError
from ...spec import Finding
from .build import class_named, output_fields

TOWERS = {"text_model": ("text_config", "Text"), "vision_model": ("vision_config", "Vision")}


def towers_of(name: str, settings: Any) -> dict[str, str]:
    """Return the towers of an architecture that infer opens: key → class of transformers; empty for other models.

    The class has the projection, or its pooled output is what images and texts are compared by.
    """
    import transformers

    stem = name.removesuffix("Model")
    if not name.endswith("Model") or not all(hasattr(settings, part) for part, _ in TOWERS.values()):
        return {}
    pooled = tower_pair(settings).pooled
    classes = {
        key: [f"{stem}{kind}ModelWithProjection", *([f"{stem}{kind}Model"] if pooled else [])]
        for key, (_, kind) in TOWERS.items()
    }
    known = {key: [one for one in names if hasattr(transformers, one)] for key, names in classes.items()}
    return {key: names[0] for key, names in known.items() if names}


def whole_config(config: Mapping[str, Any], name: str, settings: Any) -> dict[str, Any] | None:
    """Return config.json of a model of two towers with the limits and tokens of its texts; None for other models."""
    if not _compares(name, settings):
        return None
    text = settings.text_config.to_dict()
    named = ("max_position_embeddings", "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    return {**config, **{key: text.get(key) for key in named}}


def _compares(name: str, settings: Any) -> bool:
    """Return True for a class that compares images with texts as CLIP does, such as ChineseCLIPModel.

    Models of videos (X-CLIP) and of images of any shape (SigLIP 2's `spatial_shapes`) take other tensors.
    """
    found = class_named(name, settings)
    if found is None or not all(hasattr(settings, part) for part, _ in TOWERS.values()):
        return False
    takes = set(inspect.signature(found.forward).parameters)
    gives = {"logits_per_image", "image_embeds", "text_embeds"} <= set(output_fields(found))
    plain = not hasattr(settings.vision_config, "num_frames") and "spatial_shapes" not in takes
    return gives and plain and {"input_ids", "attention_mask", "pixel_values"} <= takes


def tower_pair(settings: Any) -> families.TowerPair:
    """Return how a model of two towers compares, by its configuration: as CLIP does where no family says otherwise."""
    return families.known().tower_pairs.get(settings.model_type, families.TowerPair())


def whole_meta(settings: Any) -> dict[str, Any]:
    """Return the activation of an image's logits."""
    return {"activation": tower_pair(settings).activation}


def whole_finding() -> Finding:
    """Report that both towers are in the artifact, and how to take one."""
    keys = " or ".join(f"--key {tower}" for tower in TOWERS)
    return Finding("load", "towers", "both", why=f"images are compared with texts; one alone: {keys}")


def choose_tower(key: str | None, name: str, settings: Any) -> tuple[str, Any]:
    """Return the class of the tower that `key` names and its configuration, or both unchanged without a key.

    Raises `UsageError` for a key that is no tower of the model.
    """
    if key is None:
        return name, settings
    towers = towers_of(name, settings)
    if key not in towers:
        kind = f"; known: {', '.join(towers)}" if towers else ", which has no towers to choose from"
        raise UsageError(f"no tower {key!r} of {name}{kind}", where="--key")
    found = getattr(settings, TOWERS[key][0])
    if (size := getattr(settings, "projection_dim", None)) is not None:
        found.projection_dim = size
    return towers[key], found
