"""Folding of weight and spectral normalization: normalized weights are computed once, before quantization.

In eval mode the computed weight never changes, so that the layer becomes a plain one which a format can take.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ...spec import Finding

NORMS = (parametrizations._WeightNorm, parametrizations._SpectralNorm)


@torch.no_grad()
def fold_weight_norms(model: nn.Module, into: nn.Module | None = None) -> list[Finding]:
    """Replace normalized weights by their values, in place; idempotent.

    `into` is another copy of the model, possibly on meta: it gets the same weights.
    """
    names = {name for name, _ in normalized(model)}
    if into is not None:
        names |= {name for name, _ in normalized(into)}
    for name in names:
        layer = model.get_submodule(name)
        _fold(layer)
        if into is not None:
            other = into.get_submodule(name)
            _fold(other)
            for attribute, value in layer._parameters.items():
                if value is not None:  # an object of its own: `Module.to` writes into parameters
                    setattr(other, attribute, nn.Parameter(value.detach(), requires_grad=False))
    why = "weights that normalization computed at each call"
    return [Finding("compress", "weight norms folded", len(names), "layers", why)] if names else []


def normalized(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers whose weight is computed by a weight normalization and by no other parametrization."""
    for name, layer in model.named_modules():
        if not name:
            continue
        if parametrize.is_parametrized(layer):
            steps = [step for steps in layer.parametrizations.values() for step in steps]  # type: ignore[operator, union-attr]
            if all(isinstance(step, NORMS) for step in steps):
                yield name, layer
        elif _hooks(layer) and len(_hooks(layer)) == len(layer._forward_pre_hooks):
            yield name, layer


def _hooks(layer: nn.Module) -> list[WeightNorm | SpectralNorm]:
    return [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, WeightNorm | SpectralNorm)]


def _fold(layer: nn.Module) -> None:
    layer.eval()
    if parametrize.is_parametrized(layer):
        # Not `remove_parametrizations`: it changes the class, which copies of the layer share.
        values = {name: getattr(layer, name).detach() for name in layer.parametrizations}  # type: ignore[union-attr]
        layer.__class__ = parametrize.type_before_parametrizations(layer)
        del layer._modules["parametrizations"]
        for name, value in values.items():
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
    for hook in _hooks(layer):
        remove = remove_weight_norm if isinstance(hook, WeightNorm) else remove_spectral_norm
        remove(layer, hook.name)
