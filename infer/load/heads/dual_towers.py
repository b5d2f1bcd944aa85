"""One tower of a model that compares texts with images (CLIP, SigLIP), taken from the folder of the whole model.

The tower's tensors begin with `vision_model` or `text_model`, which is what `--key` names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import SourceError, UsageError

TOWERS = {"text_model": ("text_config", "Text"), "vision_model": ("vision_config", "Vision")}


def towers_of(name: str, settings: Any) -> dict[str, str]:
    """Return the towers of an architecture that infer opens: key → class of transformers; empty for other models.

    The class has the projection, or its pooled output is what images and texts are compared by (SigLIP's).
    """
    import transformers

    stem = name.removesuffix("Model")
    if not name.endswith("Model") or not all(hasattr(settings, part) for part, _ in TOWERS.values()):
        return {}
    pooled = stem == "Siglip"
    classes = {
        key: [f"{stem}{kind}ModelWithProjection", *([f"{stem}{kind}Model"] if pooled else [])]
        for key, (_, kind) in TOWERS.items()
    }
    known = {key: [one for one in names if hasattr(transformers, one)] for key, names in classes.items()}
    return {key: names[0] for key, names in known.items() if names}


def choose_tower(key: str | None, name: str, settings: Any, folder: Path) -> tuple[str, Any]:
    """Return the class of the tower that `key` names and its configuration, or both unchanged without a key.

    Raises `SourceError` for a model of two towers without a key, and `UsageError` for a key that is none of them.
    """
    towers = towers_of(name, settings)
    if key is None and towers:
        raise SourceError(
            f"{name} has a tower for texts and one for images; an artifact holds one of them",
            where=str(folder / "config.json"),
            hint=f"Take one: {' or '.join(f'--key {tower}' for tower in towers)}",
        )
    if key is None:
        return name, settings
    if key not in towers:
        kind = f"; known: {', '.join(towers)}" if towers else ", which has no towers to choose from"
        raise UsageError(f"no tower {key!r} of {name}{kind}", where="--key")
    found = getattr(settings, TOWERS[key][0])
    if (size := getattr(settings, "projection_dim", None)) is not None:
        found.projection_dim = size
    return towers[key], found
