"""Rows of packed weights decoded tile by tile, against the formats' own decoding of the whole weight."""

from __future__ import annotations

import pytest
import torch

from infer import compress
from infer.compress.packed_weight import Packed
from infer.kernels.ops.bitpack import pack
from infer.kernels.ops.coded_weight import CodedWeight
from infer.plan import Plan
from infer.tune.memory.packed_rows import PackedRows, decode_lut_rows

FORMATS = (
    "nf4",
    "nf4:16",
    "int4",
    "fp4",
    "fp8",
    "int8",
    "int8:weight",
    "cluster:2",
    "cluster:3",
    "cluster",
    "cluster:6",
)


def packed_weight(quant: str, rows: int, columns: int) -> Packed:
    plan = Plan(source="model.pt", quant=quant)
    format = compress.get(plan)
    tensors = format.quantize(torch.randn(rows, columns), None, plan)
    return Packed(tensors, format.dequantize, torch.float32, quant)


@pytest.mark.parametrize("quant", FORMATS)
def test_tiles_of_rows_are_the_rows_of_the_whole_weight(quant: str) -> None:
    packed = packed_weight(quant, 100, 128)
    rows = PackedRows.of(packed)
    assert (rows.num_rows, rows.num_columns) == (100, 128)
    tiles = rows.tiles(size=40 * 128)
    assert tiles[0] == (0, 32)
    assert tiles[-1][1] == 100
    whole = packed.decode(packed.tensors())
    assert torch.equal(torch.cat([rows.rows(*tile) for tile in tiles]), whole)


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("rows", [1, 31, 33, 100])
@pytest.mark.parametrize("one_table", [True, False])
def test_fast_decoding_has_the_bits_of_the_slow_one(bits: int, rows: int, one_table: bool) -> None:
    codes = torch.randint(0, 2**bits, (rows, 192), dtype=torch.uint8)
    table = torch.randn(1 if one_table else -(-rows // 32), 2**bits)
    scale = torch.randint(-127, 128, (rows, 3), dtype=torch.int8)
    weight = CodedWeight(pack(codes, bits), scale, table, super_scale=torch.rand(rows))
    assert torch.equal(decode_lut_rows(weight), weight.decode())


def test_no_rows_decode_to_no_rows() -> None:
    packed = packed_weight("nf4", 64, 64)
    empty = {name: t if name == "table" else t[:0] for name, t in packed.tensors().items()}
    rows = PackedRows(empty, packed.decode, frozenset({"table"}))
    assert rows.tiles() == []
    assert decode_lut_rows(CodedWeight.of(empty)).shape == (0, 64)


def test_a_nan_scale_stays_in_its_own_row() -> None:
    packed = packed_weight("nf4", 64, 64)
    packed.super_scale[3] = torch.nan
    rows = PackedRows.of(packed).rows(0, 64, torch.bfloat16)
    assert rows.dtype == torch.bfloat16
    assert rows.isnan().any(1).nonzero().tolist() == [[3]]
