"""Block types of GGUF: decoded, split and joined by one description, judged by the format's own package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from infer.compress.formats import keep
from infer.load.gguf.block_types import BLOCK_TYPES, BlockType
from infer.load.gguf.codebooks import points
from tests.support.random_blocks import moderate_blocks, random_blocks

QUANT = gguf.GGMLQuantizationType
CODED = [kind for kind in BLOCK_TYPES.values() if kind.holds_codes]
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")

each_type = pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)


def equal(found: Tensor, expected: Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


@each_type
def test_blocks_decode_bit_equal_to_the_formats_package(kind: BlockType) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (500, kind.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, QUANT(kind.number))
    found = kind.decode(torch.from_numpy(raw)).numpy()
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    assert same.all()


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
def test_numbers_and_sizes_of_types_are_those_of_the_package(kind: BlockType) -> None:
    assert QUANT(kind.number).name == kind.name
    assert gguf.GGML_QUANT_SIZES[QUANT(kind.number)] == (kind.block, kind.num_bytes)


@each_type
def test_joined_blocks_are_the_bytes_that_were_split(kind: BlockType) -> None:
    raw = random_blocks(kind, 64)
    assert torch.equal(kind.join(kind.split(raw)), raw)
    assert torch.equal(kind.join(kind.split(raw[:1])), raw[:1])


@each_type
def test_split_blocks_are_the_codes_that_were_joined(kind: BlockType) -> None:
    parts = kind.split(moderate_blocks(kind, 64))
    rng = torch.Generator().manual_seed(1)
    if kind.points is None:
        codes = torch.randint(3 if kind.name == "TQ1_0" else 256, parts["codes"].shape, generator=rng)
        parts["codes"] = codes.to(torch.uint8) % len(kind.values) if kind.values else codes.to(torch.int8)
    parts["scale"] = parts["scale"][torch.randperm(64, generator=rng)]
    again = kind.split(kind.join(parts))
    assert again.keys() == parts.keys()
    for name, part in parts.items():
        assert torch.equal(again[name], part), name
        assert again[name].dtype == part.dtype, name


@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_that_the_package_writes_are_joined_again(name: str) -> None:
    kind = BLOCK_TYPES[name]
    weights = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(weights, QUANT[name])).reshape(-1, kind.num_bytes)
    assert torch.equal(kind.join(kind.split(raw)), raw)


@each_type
def test_codes_in_rows_decode_bit_equal_to_their_blocks(kind: BlockType) -> None:
    raw = random_blocks(kind, 512)
    rows = len(raw) * kind.block // 512
    assert equal(keep.dequantize(kind.rows(raw, rows)), kind.decode(raw).reshape(rows, 512))


@pytest.mark.parametrize("kind", [kind for kind in CODED if kind.values and kind.points is None])
def test_a_join_cuts_codes_that_are_out_of_range(kind: BlockType) -> None:
    parts = kind.split(moderate_blocks(kind, 4))
    highest = 2 if kind.name == "TQ1_0" else len(kind.values) - 1
    for value, expected in ((-300, 0), (300, highest)):
        codes = torch.full(parts["codes"].shape, value, dtype=torch.int16)
        found = kind.split(kind.join({**parts, "codes": codes}))["codes"]
        assert set(found.unique().tolist()) == {expected}


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_codebooks_are_those_of_the_formats_package(name: str) -> None:
    book = getattr(gguf.quants, name)
    book.init_grid()
    values = np.array(book.grid_map, dtype=np.float32)
    found = points(name).numpy()
    assert np.array_equal(values[found], book.grid.reshape(-1, found.shape[1]))
