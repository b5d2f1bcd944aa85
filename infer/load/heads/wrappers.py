"""Wrappers of transformers' models by the tensors that they read; outputs are those that the head names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...named_inputs import NamedInputs
from ...spec import DECODER_IDS
from .text import without_cache


class Headed(NamedInputs):
    """A model of transformers, `model`, on its inputs `names`: `outputs` in that order; one alone as a tensor.

    A classifier over a decoder runs without its KV cache.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], outputs: tuple[str, ...] = ("logits",)
    ) -> None:
        super().__init__()
        self.model, self.outputs = without_cache(model), outputs
        self.taking(names)

    def call(self, tensors: Mapping[str, Tensor]) -> Any:
        found = self.model(**tensors)
        values = tuple(getattr(found, name) for name in self.outputs)
        return values if len(values) > 1 else values[0]


class SourceHead(Headed):
    """A head over an encoder-decoder (BART, T5) that runs once: its decoder reads the source, shifted by one place."""

    def call(self, tensors: Mapping[str, Tensor]) -> Any:
        return super().call({**tensors, DECODER_IDS: self._shifted(tensors["input_ids"])})

    def _shifted(self, input_ids: Tensor) -> Tensor:
        """Return the decoder's tokens as transformers makes them, without a slice whose size has a lower bound."""
        config: Any = self.model.config
        start = (
            config.pad_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        )
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        return input_ids[:, (place - 1).clamp(min=0)].where(place > 0, start)


class SourceClassifier(SourceHead):
    """Classifier over an encoder-decoder: the decoder's state at the last end token decides.

    A row without an end token, which transformers refuses, is decided by its last token.
    """

    def call(self, tensors: Mapping[str, Tensor]) -> Tensor:
        model: Any = self.model
        input_ids, attention_mask = tensors["input_ids"], tensors["attention_mask"]
        shifted = {DECODER_IDS: self._shifted(input_ids)}
        hidden = model.base_model(**tensors, **shifted).last_hidden_state
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = place.where(attention_mask != 0, 0).amax(1)
        end = place.where(input_ids == int(model.config.eos_token_id), -1).amax(1)
        rows = torch.arange(input_ids.shape[0], device=input_ids.device)
        found: Tensor = model.classification_head(hidden[rows, end.where(end >= 0, last)])
        return found


class OneChoice(Headed):
    """A multiple choice model with one row for each choice of a question: questions may have any number of them.

    Logits are [batch, 1] of inputs [batch, seq], each row the only choice of its question.
    """

    def call(self, tensors: Mapping[str, Tensor]) -> Any:
        return super().call({name: value[:, None] for name, value in tensors.items()})


class PaddedTextEncoder(nn.Module):
    """A text tower that was trained on texts padded to its longest length and reads the padding too (SigLIP's)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.longest, self.pad = int(model.config.max_position_embeddings), int(model.config.pad_token_id)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute embeddings: int64 [batch, seq] twice, padded on the right → float [batch, dim]."""
        return self.model(input_ids=_padded(input_ids, attention_mask, self.longest, self.pad)).pooler_output


def _padded(ids: Tensor, mask: Tensor, longest: int, pad: int) -> Tensor:
    """Return token ids padded on the right to the longest text, int64 [texts, longest]."""
    real = ids.where(mask != 0, pad)
    place = torch.arange(longest, device=ids.device)
    return real[:, place.clamp(max=ids.shape[1] - 1)].where(place < ids.shape[1], pad)


class DualTowers(nn.Module):
    """A model of two towers that compares every image with every text (CLIP, SigLIP).

    `pads`: it was trained on texts padded to its longest length and reads the padding too.
    """

    def __init__(self, model: Any, *, pads: bool) -> None:
        super().__init__()
        self.model, self.pads = model, pads
        text = model.config.text_config
        self.longest, self.pad = int(text.max_position_embeddings) if pads else 0, int(text.pad_token_id or 0)

    def forward(
        self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compare float [images, C, H, W] with int64 [texts, seq] twice.

        Returns logits [images, texts], and the unit vectors of the images and texts.
        """
        texts: dict[str, Tensor] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.pads:
            texts = {"input_ids": _padded(input_ids, attention_mask, self.longest, self.pad)}
        found = self.model(pixel_values=pixel_values, **texts)
        return found.logits_per_image, found.image_embeds, found.text_embeds


class ImageEncoder(nn.Module):
    """An image model whose projected or pooled features, or else the class token, are the embedding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Compute embeddings: float [batch, C, H, W] → float [batch, dim]."""
        found = self.model(pixel_values=pixel_values)
        if (projected := getattr(found, "image_embeds", None)) is not None:
            return projected
        pooled = getattr(found, "pooler_output", None)
        return found.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)


class UnmaskedImageEncoder(ImageEncoder):
    """A masked autoencoder's encoder (ViTMAE) over all patches in their order, where training drops random ones."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        model.config.mask_ratio = 0.0
        self.patches = int(model.embeddings.patch_embeddings.num_patches)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Compute embeddings: float [batch, C, H, W] → float [batch, dim]."""
        order = torch.arange(self.patches, dtype=pixel_values.dtype, device=pixel_values.device)
        found = self.model(pixel_values=pixel_values, noise=order.expand(pixel_values.shape[0], -1))
        return found.last_hidden_state[:, 0]  # type: ignore[no-any-return]


class MaskSegmenter(nn.Module):
    """A model that gives masks with classes (MaskFormer, Mask2Former), as logits of the class of each pixel.

    They are what transformers' `post_process_semantic_segmentation` makes of them: of each class, the masks of all
    queries by their probability of it. `size`: (height, width) to which that interpolates masks before, None for not.
    """

    def __init__(self, model: nn.Module, size: tuple[int, int] | None) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Compute float [batch, labels, H', W'] from float [batch, C, H, W]."""
        found = self.model(pixel_values=pixel_values)
        masks = found.masks_queries_logits
        if self.size is not None:
            masks = F.interpolate(masks, size=self.size, mode="bilinear", align_corners=False)
        classes = found.class_queries_logits.softmax(-1)[..., :-1]
        return torch.einsum("bqc,bqhw->bchw", classes, masks.sigmoid())
