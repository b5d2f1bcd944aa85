"""Sound files as samples of a model with audio input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import UsageError
from ...preprocess.audio import AudioPreprocessor
from ...preprocess.transformers_processor import TransformersProcessor
from ...spec import DECODER_IDS
from .image_samples import spread

if TYPE_CHECKING:
    from ..loaded_model import LoadedModel

MOST_SOUNDS = 64
MOST_DECODED = 16  # of a model whose decoder needs tokens too
SECONDS = 10  # of each file


def read_sounds(paths: list[Path], loaded: LoadedModel, where: str) -> tuple[dict[str, Tensor], list[Path]]:
    """Read the first ten seconds of sound files, or what fits, as the model's inputs; also return the files used.

    A decoder gets the tokens that the float model writes.

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
    decode = loaded.decode_greedily
    used = spread(paths, MOST_SOUNDS if decode is None else MOST_DECODED)
    longest = SECONDS * steps.sampling_rate
    longest = min(longest, getattr(steps, "longest", 0) or longest)
    sounds = [steps.open(path)[:longest] for path in used]
    if not steps.masks:
        shortest = min(map(len, sounds))
        sounds = [sound[:shortest] for sound in sounds]
    found = {name: torch.from_numpy(value) for name, value in steps.batch(sounds).items()}
    if decode is not None:
        found[DECODER_IDS] = decode({loaded.inputs[0].name: found[loaded.inputs[0].name]})
    return found, used
