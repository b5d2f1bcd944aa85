"""LoRA adapters of PEFT's format, loaded by name into the slots that an artifact was made with.

A folder has adapter_config.json and adapter_model.safetensors; pickled weights are not opened. A slot is written only
while no request uses it, so loading needs no pause of the engine.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import BusyError, InputError, SourceError, unknown
from .config import LoraConfig, read_config
from .layers import INDEX, WEIGHTS, AdaptedLayer, AdapterShape

MODEL = "adapter_model.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.[^.]+)?\.weight")


class Adapters:
    """Buffer of adapter weights of a step, and the adapter in each slot. Methods may be called from any thread."""

    def __init__(self, shape: AdapterShape, device: str = "cpu") -> None:
        self.shape, self.device = shape, device
        self.weights = torch.zeros(shape.size, device=device)
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}  # by name, from 1
        self._keys: dict[
            str, str
        ] = {}  # for the prefix cache: a name that is loaded again is another adapter
        self._users: dict[str, int] = {}
        self._loads = 0

    @property
    def names(self) -> list[str]:
        return sorted(self._slots)

    def load(self, name: str, folder: Path | str) -> None:
        """Load an adapter from PEFT's folder into a free slot.

        Raises `SourceError` for a folder that is not such an adapter, or not of this model; `BusyError` when the name
        or all slots are taken.
        """
        if not _NAME.fullmatch(name):
            raise InputError("expected a name of letters, digits, ., _ and -", where="name")
        tensors = read(Path(folder), self.shape)
        with self._lock:
            if name in self._slots:
                raise BusyError(f"an adapter named {name!r} is loaded", hint="Unload it first")
            free = sorted(set(range(1, self.shape.slots + 1)) - set(self._slots.values()))
            if not free:
                raise BusyError(f"all {self.shape.slots} slots have adapters", hint="Unload one first")
            self._write(free[0], tensors)
            self._loads += 1
            self._slots[name], self._keys[name], self._users[name] = free[0], f"{name}@{self._loads}", 0

    def unload(self, name: str) -> None:
        """Clear the slot of an adapter; raises `BusyError` while requests use it."""
        with self._lock:
            self.check(name)
            if self._users[name]:
                raise BusyError(f"adapter {name!r} is used by {self._users[name]} requests")
            self._write(self._slots[name], {})
            for table in (self._slots, self._keys, self._users):
                table.pop(name)

    def check(self, name: str) -> None:
        """Raise `InputError` unless an adapter of this name is loaded."""
        if name not in self._slots:
            raise unknown("adapter", name, self.names or ["none is loaded"])

    def take(self, name: str) -> tuple[int, str]:
        """Acquire an adapter until `release`; return its slot and a key that is never reused."""
        with self._lock:
            self.check(name)
            self._users[name] += 1
            return self._slots[name], self._keys[name]

    def release(self, name: str) -> None:
        with self._lock:
            self._users[name] -= 1

    def inputs(self, slots: Sequence[int], sizes: Sequence[int]) -> dict[str, Tensor]:
        """Return the adapter inputs of a step: `sizes[i]` tokens of a sequence with slot `slots[i]` (0: none)."""
        index = torch.tensor(slots, dtype=torch.int64).repeat_interleave(
            torch.tensor(sizes, dtype=torch.int64)
        )
        return {INDEX: index.to(self.device), WEIGHTS: self.weights}

    def _write(self, slot: int, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        rank = self.shape.rank
        for site in self.shape.sites:
            a, b = (part[(slot - 1) * rank : slot * rank] for part in self.shape.parts(self.weights, site))
            a.zero_()
            b.zero_()
            if site.name in tensors:
                down, up = tensors[site.name]
                a[: len(down)] = down.to(self.device)
                b[: len(down)] = up.T.to(self.device)


def read(folder: Path, shape: AdapterShape) -> dict[str, tuple[Tensor, Tensor]]:
    """Read an adapter's folder: by layer A [rank, inputs] and B [outputs, rank], float32, the scale in B."""
    config = read_config(folder)
    path = folder / MODEL
    if not path.is_file():
        raise SourceError(f"no {MODEL}", where=str(folder), hint="Save the adapter as safetensors")
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise SourceError(f"not a safetensors file: {error}", where=str(path)) from error
    sites = {site.name: site for site in shape.sites}
    config.check_time(list(sites), path)
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise SourceError(f"{key!r} is not a LoRA weight of a linear layer", where=str(path))
        if match[1] not in sites:
            raise SourceError(
                f"this model takes no adapter at {match[1]!r}", where=str(path), hint=_known(sites)
            )
        if not config.adapts(match[1]):
            raise SourceError(f"weights for {match[1]!r}, which is no target of the adapter", where=str(path))
        if match[2] in halves.setdefault(match[1], {}):
            raise SourceError(f"{match[1]} has two lora_{match[2]}", where=str(path))
        halves[match[1]][match[2]] = tensor
    if not halves:
        raise SourceError("no LoRA weights in it", where=str(path))
    return {name: _pair(sites[name], pair, config, shape.rank, path) for name, pair in halves.items()}


def _pair(
    site: AdaptedLayer, pair: Mapping[str, Tensor], config: LoraConfig, most: int, path: Path
) -> tuple[Tensor, Tensor]:
    if set(pair) != {"A", "B"}:
        raise SourceError(
            f"expected A and B of {site.name}, got lora_{next(iter(pair))} only", where=str(path)
        )
    a, b = pair["A"], pair["B"]
    rank = a.shape[0] if a.dim() else 0
    if (
        rank < 1
        or a.dim() != 2
        or b.dim() != 2
        or a.shape[1] != site.inputs
        or b.shape != (site.outputs, rank)
    ):
        expected = f"[rank, {site.inputs}] and [{site.outputs}, rank]"
        raise SourceError(
            f"{site.name}: expected {expected}, got {list(a.shape)} and {list(b.shape)}", where=str(path)
        )
    if rank > most:
        raise SourceError(
            f"{site.name} has rank {rank}, but the slots have {most}",
            where=str(path),
            hint=f"Make the artifact with --adapters SLOTS:{rank}",
        )
    if rank != config.rank_of(site.name):
        said = f"{site.name} has rank {rank}, but r and rank_pattern say {config.rank_of(site.name)}"
        raise SourceError(said, where=str(path))
    if not (a.is_floating_point() and b.is_floating_point()):
        raise SourceError(f"{site.name} has weights of {a.dtype} and {b.dtype}", where=str(path))
    a, b = a.float(), b.float() * config.scale_of(site.name)
    if not (a.isfinite().all() and b.isfinite().all()):  # they would spoil tokens of other slots
        raise SourceError(f"{site.name} has weights that are not finite numbers", where=str(path))
    return a, b


def _known(sites: Mapping[str, AdaptedLayer]) -> str:
    kinds = sorted({name.rpartition(".")[2] for name in sites})
    return f"It takes them at {', '.join(kinds)} of its layers"
