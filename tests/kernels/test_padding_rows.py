"""Fused programs of encoders compute no padding where nothing reads it, and the rows of real tokens stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from infer.compress import quantize_model
from infer.kernels.cpu import build as compiling
from infer.kernels.ops.fused_program import HEADER
from infer.kernels.passes import prepack
from infer.kernels.passes.fused_program import padding, partition
from infer.plan import Plan
from tests.kernels.test_fused_encoder_layers import WIDTH, Layer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the exporter has many to give
    pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler"),
]
ROWS, TOKENS = Dim("rows", min=1, max=64), Dim("tokens", min=1, max=600)
PADDING = HEADER - 2  # the place of the operand in a program


class Pooled(nn.Module):
    """Two layers of an encoder whose hidden states are read in one of several ways."""

    def __init__(self, read: str, *, mask: str = "keys") -> None:
        super().__init__()
        self.read, self.mask = read, mask
        self.layers = nn.ModuleList([Layer(before=False) for _ in range(2)])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Embed x float32 [rows, tokens, width], real int64 [rows, tokens] -> float32 [rows, width]."""
        mask = real.bool()[:, None, None, :]
        if self.mask == "rows":
            mask = mask.expand(-1, -1, real.shape[1], -1) & torch.ones(
                1, 1, real.shape[1], 1, dtype=torch.bool
            )
        for layer in self.layers:
            x = layer(x, mask)
        weight = real.unsqueeze(-1).float()
        if self.read == "mean":
            return (x * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        if self.read == "first":
            return x[:, 0]
        if self.read == "maximum":
            return x.masked_fill((real == 0).unsqueeze(-1), -1e4).amax(1)
        if self.read == "gather":
            at = real.argmax(dim=1)[:, None, None].expand(-1, 1, x.shape[-1])
            return x.gather(1, at).squeeze(1)
        if self.read == "last":
            return x[:, -1]
        if self.read == "other weight":
            return (x * (1 - weight)).sum(1)
        return x.mean(1) if self.read == "all" else x


def exported(model: nn.Module) -> ExportedProgram:
    quantize_model(model.eval(), Plan(source="test", quant="int8"))
    sizes: Any = ({0: ROWS, 1: TOKENS}, {0: ROWS, 1: TOKENS})
    with torch.no_grad():
        return torch.export.export(model, inputs([5, 17, 9]), dynamic_shapes=sizes, strict=False)


def inputs(lengths: list[int], tokens: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = tokens or max(lengths)
    real = (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()
    return torch.randn(len(lengths), tokens, WIDTH, generator=generator), real


def padding_operand(program: ExportedProgram) -> int:
    (call,) = [node for node in program.graph.nodes if "infer.chain" in str(node.target)]
    return int(call.args[1][PADDING])


def run(program: ExportedProgram, given: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        result: Tensor = program.module()(*given)
    return result


def whole(step: ExportedProgram, monkeypatch: pytest.MonkeyPatch) -> ExportedProgram:
    """Return the fused program that computes all rows."""
    with monkeypatch.context() as patch:
        patch.setattr(partition, "padding_of", lambda *_: None)
        program = prepack.packed(step)
    assert padding_operand(program) == -1
    return program


@pytest.mark.parametrize("mask", ["keys", "rows"])
@pytest.mark.parametrize("read", ["mean", "first", "maximum", "gather"])
def test_rows_of_padding_are_left_out_where_nothing_reads_them(
    read: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = exported(Pooled(read, mask=mask))
    packed, padded = prepack.packed(step), whole(step, monkeypatch)
    assert padding_operand(packed) >= 0
    for lengths in ([1], [1, 40], [63, 1, 17, 100], [130, 2, 2, 2, 300, 7], [5, 5], [16] * 15 + [15]):
        given = inputs(lengths, max(lengths) + 3)
        torch.testing.assert_close(run(packed, given), run(padded, given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("read", ["last", "other weight", "all", "hidden"])
def test_rows_of_padding_are_computed_where_something_reads_them(read: str) -> None:
    assert padding_operand(prepack.packed(exported(Pooled(read)))) == -1


def test_padding_that_is_not_at_the_end_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = exported(Pooled("mean"))
    packed, padded = prepack.packed(step), whole(step, monkeypatch)
    x, real = inputs([9, 30, 12])
    for other in (real.flip(1), real * (torch.arange(30) % 3 != 1), torch.ones_like(real), real * 7):
        torch.testing.assert_close(run(packed, (x, other)), run(padded, (x, other)), rtol=1e-6, atol=1e-6)
    none = real.clone()
    none[1] = 0  # a row without tokens attends to nothing
    torch.testing.assert_close(run(packed, (x, none)), run(padded, (x, none)), rtol=1e-6, atol=1e-6)


def test_values_in_padding_do_not_affect_outputs() -> None:
    program = prepack.packed(exported(Pooled("mean")))
    x, real = inputs([3, 20, 8])
    spoiled = torch.where(real.bool().unsqueeze(-1), x, torch.nan)
    torch.testing.assert_close(run(program, (spoiled, real)), run(program, (x, real)), rtol=0, atol=0)


def test_a_row_has_the_same_bits_in_every_packed_batch() -> None:
    program = prepack.packed(exported(Pooled("mean")))
    x, real = inputs([70, 20, 8, 33])
    together = run(program, (x, real))
    for row in range(4):
        tokens = int(real[row].sum())
        alone = run(
            program, (x[row : row + 1, :tokens].contiguous(), real[row : row + 1, :tokens].contiguous())
        )
        torch.testing.assert_close(alone[0], together[row], rtol=1e-6, atol=1e-6)


def test_programs_estimate_where_attention_costs_as_much_as_layers() -> None:
    packed = prepack.packed(exported(Pooled("mean")))
    layers = 4 * WIDTH * WIDTH + 2 * WIDTH * 192
    assert padding.attention_length(packed) == round(layers / (padding.ATTENTION_COST * 2 * WIDTH))
    assert padding.attention_length(prepack.packed(exported(Pooled("all")))) is None
    assert padding.attention_length(prepack.packed(exported(Pooled("mean")), fuse_layers=False)) is None
