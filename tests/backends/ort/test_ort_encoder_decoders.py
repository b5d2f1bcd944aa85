"""Encoder-decoders in ONNX Runtime: two graphs over one cache, transformers' logits and greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from torch import nn

from backends import ort
from infer import Plan, Predictor
from infer.graph import encoder_decoder_graphs
from infer.graph.program import ENCODER
from infer.llm.engine.requests import Request, TokenLogprob
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.step.encoder_decoder.capture_encoder_decoder import capture_language_model
from infer.llm.step.encoder_decoder.encoder_decoder_probe import probe_encoder_decoder
from infer.llm.step.encoder_decoder.encoder_decoder_runner import SourceSequenceRunner
from infer.spec import DECODER_IDS
from tests.backends.ort.test_ort_steps import LENGTHS, in_steps
from tests.backends.ort.test_ort_steps import opened as opened_step
from tests.support.fake_predictors import live
from tests.support.tiny_decoders import build as build_decoder
from tests.support.tiny_encoder_decoders import START, artifact, build, greedy

if reason := ort.missing():
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters


def opened(model: nn.Module, folder: Path) -> SourceSequenceRunner:
    """Lower both graphs over small pages and return a runner of whole sequences."""
    shape = probe_encoder_decoder(model, [START], kv_dtype="float32")
    shape = msgspec.structs.replace(shape, page=4)
    graph = capture_language_model(model, shape)
    plan = Plan(source="", device="cpu", dtype="float32")
    assert encoder_decoder_graphs.refusal(ort, graph, plan) is None
    for part, place in ((graph, folder), (graph.parts[ENCODER], folder / ENCODER)):
        assert part is not None
        ort.lower(part, plan, place)
        signature = {"inputs": part.inputs, "outputs": part.outputs, "sizes": {}, "task": part.task}
        (place / "graph.json").write_bytes(msgspec.json.encode(signature))
    return SourceSequenceRunner(encoder_decoder_graphs.open_runner(ort, folder, "cpu"), shape)


def test_two_onnx_graphs_give_the_logits_of_transformers(tmp_path: Path) -> None:
    model = build("t5", num_layers=1, num_decoder_layers=2)
    runner = opened(model, tmp_path)
    generator = torch.Generator().manual_seed(4)
    given = torch.randint(3, 250, (2, 9), generator=generator)  # two whole pages and a row
    ids = torch.randint(3, 250, (2, 31), generator=generator)  # beyond T5's longest distance
    got = runner.run({"input_ids": given, DECODER_IDS: ids})["logits"]
    with torch.no_grad():
        expected: Any = model(input_ids=given, decoder_input_ids=ids).logits
    assert float((got - expected).norm() / expected.norm()) < 1e-5


def test_sound_is_read_through_onnx_runtime(tmp_path: Path) -> None:
    import transformers

    sizes = {**dict.fromkeys(("encoder_layers", "decoder_layers"), 1), "d_model": 16, "num_mel_bins": 8}
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16) | {"vocab_size": 64}
    sizes |= {"max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**sizes, bos_token_id=1, eos_token_id=2, decoder_start_token_id=START)
    model: Any = transformers.WhisperForConditionalGeneration(config).eval()
    sound, ids = torch.randn(2, 8, 20), torch.randint(3, 64, (2, 7))
    got = opened(model, tmp_path).run({"input_features": sound, DECODER_IDS: ids})["logits"]
    with torch.no_grad():
        torch.testing.assert_close(
            got, model(input_features=sound, decoder_input_ids=ids).logits, rtol=1e-4, atol=1e-5
        )


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lower a tiny BART to ONNX Runtime."""
    return artifact(tmp_path_factory.mktemp("bart"), "bart", sizes={"encoder_layers": 1}, backend="ort")


def test_forks_of_a_source_have_the_probabilities_of_transformers(bart: Path) -> None:
    import transformers

    source = list(range(5, 50))  # its last page is shared in part
    sampling = Sampling(temperature=1, seed=3, n=3, max_tokens=40, min_tokens=40, logprobs=0)
    found: list[list[TokenLogprob]] = [[], [], []]
    with Predictor.load(bart) as predictor:
        engine = predictor.language_model.new_engine()
        engine.submit(Request(id="forked", prompt=source, sampling=sampling))
        while not engine.idle:
            for output in engine.step():
                found[output.index].extend(output.logprobs)
        engine.check_integrity()
    texts = [[one.token_id for one in row] for row in found]
    assert len({tuple(text) for text in texts}) == 3
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(bart.with_suffix(""))
    given = torch.tensor([[START, *text[:-1]] for text in texts])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([source] * 3), decoder_input_ids=given).logits
    likely = logits.log_softmax(-1).gather(-1, torch.tensor(texts)[..., None])[..., 0]
    got = torch.tensor([[one.logprob for one in row] for row in found])
    torch.testing.assert_close(got, likely, rtol=1e-4, atol=1e-4)


def test_a_server_streams_what_onnx_runtime_generates(bart: Path) -> None:
    prompt, many = list(range(5, 38)), {"max_tokens": 20, "temperature": 0}
    with Predictor.load(bart) as predictor, live(predictor) as server:
        expected = predictor.generate([prompt], **many)[0].text
        url, asked = f"{server.url}/v1/completions", {"model": predictor.name, "prompt": prompt, **many}
        (choice,) = httpx.post(url, json=asked, timeout=60).json()["choices"]
        with httpx.stream("POST", url, json={**asked, "stream": True}, timeout=60) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert choice["text"] == expected
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected


def test_an_artifact_of_both_graphs_generates_after_preemption(bart: Path) -> None:
    folder = bart
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 250, (length,), generator=generator).tolist() for length in (1, 33, 50)]
    wanted = [greedy(folder.with_suffix(""), row, 40) for row in rows]
    with Predictor.load(folder) as predictor:
        found = predictor.generate(rows, max_tokens=40, temperature=0)
        assert [one.token_ids for one in found] == wanted
        shape = predictor.language_model.shape
        engine = predictor.language_model.new_engine(kv_bytes=6 * shape.layers * shape.page_bytes)
        for index, row in enumerate(rows):
            engine.submit(Request(id=str(index), prompt=row, sampling=Sampling(temperature=0, max_tokens=40)))
        tokens: dict[str, list[int]] = {}
        while not engine.idle:
            for output in engine.step():
                tokens.setdefault(output.id, []).extend(output.token_ids)
        assert engine.stats().preemptions > 0
        assert [tokens[str(index)] for index in range(len(rows))] == wanted


def test_a_step_with_alibi_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    model = build_decoder("bloom")
    ids = torch.randint(3, 60, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    shape, runner = opened_step(model, tmp_path)
    got = in_steps(shape, runner, ids, shape.new_cache(30))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    for one, row, length in zip(got, expected, LENGTHS, strict=True):
        torch.testing.assert_close(one, row[:length], atol=2e-5, rtol=1e-4)
