"""Sizes of a step of a language model: its layers, its KV cache and its state cache."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ...attention import PageLayout
from ...spec import Finding
from ..lora.layers import AdapterShape

PAGE = 32  # tokens


class SourceShape(msgspec.Struct, frozen=True):
    """Sizes of an encoder-decoder's source, and the tokens with which the decoder begins.

    A source is token ids, sound, an image, or an image with token ids (Florence-2, BLIP's answers to questions).
    """

    name: str  # of the encoder's input: input_ids, input_features, pixel_values
    max_length: int  # rows of the encoder's output at most
    start_ids: tuple[int, ...]
    vocab_size: int = 0  # of token ids, 0 where the encoder reads none
    features: tuple[int, ...] = ()  # of sound: bands and frames; of images: channels, height, width
    end_ids: tuple[int, ...] = ()  # that end a text, where the checkpoint's generation settings do not tell
    prefix_rows: int = 0  # rows of an image before those of the token ids beside it

    @property
    def reads_text(self) -> bool:
        """True where the prompt of a request is read by the encoder, False where the decoder begins with it."""
        return not self.features or self.vocab_size > 0

    @property
    def max_tokens(self) -> int:
        """Token ids of one source at most."""
        return self.max_length - self.prefix_rows if self.reads_text else 0

    def rows(self, tokens: int) -> int:
        """Return the rows of the encoder's output for a source of so many token ids."""
        return self.prefix_rows + tokens if self.reads_text else self.max_length


class StepShape(msgspec.Struct, frozen=True):
    """Sizes of the model and its KV cache; stored in the manifest as `meta["generation"]`."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    page: int = PAGE
    kv_dtype: str = "float16"
    adapters: AdapterShape | None = None
    state_layers: int = 0  # layers with state of their own, such as convolutions
    state_floats: int = 0  # of the state of one sequence, all layers together
    layer_shapes: tuple[tuple[int, int], ...] = ()  # KV heads and width of each layer, where layers differ
    source: SourceShape | None = None  # of an encoder-decoder

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.kv_heads, self.head_dim, self.page, self.kv_dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer, of the layer that needs most."""
        sizes = (PageLayout(*sizes, self.page, self.kv_dtype).num_bytes for sizes in self.layer_shapes)
        return max((self.layout.num_bytes, *sizes))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of keys and values of one token, all layers together."""
        return self.layers * self.page_bytes / self.page

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence, all layers together; 0 for models whose only state is the KV cache."""
        return 4 * self.state_floats

    def findings(self) -> list[Finding]:
        found = []
        if self.layers:
            pages = f"{self.kv_dtype}, pages of {self.page} tokens"
            found.append(Finding("capture", "KV cache", self.bytes_per_token, "bytes/token", pages))
        if self.state_floats:
            why = f"float32, of {self.state_layers} layers; two rows for each running sequence"
            found.append(Finding("capture", "state", self.state_bytes, "bytes/sequence", why))
            undo = "a state can't take back tokens that were drafted and rejected"
            found.append(Finding("capture", "drafts", value=False, why=undo))
        return found

    def new_cache(self, pages: int, device: str = "cpu") -> Tensor:
        """Allocate a cache of zeros, so that no NaN of freed memory can reach a masked product."""
        return torch.zeros((self.layers, pages, self.page_bytes), dtype=torch.uint8, device=device)

    def new_state(self, rows: int, device: str = "cpu") -> Tensor | None:
        """Allocate a state cache of zeros, float32 [rows, floats]; None for models without state layers."""
        return torch.zeros((rows, self.state_floats), device=device) if self.state_floats else None
