"""Hessians weighed by what each layer's output does to the model's outputs, for error feedback.

The Hessian of plain GPTQ takes every input row as equally important. Here a row of it counts by the mean square of the
gradients of its layer's outputs, so that error feedback lowers the error of the model's outputs to second order, and an
embedding has a Hessian too: the outer products of the gradients of the rows that it gave. Gradients are those of a
random projection of the outputs whose outer products are in expectation the Gauss-Newton matrix of KL(float ||
quantized) for logits, and of the squared error for other outputs. As GuidedQuant (Kim et al. 2025, arXiv 2505.07004),
here without labels, with one group of outputs a layer, and for embeddings, tied ones by the sum of both uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ...errors import NotUsableError
from ...fidelity.metric_sums import is_logits, kept_rows, rows_of
from ...graph.program import flatten
from ...module_hooks import hooked
from ..layer_kinds import CONVOLUTIONS, TRANSPOSED, embedding_scale, is_product
from .input_rows import input_patches, input_rows
from .layer_statistics import LayerStats

LARGE = 1 << 27  # parameters from which rows go backward one by one: their activations are kept until then
# Added to the weight of every row, relative to their mean: few rows with large gradients leave a Hessian of noise.
EVEN = 0.4
HINT = "Use --calibrate gptq, which needs no gradients"
Call = tuple[str, nn.Module, Tensor, Tensor]  # name, layer, its input, its output


def add_guided_products(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    stats: dict[str, LayerStats],
    width: int,
    names: Sequence[str],
    task: str,
) -> None:
    """Add weighed Hessians, in blocks of `width` columns, to the statistics of every layer and of embeddings.

    `names` are those of the model's outputs. A layer that no gradient reaches gets the plain Hessian. Raises
    `NotUsableError` where an operator has no gradient, or gradients are not finite; Hessians are then incomplete.
    """
    guide = _Guide(model, stats, width)
    large = sum(parameter.numel() for parameter in model.parameters()) > LARGE
    draw = torch.Generator().manual_seed(0)
    with guide.recording():
        for batch in batches:
            for inputs in _single(batch) if large else [batch]:
                guide.add(inputs, names, task, draw)
    guide.join_tied()


def _single(batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for row in range(len(next(iter(batch.values())))):
        yield {name: value[row : row + 1] for name, value in batch.items()}


def projection(
    outputs: Sequence[Tensor],
    names: Sequence[str],
    inputs: Mapping[str, Tensor],
    task: str,
    draw: torch.Generator,
) -> Tensor | None:
    """Return a random linear function of the outputs, a scalar; None where none of them has a gradient.

    Its coefficients are, of logits, the probabilities less a class drawn from them; of other outputs, normal values
    over the output's norm. Padding takes no part, other outputs take none beside logits.
    """
    pairs = dict(zip(names, outputs, strict=True))
    logits = [name for name, value in pairs.items() if is_logits(name, value, pairs, task)]
    terms = []
    for name, value in pairs.items():
        if not value.requires_grad or (logits and name not in logits):
            continue
        kept = kept_rows(value, inputs)
        rows = rows_of(value, name in logits, kept is not None).float()
        rows = rows if kept is None else rows.index_select(0, kept)
        with torch.no_grad():
            coefficients = _drawn_classes(rows, draw) if name in logits else _normal(rows, draw)
        terms.append((rows * coefficients).sum())
    return torch.stack(terms).sum() if terms else None


def _drawn_classes(logits: Tensor, draw: torch.Generator) -> Tensor:
    share = logits.softmax(-1)
    picked = torch.multinomial(share.cpu(), 1, generator=draw).to(share.device)
    return share.scatter_add(1, picked, torch.full_like(share[:, :1], -1.0))


def _normal(rows: Tensor, draw: torch.Generator) -> Tensor:
    norm = torch.linalg.vector_norm(rows).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.randn(rows.shape, generator=draw).to(rows.device) / norm


class _Guide:
    """Recorder of the inputs, outputs and gradients of all layers, and the Hessians that they make."""

    def __init__(self, model: nn.Module, stats: dict[str, LayerStats], width: int) -> None:
        self.model, self.stats, self.width = model, stats, width
        modules = dict(model.named_modules())
        self.products = {n: m for n, m in modules.items() if n in stats and _has_product(m)}
        self.lookups: dict[str, nn.Embedding] = {n: m for n, m in modules.items() if _is_lookup(m)}
        self.calls: list[Call] = []
        self.sums: dict[str, tuple[float, int]] = {}  # of the weights, and rows, by layer
        self.unit: dict[
            str, float
        ] = {}  # what weights were divided by, by layer: no square is too small for float32

    @contextmanager
    def recording(self) -> Iterator[None]:
        layers = self.products | self.lookups
        hooks = [layer.register_forward_hook(partial(self._record, name)) for name, layer in layers.items()]
        training, wanted = self.model.training, [p for p in self.model.parameters() if p.requires_grad]
        try:
            self.model.eval()
            for parameter in wanted:
                parameter.requires_grad_(False)
            with hooked(hooks):
                yield
        finally:
            self.model.train(training)
            for parameter in wanted:
                parameter.requires_grad_(True)

    def _record(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Keep a call; what follows gets a copy, which it may overwrite."""
        output = output if output.requires_grad else output.detach().requires_grad_()
        self.calls.append((name, layer, args[0].detach(), output))
        return output.clone()

    def add(
        self, inputs: Mapping[str, Tensor], names: Sequence[str], task: str, draw: torch.Generator
    ) -> None:
        """Run the model forward and backward on a batch, and add its products."""
        self.calls.clear()
        try:
            with torch.enable_grad():
                outputs = flatten(self.model(**inputs))
                scalar = projection(outputs, names, inputs, task, draw)
            gradients: Sequence[Tensor | None] = [None] * len(self.calls)
            if scalar is not None:
                gradients = torch.autograd.grad(scalar, [call[3] for call in self.calls], allow_unused=True)
        except RuntimeError as error:
            said = str(error).strip().partition("\n")[0][:200]
            raise NotUsableError(f"no gradients of this model: {said}", hint=HINT) from error
        mask = inputs.get("attention_mask")
        for (name, layer, x, _), gradient in zip(self.calls, gradients, strict=True):
            if gradient is not None and not bool(torch.isfinite(gradient.sum(dtype=torch.float64))):
                raise NotUsableError(f"the gradients at {name!r} are not finite", hint=HINT)
            if name in self.lookups:
                self._add_lookup(name, self.lookups[name], gradient)
            else:
                self._add_product(name, layer, x, gradient, mask)
        self.calls.clear()

    def _add_product(
        self, name: str, layer: nn.Module, x: Tensor, gradient: Tensor | None, mask: Tensor | None
    ) -> None:
        if isinstance(layer, CONVOLUTIONS):
            rows = input_patches(layer, x.float().cpu())
        else:
            rows = input_rows(layer, x, mask).float().cpu()
        weights = None
        if gradient is not None and not isinstance(layer, TRANSPOSED):  # outputs are sums of several rows
            each = _output_rows(layer, gradient, mask).float().cpu().square().mean(1)
            weights = (each + EVEN * self._mean(name, each)) / self._unit(name, each)
        self.stats[name].add_products(rows, self.width, weights)

    def _add_lookup(self, name: str, layer: nn.Embedding, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        rows = gradient.float().reshape(-1, gradient.shape[-1]).cpu()
        scale = embedding_scale(layer)
        each = rows.square().mean(1) / layer.weight.shape[0]  # as a product: the mean over rows of the weight
        factor = float(scale or 1.0) / (layer.weight.shape[0] * self._unit(name, each)) ** 0.5
        if name not in self.stats:
            self.stats[name] = LayerStats.of_lookup(rows.shape[1])
        self.stats[name].add_gradients(rows * factor, self.width)

    def _mean(self, name: str, each: Tensor) -> float:
        """Return the mean weight of all rows of a layer so far."""
        total, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = total + float(each.double().sum()), count + len(each)
        return self.sums[name][0] / max(self.sums[name][1], 1)

    def _unit(self, name: str, each: Tensor) -> float:
        """Return the mean weight of the first call of a layer; 1 where that is 0."""
        return self.unit.setdefault(name, float(each.double().mean()) or 1.0)

    def join_tied(self) -> None:
        """Add the Hessian of an embedding to that of the layer whose weight it shares."""
        owner = {id(layer.weight): name for name, layer in self.products.items()}
        for name, layer in self.lookups.items():
            other = owner.get(id(layer.weight))
            if other is None or name not in self.stats:
                continue
            share = self.unit[name] / self.unit.get(other, self.unit[name])
            for hessian, more in zip(self.stats[other].hessians, self.stats.pop(name).hessians, strict=True):
                hessian.add_(more, alpha=share)


def _is_lookup(layer: nn.Module) -> TypeGuard[nn.Embedding]:
    """Return true for embeddings that formats take."""
    plain = type(layer).forward is nn.Embedding.forward
    return isinstance(layer, nn.Embedding) and (plain or embedding_scale(layer) is not None)


def _has_product(layer: nn.Module) -> bool:
    """Return true for layers whose Hessian error feedback uses."""
    return is_product(layer) or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1)


def _output_rows(layer: nn.Module, gradient: Tensor, mask: Tensor | None) -> Tensor:
    """Reshape the gradient of an output to the rows of its product: [rows, outputs]."""
    if isinstance(layer, CONVOLUTIONS):
        channels = -2 if isinstance(layer, nn.Conv1d) else -3
        return gradient.movedim(channels, -1).reshape(-1, gradient.shape[channels])
    return input_rows(layer, gradient, mask)
