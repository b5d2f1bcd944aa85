"""Artifacts of language models as models of transformers: its own `generate`, over the artifact's KV cache.

transformers' loop chooses tokens, so samplers, beams, processors, streamers and stopping criteria are its own, and its
tokens those of the original within the artifact's fidelity. It runs here as without a cache, on whole sequences; what
they have in common with those of the step before is not computed again (`sequence_cache`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from ..errors import UsageError
from ..llm.step.encoder_decoder.source_pages import Source
from ..predict.predictor import Predictor
from .model import InferModel
from .sequence_cache import SequenceCache


class GeneratingModel(InferModel, GenerationMixin):
    """A decoder; its `logits` are those of the tokens given, or of the last `logits_to_keep` of them."""

    reads: ClassVar[str | None] = None  # the tensor that the encoder of an encoder-decoder reads

    def __init__(self, predictor: Predictor, config: PretrainedConfig) -> None:
        super().__init__(predictor, config)
        language_model = predictor.language_model
        step, shape, device = language_model.step, language_model.shape, language_model.device
        found = None if shape.source is None else shape.source.name
        if found != self.reads:
            kinds = [f"an encoder-decoder of {name}" if name else "a decoder" for name in (found, self.reads)]
            raise UsageError(
                f"{predictor.name} is {kinds[0]}; {type(self).__name__} opens {kinds[1]}",
                where=str(predictor.path),
            )
        self.sequences = SequenceCache(step, shape, device)
        self._is_stateful = shape.state_floats > 0
        if (predictor.path / "generation_config.json").is_file():
            self.generation_config = GenerationConfig.from_pretrained(predictor.path)
        else:
            self.generation_config = GenerationConfig.from_model_config(config)

    def can_generate(self) -> bool:
        return True

    def is_remote_code(self) -> bool:
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        return {}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # none of transformers' caches is made

    def _prepare_generation_config(
        self, *values: Any, **options: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        config, others = super()._prepare_generation_config(*values, **options)
        config.use_cache = False  # each step gets whole sequences
        return config, others

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Compute logits: int64 [batch, seq] twice → float [batch, seq, vocab], zeros at padding.

        `attention_mask`: 1 on tokens, 0 on padding, on either side. Raises `InputError` for other arguments of
        transformers' models, as `past_key_values`.
        """
        self._refuse(others)
        return self._output(self._logits(input_ids, attention_mask, logits_to_keep), return_dict)

    def _output(self, logits: Tensor, return_dict: bool | None) -> Any:
        return (logits,) if return_dict is False else self.output_class(logits=logits)

    def _logits(
        self, ids: Any, mask: Tensor | None, keep: int, sources: list[Source] | None = None
    ) -> Tensor:
        """Compute the logits of the last `keep` places of padded rows, 0: of all."""
        ids = torch.as_tensor(ids).cpu()
        batch, length = ids.shape
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu() != 0
        width = min(keep or length, length)
        wanted = real[:, length - width :]
        rows = [ids[i][real[i]].tolist() for i in range(batch)]
        counts = wanted.sum(1).tolist()
        found = self.sequences.logits(rows, counts, sources)
        logits = torch.zeros((batch, width, self.sequences.shape.vocab_size))
        logits[wanted] = torch.cat(found).float()
        return logits


class SourceModel(GeneratingModel):
    """An encoder-decoder: the encoder reads a text or a sound, the decoder goes on from `decoder_input_ids`."""

    reads = "input_ids"

    def get_encoder(self) -> Any:
        """Return the encoder as `generate` calls it: what it gives are the sources themselves, read when needed."""
        return SourceEncoder()

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        input_features: Tensor | None = None,
        encoder_outputs: Any = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Compute logits: a source and int64 [batch, seq] of the decoder → float [batch, seq, vocab].

        `attention_mask` is that of a source of tokens. Raises `InputError` for other arguments of transformers' models.
        """
        given = {"input_ids": input_ids, "input_features": input_features}
        own = given.pop(str(self.reads))
        self._refuse({**others, **given})
        source = own if encoder_outputs is None else encoder_outputs[0]
        sources = self._sources(torch.as_tensor(source).cpu(), attention_mask)
        logits = self._logits(decoder_input_ids, decoder_attention_mask, logits_to_keep, sources)
        return self._output(logits, return_dict)

    def _sources(self, batch: Tensor, mask: Tensor | None) -> list[Source]:
        """Return the source of each row, without padding where it is text."""
        if batch.is_floating_point():
            return [{self.main_input_name: row} for row in batch]
        real = torch.ones_like(batch) if mask is None else mask.cpu()
        return [{self.main_input_name: row[kept != 0]} for row, kept in zip(batch, real, strict=True)]


class SourceEncoder:
    """Encoder of a `SourceModel` for `generate`, which repeats what it gives for the rows that go on from a source."""

    def __call__(self, **kwargs: Any) -> BaseModelOutput:
        return self.forward(**kwargs)

    def forward(self, **kwargs: Any) -> BaseModelOutput:
        names = ("input_features", "input_ids")
        return BaseModelOutput(last_hidden_state=next(kwargs[name] for name in names if name in kwargs))


class SpeechModel(SourceModel, WhisperGenerationMixin):
    """A Whisper: `generate` is that of transformers' Whisper, with its languages, tasks, timestamps and long sounds."""

    reads = "input_features"

    def __init__(self, predictor: Predictor, config: PretrainedConfig) -> None:
        super().__init__(predictor, config)
        # `generate` reads of the model how many frames of a spectrogram are one row of the encoder's output.
        first, second = (SimpleNamespace(stride=(size,)) for size in (1, 2))
        self.model = SimpleNamespace(encoder=SimpleNamespace(conv1=first, conv2=second), config=config)
