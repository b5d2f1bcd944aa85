"""Florence-2: an encoder that reads an image and a task together before a decoder answers.

transformers' own `generate` runs them one after the other; a subclass gives the model the parts of an encoder-decoder.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn

from . import Family, ImageDecoder

# Task token → the text that the model was trained with, as transformers' Florence2Processor writes it.
_TASK_PROMPTS = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {input}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {input} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {input}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {input} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {input}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {input} describe?",
    "<REGION_TO_OCR>": "What text is in the region {input}?",
}


def _encoder_decoder(found: Any) -> type:
    from transformers.modeling_outputs import Seq2SeqLMOutput

    class Florence(found):  # type: ignore[misc]
        main_input_name = "pixel_values"

        def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
            return self.model.language_model.encoder  # type: ignore[no-any-return]

        def get_decoder(self) -> nn.Module:
            return self.model.language_model.decoder  # type: ignore[no-any-return]

        def encode_source(self, pixel_values: Tensor | None, input_ids: Tensor | None) -> Any:
            image = self.model.get_image_features(pixel_values).pooler_output
            words = self.get_input_embeddings()(input_ids)
            return self.get_encoder()(inputs_embeds=cat([image.to(words.dtype), words], 1))

        def forward(  # type: ignore[override]
            self,
            pixel_values: Tensor | None = None,
            input_ids: Tensor | None = None,
            decoder_input_ids: Tensor | None = None,
            encoder_outputs: Any = None,
            use_cache: bool = False,
        ) -> Any:
            hidden = (encoder_outputs or self.encode_source(pixel_values, input_ids)).last_hidden_state
            out = self.get_decoder()(
                input_ids=decoder_input_ids, encoder_hidden_states=hidden, use_cache=use_cache
            )
            logits = self.lm_head(out.last_hidden_state)
            return Seq2SeqLMOutput(logits=logits, encoder_last_hidden_state=hidden)

    Florence.__name__ = found.__name__
    return Florence


FAMILY = Family(
    image_decoders={
        "Florence2ForConditionalGeneration": ImageDecoder(
            _encoder_decoder, prompts=lambda settings: {"task_prompts": _TASK_PROMPTS}
        )
    }
)
