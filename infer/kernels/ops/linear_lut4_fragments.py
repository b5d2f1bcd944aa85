"""`linear_codes` of 4-bit codes in the order of tensor-core fragments, for GPUs.

One word of 32 bits holds the eight codes that one lane needs for one m16n8k16 product, so that a kernel decodes in
registers what it has loaded and moves nothing between lanes (the idea of Marlin, Frantar et al. 2024). Rows are padded
to blocks of `BLOCK`, columns to `UNIT`; several layers with the same input follow each other, each in whole blocks.

    codes      int32   [N / 16, K / 64, 128]   tile of 16 rows, group of 64 columns, word = lane * 4 + slice of 16
    table      float32 [N / 32, 16]
    planes     int32   [N / 32, 18]            the table's bytes and the offset of a uniform one: bfloat16, float16
    scale      int8    [K / 256, N, 4]         four groups of 64 columns in a word; 0 where columns are padding
    row_scale  float32 [N]

Of the layout `groupwise` with groups of a multiple of 64 columns and no super-scales:

    scale      float   [K / group, N]          float32, float16 or bfloat16, as the checkpoint has it
    row_scale  float32 [N]                     127
    minimum    float   [K / group, N]          added to each weight; or None

Lane 4 g + t of a tile has rows g and g + 8, of each slice of 16 columns those at 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
Code j of its word is row g + 8 (j / 2 % 2), column 2 t + j % 2 + 8 (j / 4); where it lies in the word: `places`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .bitpack import GROUP, LEVELS, TABLE_ROWS, unpack
from .coded_weight import CodedWeight
from .define_op import define

BLOCK = 128  # rows: the tallest tile of a kernel
UNIT = 256  # columns whose scales are one word
_ROWS_AT_ONCE = 4096
_ENTRIES = 16
# An integer below 128 or 1024 under the exponent of that number is the sum of both: bits, and the number itself.
OFFSETS = {torch.bfloat16: (0x4300, 128), torch.float16: (0x6400, 1024)}


def places(uniform: bool) -> list[int]:
    """Return the lowest bit of codes 0 … 7 in a word.

    Of a uniform table pairs lie 16 bits apart, where one mask takes both; else codes follow each other, as the
    selectors of a byte permutation.
    """
    return [16 * (j % 2) + 4 * (j // 2) for j in range(8)] if uniform else [4 * j for j in range(8)]


def uniform_zero(table: Tensor) -> list[int] | None:
    """Return the integer zero point of each table that is `step * (code - zero)`, None unless all are."""
    entries = table.double()
    step = (entries[:, -1:] - entries[:, :1]) / (_ENTRIES - 1)
    if not bool((step > 0).all()):
        return None
    zero = (-entries[:, :1] / step).round()
    line = (torch.arange(_ENTRIES, device=table.device) - zero) * step
    close = (line - entries).abs().amax(1, keepdim=True) <= 1e-6 * entries.abs().amax(1, keepdim=True)
    fits = close & (zero >= 0) & (zero < _ENTRIES)
    return [int(value) for value in zero.flatten().tolist()] if bool(fits.all()) else None


def is_integers(table: Tensor) -> bool:
    """Return true if each table has a uniform step of 1."""
    return uniform_zero(table) is not None and bool((table[:, -1] - table[:, 0] == _ENTRIES - 1).all())


def _padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    missing = -x.shape[dim] % multiple
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def _words(codes: Tensor, uniform: bool) -> Tensor:
    """Codes uint8 [N, K] of whole blocks and units → int32 [N / 16, K / 64, 128]."""
    # row = 16 tile + 8 h + g, column = 64 group + 16 s + 8 k + 2 t + e
    parts = codes.reshape(-1, 2, 8, codes.shape[1] // GROUP, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 1, 7)
    each = parts.reshape(*parts.shape[:2], 128, 8)
    words = torch.zeros(each.shape[:-1], dtype=torch.int32, device=codes.device)
    for j, place in enumerate(places(uniform)):
        words |= each[..., j].to(torch.int32) << place
    return words


def codes_of(words: Tensor, uniform: bool) -> Tensor:
    """Return the codes of fragments as uint8 [N, K], padding included."""
    each = torch.stack([(words >> place & 15).to(torch.uint8) for place in places(uniform)], -1)
    parts = each.reshape(*words.shape[:2], 8, 4, 4, 2, 2, 2).permute(0, 6, 2, 1, 4, 5, 3, 7)
    return parts.reshape(words.shape[0] * 16, words.shape[1] * GROUP)


def planes_of(table: Tensor, zeros: list[int] | None) -> Tensor:
    """Tables float32 [T, 16] → int32 [T, 18]: for bfloat16, then float16, low bytes, high bytes, minus the offset.

    Of a uniform table the entries are the integers `code - zero`, and the step belongs to the row scale.
    """
    made = []
    for dtype, (_, offset) in OFFSETS.items():
        entries = table.float()
        minus = torch.zeros_like(entries[:, :1])
        if zeros is not None:
            zero = torch.tensor(zeros, dtype=torch.float32, device=table.device)[:, None]
            entries = torch.arange(_ENTRIES, dtype=torch.float32, device=table.device) - zero
            minus = -(offset + zero)
        both = entries.to(dtype).view(torch.uint8).reshape(-1, _ENTRIES, 2)
        bytes_ = torch.cat([both[..., 0], both[..., 1]], 1).contiguous()
        pair = minus.to(dtype).expand(-1, 2).contiguous().view(torch.int32)
        made += [bytes_.view(torch.int32), pair]
    return torch.cat(made, 1)


def pack_factors(values: Tensor) -> Tensor:
    """Return float scales or minima [N, groups] as [groups, N], 0 in padding."""
    return _padded(values, 0, BLOCK).t().contiguous()


def pack(weight: CodedWeight, uniform: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes, table, planes, scale and row scale of one layer.

    `uniform`: the tables are so, see `uniform_zero`; entries are then integers and the row scale has their step.
    """
    codes, table = weight.codes, weight.table
    if table is None or weight.bits != 4:
        raise ValueError(f"codes of {weight.bits} bits")
    num_rows, padded_groups = weight.num_rows, -(-weight.columns // UNIT) * 4
    parts = []
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        part = unpack(codes[start : start + _ROWS_AT_ONCE], 4)
        parts.append(_words(_padded(_padded(part, 1, UNIT), 0, BLOCK), uniform))
    words = torch.cat(parts) if parts else codes.new_zeros((0, padded_groups, 128), dtype=torch.int32)
    row_scale = weight.super_scale
    if row_scale is None:
        packed_scale = pack_factors(weight.scale)
        row_scale = torch.full((num_rows,), float(LEVELS), device=codes.device)
    else:
        scales = _padded(_padded(weight.scale, 1, 4), 0, BLOCK)
        packed_scale = scales.reshape(scales.shape[0], -1, 4).transpose(0, 1).contiguous()
    tables = -(-num_rows // BLOCK) * BLOCK // TABLE_ROWS
    spread = table.float()
    spread = spread.expand(tables, -1) if table.shape[0] == 1 else spread[_kept(tables, table)]
    factor, zeros = row_scale.float(), None
    if uniform:
        zeros = uniform_zero(spread)
        step = (spread[:, -1] - spread[:, 0]) / (_ENTRIES - 1)
        factor = factor * step.repeat_interleave(TABLE_ROWS)[:num_rows]
        spread = torch.arange(_ENTRIES, device=table.device) - torch.tensor(
            zeros, dtype=torch.float32, device=table.device
        ).reshape(-1, 1)
    return words, spread.contiguous(), planes_of(spread, zeros), packed_scale, _padded(factor, 0, BLOCK)


def _kept(tables: int, table: Tensor) -> Tensor:
    """Return the table index of each 32 rows; padding rows use the last table."""
    return torch.arange(tables, device=table.device).clamp_max(table.shape[0] - 1)


def weight_of(
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    columns: int,
    uniform: bool,
    minimum: Tensor | None = None,
) -> Tensor:
    """Return the decoded weight of packed tensors, float32 [N, columns], padding rows included."""
    index = codes_of(codes, uniform).long()
    values = torch.gather(table.repeat_interleave(TABLE_ROWS, 0), 1, index)
    steps = scale.transpose(0, 1).reshape(scale.shape[1], -1).float() * (row_scale / LEVELS)[:, None]
    group = columns // scale.shape[0] if scale.is_floating_point() else GROUP
    weight = values[:, :columns] * steps.repeat_interleave(group, 1)[:, :columns]
    return weight if minimum is None else weight + minimum.t().float().repeat_interleave(group, 1)


def _linear(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    planes: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    uniform: bool,
    minimum: Tensor | None = None,
) -> Tensor:
    weight = weight_of(codes, table, scale, row_scale, x.shape[-1], uniform, minimum)[:out_features]
    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def _shape(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    planes: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    uniform: bool,
    minimum: Tensor | None = None,
) -> Tensor:
    columns = x.shape[-1]
    torch._check(
        -(-columns // UNIT) * 4 == codes.shape[1], lambda: f"x has {columns} columns, codes {codes.shape}"
    )
    return x.new_empty((*x.shape[:-1], out_features))


define(
    "linear_lut4_fragments(Tensor x, Tensor codes, Tensor table, Tensor planes, Tensor scale, Tensor row_scale, "
    "Tensor? bias, int out_features, bool uniform, Tensor? minimum=None) -> Tensor",
    _linear,
    _shape,
)
