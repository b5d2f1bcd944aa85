"""Unwrapping of state dicts: the containers that training tools save them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import SourceError

CONTAINERS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
MAX_DEPTH = 3


def unwrap(value: Any, where: str, key: str = "") -> tuple[dict[str, Tensor], list[str], str]:
    """Find the state dict inside a saved object; return it, a note for each step taken, and the rest of `key`.

    `key` names the mapping to take (`G`, `state_dict.ema`). What of it names no mapping is the prefix of names.
    """
    notes: list[str] = []
    for _ in range(MAX_DEPTH + key.count(".")):
        if not isinstance(value, Mapping):
            break
        tensors = {name: item for name, item in value.items() if isinstance(item, Tensor)}
        asked = _asked_for(value, key)
        inner = asked or _container(value, tensors)
        if inner is None:
            return (*_named(tensors, value, where, notes), key)
        others = sorted(str(name) for name in value if name != inner)
        notes.append(f"took {inner!r}" + (f", left {', '.join(others[:6])}" if others else ""))
        key = key[len(inner) + 1 :] if asked else key
        value = value[inner]
    kind = "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise SourceError(
        f"expected a state dict, got {kind}",
        where=where,
        hint="Save it with torch.save(model.state_dict(), path)",
    )


def _asked_for(value: Mapping[Any, Any], key: str) -> str | None:
    """Return the longest beginning of a dotted key that names a mapping with tensors."""
    parts = key.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1)) if key else iter(())
    return next((head for head in heads if _holds_tensors(value.get(head))), None)


def _container(value: Mapping[Any, Any], tensors: Mapping[Any, Tensor]) -> str | None:
    """Return the key of the nested mapping that is the state dict: one of the usual names, or the only one.

    Single numbers beside it, such as the best accuracy, may be tensors too.
    """
    holders = [name for name, item in value.items() if isinstance(name, str) and _holds_tensors(item)]
    for name in CONTAINERS:
        if name in holders:
            return name
    numbers_only = all(tensor.numel() == 1 for tensor in tensors.values())
    return holders[0] if len(holders) == 1 and numbers_only else None


def _holds_tensors(value: Any, depth: int = MAX_DEPTH) -> bool:
    if not isinstance(value, Mapping) or depth == 0:
        return False
    return any(isinstance(v, Tensor) or _holds_tensors(v, depth - 1) for v in value.values())


def _named(
    tensors: dict[Any, Tensor], value: Mapping[Any, Any], where: str, notes: list[str]
) -> tuple[dict[str, Tensor], list[str]]:
    holders = [str(name) for name, item in value.items() if _holds_tensors(item)]
    if not tensors and holders:
        raise SourceError(
            f"expected one state dict, got {len(holders)}: {', '.join(holders[:8])}",
            where=where,
            hint=f"Name the one to take: --key {holders[0]}",
        )
    if not tensors and {"state", "param_groups"} <= value.keys():
        raise SourceError(
            "expected the weights of a model, got the state of an optimizer",
            where=where,
            hint="Give the checkpoint that was saved beside it",
        )
    if not tensors:
        keys = ", ".join(map(str, list(value)[:8])) or "nothing"
        raise SourceError(
            f"expected a state dict, got a mapping without tensors: {keys}",
            where=where,
            hint=f"Known containers: {', '.join(CONTAINERS)}",
        )
    odd = [name for name in tensors if not isinstance(name, str)]
    if odd:
        raise SourceError(f"expected tensor names as keys, got {odd[0]!r}", where=where)
    others = [str(name) for name in value if name not in tensors and not str(name).endswith("_extra_state")]
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
