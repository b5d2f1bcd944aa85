"""Launches of every Triton kernel at sizes of published models, for the table of machine code; nothing is launched.

Linear layers are of Llama 3.1 8B, experts of Mixtral 8x7B, states of Mamba2 2.7B and Qwen3-Next; groupwise codes are
those of GGUF's Q4_K (4 bits, groups of 32 with a minimum) and Q6_K (bytes, groups of 16).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from infer import attention
from infer.attention import AttentionArgs, Rotary, _triton_attend, _triton_rotary, _triton_write
from infer.attention import triton as paged
from infer.kernels.gpu import embedding, epilogue, experts, state_space
from infer.kernels.gpu.groupwise import (
    groupwise_decode,
    groupwise_experts,
    groupwise_gemm,
    groupwise_gemv,
)
from infer.kernels.gpu.int8 import int8_gemm, int8_gemv, int8_quantize, w8a16_gemv
from infer.kernels.gpu.lut import fragment_gemm, lut_decode, lut_gemm, lut_gemv
from infer.kernels.ops import linear_lut4_fragments
from infer.kernels.ops.coded_weight import CodedWeight
from infer.kernels.passes.rotary.form import HALVES, INTERLEAVED, RotaryForm

N, K, GROUP = 14336, 4096, 64
MODULES: tuple[Any, ...] = (
    embedding, epilogue, experts, state_space, groupwise_decode, groupwise_gemv, groupwise_gemm,
    groupwise_experts, int8_quantize,
    int8_gemv, int8_gemm, w8a16_gemv, lut_decode, lut_gemv, lut_gemm, fragment_gemm,
    _triton_attend, _triton_rotary, _triton_write,
)  # fmt: skip


def _lut(bits: int) -> CodedWeight:
    codes = torch.empty((N, K * bits // 8), dtype=torch.uint8, device="meta")
    table = torch.empty((1 if bits == 4 else N // 32, 2**bits), device="meta")
    scale = torch.empty((N, K // GROUP), dtype=torch.int8, device="meta")
    return CodedWeight(codes, scale, table, super_scale=torch.empty(N, device="meta"))


def _x(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty((rows, K), dtype=dtype, device="meta")


def _int8() -> torch.Tensor:
    return torch.empty((N, K), dtype=torch.int8, device="meta")


def _scales() -> torch.Tensor:
    return torch.empty(N, device="meta")


def _attend(kind: str, batch: int, tokens: int = 1, rotation: RotaryForm | None = None) -> None:
    layout = attention.PageLayout(8, 128, 32, kind)
    blocks = 64
    meta = {"device": "meta"}
    args = AttentionArgs(
        *(torch.empty((batch * tokens, heads, 128), dtype=torch.bfloat16, **meta) for heads in (32, 8, 8)),  # type: ignore[arg-type]
        kv_cache=torch.empty((1, batch * blocks, layout.num_bytes), dtype=torch.uint8, **meta),  # type: ignore[arg-type]
        slot_mapping=torch.empty(batch * tokens, dtype=torch.int64, **meta),  # type: ignore[arg-type]
        block_table=torch.empty((batch, blocks), dtype=torch.int32, **meta),  # type: ignore[arg-type]
        query_start=torch.empty(batch + 1, dtype=torch.int32, **meta),  # type: ignore[arg-type]
        seq_lens=torch.empty(batch, dtype=torch.int32, **meta),  # type: ignore[arg-type]
        sinks=None,
        layer=0,
        page=32,
        dtype=attention.KV_DTYPES.index(kind),
        scale=128**-0.5,
    )
    rotary = None
    if rotation is not None:
        rotary = Rotary(*(_meta(batch * tokens, rotation.width) for _ in range(2)), rotation)
    paged.run(args, paged.tiling(args), 4 if tokens == 1 else 1, rotary=rotary)


def _fragments(rows: int, kind: str) -> None:
    """Call a 4-bit layer: `int4`, `lut4` are ours, `gptq`, `awq` (groups of 128) and `bnb` (64) a checkpoint's."""
    blocks, groups = N // linear_lut4_fragments.BLOCK, K // GROUP
    scale, minimum = _meta(groups // 4, N, 4, dtype=torch.int8), None
    if kind in ("gptq", "awq", "bnb"):
        scale = (
            _meta(K // 64, N, dtype=torch.float32)
            if kind == "bnb"
            else _meta(K // 128, N, dtype=torch.float16)
        )
        minimum = _meta(K // 128, N, dtype=torch.float32) if kind == "awq" else None
    words, planes = (
        _meta(*shape, dtype=torch.int32) for shape in ((blocks * 8, groups, 128), (blocks * 4, 18))
    )
    uniform, row_scale = kind not in ("lut4", "bnb"), _meta(N, dtype=torch.float32)
    fragment_gemm.linear(_x(rows), words, planes, scale, row_scale, None, N, uniform, 1, minimum)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _groupwise(bits: int, rows: int = N) -> CodedWeight:
    """Return the operands of Q4_K or, for 8 bits, of Q6_K."""
    group = 32 if bits == 4 else 16
    factors, supers = _meta(rows, K // group, dtype=torch.int8), _meta(rows, K // 256, dtype=torch.float16)
    if bits == 8:
        return CodedWeight(_int8(), factors, None, None, supers, None)
    codes, table = _meta(rows, K // 2, dtype=torch.uint8), _meta(1, 16, dtype=torch.float32)
    return CodedWeight(codes, factors, table, factors, supers, supers)


def _experts(kind: str, rows: int) -> None:
    """Call the experts of Mixtral 8x7B: 8 of [14336, 4096], 2 for each row."""
    expert = _meta(2 * rows, dtype=torch.int64)
    if kind == "lut4":
        codes, table = _meta(8 * N, K // 2, dtype=torch.uint8), _meta(1, 16, dtype=torch.float32)
        scale, row_scale = _meta(8 * N, K // 64, dtype=torch.int8), _meta(8 * N, dtype=torch.float32)
        weight = CodedWeight(codes, scale, table, super_scale=row_scale)
        experts.linear_experts_codes(_x(rows), expert, *weight, N, 2)
    elif kind == "int8":
        codes, scale = _meta(8 * N, K, dtype=torch.int8), _meta(8 * N, dtype=torch.float32)
        experts._multiply(
            _x(rows, torch.int8), _meta(rows, dtype=torch.float32), expert, codes, scale, N, 2, False, torch.bfloat16
        )  # fmt: skip
    elif kind == "groupwise":
        experts.linear_experts_codes(_x(rows), expert, *_groupwise(4, 8 * N), N, 2)
    else:
        experts.linear_experts(_x(rows), expert, _meta(8, N, K), 2)


def _state(name: str) -> None:
    """Call a layer over a state cache for eight sequences of one token: sizes of Qwen3-Next and of Mamba2 2.7B."""
    segments = _meta(8, 4, dtype=torch.int64)
    cache, f = _meta(8, 1 << 20, dtype=torch.float32), functools.partial(_meta, dtype=torch.float32)
    tail = (cache, segments, 0)
    if name == "causal_conv":
        state_space.causal_conv(f(8, 5376), f(5376, 4), f(5376), *tail, True)
    elif name == "linear_scan":
        state_space.linear_scan(f(8, 4096), f(8, 4096), *tail)
    elif name == "gated_delta":
        key = f(8, 16, 128)
        state_space.gated_delta(key, key, f(8, 32, 128), f(8, 32), f(8, 32), *tail)
    elif name == "ssd_scan":
        state_space.ssd_scan(f(8, 80, 64), f(8, 80), f(80), f(8, 1, 128), f(8, 1, 128), *tail)
    else:
        state_space.selective_scan(f(8, 5120), f(8, 5120), f(16, 5120), f(8, 1, 16), f(8, 1, 16), *tail)


FRAGMENTS = [
    *((kind, rows) for kind in ("int4", "lut4") for rows in (1, 16, 32, 64)),
    *((kind, rows) for kind in ("gptq", "awq", "bnb") for rows in (1, 64)),
]
ROTATIONS = (
    *((kind, kind, RotaryForm(0, 128, HALVES)) for kind in ("bfloat16", "int8", "float8_e4m3fn")),
    ("interleaved", "bfloat16", RotaryForm(0, 64, INTERLEAVED)),  # half of each head
)
# Kernel → (name of its function, a call that launches it).
CASES: dict[str, tuple[str, Callable[[], object]]] = {
    "lut4 rows, 1": ("_rows", lambda: lut_gemv.linear(_x(1), _lut(4), split=1)),
    "lut4 rows, 4": ("_rows", lambda: lut_gemv.linear(_x(4), _lut(4), split=1)),
    **{f"{kind} fragments, {rows}": ("_gemm", functools.partial(_fragments, rows, kind)) for kind, rows in FRAGMENTS},
    "lut4 tiles, 16": ("_tiles", lambda: lut_gemm.linear(_x(16), _lut(4), split=1)),
    "lut4 tiles, 64": ("_tiles", lambda: lut_gemm.linear(_x(64), _lut(4), split=1)),
    "lut3 rows, 1": ("_rows", lambda: lut_gemv.linear(_x(1), _lut(3), split=1)),
    "lut4 decode": ("_decode", lambda: lut_decode.decode(_lut(4), torch.bfloat16)),
    "int8 rows, 1": ("_rows", lambda: int8_gemv.linear(_x(1, torch.int8), _int8(), 1)),
    "int8 tiles, 64": ("_tiles", lambda: int8_gemm.products(_x(64, torch.int8), _int8(), 1)),
    "int8 weight rows, 1": ("_rows", lambda: w8a16_gemv.linear(_x(1), _int8(), _scales(), split=1)),
    "int8 weight rows, 2": ("_rows", lambda: w8a16_gemv.linear(_x(2), _int8(), _scales(), split=1)),
    "int8 weight tiles, 16": ("_tiles", lambda: int8_gemm.weight_only(_x(16), _int8(), _scales())),
    "quantize rows": ("_quantize", lambda: int8_quantize.quantize_rows(_x(1), None)),
    "groupwise 4-bit rows, 1": ("_rows", lambda: groupwise_gemv.linear(_x(1), _groupwise(4), split=1)),
    "groupwise int8 rows, 1": ("_rows", lambda: groupwise_gemv.linear(_x(1), _groupwise(8), split=1)),
    "groupwise 4-bit tiles, 16": ("_tiles", lambda: groupwise_gemm.linear(_x(16), _groupwise(4), split=1)),
    "groupwise 4-bit decode": ("_decode", lambda: groupwise_decode.decode(_groupwise(4), torch.bfloat16)),
    "experts lut4, 1": ("_lut", lambda: _experts("lut4", 1)),
    "experts lut4, 512": ("_lut", lambda: _experts("lut4", 512)),
    "experts groupwise 4-bit, 1": ("_rows", lambda: _experts("groupwise", 1)),
    "experts groupwise 4-bit, 16": ("_tiles", lambda: _experts("groupwise", 16)),
    "experts groupwise 4-bit, 512": ("_tiles", lambda: _experts("groupwise", 512)),
    "experts int8, 1": ("_dense", lambda: _experts("int8", 1)),
    "experts bfloat16, 1": ("_dense", lambda: _experts("bfloat16", 1)),
    "causal_conv": ("_convolve", lambda: _state("causal_conv")),
    "linear_scan": ("_scan", lambda: _state("linear_scan")),
    **{name: ("_matrix", functools.partial(_state, name)) for name in ("gated_delta", "ssd_scan", "selective_scan")},
    "attention bfloat16, decode": ("_attend", lambda: _attend("bfloat16", 1)),
    "attention int8, decode": ("_attend", lambda: _attend("int8", 1)),
    "attention bfloat16, prefill": ("_attend", lambda: _attend("bfloat16", 1, 512)),
    "attention write": ("_write", lambda: _attend("bfloat16", 1)),
    "attention write int8": ("_write", lambda: _attend("int8", 1)),
    "attention float8, decode": ("_attend", lambda: _attend("float8_e4m3fn", 1)),
    "attention write float8": ("_write", lambda: _attend("float8_e4m3fn", 1)),
    **{f"rotary and cache write {name}": ("_rotate_and_write", functools.partial(_attend, kind, 1, rotation=rotation))
       for name, kind, rotation in ROTATIONS},
}  # fmt: skip


# Weights that one lane multiplies in one turn of the loop, from the sizes of the tiles that the launches choose.
WEIGHTS = {
    "lut4 rows, 1": 128, "lut4 rows, 4": 32,
    **{f"{kind} fragments, {rows}": 256 if rows <= 16 else 128 if kind in ("int4", "lut4") else 64
       for kind, rows in FRAGMENTS},
    "lut4 tiles, 16": 32, "lut4 tiles, 64": 16, "int8 rows, 1": 128,
    "int8 weight rows, 1": 128, "int8 weight rows, 2": 64, "int8 weight tiles, 16": 32,
    "groupwise 4-bit rows, 1": 128, "groupwise int8 rows, 1": 128,
    "groupwise 4-bit tiles, 16": 32, 
    "experts lut4, 1": 32, "experts lut4, 512": 32,
    "experts groupwise 4-bit, 1": 128, "experts groupwise 4-bit, 16": 32, "experts groupwise 4-bit, 512": 32,
}  # fmt: skip


def launch_of(case: str) -> tuple[Any, ...]:
    """Return the launch (kernel, arguments, options) of a case; nothing is launched."""
    name, call = CASES[case]
    launches: list[tuple[Any, ...]] = []

    def collect(kernel: Any, _: Any, *args: Any, **options: Any) -> None:
        launches.append((kernel, args, options))

    before = [module.launch for module in MODULES]
    for module in MODULES:
        module.launch = collect
    try:
        call()
    finally:
        for module, launch in zip(MODULES, before, strict=True):
            module.launch = launch
    return next(launch for launch in launches if launch[0].fn.__name__ == name)
