"""Quantizable layers of a model, the weights that they share, and the layers to leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from .layer_kinds import embedding_scale, is_layer, is_stored_by_columns, kind_of


@dataclass
class NamedLayer:
    """One layer with all its names in the model; the first one is reported."""

    layer: nn.Module
    names: list[str] = field(default_factory=list)
    parents: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass
class Weight:
    """One weight tensor, the layers that compute with it, and the reasons why they stay float."""

    tensor: Tensor
    sites: list[NamedLayer]
    names: list[str]  # of the parameter, in the model
    reasons: dict[str, str] = field(default_factory=dict)  # layer → why it stays float

    @property
    def name(self) -> str:
        return self.sites[0].name


def find(model: nn.Module, refuses: Callable[[NamedLayer], str | None]) -> list[Weight]:
    """List every weight of a layer with a quantized form, in order; a tied weight is listed once."""
    sites = _sites(model)
    parameters = _parameters(model)
    weights: dict[int, Weight] = {}
    for site in sites:
        tensor = site.layer._parameters.get("weight")
        stored = torch.empty(0) if tensor is None else tensor  # parametrized: refused below, never read
        key = id(site) if tensor is None else id(tensor)
        weight = weights.setdefault(key, Weight(stored, [], [name for name, _ in parameters.get(key, [])]))
        weight.sites.append(site)
        if reason := why_excluded(site.layer, bool(site.parents)) or refuses(site):
            weight.reasons[site.name] = reason
    for key, weight in weights.items():
        _bind(weight, parameters.get(key, []))
    return list(weights.values())


def _sites(model: nn.Module) -> list[NamedLayer]:
    found: dict[int, NamedLayer] = {}
    for path, parent in model.named_modules(remove_duplicate=True):
        for attribute, child in parent._modules.items():
            if is_layer(child):
                site = found.setdefault(id(child), NamedLayer(child))
                site.names.append(f"{path}.{attribute}" if path else attribute)
                site.parents.append((parent, attribute))
    if is_layer(model):
        found[id(model)] = NamedLayer(model, ["the model"])
    return list(found.values())


def _parameters(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Map each parameter to all its names in the model, with the module that holds it."""
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in module._parameters.items():
            if tensor is not None:
                found.setdefault(id(tensor), []).append(
                    (f"{path}.{attribute}" if path else attribute, module)
                )
    return found


def why_excluded(layer: nn.Module, has_parent: bool) -> str | None:
    """Return the reason why no format may take this layer, or None."""
    kind = kind_of(layer)
    if not has_parent:
        return "the model is this one layer; there is nowhere to put another"
    if reason := getattr(layer, "excluded", None):
        return str(reason)
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "attention reads its weight itself (nn.MultiheadAttention)"
    if parametrize.is_parametrized(layer) or layer._parameters.get("weight") is None:
        return "its weight is computed, not stored (parametrized)"
    if type(layer).forward is not kind.forward and embedding_scale(layer) is None:
        return f"{type(layer).__name__} has a forward of its own"
    if layer._forward_pre_hooks or layer._forward_hooks:
        return "it has forward hooks, which would be lost"
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if type(weight.data) is not Tensor or not weight.is_floating_point():
        return f"its weight is a {type(weight.data).__name__} of {weight.dtype}, not a float tensor"
    return None


def _bind(weight: Weight, holders: Iterable[tuple[str, nn.Module]]) -> None:
    """Keep all layers of a weight float when it is tied to something that stays float."""
    layers = [site.layer for site in weight.sites]
    if len({is_stored_by_columns(layer) for layer in layers}) > 1:
        for site in weight.sites:
            weight.reasons.setdefault(
                site.name, "its weight is shared by layers that read it in different ways"
            )
    for name, module in holders:
        if not any(module is layer for layer in layers):
            for site in weight.sites:
                weight.reasons.setdefault(site.name, f"its weight is also {name!r}, which stays float")
    if weight.reasons:
        first, reason = next(iter(weight.reasons.items()))
        for site in weight.sites:
            weight.reasons.setdefault(site.name, f"tied to {first!r}, which stays float: {reason}")
