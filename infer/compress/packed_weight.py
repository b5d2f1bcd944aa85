"""Packed tensors of a weight, and the base class of the layers that hold one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .. import kernels  # noqa: F401  registers the operators


class Packed(nn.Module):
    """Packed tensors of one weight, as buffers; layers with tied weights hold the same `Packed`.

    `.to(dtype)` moves the scales but doesn't round them; it sets `dtype`, the type of what a layer gives. `format` is
    what stands after --quant.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        decode: Callable[..., Tensor],
        dtype: torch.dtype,
        format: str = "",
    ) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.dtype, self.decode = dtype, decode
        self.format = format

    def tensors(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._buffers.items() if buffer is not None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packed:
        before = self.tensors()
        self.dtype = fn(torch.zeros(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        for name, tensor in self.tensors().items():
            if tensor.dtype != before[name].dtype:
                self._buffers[name] = before[name].to(tensor.device)
        return self


class PackedLayer(nn.Module):
    """Base class of layers with a packed weight of `num_values` values."""

    def __init__(self, packed: Packed, num_weights: int) -> None:
        super().__init__()
        self.packed, self.num_weights = packed, num_weights

    @property
    def weight(self) -> Tensor:
        """Float weight, decoded at each access: for code that asks for its dtype or shape."""
        return self.packed.decode(self.packed.tensors()).to(self.packed.dtype)
