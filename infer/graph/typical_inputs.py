"""Inputs on which a model is timed: rows of typical lengths, without the padding that all of them have.

Samples are padded to the longest of all. A model that computes no padding would be timed on a few tokens, and its
rivals on the full length, which nobody who tokenizes those texts would give them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..rows import lie_first
from ..spec import TensorSpec

MASK = "attention_mask"  # [batch, length]: 0 where a row is padded
Sizes = Mapping[str, tuple[int, int]]


def typical_inputs(
    specs: Sequence[TensorSpec], samples: Mapping[str, Tensor], sizes: Sizes, batch: int
) -> dict[str, Tensor]:
    """Return a batch of samples: the first rows, or, of rows with an attention mask, rows of all lengths.

    Those are the quantiles of the rows' lengths, for one row the median. They are cut to the longest of them where the
    length is symbolic, but not below its smallest size. `sizes`: symbolic size → (smallest, largest).
    """
    mask = _mask(specs, samples)
    if mask is None:
        return {spec.name: spec.with_rows(samples[spec.name], batch) for spec in specs}
    lengths = row_lengths(mask)
    places = (torch.arange(batch) * 2 + 1) * len(lengths) // (2 * batch)
    rows = torch.argsort(lengths, stable=True)[places].sort().values.to(mask.device)
    return without_common_padding({spec.name: samples[spec.name][rows] for spec in specs}, specs, sizes)


def without_common_padding(
    inputs: Mapping[str, Tensor], specs: Sequence[TensorSpec], sizes: Sizes
) -> dict[str, Tensor]:
    """Cut inputs with an attention mask to their longest row, where the length is symbolic."""
    mask = _mask(specs, inputs)
    return dict(inputs) if mask is None else cut(inputs, specs, sizes, int(row_lengths(mask).max()))


def cut(
    inputs: Mapping[str, Tensor], specs: Sequence[TensorSpec], sizes: Sizes, length: int
) -> dict[str, Tensor]:
    """Cut the length of the attention mask to `length`, in all inputs that have it; a fixed length stays."""
    name = _length_symbol(specs)
    if name is None:
        return dict(inputs)
    length = max(length, sizes.get(name, (1, length))[0])
    return {
        spec.name: inputs[spec.name][
            tuple(slice(length) if size == name else slice(None) for size in spec.shape)
        ].contiguous()
        for spec in specs
    }


def timed_lengths(
    specs: Sequence[TensorSpec], samples: Mapping[str, Tensor], sizes: Sizes, batch: int
) -> Tensor | None:
    """Return the lengths int64 [batch] of the rows of `typical_inputs`; None where no attention mask tells them."""
    mask = _mask(specs, samples)
    return None if mask is None else row_lengths(typical_inputs(specs, samples, sizes, batch)[MASK])


def row_lengths(mask: Tensor) -> Tensor:
    """Return the place after the last 1 in each row of a mask [rows, length], at least 1: int64 [rows] on the CPU."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return ((mask != 0) * places).amax(dim=1).clamp(min=1).cpu()


def fixed_length(specs: Sequence[TensorSpec]) -> bool:
    """Return True when the mask's length is a number, so that inputs can't be cut."""
    return _length_symbol(specs) is None


def _length_symbol(specs: Sequence[TensorSpec]) -> str | None:
    size = next((spec.shape[1] for spec in specs if spec.name == MASK and len(spec.shape) == 2), None)
    return size if isinstance(size, str) else None


def _mask(specs: Sequence[TensorSpec], samples: Mapping[str, Tensor]) -> Tensor | None:
    """Return the attention mask [rows, length] of samples that are batched; None where there is none, or no length."""
    if not lie_first(specs) or not any(spec.name == MASK for spec in specs):
        return None
    mask = samples[MASK]
    return mask if mask.dim() == 2 and mask.numel() else None
