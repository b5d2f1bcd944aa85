"""Models of torchvision by name, `torchvision:resnet50` or `torchvision:resnet50.IMAGENET1K_V2`.

Size, normalization and class names are those of torchvision's weights of that name, or of the default ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...errors import UsageError
from ...preprocess.image import ImagePreprocessor
from .library_model import FILTERS, LibraryModel, Size, import_library, same_pixels, unknown_model

# Families that are not one tensor of images in and one tensor out.
OTHER_FAMILIES = {
    "detection": "takes a list of images and returns a list of boxes for each",
    "optical_flow": "takes two images",
    "video": "takes clips of frames",
    "quantization": "is quantized already, in a format of torch's own",
}
# Published weights need an option that the checkpoint does not tell.
TRANSFORMS_INPUT = ("googlenet", "inception_v3")
DEFAULT_SIZE = 224


def torchvision_model(name: str) -> LibraryModel:
    """Describe a model of torchvision; raise `UsageError` for an unknown name, and for families that are refused."""
    text = f"torchvision:{name}"
    models = import_library("torchvision", text).models
    architecture, _, tag = name.partition(".")
    if architecture not in models.list_models():
        raise unknown_model("torchvision", architecture, models.list_models())
    builder = models.get_model_builder(architecture)
    _refuse(architecture, builder.__module__, text)
    weights = _weights(models, architecture, tag)
    segments = ".segmentation." in builder.__module__
    meta: Mapping[str, Any] = weights.meta if weights is not None else {}
    transform = weights.transforms() if weights is not None else None
    categories = [str(category) for category in meta.get("categories", ())]

    def build(classes: int) -> nn.Module:
        named: dict[str, Any] = {"weights_backbone": None, "aux_loss": False} if segments else {}
        made: nn.Module = builder(weights=None, num_classes=classes, **named)
        return made.eval()

    def labels(classes: int) -> tuple[list[str], str]:
        return (categories, f"of {weights}") if len(categories) == classes else ([], "")

    return LibraryModel(
        text=text,
        task="image-segmentation" if segments else "image-classification",
        build=build,
        num_classes=21 if segments else 1000,
        channels=3,
        size=_size(transform),
        preprocess=lambda size: _preprocess(transform, size, f"the transforms of torchvision's {weights}"),
        labels=labels,
        training_only=("aux_classifier.",) if segments else (),
    )


def _refuse(architecture: str, module: str, text: str) -> None:
    """Raise `UsageError` for a model that is no function of a batch of images of one size."""
    family = next((family for family in OTHER_FAMILIES if f".{family}" in module), None)
    if family is not None:
        raise UsageError(
            f"{text} {OTHER_FAMILIES[family]}; models that take a batch of images are opened by name",
            hint="Give --model file.py:factory that returns the part to optimize, with the checkpoint as the source",
        )
    if architecture in TRANSFORMS_INPUT:
        raise UsageError(
            f"{text} has transform_input=True, a second normalization that a checkpoint does not record",
            hint="Give --model file.py:factory that builds it as it was trained, with the checkpoint as the source",
        )


def _weights(models: Any, architecture: str, tag: str) -> Any:
    """Return the entry of the weights called `tag`, or the default one; None where torchvision has none."""
    known = models.get_model_weights(architecture)
    names = list(known.__members__)
    if tag and tag not in names:
        raise UsageError(
            f"torchvision's {architecture} has no weights named {tag!r}",
            hint=f"Known: {', '.join(names) or 'none'}",
        )
    return known[tag] if tag else (known["DEFAULT"] if names else None)


def _size(transform: Any) -> Size:
    crop = getattr(transform, "crop_size", None)
    if crop:
        return int(crop[0]), int(crop[-1])
    return ("height", "width") if getattr(transform, "resize_size", None) else (DEFAULT_SIZE, DEFAULT_SIZE)


def _preprocess(transform: Any, size: Size, about: str) -> tuple[ImagePreprocessor | None, str]:
    if transform is None:
        return None, "torchvision has no weights of this model to take the preprocessing from"
    crop, resized = getattr(transform, "crop_size", None), transform.resize_size
    if crop and size != _size(transform):
        return None, f"--input gives another size than {about}"
    found = ImagePreprocessor(
        shortest_edge=int(resized[0]) if len(resized) == 1 else None,
        size=(int(resized[0]), int(resized[1])) if len(resized) == 2 else None,
        resample=FILTERS[transform.interpolation.value],
        crop=(int(crop[0]), int(crop[-1])) if crop else None,
        rounds_crop=True,
        scale=1 / 255,
        mean=tuple(map(float, transform.mean)),
        std=tuple(map(float, transform.std)),
    )
    return same_pixels(found, transform, about)
