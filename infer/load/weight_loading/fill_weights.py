"""Weight loading strategies: two ways to fill a model on the meta device, with measured time.

meta        map the file and assign each tensor: the page cache holds the weights, nothing is copied but what is cast
offload     large layers keep their weights on disk and read rows at each forward: one block at a time
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch
from torch import Tensor, nn

from ...errors import SourceError, unknown
from ...plan import Plan
from ...spec import Choice, Finding
from ..loaded_model import LoadedModel
from ..weights import Checkpoint, num_bytes
from .mapped_weights import MappedLoader
from .meta_model import assign

STRATEGIES = ("meta", "offload")
# Above this share of the available memory, float weights are streamed.
OFFLOAD_SHARE = 0.6


def resolve_strategy(plan: Plan, loaded: LoadedModel) -> Choice:
    """Resolve `plan.load` "auto" from the size of the float weights and the free memory."""
    if plan.load not in ("auto", *STRATEGIES):
        raise unknown("way to load", plan.load, ("auto", *STRATEGIES))
    if plan.load != "auto":
        return Choice("load", plan.load, plan.load, "asked for")
    if loaded.checkpoint is None:
        return Choice("load", "auto", "meta", "the source brings its weights in memory")
    have = psutil.virtual_memory().available
    need = num_bytes(loaded.checkpoint, dtype=torch.float32)
    sizes = f"float weights are {need / 1e9:.2f} GB, {have / 1e9:.1f} GB are available"
    if need > OFFLOAD_SHARE * have:
        return Choice("load", "auto", "offload", f"{sizes}: more than {OFFLOAD_SHARE:.0%}")
    return Choice("load", "auto", "meta", sizes)


def fill(loaded: LoadedModel, module: nn.Module | None = None, strategy: str | None = None) -> list[Finding]:
    """Give every meta parameter and buffer of `module` (default `loaded.module`) its value, in place.

    Ties stay ties; values take the dtype the model was built with. Raises `SourceError` for a name that the
    checkpoint lacks and for NaN or infinity. Safe to call again: what already has a value is left alone.
    """
    target = module if module is not None else loaded.module
    chosen = strategy or loaded.load
    if chosen not in STRATEGIES:
        raise unknown("way to load", chosen, STRATEGIES)
    if target is None or loaded.checkpoint is None:
        return []
    begin = time.perf_counter()
    source = _source_name(loaded)
    said = ""
    if chosen == "offload":
        from .offload import stream_layers

        said = stream_layers(target, loaded.checkpoint, source)
    values = MappedLoader()
    slots = _slots(target)
    for group in slots.values():
        _fill_one(group, source, loaded.checkpoint, values)
    _refuse_meta_buffers(target)
    seconds = time.perf_counter() - begin
    why = "; ".join(text for text in (f"{len(slots)} tensors", values.summary(), said) if text)
    return [Finding("load", f"fill {chosen}", seconds, "s", why)]


class Slot:
    """Meta tensor in the model, with the places that hold it."""

    def __init__(self, owner: nn.Module, attribute: str, name: str, tensor: Tensor) -> None:
        self.owner, self.attribute, self.name, self.tensor = owner, attribute, name, tensor


def _slots(module: nn.Module) -> dict[int, list[Slot]]:
    """List the meta tensors of the state dict; tied ones form one slot."""
    found: dict[int, list[Slot]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=True):
        hidden = owner._non_persistent_buffers_set
        pairs = [*owner._parameters.items(), *((k, b) for k, b in owner._buffers.items() if k not in hidden)]
        for attribute, tensor in pairs:
            if tensor is not None and tensor.is_meta:
                name = f"{prefix}.{attribute}" if prefix else attribute
                found.setdefault(id(tensor), []).append(Slot(owner, attribute, name, tensor))
    return found


def _fill_one(
    group: list[Slot], source: Callable[[str], str], checkpoint: Checkpoint, values: MappedLoader
) -> None:
    name = next((source(slot.name) for slot in group if source(slot.name) in checkpoint), None)
    first = group[0]
    if name is None:
        raise SourceError(
            f"the checkpoint holds no {source(first.name)!r}",
            where=first.name,
            hint="It belongs to another model",
        )
    weight = checkpoint[name]
    if weight.shape != tuple(first.tensor.shape):
        raise SourceError(
            f"expected {name!r} of shape {list(first.tensor.shape)}, got {list(weight.shape)}",
            where=first.name,
            hint="The checkpoint belongs to a model of other sizes",
        )
    value = values(name, weight, first.tensor.dtype)
    if isinstance(first.tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=first.tensor.requires_grad and value.is_floating_point())
    for slot in group:
        assign(slot.owner, slot.attribute, value)


def _source_name(loaded: LoadedModel) -> Callable[[str], str]:
    return lambda name: loaded.renames.get(name, name)


def _refuse_meta_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_meta:
            raise SourceError(
                f"buffer {name!r} is in no checkpoint and has no value",
                where=name,
                hint="Register it as a persistent buffer, or compute it in forward",
            )


__all__ = ["STRATEGIES", "fill", "resolve_strategy"]
