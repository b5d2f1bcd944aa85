"""`infer::linear_experts*` against one linear layer for each token and expert, and its exportable form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer.kernels import decompositions
from infer.kernels.ops.bitpack import pack
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.ops.define_op import c_functions

E, N, K = 5, 32, 64
SHAPES = [(0, 2), (1, 1), (1, 2), (3, 2), (17, 4)]  # rows of x, experts of each


def drawn(rows: int, top_k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, K, generator=generator)
    return x, torch.randint(
        0, E - 1, (rows * top_k,), generator=generator
    )  # the last expert is never asked for


def packed(kind: str) -> tuple[str, list[Tensor | None]]:
    generator = torch.Generator().manual_seed(1)
    if kind == "lut":
        codes = pack(torch.randint(0, 16, (E * N, K), generator=generator).to(torch.uint8), 4)
        table = torch.linspace(-1, 1, 16).repeat(E * N // 32, 1) * torch.arange(1, E * N // 32 + 1)[:, None]
        scale = torch.randint(1, 127, (E * N, K // 64), generator=generator).to(torch.int8)
        return "linear_codes", list(
            CodedWeight(codes, scale, table, super_scale=torch.rand(E * N, generator=generator))
        )
    codes = torch.randint(-127, 128, (E * N, K), generator=generator).to(torch.int8)
    return f"linear_{kind}", [codes, torch.rand(E * N, generator=generator)]


def rows_of(tensors: list[Tensor | None], expert: int) -> list[Tensor | None]:
    return [None if part is None else part.reshape(E, -1, *part.shape[1:])[expert] for part in tensors]


@pytest.mark.parametrize(("rows", "top_k"), SHAPES)
@pytest.mark.parametrize("kind", ["int8", "int8_weight", "lut"])
def test_packed_experts_equal_the_plain_layer_of_each_token(kind: str, rows: int, top_k: int) -> None:
    name, tensors = packed(kind)
    x, expert = drawn(rows, top_k)
    op = getattr(torch.ops.infer, name.replace("linear_", "linear_experts_")).default
    got = op(x, expert, *tensors, N, top_k)
    plain = getattr(torch.ops.infer, name)
    expected = [plain(x[i // top_k][None], *rows_of(tensors, int(e))) for i, e in enumerate(expert)]
    assert got.shape == (rows * top_k, N)
    torch.testing.assert_close(got, torch.cat([*expected, torch.empty(0, N)]), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(decompositions()[op](x, expert, *tensors, N, top_k), got, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("rows", "top_k"), SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_float_experts_equal_the_plain_layer_of_each_token(rows: int, top_k: int, transposed: bool) -> None:
    x, expert = drawn(rows, top_k)
    weight = torch.randn(E, N, K, generator=torch.Generator().manual_seed(2))
    weight[E - 1] = torch.nan  # what no token asks for is not read
    stored = weight.transpose(1, 2).contiguous() if transposed else weight
    got = torch.ops.infer.linear_experts(x, expert, stored, top_k, transposed)
    expected = [x[i // top_k][None] @ weight[e].t() for i, e in enumerate(expert.tolist())]
    torch.testing.assert_close(got, torch.cat([*expected, torch.empty(0, N)]), rtol=1e-4, atol=1e-3)
    plain = decompositions()[torch.ops.infer.linear_experts.default](x, expert, stored, top_k, transposed)
    torch.testing.assert_close(plain, got, rtol=1e-4, atol=1e-3)


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(IndexError, match=r"expert 7 is not in 0\.\.4"):
        torch.ops.infer.linear_experts(torch.zeros(1, K), torch.tensor([7]), torch.zeros(E, N, K), 1)


def test_compiled_graphs_keep_the_operator_of_experts() -> None:
    kept = decompositions().keys() - decompositions(sparse=False).keys()
    assert {op._opname for op in kept} == {
        "linear_experts",
        "linear_experts_int8",
        "linear_experts_int8_weight",
        "linear_experts_codes",
    }
    assert not kept & c_functions().keys()
