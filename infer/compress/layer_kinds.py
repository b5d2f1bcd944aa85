"""Kinds of layers with a quantized form, and their weights as rows of outputs.

Formats quantize row by row and know two shapes, [outputs, inputs] and [outputs, inputs / groups, height, width]:

    Linear, Embedding                 as they are
    …ScaledWordEmbedding              an Embedding of transformers whose rows are multiplied by one number
    Conv1D of transformers (GPT-2)    a Linear whose weight is stored as [inputs, outputs]
    Conv2d, Conv1d                    an image of height 1 where there is one dimension
    ConvTranspose2d, ConvTranspose1d  a Linear from the channels of a pixel to the patch that the pixel adds to
    Matrix                            one weight of an LSTM, GRU or RNN (`split_recurrent.py`), decoded at each call
    ExpertLinear                      a Linear of E experts, as E * outputs rows: those of one expert after another
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..kernels.expert_layers import ExpertLinear


class Matrix(nn.Module):
    """Weight matrix of a larger layer of class `owner`; a call returns the float weight."""

    def __init__(self, weight: nn.Parameter, owner: str) -> None:
        super().__init__()
        self.weight, self.owner = weight, owner

    def forward(self) -> Tensor:
        return self.weight

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.weight.shape))}, of {self.owner}"


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d)
LAYERS = (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED, Matrix, ExpertLinear)
NAMES = (
    "Linear, Embedding, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Conv1D, LSTM, GRU, RNN or experts"
)


def is_conv1d_of_gpt2(layer: nn.Module) -> bool:
    """Return true for `transformers.pytorch_utils.Conv1D` (a Linear), recognized by name without importing it."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


def is_layer(layer: nn.Module) -> bool:
    """Return true if layers of this kind have a quantized form."""
    return isinstance(layer, LAYERS) or is_conv1d_of_gpt2(layer)


def kind_of(layer: nn.Module) -> type[nn.Module]:
    """Return the class of `LAYERS` that a layer is an instance of, or the layer's own class."""
    return next((kind for kind in LAYERS if isinstance(layer, kind)), type(layer))


def is_looked_up(layer: nn.Module) -> bool:
    """Return true for layers whose weight rows are decoded, not multiplied; they need no calibration."""
    return isinstance(layer, nn.Embedding | Matrix)


def embedding_scale(layer: nn.Module) -> Tensor | float | None:
    """Return the number by which a `…ScaledWordEmbedding` of transformers multiplies its rows, or None."""
    kind = type(layer)
    named = f"{kind.__module__}.{kind.__name__}"
    if not re.fullmatch(r"transformers\.models\..*ScaledWordEmbedding", named) or kind.__bases__ != (
        nn.Embedding,
    ):
        return None
    scale = getattr(layer, "embed_scale", None)
    if isinstance(scale, Tensor):
        return scale if scale.numel() == 1 else None
    return float(scale) if isinstance(scale, (int, float)) else None


def name_of(layer: nn.Module) -> str:
    """Return the class name of a layer, before parametrization."""
    if isinstance(layer, Matrix):
        return layer.owner
    return parametrize.type_before_parametrizations(layer).__name__


def is_linear(layer: nn.Module) -> bool:
    """Return true for a product over the last axis of the input, whatever its class."""
    return isinstance(layer, nn.Linear) or is_conv1d_of_gpt2(layer)


def is_product(layer: nn.Module) -> bool:
    """Return true if the quantized form is one matrix product with [outputs, inputs]."""
    return isinstance(layer, TRANSPOSED) or is_linear(layer)


def is_stored_by_columns(layer: nn.Module) -> bool:
    """Return true if the first axis of the stored weight is inputs."""
    return isinstance(layer, TRANSPOSED) or is_conv1d_of_gpt2(layer)


def by_rows(layer: nn.Module, weight: Tensor) -> Tensor:
    """View the stored weight of a layer as rows of outputs."""
    if isinstance(layer, ExpertLinear):
        return (weight.transpose(1, 2) if layer.transposed else weight).flatten(0, 1)
    if is_stored_by_columns(layer):
        return weight.flatten(1).t()
    return weight.unsqueeze(2) if isinstance(layer, nn.Conv1d) else weight


def rows_of(layer: nn.Module) -> Tensor:
    """View a layer's own weight as rows of outputs."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return by_rows(layer, weight)


def pair(sizes: Sequence[int], first: int) -> tuple[int, int]:
    """Expand the sizes of one or two dimensions to two; `first` is that of the added dimension."""
    return (first, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def product_input(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the input of a layer's product: [..., inputs]."""
    if not isinstance(layer, TRANSPOSED):
        return x
    return x.movedim(-2 if isinstance(layer, nn.ConvTranspose1d) else -3, -1)
