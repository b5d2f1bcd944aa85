"""Attention with masks in ONNX Runtime is that of torch, for queries that see no key as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from backends.ort.layers import rewriter  # noqa: E402
from infer.onnx import export as exporter  # noqa: E402
from infer.onnx import ort_session  # noqa: E402
from tests.support.onnx_models import graph  # noqa: E402

TEXT = "x=float32[batch,time,32];mask=bool[batch,time]"


class LocalAttention(nn.Module):
    """Attention to keys at most two tokens away that are no padding; `form` is the type of its mask."""

    def __init__(self, form: str, heads: int = 4, key_heads: int = 4, scale: float | None = None) -> None:
        super().__init__()
        self.form, self.heads, self.key_heads, self.scale = form, heads, key_heads, scale
        self.keys = nn.Linear(32, 16 * key_heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        near = (places[:, None] - places).abs() <= 2
        seen = near & mask[:, None, None, :]
        if self.form == "float":
            seen = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -torch.inf)
        query = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.keys(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2).chunk(2, -1)
        grouped = self.heads != self.key_heads
        out = F.scaled_dot_product_attention(query, key, value, seen, scale=self.scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "model",
    [
        LocalAttention("bool"),
        LocalAttention("float"),
        LocalAttention("bool", key_heads=2, scale=0.3),
    ],
    ids=["bool", "float", "groups"],
)
def test_queries_without_keys_get_zeros_in_onnx_runtime(model: LocalAttention, tmp_path: Path) -> None:
    torch.manual_seed(0)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 3:] = False  # tokens from 5 on see nothing
    x = torch.randn(2, 9, 32)
    exported = graph(model.eval(), TEXT, x, mask=mask)
    exporter.export(exported, tmp_path / "model.onnx", rewriter("ort-u8u8"))
    session = ort_session.open_session(tmp_path / "model.onnx", "cpu")
    (got,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
    expected = model(x, mask).detach()
    assert float(expected[1, 5:].abs().max()) == 0
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-5, atol=1e-6)
