"""Models whose encoder reads an image and a text together before a decoder answers: Florence-2, and BLIP for questions.

transformers' own `generate` runs their parts one after the other. A subclass gives them the parts of an
encoder-decoder: `encode_source`, which returns the rows that the decoder reads, and `forward` with its output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn

QUESTIONS, FLORENCE = "BlipForQuestionAnswering", "Florence2ForConditionalGeneration"
# Task token → the text that the model was trained with, as transformers' Florence2Processor writes it.
TASK_PROMPTS = {
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


def run_encoder(model: Any, **source: Tensor) -> Tensor:
    """Return the rows that the decoder of `model` reads of a batch of sources, float [batch, rows, width]."""
    encode = getattr(model, "encode_source", None) or model.get_encoder()
    found: Tensor = encode(**source).last_hidden_state
    return found


def image_text_class(found: Any) -> type:
    """Return a subclass with the parts of an encoder-decoder; other classes as they are."""
    if found.__name__ == QUESTIONS:
        return _questions(found)
    return _florence(found) if found.__name__ == FLORENCE else found  # type: ignore[no-any-return]


def _questions(found: Any) -> type:
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

    Questions.__name__ = QUESTIONS
    return Questions


def _florence(found: Any) -> type:
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

    Florence.__name__ = FLORENCE
    return Florence
