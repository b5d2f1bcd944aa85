"""A model by a library's name: how it is built, its images, its classes; and refusals that both libraries share."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...distribution import install
from ...errors import NotUsableError, UsageError
from ...library_errors import describe, first_sentence
from ...plan import Plan
from ...preprocess.image import ImagePreprocessor
from ...spec import TensorSpec
from ...weights import Checkpoint
from ..input_specs import asked_inputs
from ..made_up_images import LARGEST_DIFFERENCE, largest_difference, made_up_images

INPUT = "pixel_values"  # as ImagePreprocessor names it
FILTERS = {
    "nearest": 0,
    "lanczos": 1,
    "bilinear": 2,
    "bicubic": 3,
    "box": 4,
    "hamming": 5,
}  # numbers of Pillow
Size = tuple[int | str, int | str]


@dataclass(frozen=True)
class LibraryModel:
    """A model as its library describes it.

    `build(classes)` makes it with random weights; the library's own weights have `num_classes` classes.
    `preprocess(size)` returns the steps from an image to `channels` x `size` and a remark, or None and the reason.
    `labels(classes)` returns the names of so many classes and a remark, or nothing. `training_only` lists
    prefixes of tensors that checkpoints hold or lack.
    """

    text: str  # "timm:resnet18.a1_in1k"
    task: str
    build: Callable[[int], nn.Module]
    num_classes: int
    channels: int
    size: Size
    preprocess: Callable[[Size], tuple[ImagePreprocessor | None, str]]
    labels: Callable[[int], tuple[list[str], str]]
    features: bool = False  # without classes it gives pooled features
    training_only: tuple[str, ...] = ()


class LibraryImageModel(nn.Module):
    """A library's `model`, called by the name of its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Any:
        """Compute logits or features from float [batch, C, H, W]."""
        found = self.model(pixel_values)
        # torchvision's segmenters return auxiliary outputs beside "out".
        return found["out"] if isinstance(found, Mapping) else found


def import_library(library: str, text: str) -> ModuleType:
    """Import timm or torchvision; raise `NotUsableError` with the way to install it."""
    if find_spec(library) is None:
        raise NotUsableError(f"{text} needs the package {library}", hint=install("vision"))
    try:
        return import_module(library)
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise NotUsableError(
            f"{library} can't be imported here: {describe(error)}",
            hint=f"It needs the torchvision that is built for torch {torch.__version__}",
        ) from error


def unknown_model(library: str, name: str, known: Iterable[str]) -> UsageError:
    """Build the error of a name that the library does not have, with the nearest ones."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    guess = f"Did you mean {', '.join(near)}? " if near else ""
    return UsageError(
        f"{library} has no model named {name!r}",
        hint=f"{guess}{library}'s list_models() returns all names",
    )


def same_pixels(
    steps: ImagePreprocessor, transform: Callable[[Any], Any], about: str
) -> tuple[ImagePreprocessor | None, str]:
    """Return the steps if they give the values of a library's transform on two images; else None and why."""
    try:
        worst = max(
            largest_difference({INPUT: transform(image)}, {INPUT: steps.row(image)})
            for image in made_up_images(steps.channels)
        )
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        return None, f"the transform of {about} can't be used: {first_sentence(error)}"
    if worst > LARGEST_DIFFERENCE:
        return None, f"the transform of {about} does something that infer does not"
    return steps, f"{about}; on two made-up images it gives the same values"


def input_size(plan: Plan, model: LibraryModel) -> TensorSpec:
    """Return the spec of the images, by --input where it is given; raise `UsageError` for any other input."""
    own = TensorSpec(INPUT, "float32", ("batch", model.channels, *model.size))
    given = list(asked_inputs(plan).values())
    if not given:
        return own
    if len(given) > 1 or given[0].name != INPUT or len(given[0].shape) != 4 or given[0].dtype != "float32":
        raise UsageError(
            f"{model.text} takes one input, {own.format()}", where="--input", hint="Change its sizes only"
        )
    return given[0]


def classes_in(module: nn.Module, checkpoint: Checkpoint, model: LibraryModel, key: str) -> int:
    """Return the number of classes of a checkpoint, by the rows of its classifier, 0 for one without.

    The classifier is the last layer of the model with as many outputs as the library's model has classes. Where none
    is, or the model has no features to give instead, the number is the library's.
    """
    layers = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer.weight.shape[0] == model.num_classes
    ]
    if not layers:
        return model.num_classes
    wanted = f"{layers[-1]}.weight"
    held = [name for name in checkpoint if not key or name.startswith(f"{key}.")]
    stored = [name for name in held if name == wanted or name.endswith(f".{wanted}")]
    if stored:
        return checkpoint[min(stored, key=len)].shape[0]
    return 0 if model.features else model.num_classes
