"""Model → graph: `torch.export` with named, typed, symbolically sized inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .spec import TensorSpec


@dataclass(frozen=True)
class Graph:
    """The captured program. Exactly one of `program` and `onnx` is set: an ONNX source stays ONNX."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    samples: Mapping[str, Tensor]  # real inputs, batch first; at least one row
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # symbolic size → (smallest, largest)
    program: torch.export.ExportedProgram | None = None
    onnx: Path | None = None
    task: str = "tensors"
