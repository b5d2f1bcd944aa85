"""Rotary embedding and cache write in one Triton launch, against plain torch: on a GPU, or in Triton's interpreter.

As in test_triton_kernels.py: without a GPU the tests marked `on_device` run in a second process, with the interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from infer import attention
from infer.attention import AttentionArgs, Rotary, _portable, reference
from infer.attention import triton as plugin
from infer.kernels.passes.rotary.form import HALVES, INTERLEAVED, INTERLEAVED_TO_HALVES, RotaryForm
from tests.support.attention_cases import Case
from tests.support.triton_compile import CUDA, DEVICE, compiled, in_turns, on_device, on_host

pytest.importorskip("triton", reason="triton is not installed")
from infer.attention import _triton_rotary  # noqa: E402

# Heads of 32 numbers: all rotated, first ones, last ones, an odd count of pairs; each with both counts of cosines.
FORMS = [
    *(RotaryForm(0, 32, order) for order in (HALVES, INTERLEAVED, INTERLEAVED_TO_HALVES)),
    *(
        RotaryForm(start, width, order)
        for start, width, order in ((0, 8, INTERLEAVED), (20, 12, HALVES), (4, 10, 2))
    ),
]


def arguments(
    form: RotaryForm, *, pairs: bool = False, dim: int = 32, **changes: Any
) -> tuple[AttentionArgs, Rotary]:
    """Three sequences: a decode step, nothing new, a prompt whose second token is not kept."""
    torch.manual_seed(0)
    case = Case(**{"heads": (6, 2), "dim": dim, "page": 8, "new": (1, 0, 5), "done": (20, 9, 0), **changes})
    args = case.args(case.cache().zero_(), case.done, case.new)
    args.slot_mapping[2] = -1
    columns = form.width // 2 if pairs else form.width
    angles = torch.randn(2, len(args.query), columns)
    return args, Rotary(angles[0].cos(), angles[1].sin(), form)


def assert_equal(args: AttentionArgs, rotary: Rotary, tolerance: float = 0.0) -> None:
    """Compare queries and every byte of the cache with plain torch."""
    want = rotary.applied(replace(args, kv_cache=args.kv_cache.clone()))
    _portable.write(want)
    names = ("query", "key", "value", "kv_cache", "slot_mapping")
    moved = replace(args, **{name: getattr(args, name).to(DEVICE, copy=name == "kv_cache") for name in names})
    on_gpu = replace(rotary, cos=rotary.cos.to(DEVICE), sin=rotary.sin.to(DEVICE))
    got = _triton_rotary.rotate_and_write(moved, on_gpu)
    assert got.is_contiguous()
    torch.testing.assert_close(got.cpu(), want.query, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(cache_parts(moved), cache_parts(want), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)


def cache_parts(args: AttentionArgs) -> list[torch.Tensor]:
    parts = args.layout.parts(args.kv_cache[args.layer])
    return [part.float() for part in parts if part is not None]


# A GPU fuses products and sums, which rounds once less.
EXACT = 2e-6 if CUDA else 0.0


@on_device
@pytest.mark.parametrize(("form", "pairs"), in_turns(FORMS, [False, True]), ids=str)
def test_every_form_of_rotation_equals_plain_torch(form: RotaryForm, pairs: bool) -> None:
    assert_equal(*arguments(form, pairs=pairs), EXACT)


@on_device
@pytest.mark.parametrize(
    ("kind", "form"),
    in_turns(attention.KV_DTYPES, [RotaryForm(0, 20, HALVES), RotaryForm(0, 6, INTERLEAVED)]),
    ids=str,
)
def test_rotated_keys_are_stored_in_every_cache_dtype(form: RotaryForm, kind: str) -> None:
    args, rotary = arguments(form, dim=20, dtype=kind)
    if kind == "bfloat16":  # the interpreter cuts bits off where a GPU rounds to bfloat16
        signs = torch.randint(0, 2, rotary.cos.shape).float()
        rotary = replace(rotary, cos=signs, sin=1 - signs)
        args = replace(args, **{n: getattr(args, n).bfloat16().float() for n in ("query", "key", "value")})
    # A code may be the next one where a GPU rounds otherwise.
    assert_equal(args, rotary, 1.0 if CUDA and kind in ("int8", "float8_e4m3fn") else EXACT)


@on_device
@pytest.mark.parametrize("heads", [(2, 2), (5, 1), (8, 2)], ids=str)
def test_rotation_takes_any_number_of_heads_and_float16(heads: tuple[int, int]) -> None:
    args, rotary = arguments(
        RotaryForm(0, 32, HALVES), heads=heads, query_dtype=torch.float16, dtype="float16"
    )
    halves = replace(rotary, cos=rotary.cos.half(), sin=rotary.sin.half())
    assert_equal(args, halves, 1e-3 if CUDA else 0.0)


@on_device
def test_queries_keys_and_values_may_be_columns_of_one_tensor() -> None:
    args, rotary = arguments(RotaryForm(0, 32, HALVES))
    merged = torch.cat([args.query.flatten(1), args.key.flatten(1), args.value.flatten(1)], 1)
    query, key, value = (x.unflatten(1, (-1, 32)) for x in merged.split([6 * 32, 2 * 32, 2 * 32], 1))
    cosines = torch.stack([rotary.cos, rotary.sin], -1)
    strided = replace(rotary, cos=cosines[..., 0], sin=cosines[..., 1])
    assert_equal(replace(args, query=query, key=key, value=value), strided, EXACT)


@on_device
def test_attention_that_rotates_equals_the_reference() -> None:
    args, rotary = arguments(RotaryForm(0, 32, HALVES), done=(40, 9, 0))
    want = reference.attend(rotary.applied(replace(args, kv_cache=args.kv_cache.clone())))
    names = [
        name for name in AttentionArgs.__dataclass_fields__ if isinstance(getattr(args, name), torch.Tensor)
    ]
    moved = replace(args, **{name: getattr(args, name).to(DEVICE, copy=True) for name in names})
    rotary = replace(rotary, cos=rotary.cos.to(DEVICE), sin=rotary.sin.to(DEVICE))
    got = plugin.run(moved, plugin.tiling(moved), 2, 16, rotary)
    kept = torch.ones(len(want), dtype=torch.bool)
    torch.testing.assert_close(got.cpu()[kept], want[kept], rtol=2e-6, atol=2e-6)


@on_host
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_rotation_compiles_without_spills_to_wide_loads(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        _triton_rotary, "launch", lambda kernel, _, *args, **o: launches.append((kernel, args, o))
    )
    form = RotaryForm(0, 128, HALVES)
    args, rotary = arguments(form, heads=(32, 8), dim=128, query_dtype=torch.bfloat16, dtype="int8", page=32)
    _triton_rotary.rotate_and_write(args, rotary)
    ptx = compiled(launches[0], capability).asm["ptx"]
    assert "ld.global.v2.b32" in ptx or "ld.global.v4.b32" in ptx
    assert ".local" not in ptx


@pytest.mark.parametrize(
    ("form", "columns", "said"),
    [
        (RotaryForm(0, 32, 3), 32, "expected an order of pairs"),
        (RotaryForm(0, 31, HALVES), 31, "columns 0 to 31 of heads of 32"),
        (RotaryForm(24, 16, HALVES), 16, "columns 24 to 40 of heads of 32"),
        (RotaryForm(0, 32, HALVES), 8, "8 cosines for 32 columns"),
    ],
)
def test_a_rotation_that_does_not_fit_is_refused(form: RotaryForm, columns: int, said: str) -> None:
    args, _ = arguments(RotaryForm(0, 32, HALVES))
    angles = torch.zeros(len(args.query), columns)
    with pytest.raises(RuntimeError, match=said):
        Rotary(angles, angles, form).check(args)
