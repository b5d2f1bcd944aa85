"""Every attention kernel gives what the reference gives, whatever the lengths, pages, dtypes and threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from infer import device
from infer.attention import KV_DTYPES, native, sdpa
from infer.errors import NotUsableError
from infer.kernels import cpu as library
from infer.kernels.passes import prepack
from infer.llm.step.paged_step import capture_step
from infer.llm.step.probe import probe
from tests.support.attention_cases import Case, reference
from tests.support.tiny_decoders import build

try:
    ISAS = library.isas()
except NotUsableError:
    ISAS = []
KERNELS = ["sdpa", *ISAS]
# Relative error of summing in another order; where queries are bfloat16, of rounding the result to it. Over int8 codes
# queries and weights are int16: a hundredth of what the codes themselves cost.
CLOSE, BFLOAT, WHOLE = 2e-6, 1e-2, 1e-4


NATIVE_DTYPES = [dtype for dtype in KV_DTYPES if dtype != "float8_e4m3fn"]


def test_the_native_kernel_refuses_a_float8_cache_by_name() -> None:
    case = Case((4, 2), 16, dtype="float8_e4m3fn", new=(1, 3), done=(5, 0))
    args = case.args(case.cache(), case.done, case.new)
    assert native.refuses(args) == "it has no float8 cache"
    assert case.error(sdpa) < CLOSE


def test_attention_of_a_float8_cache_stays_portable_on_the_cpu() -> None:
    model = build("llama")
    for dtype, kept in (("float8_e4m3fn", True), ("int8", False)):
        program = capture_step(model, probe(model, page=4, kv_dtype=dtype)).program
        assert (prepack._attentions(program) == 0) is kept


def close(dtype: str, kernel: ModuleType) -> float:
    return WHOLE if dtype == "int8" and kernel is native else CLOSE


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    if request.param == "sdpa":
        yield sdpa
        return
    before = library.isa()
    library.use_isa(request.param)
    yield native
    library.use_isa(before)


@pytest.fixture
def fast() -> ModuleType:
    if reason := native.missing():
        pytest.skip(reason)
    return native


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1), (8, 2), (7, 1), (16, 2)], ids=str)
def test_attention_is_exact_for_head_ratios_and_cache_dtypes(
    kernel: ModuleType, heads: tuple[int, int], dtype: str
) -> None:
    assert Case(heads, 64, dtype=dtype, new=(1, 1, 5), done=(300, 15, 250)).error(kernel) < close(
        dtype, kernel
    )


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("dim", [4, 16, 20, 64, 72, 80, 128])
def test_attention_is_exact_for_every_head_width(kernel: ModuleType, dim: int, dtype: str) -> None:
    assert Case((6, 2), dim, dtype=dtype, new=(1, 37), done=(65, 9)).error(kernel) < close(dtype, kernel)


@pytest.mark.parametrize("page", [1, 4, 16, 32, 48])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_attention_is_exact_for_every_page_size(kernel: ModuleType, page: int, dtype: str) -> None:
    assert Case((4, 2), 32, page, dtype, new=(1, 3, 66), done=(257, 0, 31)).error(kernel) < close(
        dtype, kernel
    )


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 63, 64, 65, 255, 256, 257, 513])
def test_attention_takes_odd_lengths_and_no_new_tokens(kernel: ModuleType, length: int) -> None:
    assert Case((4, 2), 16, new=(1, 0, length), done=(length, 9, 0)).error(kernel) < CLOSE


@pytest.mark.parametrize("window", [1, 16, 100, 256, 1000])
@pytest.mark.parametrize("new", [(1, 4), (33, 140)], ids=["few", "many"])
def test_attention_with_a_sliding_window(kernel: ModuleType, window: int, new: tuple[int, int]) -> None:
    assert Case((6, 2), 32, dtype="float16", new=new, done=(700, 60), window=window).error(kernel) < CLOSE


@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("new", [(1, 3), (30, 1)], ids=["few", "many"])
def test_attention_with_a_soft_cap_and_sinks(
    fast: ModuleType, softcap: float, sinks: bool, new: tuple[int, int]
) -> None:
    case = Case((6, 2), 64, new=new, done=(300, 90), softcap=softcap, sinks=sinks, window=200)
    assert case.error(fast) < CLOSE


@pytest.mark.parametrize("chunk", [1, 16, 100, 256, 1000])
@pytest.mark.parametrize("new", [(1, 4), (33, 140)], ids=["few", "many"])
def test_attention_in_chunks(kernel: ModuleType, chunk: int, new: tuple[int, int]) -> None:
    assert Case((6, 2), 32, dtype="float16", new=new, done=(700, 60), chunk=chunk).error(kernel) < CLOSE


@pytest.mark.parametrize("slopes", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("new", [(1, 3), (40, 1)], ids=["few", "many"])
def test_attention_with_alibi(
    kernel: ModuleType, slopes: torch.dtype, dtype: str, new: tuple[int, int]
) -> None:
    case = Case((6, 2), 20, dtype=dtype, new=new, done=(700, 90), alibi=slopes)
    assert case.error(kernel) < 5 * close(dtype, kernel)  # logits are larger by slope times distance


@pytest.mark.parametrize("distances", [1, 19, 1000])
@pytest.mark.parametrize("new", [(1, 3), (40, 1)], ids=["few", "many"])
def test_attention_with_a_relative_position_bias(
    kernel: ModuleType, distances: int, new: tuple[int, int]
) -> None:
    case = Case((6, 2), 20, dtype="float16", new=new, done=(700, 90), distances=distances)
    assert case.error(kernel) < CLOSE


def test_relative_position_bias_equals_that_of_t5() -> None:
    case = Case((4, 4), 16, new=(7,), done=(0,), distances=5)
    args = case.args(case.cache(), [0], [7])
    distance = torch.arange(7)[:, None] - torch.arange(7)
    bias = case.slopes[:, distance.clamp(0, 4)].double()
    query, key, value = (x.transpose(0, 1).double() for x in (args.query, args.key, args.value))
    logits = (query @ key.mT * args.scale + bias).masked_fill(distance < 0, -torch.inf)
    expected = (logits.softmax(-1) @ value).transpose(0, 1).float()
    torch.testing.assert_close(reference.attend(args), expected, rtol=1e-4, atol=1e-5)


def test_keys_are_written_when_there_are_no_queries(kernel: ModuleType) -> None:
    """An encoder writes the pages of a source; each query of the decoder then reads all of them."""
    case = Case((4, 4), 16, new=(5,), done=(50,))
    cache = case.cache()
    args = case.args(cache, [0], [50])
    starts, lengths = torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    kernel.attend(replace(args, query_start=starts, seq_lens=lengths))
    args = case.args(cache, [50], [5])
    each = replace(
        args,
        slot_mapping=torch.full((5,), -1),
        block_table=case.table.expand(5, -1).contiguous(),
        query_start=torch.arange(6, dtype=torch.int32),
        seq_lens=torch.full((5,), 50, dtype=torch.int32),
    )
    query, key, value = (x.transpose(0, 1) for x in (args.query, case.keys[0][:50], case.values[0][:50]))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(0, 1)
    torch.testing.assert_close(kernel.attend(each), expected, rtol=1e-4, atol=1e-4)


def test_alibi_with_a_soft_cap_a_window_and_chunks(fast: ModuleType) -> None:
    more = {"softcap": 2.0, "window": 90, "chunk": 64}
    assert Case((6, 2), 64, new=(1, 30), done=(300, 90), alibi=torch.float32, **more).error(fast) < CLOSE


def test_alibi_equals_that_of_transformers() -> None:
    """Rounded as Falcon rounds it: bfloat16 slopes times positions beyond 256."""
    case = Case((4, 4), 16, new=(5,), done=(600,), alibi=torch.bfloat16)
    args = case.args(case.cache(), [0], [605])
    bias = (args.slopes[:, None] * torch.arange(605)).double()[:, None]
    query, key, value = (x.transpose(0, 1).double() for x in (args.query, args.key, args.value))
    hidden = torch.ones(605, 605, dtype=torch.bool).triu(1)
    logits = (query @ key.mT * args.scale + bias).masked_fill(hidden, -torch.inf)
    expected = (logits.softmax(-1) @ value).transpose(0, 1).float()
    torch.testing.assert_close(reference.attend(args), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_attention_takes_float16_and_bfloat16_queries(
    kernel: ModuleType, query_dtype: torch.dtype, dtype: str
) -> None:
    case = Case((4, 2), 64, dtype=dtype, new=(1, 40), done=(90, 3), query_dtype=query_dtype)
    assert case.error(kernel) < BFLOAT


@pytest.mark.skipif(
    not {"avx512_vnni", "avx512_bf16"} <= {*ISAS, *device.isa()}, reason="no bfloat16 products of AVX-512"
)
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_only_prompts_of_bfloat16_are_multiplied_in_bfloat16(query_dtype: torch.dtype) -> None:
    case, before = (
        Case((6, 2), 64, dtype="bfloat16", new=(70,), done=(90,), query_dtype=query_dtype),
        library.isa(),
    )
    found = {}
    for name in ("avx512_vnni", "avx2"):
        library.use_isa(name)
        found[name] = case.run(native).float()
    library.use_isa(before)
    apart = float((found["avx512_vnni"] - found["avx2"]).norm() / found["avx2"].norm())
    assert 1e-3 < apart < 6e-3 if query_dtype == torch.bfloat16 else apart < CLOSE


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_attention_is_bit_equal_for_any_thread_count(fast: ModuleType, threads: None, dtype: str) -> None:
    case = Case((3, 1), 16, dtype=dtype, new=(1, 2, 40), done=(4100, 900, 300))
    torch.set_num_threads(1)
    alone = case.run(fast)
    assert case.error(fast) < close(dtype, fast)
    for count in (3, 16):  # up to 16 pieces of the longest
        torch.set_num_threads(count)
        assert torch.equal(case.run(fast), alone), count


def test_attention_of_a_sequence_is_bit_equal_in_any_batch(fast: ModuleType) -> None:
    case = Case((6, 2), 64, dtype="float16", new=(1, 1, 1), done=(3000, 70, 1))
    together = case.run(fast)
    for b in range(3):
        alone = Case((6, 2), 64, dtype="float16", new=(1,), done=(case.done[b],))
        alone.keys, alone.values, alone.queries = [case.keys[b]], [case.values[b]], [case.queries[b]]
        assert torch.equal(alone.run(fast)[0], together[b])


@pytest.mark.parametrize("new", [1, 50])
def test_nan_in_one_sequence_reaches_no_other_sequence(kernel: ModuleType, new: int) -> None:
    case = Case((4, 2), 64, dtype="float16", new=(new, new), done=(60, 61))
    case.values[0][30] = torch.nan
    case.keys[0][31] = torch.inf
    out = case.run(kernel)
    assert not out[:new].isfinite().any()
    assert out[new:].isfinite().all()


def test_a_chunked_prefill_equals_a_whole_prefill(kernel: ModuleType) -> None:
    whole = Case((4, 2), 64, new=(200,), done=(0,))
    expected = whole.run(kernel)
    cache, got = whole.cache(), []
    for start, stop in ((0, 1), (1, 100), (100, 104), (104, 199), (199, 200)):
        args = replace(whole.args(cache, [start], [stop - start]), query=expected.new_empty(0))
        got.append(kernel.attend(replace(args, query=whole.queries[0][start:stop])))
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("new", [(2, 1), (30, 1)], ids=["few", "many"])
def test_a_token_without_a_slot_attends_to_the_cache(kernel: ModuleType, new: tuple[int, int]) -> None:
    case = Case((4, 2), 64, dtype="float16", new=new, done=(30, 20))
    outs = []
    for plugin in (kernel, reference):
        cache = case.cache()
        case.run(plugin, cache)
        before = cache.clone()
        torch.manual_seed(1)
        args = case.args(cache, case.done, case.new)
        other = replace(args, key=torch.randn_like(args.key), value=torch.randn_like(args.value))
        outs.append(plugin.attend(replace(other, slot_mapping=torch.full_like(args.slot_mapping, -1))))
        assert torch.equal(cache, before)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)


def test_attention_writes_its_own_layer_and_slots_only(fast: ModuleType) -> None:
    case = Case((4, 2), 64, dtype="int8", new=(1, 1), done=(0, 0))
    cache = case.cache()
    case.run(fast, cache)
    assert (cache[0] == 255).all()
    kept = {int(case.table[b, 0]) for b in range(2)}
    for page in set(range(case.pages)) - kept:
        assert (cache[1, page] == 255).all()


def test_a_page_beyond_the_cache_is_refused(fast: ModuleType) -> None:
    case = Case(new=(1, 1), done=(40, 7))
    args = case.args(case.cache(), case.done, case.new)
    with pytest.raises(RuntimeError, match="page beyond the cache"):
        fast.attend(replace(args, block_table=args.block_table + case.pages))
    with pytest.raises(RuntimeError, match="slot_mapping"):
        fast.attend(replace(args, slot_mapping=args.slot_mapping + case.pages * case.page))
    with pytest.raises(RuntimeError, match="needs 2"):
        fast.attend(replace(args, block_table=args.block_table[:, :1].contiguous()))


def test_lowering_for_the_cpu_puts_the_native_attention_in(
    fast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = capture_step(tiny := build("llama"), probe(tiny, kv_dtype="float16")).exported
    assert [(f.what, f.value) for f in prepack.findings(graph)] == [("native attention", 2)]
    assert prepack.usable(graph)
    swapped = [str(node.target) for node in prepack.packed(graph).graph.nodes]
    assert swapped.count("infer.attend_native.default") == 2
    assert "infer.attend_paged.default" not in swapped
    monkeypatch.setenv(library.OFF, "0")
    assert not prepack.usable(graph)
    assert [(f.what, f.value) for f in prepack.findings(graph)] == [("native attention", 0)]


def test_float64_is_refused_with_the_reason() -> None:
    case = Case(query_dtype=torch.float64)
    assert native.refuses(case.args(case.cache(), case.done, case.new)) == "it has no float64"
