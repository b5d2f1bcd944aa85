"""Codes of GGUF's block types in the tensors of `kernels.ops.groupwise_codes`, without a change of any value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.ops.bitpack import pack
from .block_fields import bits, fields, half, nibbles
from .block_types import E2M1, IQ4, BlockType, six_bit_pairs, three_bit_scales
from .codebook_blocks import CODEBOOK_TYPES

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class CodeForm:
    """Split of codes from blocks uint8 [n, bytes]: uint8 below 2**bits of `table`, or int8 where there is none.

    `split` returns codes [n, weights of a block], scale [n, groups], and where present minimum, super_scale [n, 1] and
    super_minimum.
    """

    split: Callable[[Tensor], Parts]
    table: tuple[float, ...] = ()


def _q4_0(raw: Tensor) -> Parts:
    return {"codes": nibbles(raw[:, 2:]), "scale": half(raw[:, :2])}


def _q4_1(raw: Tensor) -> Parts:
    return {"codes": nibbles(raw[:, 4:]), "scale": half(raw[:, :2]), "minimum": half(raw[:, 2:4])}


def _q5_0(raw: Tensor) -> Parts:
    return {"codes": nibbles(raw[:, 6:]) | bits(raw[:, 2:6]) << 4, "scale": half(raw[:, :2])}


def _q5_1(raw: Tensor) -> Parts:
    codes = nibbles(raw[:, 8:]) | bits(raw[:, 4:8]) << 4
    halves = {"scale": half(raw[:, :2]), "minimum": half(raw[:, 2:4])}
    return {"codes": codes, **halves}


def _q8_0(raw: Tensor) -> Parts:
    return {"codes": raw[:, 2:].contiguous().view(torch.int8), "scale": half(raw[:, :2])}


def _q2_k(raw: Tensor) -> Parts:
    scales, codes = raw[:, :16], fields(raw[:, 16:80], (0, 2, 4, 6), 3, 32)
    return {
        **{"codes": codes.flatten(1), "scale": (scales & 15).to(torch.int8)},
        **{"minimum": (scales >> 4).to(torch.int8), "super_scale": half(raw[:, 80:82])},
        "super_minimum": -half(raw[:, 82:84]),
    }


def _q3_k(raw: Tensor) -> Parts:
    high, low = fields(raw[:, :32], tuple(range(8)), 1, 32), fields(raw[:, 32:96], (0, 2, 4, 6), 3, 32)
    scales = three_bit_scales(raw[:, 96:108]).to(torch.int8) - 32
    return {"codes": (low | high << 2).flatten(1), "scale": scales, "super_scale": half(raw[:, 108:110])}


def _with_minimum(raw: Tensor, codes: Tensor) -> Parts:
    scales, minima = six_bit_pairs(raw[:, 4:16])
    return {
        **{"codes": codes.flatten(1), "scale": scales.to(torch.int8), "minimum": minima.to(torch.int8)},
        **{"super_scale": half(raw[:, :2]), "super_minimum": -half(raw[:, 2:4])},
    }


def _q4_k(raw: Tensor) -> Parts:
    return _with_minimum(raw, fields(raw[:, 16:], (0, 4), 15, 32))


def _q5_k(raw: Tensor) -> Parts:
    high = fields(raw[:, 16:48], tuple(range(8)), 1, 32)
    return _with_minimum(raw, fields(raw[:, 48:], (0, 4), 15, 32) | high << 4)


def _q6_k(raw: Tensor) -> Parts:
    low, high = fields(raw[:, :128], (0, 4), 15, 64), fields(raw[:, 128:192], (0, 2, 4, 6), 3, 32)
    codes = low.reshape(-1, 8, 32) | high << 4
    scales = raw[:, 192:208].contiguous().view(torch.int8)
    return {"codes": codes.flatten(1), "scale": scales, "super_scale": half(raw[:, 208:])}


def _iq4_nl(raw: Tensor) -> Parts:
    return {"codes": nibbles(raw[:, 2:]), "scale": half(raw[:, :2])}


def _iq4_xs(raw: Tensor) -> Parts:
    high = fields(raw[:, 2:4], (0, 2, 4, 6), 3, 1).reshape(-1, 8)
    low = torch.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], 2).flatten(1)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = fields(raw[:, 8:], (0, 4), 15, 16).flatten(1)
    return {"codes": codes, "scale": scales, "super_scale": half(raw[:, :2])}


def _mxfp4(raw: Tensor) -> Parts:
    scale = torch.ldexp(torch.ones(len(raw), 1), raw[:, :1].int() - 128)
    return {"codes": nibbles(raw[:, 1:]), "scale": scale.to(torch.bfloat16)}


_CENTERED = tuple(range(-8, 8))
_UNSIGNED = tuple(range(16))
FORMS = {
    "Q4_0": CodeForm(_q4_0, _CENTERED),
    "Q4_1": CodeForm(_q4_1, _UNSIGNED),
    "Q5_0": CodeForm(_q5_0, tuple(range(-16, 16))),
    "Q5_1": CodeForm(_q5_1, tuple(range(32))),
    "Q8_0": CodeForm(_q8_0),
    "Q2_K": CodeForm(_q2_k, (0, 1, 2, 3)),
    "Q3_K": CodeForm(_q3_k, tuple(range(-4, 4))),
    "Q4_K": CodeForm(_q4_k, _UNSIGNED),
    "Q5_K": CodeForm(_q5_k, tuple(range(32))),
    "Q6_K": CodeForm(_q6_k, tuple(range(-32, 32))),
    "IQ4_NL": CodeForm(_iq4_nl, IQ4),
    "IQ4_XS": CodeForm(_iq4_xs, IQ4),
    "MXFP4": CodeForm(_mxfp4, E2M1),
    **{name: CodeForm(one.split, one.table) for name, one in CODEBOOK_TYPES.items()},
}


def split_blocks(kind: BlockType, raw: Tensor, rows: int) -> Parts:
    """Return the tensors of `rows` rows, whose blocks are `raw` uint8 [rows * blocks, bytes]."""
    form = FORMS[kind.name]
    parts = {name: value.reshape(rows, -1) for name, value in form.split(raw).items()}
    if not form.table:
        return parts
    width = len(form.table).bit_length() - 1
    table = torch.tensor([form.table], dtype=torch.float32)
    return {**parts, "codes": pack(parts["codes"].contiguous(), width), "table": table}
