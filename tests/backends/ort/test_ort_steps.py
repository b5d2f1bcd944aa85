"""The step of a language model in ONNX Runtime: transformers' logits, the cache written where it lies, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backends import ort
from backends.ort import step_runner
from backends.ort.layers import rewriter
from infer import Plan, Predictor
from infer.attention import KV_DTYPES
from infer.llm.step import paged_step
from infer.llm.step.full_sequence_runner import attention_inputs
from infer.llm.step.paged_step import capture_step
from infer.llm.step.probe import probe
from infer.llm.step.step_shape import StepShape
from infer.onnx import export
from tests.support.llm_artifacts import tiny
from tests.support.tiny_decoders import VOCABULARY, build

if reason := ort.missing():
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters
# Of three sequences, tokens per step: prefill beside decode, decode alone, nothing for one of them, chunks.
STEPS = [(7, 1, 2), (1, 1, 0), (3, 9, 1), (0, 1, 17), (9, 8, 1)]
LENGTHS = [sum(counts) for counts in zip(*STEPS, strict=True)]


def opened(
    model: nn.Module, folder: Path, kv_dtype: str = "float32"
) -> tuple[StepShape, step_runner.OrtStepRunner]:
    shape = probe(model, page=4, kv_dtype=kv_dtype)
    graph = capture_step(model, shape)
    path = folder / "model.onnx"
    export.export(graph, path, rewriter("ort-u8u8"))
    return shape, step_runner.OrtStepRunner(path, graph.inputs, graph.outputs)


def in_steps(shape: StepShape, runner: step_runner.OrtStepRunner, ids: Tensor, cache: Tensor) -> list[Tensor]:
    """Logits of each sequence, pages interleaved and given out backwards."""
    blocks = -(-max(LENGTHS) // shape.page)
    table = torch.arange(3 * blocks - 1, -1, -1, dtype=torch.int32).reshape(blocks, 3).t().contiguous()
    done, found = [0, 0, 0], [[], [], []]
    for new in STEPS:
        named = attention_inputs(shape, done, new, table)
        tokens = torch.cat([ids[i, d : d + n] for i, (d, n) in enumerate(zip(done, new, strict=True))])
        rows = torch.arange(len(tokens))
        logits = runner.run({"token_ids": tokens, "logit_rows": rows, "kv_cache": cache, **named})["logits"]
        for i, piece in enumerate(logits.split(new)):
            found[i].append(piece)
        done = [d + n for d, n in zip(done, new, strict=True)]
    return [torch.cat(pieces) for pieces in found]


def wanted(model: nn.Module, ids: Tensor) -> list[Tensor]:
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return [row[:length] for row, length in zip(logits, LENGTHS, strict=True)]


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt2"]
)  # groups, windows and soft caps, one head to a key
def test_a_step_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model, ids = build(name), torch.randint(3, VOCABULARY, (3, max(LENGTHS)))
    shape, runner = opened(model, tmp_path)
    got = in_steps(shape, runner, ids, shape.new_cache(30))
    for one, other in zip(got, wanted(model, ids), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("kv_dtype", "error"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_onnx_runtime_updates_the_paged_cache_in_place(kv_dtype: str, error: float, tmp_path: Path) -> None:
    model, ids = build("llama"), torch.randint(3, VOCABULARY, (3, max(LENGTHS)))
    shape, runner = opened(model, tmp_path, kv_dtype)
    cache, other = shape.new_cache(30), shape.new_cache(30)
    got = in_steps(shape, runner, ids, cache)
    for one, full in zip(got, wanted(model, ids), strict=True):
        assert (one - full).norm() / full.norm() < error

    class Plain:
        call = staticmethod(capture_step(model, shape).callable())

        def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with torch.no_grad():
                return {"logits": self.call(**inputs)[0]}

    in_steps(shape, Plain(), ids, other)
    for mine, theirs in zip(cache, other, strict=True):
        for a, b in zip(shape.layout.parts(mine)[:2], shape.layout.parts(theirs)[:2], strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=2 * error, rtol=2 * error)


def test_tokens_without_slots_and_rows_without_logits_are_skipped(tmp_path: Path) -> None:
    model = build("llama")
    shape, runner = opened(model, tmp_path)
    cache = shape.new_cache(4)
    named = paged_step.example(cache)
    runner.run(named)
    assert not cache.any()  # all slots are -1
    named["slot_mapping"] = torch.tensor([0, 1, 2, 4, 5])
    named["block_table"] = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    both = runner.run(named)["logits"]
    named["logit_rows"] = torch.tensor([4])
    torch.testing.assert_close(runner.run(named)["logits"], both[1:])


def test_unsupported_caches_and_devices_are_refused() -> None:
    model = build("llama")
    for kind in KV_DTYPES[3:]:
        coded = capture_step(model, probe(model, kv_dtype=kind))
        assert f"{kind} cache" in str(ort.refuses(coded, Plan(source="", device="cpu", dtype="float32")))
    half = capture_step(model, probe(model, kv_dtype="float16"))
    assert ort.refuses(half, Plan(source="", device="cpu", dtype="float32")) is None
    assert "CPUs only" in str(ort.refuses(half, Plan(source="", device="cuda", dtype="float32")))
    sinks = build("gpt_oss")
    graph = capture_step(sinks, probe(sinks))
    assert "sinks" in str(ort.refuses(graph, Plan(source="", device="cpu", dtype="float32")))


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_an_artifact_of_onnx_runtime_generates(quant: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, backend="ort", quant=quant, max_error=1.0 if quant == "int8" else None)
    prompt = list(range(3, 40))
    with Predictor.load(folder) as predictor:
        got = predictor.generate([prompt], max_tokens=12, temperature=0, ignore_eos=True)[0]
    assert len(got.token_ids) == 12
    if quant == "none":
        model = build("llama")
        want = model.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert list(got.token_ids) == want[0, len(prompt) :].tolist()
