"""Fast check of inputs that fit the specs, in one or two microseconds and without messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..spec import TensorSpec

MOST_SHAPES = 256  # that are remembered as fitting


class FastInputs:
    """Inputs of one batch that fit `specs` and `sizes` (symbolic size → smallest, largest).

    `as_arrays`: the runner takes arrays.
    """

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        sizes: Mapping[str, tuple[int, int]],
        multiples: Mapping[str, int] | None = None,
        *,
        as_arrays: bool = True,
    ) -> None:
        self._multiples = dict(multiples or {})
        self._count = len(specs)
        self._kinds = [(spec.name, spec.torch_dtype, _numpy(spec.torch_dtype)) for spec in specs]
        self._arrays_only = [(name, dtype, kind) for name, dtype, kind in self._kinds if kind is not None]
        self._are_arrays = as_arrays and len(self._arrays_only) == self._count
        self._shapes = [spec.shape for spec in specs]
        self._sizes = dict(sizes)
        self._known: set[tuple[Sequence[int], ...]] = set()

    def arrays(self, named: Mapping[str, Any]) -> tuple[Mapping[str, np.ndarray], bool] | None:
        """Return the inputs as dense arrays, plain tensors on the CPU as views, and true where there is a tensor; None
        for any other, and where one does not fit.
        """
        if not self._are_arrays or len(named) != self._count:
            return None
        shapes = []
        for name, _, kind in self._arrays_only:
            value = named.get(name)
            if type(value) is not np.ndarray or value.dtype is not kind or not value.flags.c_contiguous:
                return self._views(named)
            shapes.append(value.shape)
        key = tuple(shapes)
        return (named, False) if key in self._known or self._fit(key) else None

    def _views(self, named: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], bool] | None:
        """Return the same as `arrays` for tensors and arrays of any layout."""
        found, shapes, as_torch = {}, [], False
        for name, dtype, kind in self._arrays_only:
            value = named.get(name)
            if type(value) is Tensor:
                if value.dtype is not dtype or not value.is_cpu or value.requires_grad:
                    return None
                value, as_torch = value.numpy(), True
            elif type(value) is not np.ndarray or value.dtype != kind:
                return None
            shapes.append(value.shape)
            found[name] = value if value.flags.c_contiguous else np.ascontiguousarray(value)
        key = tuple(shapes)
        return (found, as_torch) if key in self._known or self._fit(key) else None

    def tensors(self, named: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Return the inputs as tensors, in the order of the specs; None for any that don't fit."""
        if len(named) != self._count:
            return None
        found: dict[str, Tensor] = {}
        shapes = []
        for name, dtype, kind in self._kinds:
            value = named.get(name)
            if isinstance(value, Tensor):
                fits = value.dtype is dtype
            elif isinstance(value, np.ndarray):
                fits = kind is not None and value.dtype == kind
            else:
                return None
            if not fits:
                return None
            shapes.append(value.shape)
            found[name] = (
                value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
            )
        key = tuple(shapes)
        return found if key in self._known or self._fit(key) else None

    def _fit(self, shapes: tuple[Sequence[int], ...]) -> bool:
        """Return whether shapes fit the specs; those that do are remembered."""
        fits = self._compare(shapes)
        if fits and len(self._known) < MOST_SHAPES:
            self._known.add(shapes)
        return fits

    def _compare(self, shapes: tuple[Sequence[int], ...]) -> bool:
        bound: dict[str, int] = {}
        for have, want in zip(shapes, self._shapes, strict=True):
            if len(have) != len(want):
                return False
            for length, size in zip(have, want, strict=True):
                if length != (bound.setdefault(size, length) if isinstance(size, str) else size):
                    return False
        limits = ((self._sizes.get(size), length) for size, length in bound.items())
        fit = all(limit is None or limit[0] <= length <= limit[1] for limit, length in limits)
        return fit and not any(bound.get(size, 0) % step for size, step in self._multiples.items())


def _numpy(dtype: torch.dtype) -> np.dtype | None:
    """Return numpy's type, or None for bfloat16."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None
