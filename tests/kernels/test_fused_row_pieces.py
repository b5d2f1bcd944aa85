"""Rows of a fused program that need nothing of each other: computed in pieces, with the bits of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram

from infer.kernels.cpu import build as compiling
from infer.kernels.passes import prepack
from tests.kernels import test_fused_encoder_layers as encoders
from tests.kernels import test_padding_rows as padded

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the exporter has many to give
    pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler"),
]
LENGTHS = [63, 1, 17, 61, 5, 50, 30]  # 227 rows: one piece for one thread, several for more
LONGEST_PIECE = 256


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def outputs(program: ExportedProgram, given: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    with threads(count), torch.no_grad():
        found = program.module()(*given)
    return found if isinstance(found, tuple) else (found,)


def assert_equal_bits(program: ExportedProgram, given: tuple[Tensor, ...]) -> None:
    expected = outputs(program, given, 1)
    for count in (2, 3, 7):
        for got, whole in zip(outputs(program, given, count), expected, strict=True):
            assert torch.equal(got, whole)


@pytest.mark.parametrize("mask", ["none", "keys", "expanded", "square", "float"])
def test_padded_batches_have_equal_bits_on_any_number_of_threads(mask: str) -> None:
    program = prepack.packed(encoders.exported(encoders.Encoder(mask)))
    for size in ((7, 36), (15, 17), (2, 128), (64, 4)):
        assert_equal_bits(program, encoders.inputs(*size))


def test_batches_without_padding_have_equal_bits_on_any_number_of_threads() -> None:
    program = prepack.packed(padded.exported(padded.Pooled("mean")))
    assert padded.padding_operand(program) >= 0
    for lengths in (LENGTHS, LENGTHS[::-1], [200, 3, 4, 5], [3, 4, 5, 200], [1] * 60 + [130]):
        assert_equal_bits(program, padded.inputs(lengths))


@pytest.mark.parametrize("quant", ["nf4", "int4", "int8:weight"])
def test_every_weight_format_has_equal_bits_in_pieces(quant: str) -> None:
    program = prepack.packed(encoders.exported(encoders.Encoder("keys", before=True), quant=quant))
    assert_equal_bits(program, encoders.inputs(7, 36))


def test_programs_without_attention_are_divided_by_rows() -> None:
    program = prepack.packed(encoders.exported(encoders.Branches()))
    for size in ((7, 36), (1, 251), (64, 3)):
        assert_equal_bits(program, encoders.inputs(*size))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_of_a_large_batch_have_the_bits_of_a_small_one(count: int) -> None:
    program = prepack.packed(encoders.exported(encoders.Encoder("keys")))
    x, real = encoders.inputs(40, 40)
    assert x.shape[0] * x.shape[1] > 3 * LONGEST_PIECE
    (together,) = outputs(program, (x, real), count)
    for row in (0, 7, 20, 39):
        (alone,) = outputs(program, (x[row : row + 1], real[row : row + 1]), 1)
        assert torch.equal(together[row], alone[0])


def test_nan_in_one_row_stays_in_its_row_of_a_large_batch() -> None:
    program = prepack.packed(encoders.exported(encoders.Encoder("keys")))
    x, real = encoders.inputs(12, 30)
    (clean,) = outputs(program, (x, real), 2)
    x[5, 0] = torch.nan
    (spoiled,) = outputs(program, (x, real), 2)
    others = torch.arange(12) != 5
    assert torch.equal(spoiled[others], clean[others])
    assert spoiled[5, 0].isnan().all()
