"""Models of sound of transformers: their vectors, and the sizes of the samples or the spectrogram that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...named_inputs import NamedInputs


class SoundVectors(NamedInputs):
    """A model of sound, on its inputs `names`, that gives one vector: its own, or the mean of the frames that are no
    padding, float [batch, dim].
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.taking(names)

    def call(self, tensors: Mapping[str, Tensor]) -> Tensor:
        found: Any = self.model(**tensors)
        for name in ("embeddings", "audio_embeds"):
            if (own := getattr(found, name, None)) is not None:
                return own  # type: ignore[no-any-return]
        hidden = found.last_hidden_state
        if (real := tensors.get("attention_mask")) is None:
            return hidden.mean(1)  # type: ignore[no-any-return]
        if hidden.shape[1] != real.shape[1]:
            real = self.model._get_feature_vector_attention_mask(hidden.shape[1], real)  # type: ignore[operator]
        weight = real.to(hidden.dtype)[..., None]
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)  # type: ignore[no-any-return]


def sound_size(config: Any) -> tuple[int | str, ...]:
    """Return the sizes of a sound: its samples, or frames and bands of a spectrogram."""
    if isinstance(bands := getattr(config, "num_mel_bins", None), int):
        return int(config.max_length), bands
    return ("samples",)


def frame_width(model: nn.Module) -> int | None:
    """Return the numbers of a frame that the first layer of a conformer reads: bands, their deltas, stacked frames."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "input_linear" and isinstance(module, nn.Linear):
            return module.in_features
    return None


def features_shape(config: Any, *, any_time: bool, bands: int | None = None) -> tuple[int | str, ...]:
    """Return the sizes of a spectrogram: frames and bands of any time, or those of a fixed one.

    The latter are Whisper's bands and frames, or CLAP's one channel, frames and bands.
    """
    of_encoder = getattr(config, "encoder_config", config)
    bands = bands or getattr(config, "feature_projection_input_dim", None)
    bands = bands or getattr(of_encoder, "num_mel_bins", None)
    if any_time:
        return "frames", int(bands or 80)
    if getattr(config, "spec_size", None):  # CLAP folds a spectrogram of this many frames to a square
        frames = int(config.spec_size) ** 2 // int(bands or 64)
        return 1, frames, int(bands or 64)
    return int(bands or 80), 2 * int(config.max_source_positions)
