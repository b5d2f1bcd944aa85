"""Outputs of a float form, kept by the content of the inputs: several trials are compared with the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .rounded_originals import RoundedFile, RoundedModule


class RememberedOutputs:
    """A float form that keeps its outputs by the content of the inputs, up to `room` bytes of them.

    `rounded`: the same with its constants rounded elsewhere; see `input_rounding`.
    """

    def __init__(
        self, form: Any, rounded: Sequence[RoundedFile | RoundedModule] = (), room: int = 256 << 20
    ) -> None:
        self.form, self._rounded, self._room = form, rounded, room
        self._known: dict[bytes, dict[str, Tensor]] = {}

    @property
    def rounded(self) -> list[Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | None]]:
        return [form.run for form in self._rounded]

    def run(self, inputs: Mapping[str, Tensor], rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Run one batch, or return its cached outputs; `rows`: indices of axis 1 of the outputs, others are dropped."""
        key = _content(inputs) + repr(rows).encode()
        if key in self._known:
            return dict(self._known[key])
        outputs = self.form.run(inputs)
        if rows is not None:
            outputs = {name: value[:, list(rows)] for name, value in outputs.items()}
        size = sum(value.nbytes for value in outputs.values())
        if size <= self._room:
            self._room -= size
            self._known[key] = outputs
        return dict(outputs)

    def close(self) -> None:
        """Forget the outputs."""
        self._known.clear()
        for form in self._rounded:
            form.close()


def _content(inputs: Mapping[str, Tensor]) -> bytes:
    """Digest named tensors, and the precision of products that outputs depend on."""
    digest = hashlib.blake2b(torch.get_float32_matmul_precision().encode(), digest_size=16)
    for name, value in sorted(inputs.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.digest()
