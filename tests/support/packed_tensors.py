"""Packed tensors of a quantized model, copied so that they can be compared after the model changed."""

from __future__ import annotations

from torch import Tensor, nn

from infer.compress.packed_weight import Packed


def packed(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors of all packed weights, by module name and part."""
    return {
        f"{name}.{part}": tensor.clone()
        for name, module in model.named_modules()
        if isinstance(module, Packed)
        for part, tensor in module.tensors().items()
    }
