"""A quantized model made trainable in place, and made packed again: formats, shapes and sizes stay.

Packed layers of table formats (nf4, int4, fp4, cluster) compute with a `TableWeight`; the others pass gradients and
stay as they are. Of float parameters those of one dimension are trained: norms and biases. Nothing costs anything when
the model runs afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...compress.conv_layers import QuantizedConv, QuantizedConvTranspose
from ...compress.layer_kinds import is_layer, rows_of
from ...compress.packed_layers import QuantizedEmbedding, QuantizedExperts, QuantizedLinear, QuantizedMatrix
from ...compress.packed_weight import Packed, PackedLayer
from ...errors import NotUsableError
from ...kernels.ops.coded_weight import LUT, layout_of
from ..memory.frozen_layers import frozen_compute
from .table_weight import RAMP, TableWeight

FREE = 0.3  # share of the run in which all codes are free; they are frozen over the rest

Compute = Callable[..., Tensor]
LARGEST_ERROR = 0.5  # squared, as a share of the weight's; cluster:2 has 0.15, another weight 1 and more


class TrainableLayers:
    """Packed layers and small parameters of `model` while they are trained; `store` or `discard` ends it.

    `originals` holds float weights as `original_rows` returns them; codes of these layers are trained too.
    Raises `NotUsableError`, and leaves the model as it was, where there is nothing to train or no gradient.
    """

    def __init__(self, model: nn.Module, originals: Mapping[Packed, Tensor] | None = None) -> None:
        self.weights: dict[Packed, TableWeight] = {}
        self._layers = {name: m for name, m in model.named_modules() if isinstance(m, PackedLayer)}
        self._before: list[tuple[PackedLayer, Any]] = []
        refused = [name for name, layer in self._layers.items() if _has_no_gradient(layer)]
        if refused:
            raise NotUsableError(
                f"{len(refused)} packed layers have no gradient: {', '.join(refused[:3])}",
                hint="Leave them in float (--layer NAME=float), or leave out --recover",
            )
        if not any(is_table(layer) for layer in self._layers.values()):
            raise NotUsableError(
                "no layer has a format with tables or group scales to train",
                hint="--recover is for --quant nf4, int4, fp4 and cluster",
            )
        for layer in self._layers.values():
            if is_table(layer) and layer.packed not in self.weights:
                original = (originals or {}).get(layer.packed)
                self.weights[layer.packed] = TableWeight(layer.packed.tensors(), original)
        self._own_parameters(model)
        for layer in self._layers.values():
            self._before.append((layer, layer.compute))
            layer.compute = _compute(layer, self.weights.get(layer.packed))  # type: ignore[assignment]
        for packed, weight in self.weights.items():
            packed.trained = weight  # a submodule: its parameters are the model's

    def _own_parameters(self, model: nn.Module) -> None:
        """Give the model its own norms and biases, to be trained: the original's may be the same objects."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in list(model.modules()):
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in made:
                    trains = parameter.dim() == 1 and parameter.is_floating_point()
                    made[parameter] = (
                        nn.Parameter(parameter.detach().clone())
                        if trains
                        else nn.Parameter(parameter.detach(), requires_grad=False)
                    )
                module._parameters[name] = made[parameter]

    def set_progress(self, share: float) -> None:
        """Narrow the ramps between codes, and freeze codes, as is due at a share of the run.

        On a ramp a value changes as far as its position moves. Without ramps, positions near a threshold would cross
        it back and forth, a whole code each time.
        """
        for weight in self.weights.values():
            weight.width = RAMP * (1 - share)
            weight.freeze(max(share - FREE, 0) / (1 - FREE))

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Compute with the codes as they would be packed."""
        widths = [weight.width for weight in self.weights.values()]
        for weight in self.weights.values():
            weight.width = 0.0
        try:
            yield
        finally:
            for weight, width in zip(self.weights.values(), widths, strict=True):
                weight.width = width

    @torch.no_grad()
    def store(self) -> None:
        """Pack what was trained, in tensors of their own, and let the model compute as before."""
        for packed, weight in self.weights.items():
            for name, tensor in weight.tensors().items():
                packed._buffers[name] = tensor
        self.discard()

    def discard(self) -> None:
        """Let packed layers compute as before, with their tensors as they are."""
        for layer, compute in self._before:
            layer.compute = compute
        for packed in self.weights:
            if "trained" in packed._modules:
                del packed.trained
        self._before = []


def is_table(layer: PackedLayer) -> bool:
    return layout_of(layer.packed.tensors()) == LUT


def _has_no_gradient(layer: PackedLayer) -> bool:
    """Return true for a packed layer that is neither trained nor passes gradients."""
    passing = QuantizedLinear | QuantizedConvTranspose | QuantizedExperts | QuantizedEmbedding
    return not is_table(layer) and not isinstance(layer, passing)


def _compute(layer: PackedLayer, weight: TableWeight | None) -> Compute:
    """Return what takes the place of a layer's `compute`, with gradients."""
    if weight is None:
        if isinstance(layer, QuantizedEmbedding):
            return layer.compute
        return frozen_compute(layer, "decoded")
    if isinstance(layer, QuantizedEmbedding | QuantizedMatrix):
        return lambda ids, tensors: weight.rows(ids)
    if isinstance(layer, QuantizedConv):
        return lambda x, tensors, bias, options: _conv2d(x, weight(), bias, options)
    if isinstance(layer, QuantizedExperts):
        return lambda x, expert, tensors, features, top_k: _experts(x, expert, weight(), features, top_k)
    return lambda x, tensors, bias: F.linear(x.float(), weight(), _float(bias)).to(x.dtype)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, options: Mapping[str, Any]) -> Tensor:
    kernel = weight.to(x.dtype).reshape(len(weight), -1, *options["kernel_size"])
    last = (options["stride"], options["padding"], options["dilation"], options["groups"])
    return F.conv2d(x, kernel, bias, *last)


def _experts(x: Tensor, expert: Tensor, weight: Tensor, features: int, top_k: int) -> Tensor:
    """Multiply the rows of each expert that is asked for: x [R, K], expert int64 [R * top_k] → [R * top_k, N]."""
    result = x.new_zeros((len(expert), features))
    for e in torch.unique(expert).tolist():
        own = (expert == e).nonzero().squeeze(1)
        part = x[own // top_k].float() @ weight[e * features : (e + 1) * features].t()
        result = result.index_put((own,), part.to(x.dtype))
    return result


@torch.no_grad()
def original_rows(student: nn.Module, teacher: nn.Module) -> dict[Packed, Tensor]:
    """Return float weights [N, K] by packed weight in a table format, without copies where they are float32.

    A layer that the teacher does not have by this name (recurrent layers are split), or with another weight (a batch
    norm was folded into the student's) has none: its codes can't be trained.
    """
    found: dict[Packed, Tensor] = {}
    for name, layer in student.named_modules():
        if not isinstance(layer, PackedLayer) or not is_table(layer) or layer.packed in found:
            continue
        try:
            own = teacher.get_submodule(name)
        except AttributeError:
            continue
        if not is_layer(own):
            continue
        rows = rows_of(own).detach()
        rows = rows.reshape(len(rows), -1).float()
        decoded = layer.packed.decode(layer.packed.tensors()).float()
        decoded = decoded.reshape(len(decoded), -1)
        if rows.shape == decoded.shape and _is_near(decoded, rows):
            found[layer.packed] = rows
    return found


def _is_near(decoded: Tensor, rows: Tensor) -> bool:
    error, size = (decoded - rows).square().sum(), rows.square().sum()
    return bool(error <= LARGEST_ERROR * size)
