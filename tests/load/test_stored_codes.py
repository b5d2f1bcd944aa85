"""Codes of quantized sources: carried over, they stand for the weights that the source's own reader gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infer.compress.formats import keep
from infer.load.gguf.block_codes import FORMS, split_blocks
from infer.load.gguf.block_types import BLOCK_TYPES
from tests.load.test_quantized_weights import CASES, opened

FLOAT8 = [case for case in CASES if "float8" in case]


@pytest.mark.parametrize(
    "kind", [kind for kind in BLOCK_TYPES.values() if kind.decode], ids=lambda kind: kind.name
)
def test_codes_of_every_gguf_type_decode_bit_equal(kind) -> None:  # type: ignore[no-untyped-def]
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (512, kind.num_bytes), dtype=np.uint8))
    rows = len(raw) * kind.block // 512
    expected = kind.decode(raw).reshape(rows, 512)
    found = keep.dequantize(split_blocks(kind, raw, rows))
    assert bool(((found == expected) | (found.isnan() & expected.isnan())).all())
    assert kind.name in FORMS


@pytest.mark.parametrize("case", [case for case in CASES if case not in FLOAT8])
def test_codes_of_every_method_decode_bit_equal(case: str) -> None:
    parts, weight, settings = CASES[case]((64, 128), torch.Generator().manual_seed(0))
    codes = opened(parts, settings).codes("layer.weight")
    assert codes is not None
    assert codes.refused == ""
    assert codes.shape == (64, 128)
    assert codes.dtype == weight.dtype
    for start, stop in ((0, 64), (5, 24)):
        tensors = codes.rows(start, stop)
        tensors |= {} if codes.order is None else {"order": codes.order}
        found = keep.dequantize(tensors).to(weight.dtype)
        exact = (
            0 if case != "int8 rows" else 1e-6
        )  # bitsandbytes multiplies by two numbers, each time rounded
        torch.testing.assert_close(found, weight[start:stop], rtol=exact, atol=0)


@pytest.mark.parametrize("case", FLOAT8)
def test_float8_can_not_be_carried_over_and_says_so(case: str) -> None:
    parts, _, settings = CASES[case]((64, 128), torch.Generator().manual_seed(0))
    codes = opened(parts, settings).codes("layer.weight")
    assert codes is not None
    assert "no packed form" in codes.refused
