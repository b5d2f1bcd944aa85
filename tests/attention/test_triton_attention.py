"""Attention in Triton against the plain reference: on a GPU, or in Triton's interpreter on the CPU.

As in test_triton_kernels.py: without a GPU the tests marked `on_device` run in a second process, with the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infer import attention
from infer.attention import AttentionArgs, reference
from infer.attention import triton as plugin
from tests.support import ptx_elementwise
from tests.support.triton_compile import CUDA, DEVICE, assembly, on_device, on_host

pytest.importorskip("triton", reason="triton is not installed")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from infer.attention import _triton_attend, _triton_elementwise, _triton_write  # noqa: E402

PAGE = 8
SPLITS = [1, 2, 5, 16] if CUDA else [1, 2, 5]  # of five the last is without keys already
# Tokens in the cache and new ones: decode, prefill, drafts, a row with nothing new, empty before.
ROWS = [(60, 1), (0, 7), (17, 3), (9, 0), (0, 1)]


@triton.jit
def _float8_and_back(
    x_ptr: tl.tensor, code_ptr: tl.tensor, back_ptr: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    at = tl.arange(0, BLOCK)
    code = _triton_elementwise.to_float8(tl.load(x_ptr + at, mask=at < count, other=0.0))
    tl.store(code_ptr + at, code, mask=at < count)
    tl.store(back_ptr + at, _triton_elementwise.from_float8(code), mask=at < count)


def arguments(
    rows: list[tuple[int, int]] = ROWS,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 64,
    kind: str = "float32",
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> AttentionArgs:
    """Sequences of `rows` (done, new) tokens, pages given out backwards; what is done is in the cache already."""
    generator = torch.Generator().manual_seed(len(rows) * width + heads)
    layout = attention.PageLayout(kv_heads, width, PAGE, kind)
    blocks = max(-(-(done + new) // PAGE) for done, new in rows) + 1
    pages = len(rows) * blocks + 1
    table = torch.arange(pages - 1, 0, -1, dtype=torch.int32).reshape(blocks, len(rows)).t().contiguous()
    cache = torch.zeros(2, pages, layout.num_bytes, dtype=torch.uint8)

    def step(done: list[int], new: list[int]) -> AttentionArgs:
        places = [
            table[i, p // PAGE].item() * PAGE + p % PAGE
            for i, (d, n) in enumerate(zip(done, new, strict=True))
            for p in range(d, d + n)
        ]
        # The interpreter cuts bits off where a GPU rounds to bfloat16: such a cache gets numbers that need neither.
        exact = torch.bfloat16 if kind == "bfloat16" else torch.float32
        made = {
            name: torch.randn(len(places), count, width, generator=generator).to(exact).to(dtype)
            for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))
        }
        return AttentionArgs(
            **made,
            kv_cache=cache,
            slot_mapping=torch.tensor(places, dtype=torch.int64),
            block_table=table,
            query_start=torch.tensor([0, *new]).cumsum(0).int(),
            seq_lens=torch.tensor([d + n for d, n in zip(done, new, strict=True)], dtype=torch.int32),
            sinks=None,
            layer=1,
            page=PAGE,
            dtype=attention.KV_DTYPES.index(kind),
            scale=width**-0.5,
        )

    done, new = (list(x) for x in zip(*rows, strict=True))
    reference.attend(step([0] * len(rows), done))
    return replace(step(done, new), **changes)


def both(
    args: AttentionArgs, splits: int = 1, least: int = 16, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the kernels' output, and the reference on the CPU with a cache of its own."""
    want = reference.attend(replace(args, kv_cache=args.kv_cache.clone()))
    moved = {
        name: value.to(DEVICE, copy=True)
        for name in AttentionArgs.__dataclass_fields__
        if isinstance(value := getattr(args, name), Tensor)
    }
    args = replace(args, **moved)
    tile = plugin.tiling(args)
    if rows is not None:
        tile = tile._replace(rows=rows, tokens=rows // (args.query.shape[1] // args.key.shape[1]))
    return plugin.run(args, tile, splits, least), want.to(DEVICE)


def assert_near(pair: tuple[Tensor, Tensor], tolerance: float = 2e-6) -> None:
    got, want = pair
    assert got.shape == want.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@on_device
@pytest.mark.parametrize("splits", SPLITS)
def test_any_number_of_kv_splits_equals_the_reference(splits: int) -> None:
    assert_near(both(arguments(), splits))


@on_device
@pytest.mark.parametrize(("group", "splits"), [(1, 1), (2, 3), (3, 2), (4, 1), (8, 2)])
def test_grouped_query_heads_equal_the_reference(group: int, splits: int) -> None:
    assert_near(both(arguments(heads=2 * group), splits))


@on_device
@pytest.mark.parametrize("width", [64, 80, 128, 20])
def test_triton_attention_takes_heads_of_any_width(width: int) -> None:
    assert_near(both(arguments(ROWS[:4], width=width), 2))


@on_device
@pytest.mark.parametrize("rows", [16, 32, 64] if CUDA else [16, 64])
def test_tiles_of_any_height_cover_a_prefill(rows: int) -> None:
    assert_near(both(arguments([(0, 70), (3, 33), (50, 1)], heads=6), 1, rows=rows))


CHANGES: list[dict[str, object]] = [
    {"window": 1},
    {"window": 9},
    {"softcap": 2.0},
    {"sinks": torch.tensor([0.5, -torch.inf, 3.0, 40.0])},
    {"window": 17, "softcap": 1.0, "sinks": torch.ones(4)},
    {"chunk": 8},
    {"chunk": 13, "softcap": 2.0},
    {"slopes": torch.tensor([0.7, 0.3, 0.1, 0.01])},
    {"slopes": torch.tensor([0.7, 0.3, 0.1, 0.03]).bfloat16(), "chunk": 20, "window": 11},
]


def with_splits(cases: Sequence[object]) -> list[tuple[object, int]]:
    """Pair each case with one piece and with several; in the interpreter with one of the two, in turns."""
    return [(case, splits) for i, case in enumerate(cases) for splits in ((1, 4) if CUDA else (1 + i % 2,))]


@on_device
@pytest.mark.parametrize(("changes", "splits"), with_splits(CHANGES), ids=str)
def test_windows_soft_caps_and_sinks(changes: dict[str, object], splits: int) -> None:
    assert_near(both(arguments(**changes), splits), 5e-6)


@on_device
@pytest.mark.parametrize(("kind", "splits"), with_splits(attention.KV_DTYPES))
def test_int8_and_float8_caches_are_written_and_read(kind: str, splits: int) -> None:
    args = arguments(kind=kind)
    before = args.kv_cache.clone()
    assert_near(both(args, splits), 5e-6)
    assert torch.equal(args.kv_cache, before)  # of the caller: both worked on copies


@on_device
@pytest.mark.parametrize("kind", attention.KV_DTYPES)
def test_the_cache_holds_the_bytes_of_the_reference(kind: str) -> None:
    args = arguments(kind=kind, kv_heads=3, heads=3, width=20)
    args.slot_mapping[2] = -1
    args.key[4] = 0
    ours, theirs = args.kv_cache.to(DEVICE, copy=True), replace(args, kv_cache=args.kv_cache.clone())
    from infer.attention import _portable

    _portable.write(theirs)
    given = {name: getattr(args, name).to(DEVICE) for name in ("key", "value", "slot_mapping")}
    _triton_write.write(replace(args, kv_cache=ours, **given))
    assert torch.equal(ours.cpu(), theirs.kv_cache)


@on_device
@pytest.mark.parametrize("kind", ["float16", "int8", "float8_e4m3fn"])
def test_half_precision_stays_close_to_the_reference(kind: str) -> None:
    # The interpreter multiplies the bits of bfloat16, not its values.
    for dtype in (torch.float16, torch.bfloat16)[: 2 if CUDA else 1]:
        args = arguments(kind=kind, dtype=dtype, heads=8)
        assert_near(both(args, 2), 3e-3 if dtype == torch.float16 else 2e-2)


@on_device
def test_float8_conversions_equal_those_of_torch() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    every = every[(every & 127) != 127].to(DEVICE)  # NaN
    values = every.view(torch.float8_e4m3fn).float()
    between = (values[:-1] + values[1:]) / 2  # halves go to even
    x = torch.cat([values, between, between * 1.001, torch.tensor([447.9, 500.0, -1e9, 1e-9], device=DEVICE)])
    codes, back = torch.empty(len(x), dtype=torch.uint8, device=DEVICE), torch.empty_like(x)
    _float8_and_back[(1,)](x, codes, back, len(x), BLOCK=1024)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(back, want.float())
    assert torch.equal(codes, want.view(torch.uint8))


@on_device
def test_small_values_in_int8_do_not_vanish_in_float16() -> None:
    args = arguments(kind="int8", dtype=torch.float16)
    shrunk = replace(args, value=args.value * 1e-3, kv_cache=torch.zeros_like(args.kv_cache))
    got, want = both(replace(shrunk, seq_lens=shrunk.query_start.diff()))
    assert float((got - want).norm() / want.norm()) < 2e-3


@on_device
def test_transposed_inputs_are_accepted() -> None:
    args = arguments()
    turned = {
        name: getattr(args, name).transpose(0, 1).contiguous().transpose(0, 1)
        for name in ("query", "key", "value")
    }
    assert_near(both(replace(args, **turned), 2))


@on_device
def test_an_empty_batch_leaves_the_cache_unchanged() -> None:
    args = arguments([(9, 0)])
    got, _ = both(args)
    assert got.shape == args.query.shape


@on_device
def test_a_tile_finds_its_sequence_among_many() -> None:
    rows = [(i % 3, i % 2) for i in range(140)]
    assert_near(both(arguments(rows, heads=2, kv_heads=1, width=16)))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Collect launches that were not made: (kernel, arguments, options)."""
    launches: list[tuple] = []
    for module in (_triton_attend, _triton_write):
        monkeypatch.setattr(
            module, "launch", lambda kernel, _, *args, **options: launches.append((kernel, args, options))
        )
    return launches


@on_host
@pytest.mark.parametrize("capability", [80, 90])
def test_decode_attention_compiles_to_mma_and_one_atomic(captured: list[tuple], capability: int) -> None:
    rows, other = [(100, 1)] * 3, ("float32", torch.float32) if capability == 80 else ("int8", torch.float16)
    float8 = ("float8_e4m3fn", torch.bfloat16 if capability == 80 else torch.float16)
    for kind, dtype in (("bfloat16", torch.bfloat16), other, float8):
        changes = {"window": 64, "softcap": 3.0, "sinks": torch.ones(8)}
        if kind not in ("int8", "float8_e4m3fn"):
            changes = {"slopes": torch.ones(8).bfloat16(), "chunk": 64}
        args = arguments(rows, heads=8, width=128, kind=kind, dtype=dtype, **changes)
        plugin.run(args, plugin.tiling(args), 4)
    texts = assembly(captured, capability)
    assert len(texts) == 6  # the write, and tiles whose last program merges
    assert "mma.sync" in texts[1]
    assert [text.count("atom.") for text in texts] == [0, 1] * 3


@on_host
@pytest.mark.parametrize("half", ["F16", "BF16"])
def test_float8_keys_and_values_become_halves_exactly(half: str) -> None:
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[half]
    finite = [byte for byte in range(256) if byte & 127 != 127]
    for first in range(0, len(finite) - 3, 3):
        part = finite[first : first + 4]
        word = sum(byte << 8 * i for i, byte in enumerate(part))
        pairs = ptx_elementwise.run(getattr(_triton_elementwise, f"FLOAT8_TO_{half}"), [word], 2)
        bits = torch.tensor([half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)])
        want = torch.tensor(part, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
        assert torch.equal(bits.to(torch.int16), want.view(torch.int16))


@on_host
@pytest.mark.parametrize("half", ["F16", "BF16"])
def test_int8_keys_and_values_become_halves_exactly(half: str) -> None:
    text, dtype = (
        getattr(_triton_elementwise, f"BYTES_TO_{half}"),
        getattr(torch, {"F16": "float16"}.get(half, "bfloat16")),
    )
    for first in range(0, 256, 4):
        word = sum((first + 67 * i) % 256 << 8 * i for i in range(4))
        pairs = ptx_elementwise.run(text, [word], 2)
        bits = torch.tensor([part for pair in pairs for part in (pair & 0xFFFF, pair >> 16)])
        want = torch.tensor([(first + 67 * i) % 256 for i in range(4)]).to(torch.int8)
        assert torch.equal(bits.to(torch.int16).view(dtype), want.to(dtype))


@on_host
@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async")])
def test_prefill_compiles_to_tensor_cores(captured: list[tuple], capability: int, instruction: str) -> None:
    args = arguments([(8, 40)], heads=8, width=128, kind="bfloat16", dtype=torch.bfloat16)
    tile = plugin.tiling(args)
    assert tile.rows == 128
    plugin.run(args, tile, 1)
    assert instruction in assembly(captured, capability)[1]


@pytest.mark.parametrize(
    ("rows", "tokens"), [([(40, 1)] * 4, 4), ([(40, 4)] * 4, 4), ([(0, 100)], 32), ([(0, 0)], 4)]
)
def test_a_tile_has_as_many_rows_as_a_sequence(rows: list[tuple[int, int]], tokens: int) -> None:
    args = arguments(rows, heads=8, kind="float16", dtype=torch.float16)
    assert plugin.tiling(args).tokens == tokens


def test_pieces_fill_the_processors_and_no_more() -> None:
    args = arguments([(1000, 1)], heads=8, kind="float16", dtype=torch.float16)
    tile = plugin.tiling(args)
    table = torch.zeros(1, 4096, dtype=torch.int32)
    assert plugin.splits_of(replace(args, block_table=table), tile, 1) == 1
    assert plugin.splits_of(replace(args, block_table=table), tile, 16) == 16
    assert plugin.splits_of(replace(args, block_table=table), tile, 1000) == plugin.MOST_SPLITS
    assert plugin.splits_of(args, tile, 132) == 4  # of at least 256 tokens
    assert plugin.splits_of(replace(args, block_table=table, window=300), tile, 132) == 2
    many = arguments([(9, 1)] * 64, heads=8, kind="float16", dtype=torch.float16)
    assert plugin.splits_of(replace(many, block_table=table.expand(64, -1)), tile, 132) == 3


def test_triton_attention_gives_the_reason_where_it_cannot_run() -> None:
    assert plugin.refuses(arguments(ROWS[:1])) == "the tensors are on cpu"
    if not CUDA:
        assert "CUDA" in str(plugin.missing()) or "GPU" in str(plugin.missing())
