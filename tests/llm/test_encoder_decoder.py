"""Encoder-decoders give what transformers' `generate` gives, whatever runs beside them, from source to server."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from infer import Plan, Predictor, compress
from infer.artifact import store
from infer.errors import InputError, NotUsableError
from infer.graph.program import ENCODER
from infer.kernels.cpu import build as compiling
from infer.kernels.passes import prepack
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.step.encoder_decoder.capture_encoder_decoder import capture_encoder_decoder
from infer.llm.step.encoder_decoder.encoder_decoder_probe import probe_encoder_decoder
from infer.llm.step.encoder_decoder.encoder_decoder_runner import sequence_runner
from infer.llm.step.encoder_decoder.encoder_step import HIDDEN
from infer.llm.step.schedules.schedule_consistency import (
    compare_schedules,
    judged_windows,
    require_float_step,
)
from infer.llm.step.step_shape import StepShape
from tests.support.tiny_encoder_decoders import END, START, artifact, build, folder_of, greedy

LENGTHS = (1, 33, 7, 50)  # of sources: shorter than a page, a page and a token, almost two
COUNT = 40
NAMES = ("t5", "bart")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the source folder's parent and the artifact of each model, by name."""
    folder = tmp_path_factory.mktemp("encoder_decoders")
    return {name: artifact(folder, name) for name in NAMES}


@pytest.fixture(scope="session")
def wanted(made: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Return what transformers gives for each source, by name."""
    return {
        name: [greedy(path.with_suffix(""), source, COUNT) for source in sources()]
        for name, path in made.items()
    }


def sources() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 250, (length,), generator=generator).tolist() for length in LENGTHS]


def run(predictor: Predictor, requests: list[Request], kv_bytes: int | None = None) -> tuple[Any, Any]:
    """Step an engine of its own until all are done; return the tokens by (id, index), and the engine."""
    engine = predictor.language_model.new_engine(kv_bytes=kv_bytes)
    for request in requests:
        engine.submit(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            assert output.finish != "error", output.stopped_by
            tokens.setdefault((output.id, output.index), []).extend(output.token_ids)
        engine.check_integrity()
    return tokens, engine


def requests_of(rows: list[list[int]], **sampling: Any) -> list[Request]:
    asked = Sampling(temperature=0, max_tokens=COUNT, **sampling)
    return [Request(id=str(i), prompt=row, sampling=asked) for i, row in enumerate(rows)]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_encoder_decoder_tokens_equal_transformers(name: str, made: Any, wanted: Any) -> None:
    with Predictor.load(made[name]) as predictor:
        found = predictor.generate(sources(), max_tokens=COUNT, temperature=0)
        assert [one.token_ids for one in found] == wanted[name]
        assert [one.prompt_tokens for one in found] == list(LENGTHS)


@pytest.mark.parametrize("name", NAMES)
def test_encoder_decoder_tokens_survive_preemption(name: str, made: Any, wanted: Any) -> None:
    with Predictor.load(made[name]) as predictor:
        shape = predictor.language_model.shape
        tokens, engine = run(predictor, requests_of(sources()), 8 * shape.layers * shape.page_bytes)
        assert engine.stats().preemptions > 0
        assert [tokens[str(i), 0] for i in range(len(LENGTHS))] == wanted[name]
        assert engine.block_manager.num_used == 0


def test_completions_of_one_request_share_the_source(made: Any, wanted: Any) -> None:
    with Predictor.load(made["bart"]) as predictor:
        tokens, engine = run(predictor, requests_of(sources()[3:], n=3))
        assert [tokens["0", i] for i in range(3)] == [wanted["bart"][3]] * 3
        assert engine.stats().prefill_tokens == LENGTHS[3] + 1  # encoded once


def test_cached_pages_are_of_one_source_only(made: Any, wanted: Any) -> None:
    """Two sources begin with the same token of the decoder: their pages differ all the same."""
    with Predictor.load(made["t5"]) as predictor:
        rows = sources()[1:3]
        for _ in range(2):
            found = predictor.generate(rows, max_tokens=COUNT, temperature=0)
            assert [one.token_ids for one in found] == wanted["t5"][1:3]


def test_predict_gives_the_logits_of_the_decoder(made: Any) -> None:
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(made["t5"].with_suffix(""))
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(1))
    decoded = torch.randint(3, 250, (2, 5), generator=torch.Generator().manual_seed(2))
    with Predictor.load(made["t5"]) as predictor, torch.no_grad():
        got = predictor.predict({"input_ids": ids, "decoder_input_ids": decoded})["logits"]
        expected = model(input_ids=ids, decoder_input_ids=decoded).logits
    torch.testing.assert_close(torch.as_tensor(got), expected, rtol=1e-4, atol=1e-4)


def test_requests_that_an_encoder_decoder_can_not_run_are_refused(made: Any) -> None:
    with Predictor.load(made["bart"]) as predictor:
        engine = predictor.language_model.engine
        with pytest.raises(InputError, match="the encoder reads at most 96"):
            predictor.generate([5] * 97)
        with pytest.raises(InputError, match="a prompt of 1 tokens and max_tokens 96 need 97"):
            predictor.generate([5] * 9, max_tokens=96)
        with pytest.raises(InputError, match="no log probabilities of its prompt"):
            predictor.score([5, 6, 7])
        small = predictor.language_model.new_engine(
            kv_bytes=2 * engine.shape.layers * engine.shape.page_bytes
        )
        with pytest.raises(InputError, match="a source of 50 and 41 tokens need 4 pages of the KV cache"):
            small.submit(requests_of(sources()[3:])[0])


@pytest.mark.parametrize("name", ["mt5", "marian", "pegasus", "mbart", "m2m_100"])
def test_steps_of_all_encoder_decoder_families_equal_the_model(name: str) -> None:
    model = build(name)
    shape = probe_encoder_decoder(model, [START], kv_dtype="float32")
    ids = torch.randint(3, 250, (2, 72), generator=torch.Generator().manual_seed(0))
    found = require_float_step(
        model, msgspec.structs.replace(shape, page=16), ids, {"input_ids": ids.flip(1)}
    )
    assert found[0].value < 1e-4


def test_a_request_names_the_language_to_translate_into(made: Any) -> None:
    """Greedy tokens are those of `generate(forced_bos_token_id=…)`; the source's token is put first."""
    import transformers

    english, french = 300, 301
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(made["bart"].with_suffix(""))
    ids = [70, 71, 72, END]
    wanted = {
        rows: model.generate(
            torch.tensor([rows]), attention_mask=torch.ones((1, len(rows)), dtype=torch.int64),
            max_new_tokens=9, do_sample=False, num_beams=1, forced_bos_token_id=french,
        )[0].tolist()[2:]
        for rows in ((*ids,), (english, *ids))
    }  # fmt: skip
    with Predictor.load(made["bart"]) as predictor:
        with pytest.raises(InputError, match="has no tokens for languages"):
            predictor.generate(ids, tgt_lang="fra_Latn")
        predictor.language_model.text.special |= {english: "eng_Latn", french: "fra_Latn"}
        options: Any = {"temperature": 0, "max_tokens": 8, "tgt_lang": "fra_Latn"}
        predictor.language_model.text.__dict__.pop("languages")
        assert predictor.generate(ids, **options).token_ids == wanted[(*ids,)]
        found = predictor.generate([french, *ids], src_lang="eng_Latn", **options)
        assert found.token_ids == wanted[(english, *ids)]
        with pytest.raises(InputError, match="expected one of the 2 languages of this model") as caught:
            predictor.generate(ids, tgt_lang="fra_Lat")
        assert (caught.value.where, caught.value.hint) == ("tgt_lang", "Did you mean fra_Latn?")


def test_an_unsupported_decoder_is_refused_by_name() -> None:
    import transformers

    sizes = {"hidden_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 64}
    sizes |= dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 1)
    sizes |= dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 2)
    model = transformers.ProphetNetForConditionalGeneration(transformers.ProphetNetConfig(**sizes))
    with pytest.raises(NotUsableError, match="ProphetNetForConditionalGeneration has no cross-attention"):
        probe_encoder_decoder(model, [0], kv_dtype="float32")


