"""Checkpoints under the parameter names of a transformers model, by transformers' own conversion mapping.

From version 5 on transformers stores modules under other names and shapes than the Hub's checkpoints have (experts
merged to 3-D tensors, gate and up projections concatenated, prefixes renamed) and converts at load. The same mapping
is applied here, first to meta tensors, which gives names and shapes, then to the data of one target at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SourceError
from ...library_errors import first_sentence
from ...weights import Checkpoint, StoredCodes, Weight
from .stacked_codes import stack_codes

# Operations that act on each index of dimension 0 alone when their own dimensions are others.
_ROW_WISE = {"Concatenate", "Transpose", "Interleave"}
MAX_CACHED = 1 << 30


class ModelShapes:
    """Configuration and parameter shapes of a model, as conversions read them, without weights or modules."""

    def __init__(self, model: nn.Module) -> None:
        self.config = getattr(model, "config", None)
        self._tensors = {name: value.to("meta") for name, value in model.state_dict().items()}

    def get_parameter(self, name: str) -> Tensor:
        return self._tensors[name]

    get_parameter_or_buffer = get_parameter


@dataclass
class Conversion:
    """Operation of transformers (`transform`) from checkpoint tensors to the parameters `targets`.

    `sources` holds, for each pattern of the operation, the checkpoint tensors in the order of the conversion.
    """

    first: str
    transform: Any
    sources: dict[str, list[str]]
    targets: dict[str, Tensor]
    stacked: bool

    def run(
        self, model: ModelShapes, read: Callable[[str], Tensor], rows: slice = slice(None)
    ) -> dict[str, Tensor]:
        """Convert what `read` gives; `rows` are those of the targets when `stacked`."""
        transform = copy.deepcopy(self.transform)
        for pattern, names in self.sources.items():
            transform.collected_tensors[pattern] = [read(name) for name in names[rows]]
        made = transform.convert(self.first, model=model, config=model.config)
        made = made[0] if isinstance(made, tuple) else made  # 5.0 gives errors along
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Converter:
    """Weights that conversions make of a checkpoint's.

    Stacks of experts are read expert by expert; other conversions hold one converted group in memory, and the last one
    of at most `MAX_CACHED` bytes is kept.
    """

    def __init__(self, checkpoint: Checkpoint, model: ModelShapes) -> None:
        self._checkpoint, self._model = checkpoint, model
        self._cached: tuple[Conversion, dict[str, Tensor]] | None = None

    def weight(self, group: Conversion, name: str) -> Weight:
        """Return the target `name` of a conversion."""
        meta = group.targets[name]

        def rows(start: int, stop: int) -> Tensor:
            if group.stacked:
                return group.run(self._model, self._read, slice(start, stop))[name].contiguous()
            whole = self._whole(group)[name]
            return (whole[start:stop] if whole.ndim else whole).clone(memory_format=torch.contiguous_format)

        return Weight(meta.dtype, tuple(meta.shape), rows, codes=lambda: self._codes(group, name))

    def _read(self, name: str) -> Tensor:
        return self._checkpoint[name].read()

    def _codes(self, group: Conversion, name: str) -> StoredCodes | None:
        """Return the codes of a stack of experts row by row as the conversion places them."""
        found = [self._checkpoint[source].codes() for names in group.sources.values() for source in names]
        if all(codes is None for codes in found):
            return None
        if not group.stacked or None in found:
            return StoredCodes.without("codes", "transformers joins it with other tensors at load")
        size = len(found) // len(group.sources)
        experts = [[codes for codes in found[e::size] if codes is not None] for e in range(size)]

        def convert(rows: list[Tensor]) -> Tensor:
            values = dict(zip((names[0] for names in group.sources.values()), rows, strict=True))
            return group.run(self._model, values.__getitem__, slice(0, 1))[name][0]

        return stack_codes(experts, convert)

    def _whole(self, group: Conversion) -> dict[str, Tensor]:
        """Convert all tensors of a group, and cache them."""
        cached = self._cached
        if cached is None or cached[0] is not group:
            self._cached = None
            cached = (group, group.run(self._model, self._read))
            if sum(value.nbytes for value in cached[1].values()) <= MAX_CACHED:
                self._cached = cached
        return cached[1]


def convert_names(checkpoint: Checkpoint, model: nn.Module, where: str = "") -> Checkpoint:
    """Present a checkpoint by the names of `model`'s state dict.

    Names that no rule maps to a parameter are kept. Raises `SourceError` where a conversion can't take the tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted, prefix = model.state_dict(keep_vars=True), getattr(model, "base_model_prefix", "")
    renamed: dict[str, str] = {}
    groups: dict[str, Conversion] = {}
    for name in sorted(checkpoint, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if new not in wanted and name in wanted:
            new, pattern = name, None
        if new not in wanted:
            renamed.setdefault(name, name)
        elif pattern is None:
            _place(renamed, new, name, where)
        else:
            group = groups.setdefault(new, Conversion(new, by_pattern[pattern], {}, {}, False))
            group.sources.setdefault(pattern, []).append(name)
    shapes = ModelShapes(model)
    for group in groups.values():
        _describe(group, shapes, checkpoint, where)
    converter = Converter(checkpoint, shapes)
    return {new: checkpoint[name] for new, name in renamed.items()} | {
        name: converter.weight(group, name) for group in groups.values() for name in group.targets
    }


def _place(renamed: dict[str, str], new: str, name: str, where: str) -> None:
    """Note that parameter `new` is tensor `name`; a tensor of the parameter's own name takes precedence."""
    held = renamed.get(new, name)
    if name != new and held == new:
        renamed[name] = name
        return
    if name not in (new, held):
        raise SourceError(
            f"the checkpoint holds {new!r} twice, as {held!r} and {name!r}",
            where=where,
            hint="Keep one of the two: they may differ",
        )
    if held not in (new, name):
        renamed[held] = held
    renamed[new] = name


def _describe(group: Conversion, model: ModelShapes, checkpoint: Checkpoint, where: str) -> None:
    """Set `targets` and `stacked`, from the conversion of meta tensors of the checkpoint's shapes and dtypes."""

    def meta(name: str) -> Tensor:
        return torch.empty(checkpoint[name].shape, dtype=checkpoint[name].dtype, device="meta")

    try:
        group.targets = group.run(model, meta)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        held = [f"{n} {list(checkpoint[n].shape)}" for names in group.sources.values() for n in names[:2]]
        raise SourceError(
            f"transformers can't convert the checkpoint to {group.first!r} ({first_sentence(error)}): "
            f"{', '.join(held)}",
            where=where,
            hint="Tensors are missing, or of another model: download the folder again, whole",
        ) from error
    group.stacked = _is_stacked(group)


def _is_stacked(group: Conversion) -> bool:
    """Return true if row i of the only target comes from the i-th tensor of each pattern alone."""
    operations = list(getattr(group.transform, "operations", []))
    counts = {len(names) for names in group.sources.values()}
    return (
        len(group.targets) == 1
        and len(counts) == 1
        and bool(operations)
        and type(operations[0]).__name__ == "MergeModulelist"
        and operations[0].dim == 0
        and next(iter(group.targets.values())).shape[:1] == torch.Size(counts)
        and all(_keeps_rows(operation) for operation in operations[1:])
    )


def _keeps_rows(operation: Any) -> bool:
    dims = [getattr(operation, name) for name in ("dim", "dim0", "dim1") if hasattr(operation, name)]
    compares_shapes = getattr(operation, "check_dims", False)
    return type(operation).__name__ in _ROW_WISE and min(dims) > 0 and not compares_shapes
