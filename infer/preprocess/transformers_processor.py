"""Preprocessing by transformers' own image processor or feature extractor, where infer has no such steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..distribution import install
from ..errors import ArtifactError, InputError, NotUsableError
from ..library_errors import quiet
from .audio import open_sound
from .image import MODES

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = ("ImageProcessor", "ImageProcessorPil", "ImageProcessorFast", "FeatureExtractor")


class TransformersProcessor(msgspec.Struct, frozen=True, kw_only=True):
    """A processor of transformers: `processor` is its class and `config` its settings as JSON text.

    `tensors`: those of its outputs that the model takes. Of images, `channels` and `output_size` (height, width), None
    where it depends on the image. Of sound, `sampling_rate` (Hz, 0 for images), `longest` (samples, 0 without a limit)
    and `masks`: sounds of several lengths may share a batch.
    """

    processor: str
    config: str
    tensors: tuple[str, ...]
    channels: int = 0
    output_size: tuple[int, int] | None = None
    sampling_rate: int = 0
    longest: int = 0
    masks: bool = False

    def batch(self, rows: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return the model's inputs for Pillow images, or for float32 [samples] at `sampling_rate`."""
        processor = _opened(self.processor, self.config)
        if not self.sampling_rate:
            return self._tensors(
                processor(images=[self._converted(row) for row in rows], return_tensors="np")
            )
        for row in rows:
            self._check(len(row))
        return self._tensors(processor(list(rows), sampling_rate=self.sampling_rate, return_tensors="np"))

    def spectrogram(self, sound: np.ndarray) -> np.ndarray:
        """Return `input_features` of a whole sound, float32 [bands, frames]: padded to `longest`, never cut."""
        if len(sound) <= self.longest:
            return self.batch([sound])["input_features"][0]
        named = {"truncation": False, "padding": "longest", "return_tensors": "np"}
        features = _opened(self.processor, self.config)(sound, sampling_rate=self.sampling_rate, **named)
        return np.ascontiguousarray(features["input_features"][0], np.float32)

    def open(
        self, source: str | Path | bytes, where: str = "", max_seconds: float | None = None
    ) -> np.ndarray:
        """Decode a sound file to float32 [samples] of one channel at `sampling_rate`."""
        return open_sound(source, self.sampling_rate, where, max_seconds)

    def _check(self, samples: int) -> None:
        if not samples:
            raise InputError("expected sound, got no samples")
        if self.longest and samples > self.longest:
            seconds, most = (number / self.sampling_rate for number in (samples, self.longest))
            raise InputError(
                f"expected at most {most:g} s of sound, got {seconds:.2f} s", hint="Cut it into pieces"
            )

    def _converted(self, image: Image) -> Image:
        return image.convert(MODES[self.channels])

    def _tensors(self, features: Any) -> dict[str, np.ndarray]:
        values = {name: np.asarray(features[name]) for name in self.tensors}
        return {
            name: np.ascontiguousarray(value, np.float32 if value.dtype.kind == "f" else np.int64)
            for name, value in values.items()
        }


@cache
def _opened(name: str, config: str) -> Any:
    """Make the processor; raise `NotUsableError` without transformers, `ArtifactError` for no such class."""
    if find_spec("transformers") is None:
        raise NotUsableError(f"images and sound of this model need transformers' {name}", hint=install("hf"))
    if not name.endswith(ENDINGS):
        raise ArtifactError(
            f"expected an image processor or a feature extractor of transformers, got {name[:80]!r}"
        )
    with quiet():
        import transformers

        kind = getattr(transformers, name, None)
        if kind is None:
            raise NotUsableError(
                f"this version of transformers has no {name}", hint="Install the version of the artifact"
            )
        return kind.from_dict(msgspec.json.decode(config))
