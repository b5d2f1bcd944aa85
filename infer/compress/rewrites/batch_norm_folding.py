"""Folding of batch norms into the convolutions before them, ahead of calibration and quantization.

In eval mode a batch norm multiplies each channel by a constant and adds another. Folded into the convolution's weight
and bias it costs nothing, and the int8 scale of each output channel is that of what the next layer really sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ...spec import Finding


def fold_batch_norms(
    model: nn.Module, program: ExportedProgram, into: nn.Module | None = None
) -> list[Finding]:
    """Fold every BatchNorm2d that is the only reader of a Conv2d in `program`, the capture of `model`, in place.

    The program keeps its own weights. `into` is another copy of the model, possibly on meta: it gets the same folded
    weights. Calling it again changes nothing.
    """
    pairs = pairs_of(model, program)
    for conv, norm in pairs.items():
        if isinstance(model.get_submodule(norm), nn.BatchNorm2d):
            _fold(model, conv, norm)
        if into is not None:
            _share(model, into, conv, norm)
    if not pairs:
        return []
    return [
        Finding("compress", "batch norms folded", len(pairs), "layers", "into the convolutions before them")
    ]


def pairs_of(model: nn.Module, program: ExportedProgram) -> dict[str, str]:
    """Map each convolution to the batch norm after it, by name, where both are used once and nothing is between."""
    signature = program.graph_signature
    owners = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    found = {}
    norm: Any
    for norm in program.graph.nodes:
        conv: Any = norm.args[0] if norm.args else None
        if str(norm.target) != "aten.batch_norm.default" or not isinstance(conv, fx.Node):
            continue
        if str(conv.target) != "aten.conv2d.default" or len(conv.users) != 1 or norm.args[5]:
            continue
        held: list[Any] = [conv.args[1], norm.args[3]]  # weight and running mean
        if not all(isinstance(node, fx.Node) and len(node.users) == 1 for node in held):
            continue
        names = [owners.get(node.name, "").rpartition(".")[0] for node in held]
        if all(names) and _foldable(model, *names):
            found[names[0]] = names[1]
    return found


def _foldable(model: nn.Module, conv: str, norm: str) -> bool:
    """Return true if convolution and batch norm are plain modules without hooks, the norm possibly folded already."""
    first, second = model.get_submodule(conv), model.get_submodule(norm)
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in (first, second))
    return type(first) is nn.Conv2d and type(second) in (nn.BatchNorm2d, nn.Identity) and not hooked


@torch.no_grad()
def _fold(model: nn.Module, conv: str, norm: str) -> None:
    first, second = _modules(model, conv, norm)
    # In float64: the quotient of a tiny variance is large, and this is done once.
    bias = None if first.bias is None else first.bias.double()
    given = (second.running_mean, second.running_var, second.weight, second.bias)
    mean, variance, scale, shift = (None if t is None else t.double() for t in given)
    made: Any = (first.weight.double(), bias, mean, variance, second.eps, scale, shift)
    for name, value in zip(("weight", "bias"), fuse_conv_bn_weights(*made), strict=True):
        setattr(first, name, nn.Parameter(value.to(first.weight.dtype), requires_grad=False))
    _drop(model, norm)


def _modules(model: nn.Module, conv: str, norm: str) -> Any:
    return model.get_submodule(conv), model.get_submodule(norm)


def _share(model: nn.Module, into: nn.Module, conv: str, norm: str) -> None:
    (folded, _), (layer, _) = _modules(model, conv, norm), _modules(into, conv, norm)
    for name in ("weight", "bias"):  # objects of their own: `Module.to` writes into parameters
        setattr(layer, name, nn.Parameter(getattr(folded, name).detach(), requires_grad=False))
    _drop(into, norm)


def _drop(model: nn.Module, norm: str) -> None:
    parent, _, attribute = norm.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Identity())
