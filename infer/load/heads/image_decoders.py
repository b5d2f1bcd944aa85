"""Models that write text about an image by an encoder and a decoder: their configurations and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import families


def vision_config(settings: Any) -> Any:
    """Return the configuration of the encoder of a model of images, `settings` itself where it has no other."""
    found = getattr(settings, "encoder", None) or getattr(settings, "vision_config", None)
    return settings if found is None or isinstance(found, dict) else found


def decoder_config(settings: Any) -> Any:
    """Return the configuration of the decoder of a model that writes text about an image."""
    return getattr(settings, "decoder", None) or settings.text_config


def decoder_metadata(config: Mapping[str, Any], name: str, settings: Any) -> dict[str, Any]:
    """Return config.json with the settings of the decoder where a configuration of text has them.

    `name`: the class. Those of the whole come first, as in transformers' generation.
    """
    decoder = decoder_config(settings)
    names = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    found = {key: getattr(decoder, key, None) for key in (*names, "max_position_embeddings")}
    found |= {key: value for key, value in config.items() if value is not None}
    return {**found, **own_tokens(name, settings), "is_encoder_decoder": True}


def own_tokens(name: str, settings: Any) -> dict[str, Any]:
    """Return the special tokens that the family of a class of models names for its generation."""
    tokens = families.known().image_decoders[name].tokens
    return {} if tokens is None else tokens(settings)


def own_prompts(name: str, settings: Any) -> dict[str, Any]:
    """Return the metadata by which the family of a class of models makes prompts."""
    prompts = families.known().image_decoders[name].prompts
    return {} if prompts is None else prompts(settings)


def encoder_decoder_class(found: Any) -> Any:
    """Return the class of a family with the parts of an encoder-decoder; others as they are."""
    decoder = families.known().image_decoders.get(found.__name__)
    return found if decoder is None or decoder.parts is None else decoder.parts(found)
