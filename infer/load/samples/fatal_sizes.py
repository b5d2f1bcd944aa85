"""Sizes for which a runtime does not raise an error but ends its whole process, found by trying in another process.

Such a size would end the program of whoever uses the artifact, or a worker of a server, so that it is refused instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...spec import BATCH, UNBOUNDED
from ..loaded_model import LoadedModel
from .batch_axes import LIMIT_SECONDS, Make, Runs

Shapes = Mapping[str, Sequence[int]]
SMALL = (1, 64)  # sizes that are tried
ROWS = 3  # with one row a size that is fatal may be an error


@dataclass(frozen=True)
class InputTrials:
    """A model to be tried on inputs: `runs` them, and `died_of` lists the shapes of those that ended its process."""

    runs: Runs
    died_of: Sequence[Shapes]
    close: Callable[[], object]


def refuse(
    loaded: LoadedModel, samples: Mapping[str, Tensor], trials: InputTrials, make: Make
) -> LoadedModel:
    """Return the model with a lower bound for each size that, smaller than in the samples, ends the process.

    The bound lies between both, by halves; where that takes long, it stays on the side that is known to run.
    """
    ran = _sizes_of(loaded, {name: value.shape for name, value in samples.items()})
    began = time.monotonic()

    def runs_at(name: str, size: int) -> bool:
        rows = min(ROWS, loaded.sizes.get(BATCH, (1, ROWS))[1])
        return trials.runs(make(loaded.inputs, {**ran, BATCH: rows, name: size})) is not None

    bounds: dict[str, tuple[int, int]] = {}
    for name, least in ran.items():
        if name == BATCH:
            continue
        low, high = loaded.sizes.get(name, (1, UNBOUNDED))
        for size in SMALL:
            if low <= size < least and time.monotonic() - began < LIMIT_SECONDS:
                runs_at(name, size)  # which adds to `died_of`
        died = [_sizes_of(loaded, shapes)[name] for shapes in trials.died_of]
        fatal = max((size for size in died if size < least), default=least)
        while least - fatal > 1 and time.monotonic() - began < LIMIT_SECONDS:
            middle = (fatal + least) // 2
            fatal, least = (fatal, middle) if runs_at(name, middle) else (middle, least)
        if fatal < least:
            bounds[name] = (least, max(high, least))
    if not bounds:
        return loaded
    each = ", ".join(f"{name} from {low}" for name, (low, _) in bounds.items())
    limited = replace(loaded, sizes={**loaded.sizes, **bounds})
    return limited.limited(
        f"sizes: {each} (found by trying: smaller ones end the whole process of its runtime)"
    )


def _sizes_of(loaded: LoadedModel, shapes: Shapes) -> dict[str, int]:
    """Return the symbolic sizes of inputs of these shapes."""
    return {
        size: have
        for spec in loaded.inputs
        for size, have in zip(spec.shape, shapes[spec.name], strict=True)
        if isinstance(size, str)
    }
