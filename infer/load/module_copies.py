"""Copies of a module that share its weights but not its layers."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import Tensor, nn

from ..errors import NotUsableError
from .loaded_model import LoadedModel


def unfilled_copy(loaded: LoadedModel) -> LoadedModel:
    """Return a copy of the model as it was before `fill`, without opening the source again.

    Readers, samples and tokens are those of `loaded`.
    """
    if loaded.rebuild is None:
        raise NotUsableError("an ONNX source has no torch module", hint="Use --backend ort")
    return replace(loaded, module=loaded.rebuild(), findings=())


def separate(module: nn.Module, other: nn.Module) -> nn.Module:
    """Return `module`, or a copy of its structure where it shares layers with `other`.

    A factory that keeps layers gives the same ones at each call.
    """
    known = {id(layer) for layer in other.modules()}
    shares = isinstance(module, nn.Module) and any(id(layer) in known for layer in module.modules())
    return copy_structure(module) if shares else module


def copy_structure(module: nn.Module) -> nn.Module:
    """Copy a module deeply except for the values of its parameters, which are shared.

    Buffers are copied, since code may write into them.
    """
    memo: dict[int, object] = {id(p): _own(p) for p in module.parameters()}
    memo |= {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    for (
        layer
    ) in module.modules():  # computed weights, as of weight normalization: no leaves, which can't be copied
        computed = (value for value in vars(layer).values() if isinstance(value, Tensor))
        memo |= {id(value): value.detach() for value in computed if id(value) not in memo}
    return copy.deepcopy(module, memo)


def own_parameters(module: nn.Module) -> None:
    """Give `module` parameter objects of its own, in place, with the same values: `Module.to` writes into them."""
    copies: dict[int, nn.Parameter] = {}
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                layer._parameters[name] = copies.setdefault(id(parameter), _own(parameter))


def _own(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
