"""Layers whose outputs the original teaches too, because the model's own outputs are few numbers a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...fidelity.metric_sums import is_logits
from ...graph.program import flatten
from ..objectives.layer_outputs import LayerOutputs
from .layer_calls import is_hidden

FEWEST = 2

Pairs = tuple[list[nn.Module], list[nn.Module]]


@torch.no_grad()
def compared_layers(
    student: nn.Module, teacher: nn.Module, batch: Mapping[str, Tensor], names: Sequence[str], task: str
) -> Pairs | None:
    """Return layers of the student and those of the teacher, or None where the outputs say enough.

    They are the members of lists of layers, by name, which give hidden states [rows, tokens, hidden]. An embedding of
    a text says little about each of the codes that made it; the hidden states of its tokens say more. Logits, whose
    divergence is another unit, and outputs of as many numbers as a layer's need none. `batch` is run once.
    """
    found = [name for names in layer_lists(student, teacher) for name in names]
    theirs = [teacher.get_submodule(name) for name in found]
    if len(found) < FEWEST:
        return None
    outputs = LayerOutputs(theirs)
    try:
        values = flatten(teacher.eval()(**batch))
        states = outputs.taken()
    finally:
        outputs.remove()
    pairs = dict(zip(names, values, strict=False))
    if any(is_logits(name, value, pairs, task) for name, value in pairs.items()):
        return None
    if len(states) < len(found) or not all(is_hidden(each) for each in states):
        return None
    if sum(value.numel() for value in values) >= min(each.numel() for each in states):
        return None
    return [student.get_submodule(name) for name in found], theirs


def layer_lists(student: nn.Module, teacher: nn.Module) -> list[list[str]]:
    """Return the names of the layers of each outermost list of at least `FEWEST` that both models have."""
    found: dict[str, list[str]] = {}
    for name, module in student.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) >= FEWEST and not inner:
            members = [f"{name}.{index}" if name else str(index) for index in range(len(module))]
            found[name] = [member for member in members if _has(teacher, member)]
    return list(found.values())


def _has(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
