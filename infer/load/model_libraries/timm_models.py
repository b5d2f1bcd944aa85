"""Models of timm by name, `timm:resnet18` or `timm:resnet18.a1_in1k`, and by a folder with timm's config.json.

Size, crop and normalization of the images are those of timm's data configuration for the tag of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import SourceError, UsageError
from ...library_errors import quiet
from ...preprocess.image import ImagePreprocessor
from .library_model import FILTERS, LibraryModel, Size, import_library, same_pixels, unknown_model


def timm_model(name: str) -> LibraryModel:
    """Describe a model of timm's registry; raise `UsageError` for an unknown name or tag."""
    text = f"timm:{name}"
    timm = import_library("timm", text)
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise unknown_model("timm", architecture, timm.list_models())
    tags = [known for known in timm.models.get_arch_pretrained_cfgs(architecture) if "." in known]
    if tag and name not in tags:
        raise UsageError(
            f"timm's {architecture} has no weights with the tag {tag!r}",
            hint=f"Known: {', '.join(known.partition('.')[2] for known in tags) or 'none'}",
        )
    found: Any = timm.models.get_pretrained_cfg(name)
    values = found.to_dict() if found is not None else {}
    named = f"{architecture}.{values['tag']}" if values.get("tag") else name
    about = f"timm's data configuration of {named}" + ("" if tag else ", its default weights")
    return _described(timm, text, name, values, about)


def timm_folder(folder: Path) -> LibraryModel:
    """Describe the model of a folder with timm's config.json, as the Hub has them."""
    timm = import_library("timm", f"{folder.name}, a folder of timm,")
    try:
        with quiet():
            values, architecture, _ = timm.models.load_model_config_from_path(folder)
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"timm can't read it: {error!r:.200}", where=str(folder / "config.json")) from error
    if not timm.is_model(architecture):
        raise unknown_model("timm", architecture, timm.list_models())
    about = "the data configuration in its config.json"
    return _described(timm, f"timm:{architecture}", f"local-dir:{folder}", dict(values), about)


def _described(timm: Any, text: str, name: str, values: dict[str, Any], about: str) -> LibraryModel:
    def build(classes: int) -> nn.Module:
        with quiet():
            made: nn.Module = timm.create_model(name, pretrained=False, exportable=True, num_classes=classes)
        return made.eval()

    config = timm.data.resolve_data_config({}, pretrained_cfg=values)
    channels, height, width = config["input_size"]
    return LibraryModel(
        text=text,
        task="image-classification",
        build=build,
        num_classes=int(values.get("num_classes") or 1000),
        channels=channels,
        size=(height, width),
        preprocess=lambda size: _preprocess(timm, config, size, about),
        labels=lambda classes: _labels(timm, values, classes),
        features=True,
    )


def _preprocess(
    timm: Any, config: Mapping[str, Any], size: Size, about: str
) -> tuple[ImagePreprocessor | None, str]:
    height, width = size
    if isinstance(height, str) or isinstance(width, str):
        return None, "the size of the images is not fixed"
    resized = math.floor(height / config["crop_pct"]), math.floor(width / config["crop_pct"])
    squashed = config["crop_mode"] == "squash"
    channels = config["input_size"][0]
    found = ImagePreprocessor(
        channels=channels,
        size=resized if squashed else None,
        shortest_edge=None if squashed else resized[0],
        resample=FILTERS.get(config["interpolation"], FILTERS["bilinear"]),
        crop=(height, width),
        rounds_crop=True,
        scale=1 / 255,
        mean=tuple(map(float, config["mean"])),
        std=tuple(map(float, config["std"])),
    )
    named = {**config, "input_size": (channels, height, width)}
    transform = timm.data.create_transform(**named, is_training=False)
    return same_pixels(found, transform, about)


def _labels(timm: Any, values: Mapping[str, Any], classes: int) -> tuple[list[str], str]:
    """Return the names of the classes: those of the folder, else of the ImageNet subset of that size."""
    names, described = values.get("label_names"), values.get("label_descriptions") or {}
    if isinstance(names, list | tuple) and len(names) == classes:
        given = described if isinstance(described, Mapping) else {}
        return [str(given.get(name, name)) for name in names], "of the folder's config.json"
    subset = timm.data.infer_imagenet_subset({"num_classes": classes})
    if classes != values.get("num_classes") or subset is None or values.get("label_offset"):
        return [], ""
    return list(timm.data.ImageNetInfo(subset).label_descriptions()), f"of {subset}, by their number"
