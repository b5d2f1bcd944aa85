"""Wrappers of transformers' models of sound, by samples or by a spectrogram."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .wrappers import Headed


class AudioHead(Headed):
    """A model of sound with a head, such as a classifier or CTC."""

    def forward(self, input_values: Tensor) -> Any:
        """Compute the outputs from float [batch, samples]."""
        return self._named(input_values=input_values)


class MaskedAudioHead(Headed):
    """A model of sound that tells real samples from padding by their mask."""

    def forward(self, input_values: Tensor, attention_mask: Tensor) -> Any:
        """Compute the outputs from float [batch, samples] and int64 [batch, samples], 1 on real samples."""
        return self._named(input_values=input_values, attention_mask=attention_mask)


class FeaturesHead(Headed):
    """A model of a spectrogram of a fixed time with a head, as Whisper's encoder has."""

    def forward(self, input_features: Tensor) -> Any:
        """Compute the outputs from float [batch, bands, frames]."""
        return self._named(input_features=input_features)


class MaskedFeaturesHead(Headed):
    """A model of a spectrogram of any time that tells frames of sound from padding by their mask."""

    def forward(self, input_features: Tensor, attention_mask: Tensor) -> Any:
        """Compute the outputs from float [batch, frames, bands] and int64 [batch, frames], 1 on frames of sound."""
        return self._named(input_features=input_features, attention_mask=attention_mask)


class SoundVectors(nn.Module):
    """Base of models that give one vector for a sound: their own, or the mean of the frames that are no padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def _vector(self, attention_mask: Tensor | None = None, **inputs: Tensor) -> Tensor:
        masked = {} if attention_mask is None else {"attention_mask": attention_mask}
        found: Any = self.model(**inputs, **masked)
        for name in ("embeddings", "audio_embeds"):
            if (own := getattr(found, name, None)) is not None:
                return own  # type: ignore[no-any-return]
        hidden = found.last_hidden_state
        if attention_mask is None:
            return hidden.mean(1)  # type: ignore[no-any-return]
        real = attention_mask
        if hidden.shape[1] != real.shape[1]:
            real = self.model._get_feature_vector_attention_mask(hidden.shape[1], attention_mask)  # type: ignore[operator]
        weight = real.to(hidden.dtype)[..., None]
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)  # type: ignore[no-any-return]


class AudioEncoder(SoundVectors):
    """A model of samples whose vector is the embedding."""

    def forward(self, input_values: Tensor) -> Tensor:
        """Compute embeddings: float [batch, samples] → float [batch, dim]."""
        return self._vector(input_values=input_values)


class MaskedAudioEncoder(SoundVectors):
    """A model of samples that tells real ones from padding."""

    def forward(self, input_values: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute embeddings: float and int64 [batch, samples] → float [batch, dim]."""
        return self._vector(attention_mask, input_values=input_values)


class FeaturesEncoder(SoundVectors):
    """A model of a spectrogram of a fixed time, such as CLAP's tower of sound."""

    def forward(self, input_features: Tensor) -> Tensor:
        """Compute embeddings from float [batch, 1, frames, bands] → float [batch, dim]."""
        return self._vector(input_features=input_features)


class MaskedFeaturesEncoder(SoundVectors):
    """A model of a spectrogram of any time whose vector is the embedding."""

    def forward(self, input_features: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute embeddings: float [batch, frames, bands], int64 [batch, frames] → float [batch, dim]."""
        return self._vector(attention_mask, input_features=input_features)


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
