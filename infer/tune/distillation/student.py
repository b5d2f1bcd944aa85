"""Students made of their teacher: layers left out, feed-forward networks narrowed, all weights carried over.

Layers are taken evenly from the first to the last, as DistilBERT's were (Sanh et al. 2019, arXiv 1910.01108).
Neurons of feed-forward networks are kept by the product of the norms of their weights, the size of their largest
contribution (Li et al. 2017, arXiv 1608.08710).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import NotUsableError, UsageError
from ..objectives.outputs import outermost_lists
from ..settings import FORMS

DEPTH, WIDTH = "num_hidden_layers", "intermediate_size"
MULTIPLE = 64  # of the kept neurons: group of a quantized weight


@dataclass(frozen=True)
class Student:
    """A model smaller than its teacher. `layers`: the teacher's layer that each of its own was taken from."""

    model: nn.Module
    layers: tuple[int, ...]


def student_of(teacher: nn.Module, shape: StudentShape) -> Student:
    """Build a student from a model of transformers with the teacher's weights in float32.

    Raises `UsageError` for a shape that is the teacher's own, `NotUsableError` for a model whose layers or neurons are
    not told by `num_hidden_layers` and `intermediate_size`.
    """
    config = copy.deepcopy(_config(teacher))
    total = _size(config, DEPTH)
    picks = evenly(total, shape.num_layers(total))
    neurons = shape.num_neurons(_size(config, WIDTH)) if shape.width < 1 else None
    if len(picks) == total and neurons in (None, _size(config, WIDTH)):
        raise UsageError(f"a student of {total} layers and all neurons is its teacher", where="--student")
    _shrink(config, picks, neurons)
    model = type(teacher)(config).float()
    drop_unused_parts(teacher, model)
    carry_weights(teacher, model, picks, total)
    return Student(model, picks)


def drop_unused_parts(teacher: nn.Module, student: nn.Module) -> None:
    """Replace the student's parts as its teacher's were when it was opened: a pooler that no output needs is none."""
    for name, part in list(student.named_children()):
        given = getattr(teacher, name, None)
        if type(given) is not type(part):
            setattr(student, name, copy.deepcopy(given))
        elif not isinstance(part, nn.ModuleList):
            drop_unused_parts(given, part)


def evenly(total: int, count: int) -> tuple[int, ...]:
    """Return `count` of `range(total)`, evenly from the first to the last; of one the first."""
    if count == 1:
        return (0,)
    return tuple(round(i * (total - 1) / (count - 1)) for i in range(count))


@torch.no_grad()
def carry_weights(teacher: nn.Module, student: nn.Module, picks: Sequence[int], total: int) -> None:
    """Copy every tensor of the student from its layer of the teacher's `total`, narrowed to the neurons that are kept.

    Raises `NotUsableError` for a tensor without counterpart.
    """
    blocks = layer_lists(teacher, total)
    sources = {**dict(teacher.named_parameters()), **dict(teacher.named_buffers())}
    targets = {**dict(student.named_parameters()), **dict(student.named_buffers())}
    pairs = {name: (_renamed(name, blocks, picks), tensor) for name, tensor in targets.items()}
    lacking = [name for name, (source, _) in pairs.items() if source not in sources]
    if lacking:
        raise NotUsableError(
            f"{len(lacking)} tensors of the student have no counterpart in its teacher: {', '.join(lacking[:3])}",
            hint="Give a student of your own: --student FOLDER",
        )
    narrowed: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for name, (source, tensor) in pairs.items():
        given = sources[source]
        if given.shape == tensor.shape:
            tensor.copy_(given)
        else:
            narrowed.setdefault(_block_of(name, blocks), {})[name] = (given, tensor)
    for tensors in narrowed.values():
        _copy_narrowed(tensors)


def layer_lists(model: nn.Module, count: int) -> list[str]:
    """Return the names of the outermost lists of so many layers."""
    return list(outermost_lists(model, lambda layers: len(layers) == count))


