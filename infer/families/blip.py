"""BLIP: a captioner and a model that answers questions, with the parts of an encoder-decoder.

transformers' own `generate` runs their parts one after the other, under names of their own. The attention of their
decoder has code of its own; the decoder begins with `bos_token_id` and ends with `sep_token_id`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import NotUsableError
from . import Attend, Family, ImageDecoder, Replacement


def _attention(attend: Attend, module: Any, hidden_states: Tensor, *_: Any, **given: Any) -> Any:
    """Attend in BlipTextSelfAttention, whose output another module projects."""
    if given.get("encoder_hidden_states") is not None:
        raise NotUsableError("attention of this model has other keys than those of its tokens")
    projections = (module.query, module.key, module.value)
    heads = [
        p(hidden_states).unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2) for p in projections
    ]
    return attend(module, *heads, scaling=module.attention_head_size**-0.5).flatten(2), None


def _tokens(settings: Any) -> dict[str, Any]:
    text = settings.text_config
    return {"decoder_start_token_id": text.bos_token_id, "eos_token_id": text.sep_token_id}


def _captioner(found: Any) -> type:
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

    Captioner.__name__ = found.__name__
    return Captioner


def _answerer(found: Any) -> type:
    """Return a class whose encoder reads an image and a question together before the decoder answers."""
    from transformers.modeling_outputs import Seq2SeqLMOutput

    class Questions(found):  # type: ignore[misc]
        main_input_name = "pixel_values"

        def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
            return self.text_encoder  # type: ignore[no-any-return]

        def get_decoder(self) -> nn.Module:
            return self.text_decoder  # type: ignore[no-any-return]

        def get_output_embeddings(self) -> nn.Module:
            return self.text_decoder.get_output_embeddings()  # type: ignore[no-any-return]

        def encode_source(self, pixel_values: Tensor | None, input_ids: Tensor | None) -> Any:
            image = self.vision_model(pixel_values=pixel_values).last_hidden_state
            return self.text_encoder(input_ids=input_ids, encoder_hidden_states=image)

        def forward(  # type: ignore[override]
            self,
            pixel_values: Tensor | None = None,
            input_ids: Tensor | None = None,
            decoder_input_ids: Tensor | None = None,
            encoder_outputs: Any = None,
            decoder_position_ids: Tensor | None = None,
            use_cache: bool = False,
        ) -> Any:
            hidden = (encoder_outputs or self.encode_source(pixel_values, input_ids)).last_hidden_state
            out = self.text_decoder(
                input_ids=decoder_input_ids,
                position_ids=decoder_position_ids,
                encoder_hidden_states=hidden,
                use_cache=use_cache,
            )
            return Seq2SeqLMOutput(logits=out.logits, encoder_last_hidden_state=hidden)

    Questions.__name__ = found.__name__
    return Questions


FAMILY = Family(
    attention={"BlipTextSelfAttention": Replacement(_attention)},
    image_decoders={
        "BlipForConditionalGeneration": ImageDecoder(_captioner, _tokens),
        "BlipForQuestionAnswering": ImageDecoder(_answerer, _tokens),
    },
)
