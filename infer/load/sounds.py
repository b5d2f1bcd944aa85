"""Sound files as samples of a model with `input_values`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UsageError
from ..preprocess.audio import AudioPreprocessor
from ..preprocess.transformers_processor import TransformersProcessor
from .images import spread

if TYPE_CHECKING:
    from .loaded_model import LoadedModel

MOST_SOUNDS = 64
SECONDS = 10  # of each file


def read_sounds(paths: list[Path], loaded: LoadedModel, where: str) -> tuple[dict[str, Tensor], list[Path]]:
    """Read the first ten seconds of sound files as the model's inputs; also return the files used.

    Raises `UsageError` for a model without preprocessing of sound. Without a mask all are cut to the shortest file,
    since the padding would be judged.
    """
    steps = loaded.preprocessor
    if not isinstance(steps, AudioPreprocessor | TransformersProcessor) or not steps.sampling_rate:
        takes = ", ".join(spec.format() for spec in loaded.inputs)
        raise UsageError(
            f"sound files need a model with a preprocessor_config.json for sound; this one takes {takes}",
            where=where,
        )
    used = spread(paths, MOST_SOUNDS)
    sounds = [steps.open(path)[: SECONDS * steps.sampling_rate] for path in used]
    if not steps.masks:
        shortest = min(map(len, sounds))
        sounds = [sound[:shortest] for sound in sounds]
    return {name: torch.from_numpy(value) for name, value in steps.batch(sounds).items()}, used
