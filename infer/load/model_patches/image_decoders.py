"""Models that write text about an image, with the parts of an encoder-decoder: TrOCR, Donut and kin, and BLIP.

transformers' VisionEncoderDecoder has them already. BLIP's captioner names its encoder `vision_model` and its decoder
`text_decoder`, and its own `generate` runs one after the other; a subclass gives it the usual names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .image_text_encoders import image_text_class

VISION_ENCODER_DECODER, CAPTIONER = "VisionEncoderDecoderModel", "BlipForConditionalGeneration"


def vision_config(settings: Any) -> Any:
    """Return the configuration of the encoder of a model of images, `settings` itself where it has no other."""
    found = getattr(settings, "encoder", None) or getattr(settings, "vision_config", None)
    return settings if found is None or isinstance(found, dict) else found


def decoder_config(settings: Any) -> Any:
    """Return the configuration of the decoder of a model that writes text about an image."""
    return getattr(settings, "decoder", None) or settings.text_config


def decoder_metadata(config: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Return config.json with the settings of the decoder where a configuration of text has them.

    Those of the whole come first, as in transformers' generation; BLIP's decoders begin with `bos_token_id` and end
    with `sep_token_id`.
    """
    decoder = decoder_config(settings)
    names = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    found = {name: getattr(decoder, name, None) for name in (*names, "max_position_embeddings")}
    found |= {name: value for name, value in config.items() if value is not None}
    if settings.model_type == "blip":
        found |= {"decoder_start_token_id": decoder.bos_token_id, "eos_token_id": decoder.sep_token_id}
    return {**found, "is_encoder_decoder": True}


def replaces_start(settings: Any) -> bool:
    """Return True for Donut, whose task prompt stands in place of the token that its decoder begins with."""
    encoder = vision_config(settings)
    return settings.model_type == "vision-encoder-decoder" and "donut" in str(encoder.model_type)


def encoder_decoder_class(found: type) -> type:
    """Return a subclass of BLIP's models and Florence-2 with the parts of an encoder-decoder; others as they are."""
    if found.__name__ != CAPTIONER:
        return image_text_class(found)

    class Captioner(found):  # type: ignore[misc, valid-type]
        def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
            return self.vision_model  # type: ignore[no-any-return]

        def get_decoder(self) -> nn.Module:
            return self.text_decoder  # type: ignore[no-any-return]

        def get_output_embeddings(self) -> nn.Module:
            return self.text_decoder.get_output_embeddings()  # type: ignore[no-any-return]

        def forward(  # type: ignore[override]
            self,
            pixel_values: Tensor | None = None,
            decoder_input_ids: Tensor | None = None,
            encoder_outputs: Any = None,
            decoder_position_ids: Tensor | None = None,
            use_cache: bool = False,
        ) -> Any:
            encoded = encoder_outputs or self.vision_model(pixel_values=pixel_values)
            return self.text_decoder(
                input_ids=decoder_input_ids,
                position_ids=decoder_position_ids,
                encoder_hidden_states=encoded.last_hidden_state,
                use_cache=use_cache,
            )

    Captioner.__name__ = CAPTIONER
    return Captioner


def without_pooler(model: nn.Module) -> nn.Module:
    """Remove the pooler of the encoder, which no decoder reads and many checkpoints lack."""
    encoder: Any = getattr(model, "encoder", None)
    if type(model).__name__ == VISION_ENCODER_DECODER and getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return model
