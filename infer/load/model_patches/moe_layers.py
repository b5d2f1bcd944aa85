"""Experts of a mixture, whose 3-D parameters become layers: formats quantize them, and a step is captured with them.

transformers stores the weights of all experts of a layer in 3-D parameters and computes with them by one of its
interchangeable functions; each of these loops over what a router gave or copies weights, which no exporter takes.
`split_experts` gives each parameter a layer that computes with one operator, `infer::linear_experts`. Routing, shared
experts and the gate (`_apply_gate`) stay the model's own code.
"""

from __future__ import annotations

from torch import nn

from ... import families
from ...kernels.expert_layers import ExpertLinear, StoredExperts

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def split_experts(model: nn.Module) -> nn.Module:
    """Give the 3-D parameters of every experts module of transformers a layer, in place, with unchanged values.

    Layers for which a family has a class get that one put before theirs. Returns `model`.
    """
    known = families.known().layers
    for module in list(model.modules()):
        base = known.get(families.class_name(module))
        if _is_experts(module, base):
            base = base or StoredExperts
            for name in PROJECTIONS:
                weight = module._parameters.pop(name, None)
                if weight is not None:
                    transposed = bool(getattr(module, "is_transposed", False))
                    module.add_module(name, ExpertLinear(weight, transposed=transposed))
        elif base is None or issubclass(base, StoredExperts):
            continue
        kind = type(module)
        if kind not in _CLASSES:
            _CLASSES[kind] = type(f"Stored{kind.__name__}", (base, kind), {})
        module.__class__ = _CLASSES[kind]
    return model


def checkpoint_names(model: nn.Module) -> dict[str, str]:
    """Return the parameter name of each split weight, and the name that it has in a checkpoint."""
    layers = (name for name, module in model.named_modules() if isinstance(module, ExpertLinear))
    return {f"{name}.weight": name for name in layers}


def _is_experts(module: nn.Module, base: type[nn.Module] | None) -> bool:
    """Return true for a module of transformers' experts interface whose layout is declared, by itself or a family."""
    flags = ("is_transposed", "has_bias", "_apply_gate")
    first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    weights = [module._parameters.get(name) for name in (first, "down_proj")]
    declared = (
        all(hasattr(module, flag) for flag in flags) if base is None else issubclass(base, StoredExperts)
    )
    return declared and all(w is not None and w.dim() == 3 for w in weights)