def test_generation_settings_are_applied_or_reported(tmp_path: Path) -> None:
    from infer import load

    source = folder_of(tmp_path, "bart")
    config = json.loads((source / "generation_config.json").read_text())
    config |= {"forced_bos_token_id": 7, "num_beams": 4, "no_repeat_ngram_size": 3}
    (source / "generation_config.json").write_text(json.dumps(config))
    loaded = load.load(Plan(source=str(source), data="random"))
    assert loaded.meta["decoder_start_ids"] == [START, 7]
    asked = "the checkpoint asks for num_beams 4, no_repeat_ngram_size, which generation here does not apply"
    assert loaded.limitations == (asked,)


def test_each_graph_holds_its_own_weights(made: Any) -> None:
    """Projections of the source are in the encoder's graph alone, those of its queries in the step's."""
    from safetensors import safe_open

    names = {}
    for part in (".", "encoder"):
        with safe_open(made["bart"] / part / "weights/model.safetensors", "pt") as file:
            names[part] = set(file.keys())
    crossed = "model.model.decoder.layers.0.encoder_attn"
    assert f"{crossed}.k_proj.weight" in names["encoder"] - names["."]
    assert f"{crossed}.q_proj.weight" in names["."] - names["encoder"]
    assert "encoder/graph.pt2" in store.read_manifest(made["bart"]).files


class PackedGraphs:
    """Runner of both graphs of an encoder-decoder, their layers packed and fused."""

    def __init__(self, model: Any, shape: StepShape) -> None:
        graph = capture_encoder_decoder(model, shape)
        self.step, encoder = (prepack.packed(one.exported) for one in (graph, graph.parts[ENCODER]))
        self._calls = {"logits": self.step.module(), HIDDEN: encoder.module()}

    def run(self, inputs: Any) -> dict[str, Tensor]:
        name = "logits" if "token_ids" in inputs else HIDDEN
        with torch.no_grad():
            return {name: self._calls[name](**inputs)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["bart", "marian"])
def test_fused_layers_keep_source_and_decoder_tokens_apart(name: str) -> None:
    sizes = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    model: Any = build(name, **sizes)
    shape = probe_encoder_decoder(model, [START], kv_dtype="float32")
    compress.quantize_model(model, Plan(source="test", quant="int8:weight"))
    packed = PackedGraphs(model, shape)
    calls = Counter(str(node.target) for node in packed.step.graph.nodes)
    assert calls["infer.chain_attend.default"] == 1
    assert calls["infer.attend_native.default"] == 0

    def reference(ids: Tensor, source: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            out = model(input_ids=source["input_ids"][None], decoder_input_ids=ids[None], use_cache=False)
        logits: Tensor = out.logits[0]
        return logits

    ids = torch.randint(3, 250, (2, 72), generator=torch.Generator().manual_seed(0))
    windows = judged_windows(ids, shape.vocab_size, shape.max_positions)
    stepping = sequence_runner(packed, shape)
    found = compare_schedules(
        stepping, windows, reference, sources=[{"input_ids": one} for one in windows[::-1]]
    )
    assert max(float(metric.value) for metric in found) < 1e-4
