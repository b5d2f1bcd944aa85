"""Weight loading strategies: two ways to fill a model on the meta device, with measured time.

meta        map the file and assign each tensor: the page cache holds the weights, nothing is copied but what is cast
offload     large layers keep their weights on disk and read rows at each forward: one block at a time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import psutil
import torch
from torch import Tensor, nn

from ...errors import SourceError, unknown
from ...plan import Plan
from ...spec import Choice, Finding
from ...weights import Checkpoint, Weight, check_finite, num_bytes
from ...weights.file_blocks import BLOCK_BYTES, FileBlocks, FileExtent, raw_bytes, row_blocks
from ..loaded_model import LoadedModel

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


def fill(loaded: LoadedModel, strategy: str | None = None) -> list[Finding]:
    """Give every meta parameter and buffer of `loaded.module` its value, in place.

    Ties stay ties; values take the dtype the model was built with. Raises `SourceError` for a name that the
    checkpoint lacks and for NaN or infinity. Safe to call again: what already has a value is left alone.
    """
    target, chosen = loaded.module, strategy or loaded.load
    if chosen not in STRATEGIES:
        raise unknown("way to load", chosen, STRATEGIES)
    if target is None or loaded.checkpoint is None:
        return []
    begin = time.perf_counter()

    def source(name: str) -> str:
        return loaded.renames.get(name, name)

    streamed = ""
    if chosen == "offload":
        from .offload import stream_layers

        streamed = stream_layers(target, loaded.checkpoint, source)
    values = MappedLoader()
    slots = _slots(target)
    for group in slots.values():
        _fill_one(group, source, loaded.checkpoint, values)
    _refuse_meta_buffers(target)
    seconds = time.perf_counter() - begin
    why = "; ".join(text for text in (f"{len(slots)} tensors", values.summary(), streamed) if text)
    return [Finding("load", f"fill {chosen}", seconds, "s", why)]


class MappedLoader:
    """Values as mapped views where dtype and alignment allow, else of copies; counts both in bytes."""

    def __init__(self) -> None:
        self.mapped = self.copied = 0
        self._storages: dict[Path, torch.UntypedStorage] = {}
        self._files: dict[Path, FileBlocks] = {}
        self._scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def __call__(self, name: str, weight: Weight, dtype: torch.dtype) -> Tensor:
        extent = weight.extent
        if extent is None or extent.dtype != dtype or extent.offset % dtype.itemsize or extent.num_bytes == 0:
            tensor = weight.read_as(dtype)
            self.copied += tensor.numel() * tensor.element_size()
            return tensor
        self._check(name, extent)
        self.mapped += extent.num_bytes
        return view(self._storage(extent.path), extent)

    def summary(self) -> str:
        mapped = f"{self.mapped / 1e6:.1f} MB mapped from the file"
        return f"{mapped}, {self.copied / 1e6:.1f} MB copied (cast or not aligned)" if self.copied else mapped

    def _check(self, name: str, extent: FileExtent) -> None:
        """Raise `SourceError` for NaN and infinity, by `pread` into one buffer: mapped pages stay non-resident.

        Blocks allocated one by one would be pinned in malloc's heap by what is allocated between them.
        """
        shape = extent.shape or (1,)
        row_bytes = extent.num_bytes // shape[0]
        file = self._files.setdefault(extent.path, FileBlocks(extent.path))
        for start, stop in row_blocks(shape, extent.dtype.itemsize):
            size = (stop - start) * row_bytes
            if size > self._scratch.numel():
                self._scratch = torch.empty(size, dtype=torch.uint8)
            part = self._scratch[:size]
            file.read_into(raw_bytes(part), extent.offset + start * row_bytes)
            rows = part.view(extent.dtype).view(stop - start, *shape[1:])
            check_finite(name, rows, str(extent.path), row=start)

    def _storage(self, path: Path) -> torch.UntypedStorage:
        if path not in self._storages:
            # Private: a write to a weight copies its page and never reaches the file.
            mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
            self._storages[path] = cast(torch.UntypedStorage, mapped)
        return self._storages[path]


def view(storage: torch.UntypedStorage, extent: FileExtent) -> Tensor:
    """Return the tensor at the extent's place in the mapped file; memory is shared."""
    stride = torch.empty(extent.shape, device="meta").stride()
    empty = torch.empty(0, dtype=extent.dtype)
    return empty.set_(storage, extent.offset // extent.dtype.itemsize, extent.shape, stride)


class Slot(NamedTuple):
    """Place that holds a tensor of the state dict: its module and attribute there, and its name."""

    owner: nn.Module
    attribute: str
    name: str
    tensor: Tensor

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the place, whatever its name."""
        return id(self.owner), self.attribute


def saved_tensors(module: nn.Module) -> Iterator[Slot]:
    """Yield each place of a tensor that is in the state dict; tied ones have several."""
    for prefix, owner in list(module.named_modules()):
        hidden = owner._non_persistent_buffers_set
        pairs = [*owner._parameters.items(), *((k, b) for k, b in owner._buffers.items() if k not in hidden)]
        for attribute, tensor in pairs:
            if tensor is not None:
                yield Slot(owner, attribute, f"{prefix}.{attribute}" if prefix else attribute, tensor)


def assign(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer in place, whatever its old value was."""
    table = owner._parameters if name in owner._parameters else owner._buffers
    table[name] = tensor  # type: ignore[assignment]


def _slots(module: nn.Module) -> dict[int, list[Slot]]:
    """List the meta tensors of the state dict; tied ones form one slot."""
    slots: dict[int, list[Slot]] = {}
    for slot in saved_tensors(module):
        if slot.tensor.is_meta:
            slots.setdefault(id(slot.tensor), []).append(slot)
    return slots


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


def _refuse_meta_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_meta:
            raise SourceError(
                f"buffer {name!r} is in no checkpoint and has no value",
                where=name,
                hint="Register it as a persistent buffer, or compute it in forward",
            )
