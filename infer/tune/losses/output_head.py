"""Output layer of a language model as the chunked losses use it: logits of a tile of the vocabulary at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...compress.packed_layers import QuantizedConv1D, QuantizedLinear
from ...compress.quantizer import Quantizer
from ...errors import NotUsableError
from ..memory.frozen_layers import Forward
from ..memory.packed_rows import PackedRows, inference_linear, note_workspace, quantizer_of

CHUNK = 1 << 22  # logits that exist at once: 16 MiB of float32
FEWEST_ROWS = 256  # of the vocabulary in one tile


@dataclass(frozen=True)
class OutputHead:
    """logits = cap(scale · (hidden · Wᵀ + bias)), cap(z) = softcap · tanh(z / softcap).

    `weight` is float [vocab, hidden], trainable or not, or packed rows. `scale` is a factor of the logits (Cohere's
    logit_scale, one over Granite's logits_scaling); `softcap` that of Gemma 2 and 3n.
    """

    weight: Tensor | PackedRows
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    quantizer: Quantizer | None = None  # of packed rows that are multiplied as inference does

    @property
    def vocab(self) -> int:
        return self.weight.num_rows if isinstance(self.weight, PackedRows) else int(self.weight.shape[0])

    @property
    def columns(self) -> int:
        return self.weight.num_columns if isinstance(self.weight, PackedRows) else int(self.weight.shape[1])

    @property
    def trainable_weight(self) -> Tensor | None:
        """Float weight, None where it is packed."""
        return None if isinstance(self.weight, PackedRows) else self.weight

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight in `dtype`, without a gradient."""
        if isinstance(self.weight, PackedRows):
            return self.weight.rows(start, stop, dtype)
        return self.weight.detach()[start:stop].to(dtype)

    def rows_for_logits(self, start: int, stop: int, dtype: torch.dtype) -> Tensor | None:
        """Return the rows that `logits` multiplies by; None where the kernels of inference read packed ones."""
        return self.rows(start, stop, dtype) if self.quantizer is None else None

    def logits(self, hidden: Tensor, start: int, stop: int, rows: Tensor | None) -> Tensor:
        """Return logits of hidden [M, H] for rows `start` to `stop` of the weight, in float32 or float64."""
        if rows is None:
            if not isinstance(self.weight, PackedRows) or self.quantizer is None:
                raise ValueError("a float head is multiplied by rows of its weight, got none")
            z = inference_linear(hidden, self.weight.section(start, stop), None, self.quantizer)
        else:
            z = hidden @ rows.t()
        z = z.to(torch.promote_types(hidden.dtype, torch.float32))
        if self.bias is not None:
            z += self.bias.detach()[start:stop].to(z.dtype)
        if self.scale != 1.0:
            z *= self.scale
        return z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden [..., H] for the whole vocabulary, with torch's own gradients."""
        weight = self.trainable_weight
        weight = self.rows(0, self.vocab, hidden.dtype) if weight is None else weight.to(hidden.dtype)
        z = nn.functional.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
        z = (z if self.bias is None else z + self.bias) * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def before_cap(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient of hidden · Wᵀ + bias from that of the logits, in place; `logits` is overwritten."""
        if self.softcap is not None:
            grad *= logits.div_(self.softcap).square_().neg_().add_(1)
        return grad if self.scale == 1.0 else grad.mul_(self.scale)

    def tiles(self, tokens: int, size: int | None = None) -> list[tuple[int, int]]:
        """Return ranges of the vocabulary whose logits of `tokens` rows are at most `size` (`CHUNK`) numbers."""
        rows = max((size or CHUNK) // max(tokens, 1), FEWEST_ROWS) // 32 * 32
        return [(start, min(start + rows, self.vocab)) for start in range(0, self.vocab, rows)]

    def note_workspace(self, hidden: Tensor) -> None:
        """Allocate and drop as many bytes as tiles of logits and of rows take, in a run without data."""
        tile = self.tiles(max(len(hidden), 1))[0][1]
        note_workspace(hidden, 9 * min(tile * len(hidden), CHUNK) + 6 * tile * self.columns)


class HeadGradients:
    """Gradients of hidden states and of an output head, summed tile by tile from gradients of logits."""

    def __init__(
        self, head: OutputHead, hidden: Tensor, of_hidden: bool, of_weight: bool, of_bias: bool
    ) -> None:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        self.head, self.hidden = head, hidden
        self.of_hidden = torch.zeros_like(hidden, dtype=kind) if of_hidden else None
        weight = head.trainable_weight
        if of_weight and weight is None:
            raise NotUsableError("a packed output head can't be trained")
        self.of_weight = torch.zeros_like(weight) if of_weight and weight is not None else None
        self.of_bias = torch.zeros_like(head.bias, dtype=kind) if of_bias and head.bias is not None else None

    def add(self, part: slice, start: int, rows: Tensor, change: Tensor, logits: Tensor) -> None:
        """Add what `change`, the gradient of a tile of logits, gives; both tiles are overwritten."""
        change = self.head.before_cap(change, logits)
        hidden, tile = self.hidden[part], slice(start, start + len(rows))
        if self.of_bias is not None:
            self.of_bias[tile] += change.sum(0)
        change = change.to(hidden.dtype)
        if self.of_hidden is not None:
            self.of_hidden[part] += change @ rows
        if self.of_weight is not None:
            self.of_weight[tile] += (change.t() @ hidden).to(self.of_weight.dtype)

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias, each None where it is not wanted."""
        hidden = None if self.of_hidden is None else self.of_hidden.to(self.hidden.dtype)
        bias = (
            None if self.of_bias is None or self.head.bias is None else self.of_bias.to(self.head.bias.dtype)
        )
        return hidden, self.of_weight, bias


def token_chunks(tokens: int, tile: int, size: int | None = None) -> list[slice]:
    """Return slices of tokens whose logits for `tile` rows of the vocabulary are at most `size` (`CHUNK`) numbers."""
    count = max((size or CHUNK) // max(tile, 1), 1)
    return [slice(start, min(start + count, tokens)) for start in range(0, tokens, count)]


def output_head(model: nn.Module, forward: Forward = "decoded") -> OutputHead:
    """Return the output head of a transformers language model, float or packed.

    `forward` is that of `frozen_linear`, for a packed head.

    Raises `NotUsableError` for a head that is not one linear layer, or logits that the model changes in a way that
    is not known; `check_output_head` compares with the model's own logits.
    """
    whole: Any = model
    layer = whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(layer, QuantizedLinear) and not isinstance(layer, QuantizedConv1D):
        weight: Tensor | PackedRows = PackedRows.of(layer.packed)
        quantizer = quantizer_of(layer.packed) if forward == "inference" else None
    elif type(layer) is nn.Linear:
        weight, quantizer = layer.weight, None
    else:
        found = "no output embeddings" if layer is None else f"an output layer {type(layer).__name__}"
        raise NotUsableError(f"{type(model).__name__} has {found}, expected one linear layer")
    config = getattr(whole.config, "text_config", whole.config)
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(weight, layer.bias, scale, None if cap is None else float(cap), quantizer)


def check_output_head(head: OutputHead, hidden: Tensor, logits: Tensor) -> None:
    """Raise `NotUsableError` unless the head gives the model's own `logits` [M, vocab] of `hidden` [M, H].

    The bound is 5 % of their norm: packed heads of inference round activations, which a chunked loss does not.
    """
    with torch.no_grad():
        tiles = [(*tile, head.rows_for_logits(*tile, hidden.dtype)) for tile in head.tiles(len(hidden))]
        own = torch.cat([head.logits(hidden, *tile) for tile in tiles], -1)
    error = float((own - logits).norm() / logits.norm().clamp_min(1e-30))
    if own.shape != logits.shape or not error < 0.05:
        raise NotUsableError(
            f"the model's logits are not those of its output layer (relative difference {error:.2g})",
            hint="Use a loss of whole logits",
        )
