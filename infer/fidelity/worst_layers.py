"""Layers of the compressed model farthest from the float one: one forward of each, compared by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..module_hooks import hooked
from ..results import LayerError

KEPT = 1 << 16  # values kept of each layer's output, evenly spread: 256 KiB a layer


def worst_layers(
    float_module: nn.Module, small_module: nn.Module, samples: Mapping[str, Tensor], count: int = 5
) -> list[LayerError]:
    """Return relative errors of same-named submodules' outputs, worst first; errors of earlier layers propagate.

    Looked at are the layers that quantization replaced and the modules that hold them (all leaves when
    nothing was replaced). Both modules are called by keyword with `samples`; at most `KEPT` values of each
    output count.
    """
    names = _names(float_module, small_module)
    expected = _outputs(float_module, names, samples)
    got = _outputs(small_module, names, samples)
    errors = []
    for name in names & expected.keys() & got.keys():
        error = _error(expected[name], got[name])
        kind = type(float_module.get_submodule(name)).__name__
        errors.append(LayerError(name, kind, error))
    return sorted(errors, key=lambda layer: (-_or_infinite(layer.error), layer.name))[:count]


def _names(float_module: nn.Module, small_module: nn.Module) -> set[str]:
    before, after = dict(float_module.named_modules()), dict(small_module.named_modules())
    common = [name for name in before if name and name in after]
    leaves = [name for name in common if not any(before[name].children())]
    replaced = [name for name in leaves if type(before[name]) is not type(after[name])]
    chosen = set(replaced or leaves)
    for name in replaced:
        while name := name.rpartition(".")[0]:
            chosen.add(name)
    return chosen & set(common)


def _outputs(module: nn.Module, names: set[str], samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Record the first float output of each named submodule's first call, thinned to `KEPT` values."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = (
                t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()
            )
            first = next(tensors, None)
            if name not in kept and first is not None:
                kept[name] = _thin(first.detach())

        return hook

    hooks = [module.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    with hooked(hooks), torch.no_grad():
        module(**samples)
    return kept


def _thin(value: Tensor) -> Tensor:
    flat = value.reshape(-1)
    step = max(1, math.ceil(flat.numel() / KEPT)) | 1  # odd, so that it does not walk down one column
    return flat[::step].float().cpu().clone()


def _error(expected: Tensor, got: Tensor) -> float | None:
    if expected.shape != got.shape:
        return None
    norm = float(expected.double().norm())
    difference = float((got.double() - expected.double()).norm())
    if norm == 0:
        return 0.0 if difference == 0 else None
    return difference / norm if math.isfinite(difference) else None


def _or_infinite(error: float | None) -> float:
    return math.inf if error is None else error
