"""Layers of sentence-transformers that follow a Transformer: pooling, Dense, LayerNorm, Normalize, SPLADE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


class Pooling(nn.Module):
    """Pooling over real tokens; the results of several modes are joined in the order given.

    `modes`: any of `MODES`. Padding may be on either side: a row's first and last tokens are those of its mask.
    """

    def __init__(self, modes: Sequence[str] = ("mean",)) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Pool hidden states [batch, seq, dim] by attention_mask [batch, seq] of 0 and 1 → [batch, modes x dim]."""
        parts = [self._pooled(mode, hidden, attention_mask) for mode in self.modes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _pooled(self, mode: str, hidden: Tensor, mask: Tensor) -> Tensor:
        if mode == "max":
            away = (mask == 0).unsqueeze(-1)
            return hidden.masked_fill(away, torch.finfo(hidden.dtype).min).amax(dim=1)
        if mode == "cls":
            return _token(hidden, first_token(mask))
        if mode == "lasttoken":
            return _token(hidden, last_token(mask))
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        if mode == "weightedmean":  # positions count from the first real token
            weight = weight * mask.cumsum(dim=1).unsqueeze(-1).to(hidden.dtype)
        count = weight.sum(dim=1).clamp(min=1e-9)
        total = (hidden * weight).sum(dim=1)
        return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


def first_token(attention_mask: Tensor) -> Tensor:
    """Return the column of each row's first real token: int64 [batch, seq] → int64 [batch]."""
    return attention_mask.argmax(dim=1)


def last_token(attention_mask: Tensor) -> Tensor:
    """Return the column of each row's last real token: int64 [batch, seq] → int64 [batch]."""
    places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (attention_mask * places).amax(dim=1)


def _token(hidden: Tensor, column: Tensor) -> Tensor:
    """Pick one token of each row: [batch, seq, dim], [batch] → [batch, dim]."""
    index = column[:, None, None].expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, index).squeeze(1)


class SpladePooling(nn.Module):
    """Sparse embedding of masked-LM logits: log(1 + relu(logits)), maximum or sum over real tokens.

    `twice` takes log(1 + x) two times, as `log1p_relu` (https://huggingface.co/papers/2504.14839) asks.
    """

    def __init__(self, mode: str = "max", *, twice: bool = False) -> None:
        super().__init__()
        self.mode, self.twice = mode, twice

    def forward(self, logits: Tensor, attention_mask: Tensor) -> Tensor:
        """Pool logits [batch, seq, vocab] by attention_mask [batch, seq] of 0 and 1 → [batch, vocab] of ≥ 0."""
        weights = torch.log1p(torch.relu(logits * attention_mask.unsqueeze(-1).to(logits.dtype)))
        if self.twice:
            weights = torch.log1p(weights)
        return weights.amax(dim=1) if self.mode == "max" else weights.sum(dim=1)


class Dense(nn.Module):
    """Linear layer over the pooled vector with its activation; `residual` adds the input, projected if sizes differ."""

    def __init__(self, sizes: tuple[int, int], activation: nn.Module, *, bias: bool, residual: bool) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(*sizes, bias=bias, device="meta"), activation
        self.adds_input = residual
        self.residual: nn.Module = nn.Identity()
        if residual and sizes[0] != sizes[1]:
            self.residual = nn.Linear(*sizes, bias=False, device="meta")

    def forward(self, vector: Tensor) -> Tensor:
        """Project vectors: [batch, in] → [batch, out]."""
        made = self.activation(self.linear(vector))
        return made + self.residual(vector) if self.adds_input else made


class LayerNorm(nn.Module):
    """Layer normalization of the pooled vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size, device="meta")

    def forward(self, vector: Tensor) -> Tensor:
        """Normalize vectors: [batch, dim] → [batch, dim]."""
        return self.norm(vector)


class Normalize(nn.Module):
    """L2 normalization of the pooled vector."""

    def forward(self, vector: Tensor) -> Tensor:
        """Scale vectors to length one: [batch, dim] → [batch, dim]."""
        return nn.functional.normalize(vector, p=2.0, dim=-1)


class TokenHead(nn.Module):
    """All that turns hidden states into a normalized vector for each token (late interaction).

    `layers`: as of `EmbeddingHead`. Rows of padding are zeros, unless tokens that no other attends to are compared.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, hides_expansion: bool) -> None:
        super().__init__()
        self.layers, self.hides_expansion = nn.ModuleDict(layers), hides_expansion

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed hidden states [batch, seq, dim] and attention_mask [batch, seq] → [batch, seq, vector]."""
        for layer in self.layers.values():
            hidden = layer(hidden)
        found = nn.functional.normalize(hidden, p=2.0, dim=-1)
        return found if self.hides_expansion else found * attention_mask[..., None].to(found.dtype)


class EmbeddingHead(nn.Module):
    """All that turns hidden states into one vector per text: a pooling, then layers in their order.

    `layers`: folder name of the module → layer; the default of the class is a normalized mean.
    """

    def __init__(
        self, pooling: nn.Module | None = None, layers: Mapping[str, nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.pooling = pooling or Pooling()
        self.layers = nn.ModuleDict({"normalize": Normalize()} if layers is None else layers)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed hidden states [batch, seq, dim] and attention_mask [batch, seq] → [batch, embedding dim]."""
        vector = self.pooling(hidden, attention_mask)
        for layer in self.layers.values():
            vector = layer(vector)
        return vector
