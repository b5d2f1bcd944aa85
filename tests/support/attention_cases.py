"""Sequences of many lengths over a paged cache, for every attention kernel: what they are given and what they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from infer.attention import KV_DTYPES, AttentionArgs, PageLayout, reference

LAYERS, SPARE = 2, 3


@dataclass
class Case:
    """`new[b]` tokens of sequence b after `done[b]` that are in the cache. Pages are shuffled, SPARE ones unused."""

    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    page: int = 32
    dtype: str = "float32"
    new: Sequence[int] = (1, 1)
    done: Sequence[int] = (40, 7)
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    query_dtype: torch.dtype = torch.float32
    layer: int = 1
    alibi: torch.dtype | None = None  # of its slopes
    chunk: int = 0
    distances: int = 0  # of a bias by distance
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        longest = max(a + b for a, b in zip(self.new, self.done, strict=True))
        blocks = -(-longest // self.page) + 1  # the last is padding
        order = torch.randperm(len(self.new) * blocks + SPARE)
        self.table = order[: len(self.new) * blocks].to(torch.int32).reshape(-1, blocks)
        self.pages = len(order)
        lengths = [a + b for a, b in zip(self.new, self.done, strict=True)]
        self.keys = [self._heads(n, self.heads[1]) for n in lengths]
        self.values = [self._heads(n, self.heads[1]) for n in lengths]
        self.queries = [self._heads(n, self.heads[0]) for n in self.new]
        slopes = 2.0 ** -(torch.arange(self.heads[0]) * 0.7 + 1)
        self.slopes = None if self.alibi is None else slopes.to(self.alibi)
        if self.distances:
            self.slopes = torch.randn(self.heads[0], self.distances)
        self.sink_logits = torch.randn(self.heads[0]) if self.sinks else None

    def _heads(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, self.dim).to(self.query_dtype)

    def cache(self) -> Tensor:
        """Every byte 255: NaN, so that what was never written shows where it is read."""
        layout = PageLayout(self.heads[1], self.dim, self.page, self.dtype)
        return torch.full((LAYERS, self.pages, layout.num_bytes), 255, dtype=torch.uint8)

    def args(self, cache: Tensor, start: Sequence[int], count: Sequence[int]) -> AttentionArgs:
        """Tokens start..start+count of every sequence; the tensors are transposed views, as models give them."""
        rows = [slice(s, s + c) for s, c in zip(start, count, strict=True)]
        slots = [
            self.table[b, t // self.page].item() * self.page + t % self.page
            for b, part in enumerate(rows)
            for t in range(part.start, part.stop)
        ]
        new = list(start) == list(self.done)
        queries = self.queries if new else [self._heads(c, self.heads[0]) for c in count]
        starts = torch.tensor([0, *count]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([part.stop for part in rows], dtype=torch.int32)
        return AttentionArgs(
            *(
                _transposed(torch.cat(parts))
                for parts in (
                    queries,
                    [k[part] for k, part in zip(self.keys, rows, strict=True)],
                    [v[part] for v, part in zip(self.values, rows, strict=True)],
                )
            ),
            *(cache, torch.tensor(slots, dtype=torch.int64), self.table, starts, lengths, self.sink_logits),
            *(self.layer, self.page, KV_DTYPES.index(self.dtype), self.dim**-0.5, self.window, self.softcap),
            *(self.slopes, self.chunk),
        )

    def run(self, kernel: ModuleType, cache: Tensor | None = None) -> Tensor:
        """Run a step that fills the cache and return the output of the new tokens, [sum of new, heads, dim]."""
        cache = self.cache() if cache is None else cache
        if any(self.done):
            kernel.attend(self.args(cache, [0] * len(self.new), self.done))
        args = self.args(cache, self.done, self.new)
        args.check()
        reason = kernel.refuses(args)
        assert reason is None, reason
        out: Tensor = kernel.attend(args)
        return out

    def error(self, kernel: ModuleType) -> float:
        """Relative, against the reference."""
        got, expected = self.run(kernel).double(), self.run(reference).double()
        assert got.shape == expected.shape
        return float((got - expected).norm() / expected.norm())


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)
