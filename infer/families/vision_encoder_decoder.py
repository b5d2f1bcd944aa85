"""VisionEncoderDecoder: TrOCR, Donut and kin, which have the parts of an encoder-decoder already."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import Family, ImageDecoder


def _prompts(settings: Any) -> dict[str, Any]:
    """Return that a prompt stands in place of the token that the decoder begins with, as Donut's task prompts do."""
    return {"prompt_replaces_start": True} if "donut" in str(settings.encoder.model_type) else {}


def _without_pooler(model: Any) -> nn.Module:
    """Remove the pooler of the encoder, which no decoder reads and many checkpoints lack."""
    if getattr(model.encoder, "pooler", None) is not None:
        model.encoder.pooler = None
    return model  # type: ignore[no-any-return]


FAMILY = Family(
    image_decoders={"VisionEncoderDecoderModel": ImageDecoder(prompts=_prompts)},
    patches={"vision-encoder-decoder": _without_pooler},
)
