"""Images and sound of one artifact: from files to the model's tensors, and from its outputs to answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..artifact.model_info import ModelInfo
from ..errors import ArtifactError, InputError
from ..preprocess.audio import AudioPreprocessor
from ..preprocess.image import MAX_PIXELS, ImagePreprocessor, open_image
from ..preprocess.transformers_processor import TransformersProcessor
from ..spec import ZERO_SHOT_IMAGES
from . import answers
from .answers import Answer
from .ctc import CTCDecoder
from .score_activation import activation_of
from .whisper import WhisperTokens

IMAGE_TASKS = (
    *(
        "image-classification",
        "image-segmentation",
        "object-detection",
        "depth-estimation",
        "image-embedding",
    ),
    ZERO_SHOT_IMAGES,
)
SOUND_TASKS = ("audio-classification", "automatic-speech-recognition", "audio-embedding")
Preprocessor = ImagePreprocessor | AudioPreprocessor | TransformersProcessor


class MediaModel:
    """Preprocessing and answers of a model of images or sound; `inputs`: names of its tensors."""

    def __init__(self, info: ModelInfo) -> None:
        self.name, self.task, self.meta, self.sizes = info.name, info.task, info.meta, info.sizes
        self.folder = None if info.path is None else Path(info.path)
        self.inputs = frozenset(spec.name for spec in info.inputs)

    @cached_property
    def steps(self) -> Preprocessor | None:
        """The steps from an image or sound to tensors; None where the artifact holds none."""
        found = self.meta.get("preprocessing")
        if found is None:
            return None
        kind: type[Preprocessor] = ImagePreprocessor
        if "processor" in found:
            kind = TransformersProcessor
        elif "sampling_rate" in found:
            kind = AudioPreprocessor
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            raise ArtifactError(
                f"the preprocessing can't be read: {error}", where=str(self.folder)
            ) from error

    @property
    def reads_sound(self) -> bool:
        """True for a model of sound."""
        return self.sampling_rate > 0

    @property
    def sampling_rate(self) -> int:
        """Samples of sound a second; 0 for images."""
        return int(getattr(self.steps, "sampling_rate", 0))

    @property
    def output_size(self) -> tuple[int, int] | None:
        """Height and width of every image as the model takes it; None where it depends on the image."""
        return getattr(self.steps, "output_size", None)

    @property
    def labels(self) -> list[str]:
        """Names of the classes; empty where the model has none."""
        return list(self.meta.get("labels") or ())

    @cached_property
    def ctc(self) -> CTCDecoder:
        """The decoder of CTC outputs; raises `UsageError` without a vocabulary."""
        return CTCDecoder.open(self.folder, self.meta, self.name)

    @cached_property
    def whisper(self) -> WhisperTokens:
        """The special tokens of a decoder that transcribes; raises `ArtifactError` without them."""
        if self.folder is None:
            raise ArtifactError(f"{self.name} has no folder with its generation_config.json")
        return WhisperTokens.open(self.folder)

    @property
    def window_seconds(self) -> float:
        """Seconds of sound that a model reads at once; 0 where there is no limit."""
        return float(getattr(self.steps, "longest", 0)) / max(self.sampling_rate, 1)

    def spectrogram(self, sound: np.ndarray) -> np.ndarray:
        """Return the features of a whole sound of a model that transcribes, float32 [bands, frames]."""
        if not isinstance(self.steps, TransformersProcessor):
            raise InputError(f"{self.name} takes tensors only")
        return self.steps.spectrogram(sound)

    def open(
        self, source: Any, where: str = "", *, max_pixels: int = MAX_PIXELS, max_seconds: float | None = None
    ) -> Any:
        """Decode a file to a Pillow image, or to float32 [samples] at the model's rate; Pillow images are kept."""
        steps = self.steps
        if isinstance(steps, ImagePreprocessor) or (steps is not None and not steps.sampling_rate):
            if isinstance(source, str | Path | bytes) or hasattr(source, "getbands"):
                return open_image(source, where, max_pixels)
            raise InputError(f"expected an image file, got {type(source).__name__}", where=where)
        if steps is None or not isinstance(source, str | Path | bytes):
            raise InputError(f"expected a sound file, got {type(source).__name__}", where=where)
        return steps.open(source, where, max_seconds)

    def tensors(self, opened: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return the model's inputs for what `open` returned."""
        if self.steps is None:
            raise InputError(f"{self.name} takes tensors only")
        found = self.steps.batch(opened)
        return {name: value for name, value in found.items() if name in self.inputs}

    def label_scores(self, logits: np.ndarray, top: int | None = answers.TOP) -> list[Answer]:
        """Return labels with scores, best first, of logits [labels]."""
        return answers.label_scores(logits, self.labels, activation_of(self.meta, len(logits)), top)

    def candidate_scores(self, logits: np.ndarray, labels: Sequence[str]) -> list[Answer]:
        """Return texts with scores, best first, of an image's logits [texts]."""
        return answers.label_scores(logits, labels, activation_of(self.meta, len(logits)), None)

    def answer(self, outputs: Mapping[str, np.ndarray], opened: Any) -> Any:
        """Return the answer of the task, ready for JSON, from the outputs of one row and what `open` returned."""
        ways: dict[str, Callable[[], Any]] = {
            "image-classification": lambda: self.label_scores(outputs["logits"]),
            "audio-classification": lambda: self.label_scores(outputs["logits"]),
            "image-segmentation": lambda: answers.class_areas(outputs["logits"], self.labels),
            "object-detection": lambda: answers.boxes(
                outputs["logits"], outputs["pred_boxes"], (opened.height, opened.width), self.labels
            ),
            "depth-estimation": lambda: answers.depth_range(outputs["predicted_depth"]),
            "image-embedding": lambda: answers.unit_vector(outputs["embedding"]),
            "audio-embedding": lambda: answers.unit_vector(outputs["embedding"]),
            "automatic-speech-recognition": lambda: self._text(outputs["logits"]),
        }
        return ways[self.task]()

    def _text(self, logits: np.ndarray) -> Answer:
        return {"text": self.ctc.text(self.ctc.tokens(self.ctc.frames(logits)))}
