"""Arguments of an attention kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.passes.rotary.form import RotaryForm, rotated
from ._pages import KV_DTYPES, PageLayout


@dataclass(frozen=True)
class AttentionArgs:
    """Arguments of an attention kernel. `sinks`: a logit per query head, in the softmax only.

    query [T, Hq, D], key and value [T, Hkv, D], one float dtype; kv_cache uint8 [layers, pages, page_bytes], written in
    place; slot_mapping int64 [T]: page number * page + place, or -1 for a token that is not kept; block_table int32 [B,
    blocks]; query_start int32 [B+1]; seq_lens int32 [B]; sinks float [Hq] or None.

    window: a query sees its own token and the window-1 before it, 0: all. chunk: it sees no token before the last
    multiple of chunk up to its own position, 0: all. softcap: logits become softcap * tanh(logits / softcap), 0: they
    stay. slopes [Hq] float32 or bfloat16, or None: ALiBi, slopes[h] * position of the key is added to the logits after
    that, position and product rounded to bfloat16 where slopes are (as Falcon has it); not together with sinks. slopes
    float32 [Hq, distances] are a bias by distance instead, as T5 has it: slopes[h, min(position of the query - position
    of the key, distances - 1)] is added.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    query_start: Tensor
    seq_lens: Tensor
    sinks: Tensor | None
    layer: int
    page: int
    dtype: int  # an index of KV_DTYPES
    scale: float
    window: int = 0
    softcap: float = 0.0
    slopes: Tensor | None = None
    chunk: int = 0

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.key.shape[1], self.key.shape[2], self.page, KV_DTYPES[self.dtype])

    def check(self) -> None:
        """Raise `RuntimeError` unless shapes and dtypes fit together: the caller is our own code."""
        tokens, heads, width = self.query.shape
        kv = self.key.shape
        torch._check(self.key.shape == self.value.shape == (tokens, kv[1], width), lambda: f"key {kv}")
        torch._check(heads % kv[1] == 0, lambda: f"{heads} query heads, {kv[1]} of keys")
        torch._check(
            self.kv_cache.dtype == torch.uint8 and self.kv_cache.is_contiguous(), lambda: "a dense cache"
        )
        torch._check(
            self.kv_cache.shape[2] >= self.layout.num_bytes,
            lambda: f"pages of {self.kv_cache.shape[2]} bytes, needed {self.layout.num_bytes}",
        )
        torch._check(self.slopes is None or self.sinks is None, lambda: "ALiBi together with sinks")
        torch._check(self.slopes is None or self.slopes.shape[0] == heads, lambda: f"{heads} slopes")
        torch._check(self.query_start.shape[0] == self.seq_lens.shape[0] + 1, lambda: "query_start")


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding that attention applies to its queries and keys: cos, sin [T, columns], float."""

    cos: Tensor
    sin: Tensor
    form: RotaryForm

    def check(self, args: AttentionArgs) -> None:
        """Raise `RuntimeError` unless it fits the arguments."""
        tokens, columns = args.query.shape[0], self.cos.shape[1]
        torch._check(
            self.cos.shape == self.sin.shape == (tokens, columns), lambda: f"cosines {self.cos.shape}"
        )
        reason = self.form.refuses(args.key.shape[2], columns)
        torch._check(reason is None, lambda: f"rotary embedding: {reason}")

    def applied(self, args: AttentionArgs) -> AttentionArgs:
        """Return the arguments with rotated queries and keys, by plain torch."""
        query, key = (rotated(x, self.cos, self.sin, self.form) for x in (args.query, args.key))
        return replace(args, query=query, key=key)


class Tiling(NamedTuple):
    """Tile of a Triton program: `tokens` new tokens of a sequence in `rows` ≥ tokens * group rows, `keys` at a time."""

    rows: int
    tokens: int
    keys: int
    warps: int
