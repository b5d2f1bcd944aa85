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
    """Sizes of an encoder-decoder's source, and the tokens with which the decoder begins."""

    name: str  # of the encoder's input: input_ids, input_features
    max_length: int  # rows of the encoder's output
    start_ids: tuple[int, ...]
    vocab_size: int = 0  # of token ids
    features: tuple[int, ...] = ()  # of sound: bands and frames; of images: channels, height, width
    end_ids: tuple[int, ...] = ()  # that end a text, where the checkpoint's generation settings do not tell

    @property
    def dtype(self) -> str:
        return "float32" if self.features else "int64"


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
