"""Baseline loading: read the whole checkpoint into memory, then copy it into an allocated model."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..weights import FiniteReader, WeightReader, check_finite
from ..weights.nested_state_dict import unwrap
from ..weights.safetensors_reader import SafetensorsReader
from ..weights.torch_reader import TorchReader, load_safely


class FullReadLoader:
    """Weights read by one `torch.load` or `load_file`; a call returns a copy, as `load_state_dict` makes."""

    def __init__(self, reader: WeightReader) -> None:
        inner = reader.inner if isinstance(reader, FiniteReader) else reader
        self.tensors: dict[str, Tensor] = {}
        if isinstance(inner, TorchReader):
            self.tensors, _, _ = unwrap(load_safely(inner.path), str(inner.path), inner.key)
        elif isinstance(inner, SafetensorsReader):
            for path in inner.paths:
                self.tensors |= load_file(path)
        else:
            self.tensors = {name: inner.read(name) for name in inner.names()}

    def __call__(self, name: str, dtype: torch.dtype) -> Tensor:
        check_finite(name, self.tensors[name])
        out = torch.empty(self.tensors[name].shape, dtype=dtype)
        return out.copy_(self.tensors[name].detach())
