"""Unwrapping of state dicts: containers around them and prefixes of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import SourceError

CONTAINERS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
PREFIXES = ("module.", "_orig_mod.")
MAX_DEPTH = 3


def unwrap(value: Any, where: str) -> tuple[dict[str, Tensor], list[str]]:
    """Find the state dict inside a saved object; return it and a note for each step taken."""
    notes: list[str] = []
    for _ in range(MAX_DEPTH):
        if not isinstance(value, Mapping):
            break
        tensors = {key: item for key, item in value.items() if isinstance(item, Tensor)}
        inner = _container(value) if not tensors else None
        if inner is None:
            return _named(tensors, value, where, notes)
        others = sorted(str(key) for key in value if key != inner)
        notes.append(f"took {inner!r}" + (f", left {', '.join(others[:6])}" if others else ""))
        value = value[inner]
    kind = "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise SourceError(
        f"expected a state dict, got {kind}",
        where=where,
        hint="Save it with torch.save(model.state_dict(), path)",
    )


def _container(value: Mapping[Any, Any]) -> str | None:
    """Return the key of the one nested mapping that holds tensors; the usual names win."""
    holders = [key for key, item in value.items() if isinstance(key, str) and _holds_tensors(item)]
    for key in CONTAINERS:
        if key in holders:
            return key
    return holders[0] if len(holders) == 1 else None


def _holds_tensors(value: Any, depth: int = MAX_DEPTH) -> bool:
    if not isinstance(value, Mapping) or depth == 0:
        return False
    return any(isinstance(v, Tensor) or _holds_tensors(v, depth - 1) for v in value.values())


def _named(
    tensors: dict[Any, Tensor], value: Mapping[Any, Any], where: str, notes: list[str]
) -> tuple[dict[str, Tensor], list[str]]:
    if not tensors:
        keys = ", ".join(map(str, list(value)[:8])) or "nothing"
        raise SourceError(
            f"expected a state dict, got a mapping without tensors: {keys}",
            where=where,
            hint=f"Known containers: {', '.join(CONTAINERS)}",
        )
    odd = [key for key in tensors if not isinstance(key, str)]
    if odd:
        raise SourceError(f"expected tensor names as keys, got {odd[0]!r}", where=where)
    others = [str(key) for key in value if key not in tensors and not str(key).endswith("_extra_state")]
    if others:
        notes.append(f"left {', '.join(others[:6])} (not tensors)")
    return tensors, notes


def refuse_expanded(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise `SourceError` for a tensor that claims more elements than its storage has: copying it would need them."""
    for name, tensor in tensors.items():
        need = tensor.numel() * tensor.element_size()
        have = tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else need
        if need > have:
            raise SourceError(
                f"tensor {name!r} {list(tensor.shape)} needs {need} bytes, its storage has {have}",
                where=where,
                hint="An expanded tensor: save it after .contiguous()",
            )


def strip_prefixes(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Take off `module.` (DataParallel) and `_orig_mod.` (torch.compile) where every name bears them."""
    notes: list[str] = []
    while tensors:
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in tensors)), None)
        if prefix is None:
            break
        tensors = {name[len(prefix) :]: tensor for name, tensor in tensors.items()}
        notes.append(f"took the prefix {prefix!r} off {len(tensors)} names")
    return tensors, notes
