"""Walk over the weights of a torch model whose layers were quantized: what `Coverage` counts.

Every floating-point parameter counts once, tied or not, and so does every persistent buffer that holds more than two
different values (a mask holds two and is no weight).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..coverage import Coverage
from .layer_kinds import name_of
from .packed_weight import Packed, PackedLayer


def cover(model: nn.Module, reasons: Mapping[str, str], pinned: Collection[str] = frozenset()) -> Coverage:
    """Count the weights of a model whose layers were quantized.

    `reasons` holds why a layer that a format could take stays float, by layer name; `pinned` names those that the user
    keeps float.
    """
    found, seen = Coverage(), set[object]()
    for name, module in model.named_modules():
        if isinstance(module, Packed):
            continue
        if isinstance(module, PackedLayer) and id(module.packed) not in seen:
            seen.add(id(module.packed))
            size = module.num_weights * module.packed.dtype.itemsize
            found.add_quantized(module.packed.format, module.num_weights, size)
        for attribute, tensor in _weights(module):
            if (key := _key(tensor)) not in seen:
                seen.add(key)
                inside, computed, _ = name.partition(".parametrizations.")
                if computed:
                    kind, reason = (
                        name_of(model.get_submodule(inside)),
                        "its weight is computed (parametrized)",
                    )
                else:
                    kind, reason = _left(name, module, attribute, tensor, reasons)
                found.add_left(kind, tensor.numel(), tensor.nbytes, reason, pinned=name in pinned)
    return found


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own float parameters and persistent float buffers that are no masks."""
    for name, tensor in module._parameters.items():
        if tensor is not None and _is_float(tensor):
            yield name, tensor
    for name, buffer in module._buffers.items():
        temporary = name in module._non_persistent_buffers_set
        if buffer is not None and not temporary and _is_float(buffer) and not _is_mask(buffer):
            yield name, buffer


def _is_float(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def _is_mask(buffer: Tensor) -> bool:
    if buffer.dim() < 2 or buffer.is_meta or buffer.is_complex():
        return False
    return bool(((buffer == buffer.amin()) | (buffer == buffer.amax())).all())


def _key(tensor: Tensor) -> object:
    """Return a key that is equal for two tensors over the same memory."""
    if tensor.is_meta or type(tensor.data) is not Tensor or tensor.layout != torch.strided:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _left(
    name: str, module: nn.Module, attribute: str, tensor: Tensor, reasons: Mapping[str, str]
) -> tuple[str, str]:
    """Return the layer kind of one float weight and the reason why it stays float."""
    kind = name_of(module).removeprefix("Stored")
    if isinstance(module, PackedLayer):
        return "bias", "is added in float"
    if attribute == "weight" and name in reasons:
        return kind, reasons[name]
    if attribute in module._buffers:
        return kind, f"its buffer {attribute!r} is used in float"
    if tensor.dim() < 2:
        return kind, "vectors are applied in float"
    if type(module).__module__.startswith("torch.nn."):
        return kind, f"{kind} has no quantized form"
    return kind, f"{kind} uses its parameters directly, not through a layer that has a quantized form"