def _copy_narrowed(tensors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Copy the tensors of one layer whose neurons are fewer in the student: those with the largest weights."""
    sizes = {
        (given.shape[d], own.shape[d])
        for given, own in tensors.values()
        for d in range(own.dim())
        if given.dim() == own.dim() and given.shape[d] != own.shape[d]
    }
    many, few = min(sizes, default=(0, 0))
    folds = {(a, b): a // max(many, 1) for a, b in sizes}
    if not many or any(a != many * n or b != few * n for (a, b), n in folds.items()):
        raise NotUsableError(
            f"sizes of {', '.join(list(tensors)[:3])} depend on intermediate_size in a way that is not known",
            hint="Give a student of fewer layers: --student half",
        )
    score = torch.zeros(many)
    for given, own in tensors.values():
        dims = [d for d in range(own.dim()) if given.shape[d] != own.shape[d]]
        if len(dims) != 1:
            raise NotUsableError("a tensor has neurons in two dimensions", hint="Try --student half")
        rows = given.float().movedim(dims[0], 0).reshape(given.shape[dims[0]], -1).square().sum(1)
        score += rows.reshape(-1, many).sum(0).clamp_min(1e-30).log()
    kept = score.topk(few).indices.sort().values
    for given, own in tensors.values():
        dim = next(d for d in range(own.dim()) if given.shape[d] != own.shape[d])
        folded = given.shape[dim] // many
        index = torch.cat([kept + part * many for part in range(folded)])
        own.copy_(given.index_select(dim, index.to(given.device)))


def _renamed(name: str, blocks: Sequence[str], picks: Sequence[int]) -> str:
    for block in blocks:
        if match := re.match(rf"{re.escape(block)}\.(\d+)\.", name):
            return f"{block}.{picks[int(match[1])]}.{name[match.end() :]}"
    return name


def _block_of(name: str, blocks: Sequence[str]) -> str:
    for block in blocks:
        if match := re.match(rf"{re.escape(block)}\.\d+\.", name):
            return match[0]
    return ""


def _config(teacher: nn.Module) -> Any:
    config: Any = getattr(teacher, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise NotUsableError(
            f"a student is made of models of transformers, and the teacher is a {type(teacher).__name__}",
            hint="Name one of yours: --student FILE.py:FACTORY",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise NotUsableError(
            f"{type(teacher).__name__} has an encoder and a decoder; a student is made of one tower",
            hint="Give a student of your own: --student FOLDER",
        )
    return config


def _size(config: Any, field: str) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int):
        shown = "nothing" if value is None else repr(value)
        raise NotUsableError(f"expected {field} in the configuration of {config.model_type}, got {shown}")
    return value


def _shrink(config: Any, picks: Sequence[int], neurons: int | None) -> None:
    """Set the sizes in the configuration; its lists with an entry for each layer keep those of the layers taken."""
    total = _size(config, DEPTH)
    for field, value in config.to_dict().items():
        own = getattr(config, field, None)
        if isinstance(value, list) and isinstance(own, list | tuple) and len(own) == total:
            setattr(config, field, [own[i] for i in picks])
    setattr(config, DEPTH, len(picks))
    if neurons is not None:
        setattr(config, WIDTH, neurons)


@dataclass(frozen=True)
class StudentShape:
    """Size of a student beside its teacher: `layers` as a number or a share, `width` as a share of the neurons."""

    layers: int | float = 1.0
    width: float = 1.0

    def num_layers(self, teacher: int) -> int:
        """Return the student's layers of a teacher with so many; raise `UsageError` for more than it has."""
        count = self.layers if isinstance(self.layers, int) else max(1, round(self.layers * teacher))
        if count > teacher:
            raise UsageError(f"the teacher has {teacher} layers, not {count}", where="--student")
        return count

    def num_neurons(self, teacher: int) -> int:
        """Return the student's neurons, a multiple of 64 where that leaves one."""
        wanted = max(1, round(self.width * teacher))
        return min(teacher, max(MULTIPLE, wanted // MULTIPLE * MULTIPLE)) if wanted < teacher else teacher


def parse_shape(text: str) -> StudentShape | None:
    """Parse `half`, `layers:N`, `width:SHARE` or both; None for anything else, which names a folder or a module.

    Raises `UsageError` for a number out of range.
    """
    if text == "half":
        return StudentShape(layers=0.5)
    parts = dict(part.partition(":")[::2] for part in text.split(","))
    if not set(parts) <= {"layers", "width"} or not all(parts.values()):
        return None
    try:
        shape = StudentShape(int(parts.get("layers", 0)) or 1.0, float(parts.get("width", 1.0)))
    except ValueError:
        raise UsageError(f"expected {FORMS}, got {text!r}", where="--student") from None
    if not 0 < shape.width <= 1 or shape.layers < 1:
        raise UsageError(f"expected at least one layer and a share up to 1, got {text!r}", where="--student")
    return shape
