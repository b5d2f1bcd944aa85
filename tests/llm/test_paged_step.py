"""The captured step of a language model gives transformers' own logits, however the tokens are cut into steps."""

from __future__ import annotations

import pytest
import torch

from infer.attention import KV_DTYPES
from infer.errors import NotUsableError
from infer.llm.step import paged_step
from infer.llm.step.attention import paged_attention
from infer.llm.step.full_sequence_runner import attention_inputs
from infer.llm.step.paged_step import capture_step
from infer.llm.step.probe import probe
from infer.llm.step.step_shape import StepShape
from tests.support.tiny_decoders import GROUPED, SIZES, VOCABULARY, build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
# Of two sequences, tokens per step: prefill beside decode, one token alone, nothing for one of them.
STEPS = [(7, 1), (1, 1), (3, 9), (0, 1), (9, 9), (1, 0)]


def in_steps(model: torch.nn.Module, shape: StepShape, ids: torch.Tensor) -> torch.Tensor:
    """Logits of ids [2, 21] by the captured step, pages interleaved and given out backwards."""
    run = capture_step(model, shape).callable()
    pages = -(-21 // shape.page)
    table = torch.arange(2 * pages - 1, -1, -1, dtype=torch.int32).reshape(pages, 2).t().contiguous()
    cache, done = shape.new_cache(2 * pages), [0, 0]
    logits = torch.full((2, 21, shape.vocab_size), torch.nan)
    for new in STEPS:
        named = attention_inputs(shape, done, new, table)
        cut = [slice(d, d + n) for d, n in zip(done, new, strict=True)]
        tokens = torch.cat([ids[i, part] for i, part in enumerate(cut)])
        with torch.no_grad():
            got = run(token_ids=tokens, logit_rows=torch.arange(len(tokens)), kv_cache=cache, **named)[0]
        logits[0, cut[0]], logits[1, cut[1]] = got.split(new)
        done = [d + n for d, n in zip(done, new, strict=True)]
    return logits


@pytest.mark.parametrize("name", SIZES)
def test_a_step_gives_the_logits_of_transformers(name: str) -> None:
    model = build(name)
    ids = torch.randint(3, VOCABULARY, (2, 21))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    shape = probe(model, page=4, kv_dtype="float32")
    torch.testing.assert_close(in_steps(model, shape, ids), expected, atol=2e-5, rtol=1e-4)


def test_attention_output_can_be_viewed_by_the_model() -> None:
    model = build("jetmoe", sizes=GROUPED)
    ids = torch.randint(3, VOCABULARY, (2, 21))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    shape = probe(model, page=4, kv_dtype="float32")
    torch.testing.assert_close(in_steps(model, shape, ids), expected, atol=2e-5, rtol=1e-4)


def test_layers_are_distinguished_by_their_order() -> None:
    """The exporter passes stand-ins for modules that live for one call, so that their ids come again."""
    shape = StepShape(
        layers=3, query_heads=2, kv_heads=1, head_dim=16, vocab_size=8, max_positions=64, page=4
    )
    cache = shape.new_cache(2)
    named = {**paged_step.example(cache), "slot_mapping": torch.arange(5)}
    token = paged_attention.CALL.set(
        paged_attention.StepCall(named, shape.page, KV_DTYPES.index(shape.kv_dtype), records_attention=False)
    )
    query, key = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 5, 16)
    for _ in range(shape.layers):
        paged_attention.attend(torch.nn.Identity(), query, key, key, None)
    paged_attention.CALL.reset(token)
    assert [bool(layer.any()) for layer in cache] == [True, True, True]


@pytest.mark.parametrize(("dtype", "error"), [*zip(KV_DTYPES, (1e-6, 1e-3, 1e-2, 2e-2, 6e-2), strict=True)])
def test_a_step_over_a_quantized_cache_stays_close(dtype: str, error: float) -> None:
    model = build("llama")
    ids = torch.randint(3, VOCABULARY, (2, 21))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    shape = probe(model, page=4, kv_dtype=dtype)
    got = in_steps(model, shape, ids)
    assert (got - expected).norm() / expected.norm() < error


def test_a_model_without_the_attention_interface_is_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "megatron-bert", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(NotUsableError, match="paged cache|attention interface"):
        probe(model)
