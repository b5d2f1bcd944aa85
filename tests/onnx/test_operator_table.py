"""Operators that torch's ONNX exporter has no right form for."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from infer.onnx.operator_table import mended


class Remainders(nn.Module):
    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.remainder(x, 2.5), i % 3, torch.arange(2 * x.shape[0]) % x.shape[0]


def test_a_remainder_by_a_symbolic_size_has_the_sign_of_the_divisor(tmp_path: Path) -> None:
    x, i = 9 * torch.randn(5, 3), torch.arange(-7, 8)
    program = torch.export.export(
        Remainders(), (x, i), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)}, None)
    )
    with warnings.catch_warnings(action="ignore"):  # deprecations inside torch
        exported = torch.onnx.export(program, (), custom_translation_table=mended(), verbose=False)
    assert exported is not None
    exported.save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    x = 9 * torch.randn(7, 3)
    names = [value.name for value in session.get_inputs()]
    got = session.run(None, dict(zip(names, (x.numpy(), i.numpy()), strict=True)))
    for one, other in zip(got, Remainders()(x, i), strict=True):
        np.testing.assert_array_equal(one, other.numpy())
