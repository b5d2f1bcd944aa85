"""Tied weights of a model whose checkpoint holds several values for them.

torch's `load_state_dict` copies every name into the one tensor, so the last wins. transformers' `from_pretrained` ties
only what is equal or absent: matrices that differ are both kept, whatever config.json says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...weights import Checkpoint, num_bytes
from ...weights.file_blocks import BLOCK_BYTES, row_blocks
from .fill_weights import Slot, assign
from .meta_model import CheckpointMatch


@dataclass
class KeptApart:
    """Parameters that got a tensor of their own, each with the one that it was tied to, and stored copies not read."""

    names: dict[str, str] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)

    def untie(self, module: nn.Module) -> nn.Module:
        """Give the parameters tensors of their own, in place, in a model as it was built."""
        for name in self.names:
            _separate(_slot(module, name))
        return module


def take_last(module: nn.Module, fit: CheckpointMatch, checkpoint: Checkpoint) -> list[str]:
    """Let the last stored name of a tied tensor give its value, as `load_state_dict` does; tell where names differ."""
    notes: list[str] = []
    for names in _tied(module):
        stored = list(dict.fromkeys(fit.found[name] for name in names if name in fit.own))
        if len(stored) < 2:
            continue
        fit.found |= dict.fromkeys(names, stored[-1])
        others = [name for name in stored[:-1] if not same_values(checkpoint, name, stored[-1])]
        if others:
            notes.append(
                f"one tensor of the model is {' and '.join((*others, stored[-1]))}, which differ: took {stored[-1]}, "
                "the last, as load_state_dict does"
            )
    return notes


def keep_apart(module: nn.Module, model: Any, fit: CheckpointMatch, checkpoint: Checkpoint) -> KeptApart:
    """Untie, in place, what the checkpoint holds with different values, as transformers does for `model`.

    `module` wraps `model`, whose `_tied_weights_keys` tell which of several tied tensors the others are compared with.
    """
    kept = KeptApart()
    ranks = _ranks(model)
    for names in _tied(module):
        places = [_slot(module, name) for name in names]
        stored = [place for place in places if place.name in fit.own]
        if len({fit.found[place.name] for place in stored}) < 2:
            continue
        first = min(stored, key=lambda place: ranks.get(place.key, len(ranks)))
        value = fit.found[first.name]
        apart: set[tuple[int, str]] = set()
        for place in stored:
            if place.key == first.key or place.key in apart:
                continue
            if same_values(checkpoint, fit.found[place.name], value):
                kept.copies |= {fit.found[place.name]} - {value}
            else:
                _separate(place)
                apart.add(place.key)
                kept.names[place.name] = first.name
        for place in places:
            if place.key not in apart:
                fit.found[place.name] = value
    kept.copies -= set(fit.found.values())
    return kept


def same_values(checkpoint: Checkpoint, first: str, other: str) -> bool:
    """Tell if two stored tensors are equal in float32, block by block; one that lies in the file once is not read."""
    if first == other:
        return True
    shape = checkpoint[first].shape
    if shape != checkpoint[other].shape:
        return False
    extents = [checkpoint[name].extent for name in (first, other)]
    if extents[0] is not None and extents[0] == extents[1]:
        return True
    if not shape:
        return _equal(checkpoint[first].read(), checkpoint[other].read())
    width = max(checkpoint[first].dtype.itemsize, checkpoint[other].dtype.itemsize)
    return all(
        _equal(checkpoint[first].rows(start, stop), checkpoint[other].rows(start, stop))
        for start, stop in row_blocks(shape, width, BLOCK_BYTES)
    )


def copied_bytes(kept: KeptApart, checkpoint: Checkpoint) -> int:
    """Return the bytes of stored copies of tied tensors, which the model holds once."""
    return num_bytes(checkpoint, kept.copies)


def _equal(first: Tensor, other: Tensor) -> bool:
    if first.dtype != other.dtype:
        first, other = first.to(torch.float32), other.to(torch.float32)
    return torch.equal(first, other)


def _tied(module: nn.Module) -> list[list[str]]:
    """List the names of each tensor that has several, in the order of the state dict."""
    names_by_tensor: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names_by_tensor.setdefault(id(tensor), []).append(name)
    return [names for names in names_by_tensor.values() if len(names) > 1]


def _slot(module: nn.Module, name: str) -> Slot:
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    return Slot(owner, attribute, name, getattr(owner, attribute))


def _ranks(model: Any) -> dict[tuple[int, str], int]:
    """Give the places that transformers ties their order: all sources first, then the others as it lists them."""
    expand = getattr(model, "get_expanded_tied_weights_keys", None)
    pairs: dict[str, str] = {} if expand is None else expand(all_submodels=True)
    ranks: dict[tuple[int, str], int] = {}
    for name in (*pairs.values(), *pairs):
        ranks.setdefault(_slot(model, name).key, len(ranks))
    return ranks


def _separate(place: Slot) -> None:
    separate = torch.empty_like(place.tensor, device="meta")
    if isinstance(place.tensor, nn.Parameter):
        separate = nn.Parameter(separate, requires_grad=place.tensor.requires_grad)
    assign(place.owner, place.attribute, separate)
