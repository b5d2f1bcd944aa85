"""`generate` of an artifact gives the tokens of transformers' model: greedy, sampled, by beams, streamed, stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infer
from infer.errors import InputError, UsageError
from tests.support import tiny_encoder_decoders, tiny_hybrids, tiny_whisper
from tests.support.llm_artifacts import bytes_as_tokens
from tests.support.tiny_decoders import build

pytest.importorskip("optimum")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
PLAN: dict[str, Any] = {
    "backend": "eager", "batches": (), "allow_slower": True, "data": "random", "kv_dtype": "float32",
}  # fmt: skip
IDS = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
WAYS = (
    {},
    {"num_beams": 3, "num_return_sequences": 2},
    {"do_sample": True, "temperature": 0.8, "top_k": 20},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
)


def tokens(model: Any, *values: Any, **options: Any) -> list[list[int]]:
    torch.manual_seed(0)
    return model.generate(*values, **{"max_new_tokens": 40, "do_sample": False, **options}).tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("llama") / "llama"
    build("llama").save_pretrained(folder)
    bytes_as_tokens(folder)
    model = infer.InferModelForCausalLM.from_pretrained(folder, export=True, **PLAN)
    return model, transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("options", WAYS, ids=("greedy", "beams", "sampled", "penalties"))
def test_a_decoder_writes_the_tokens_of_transformers(llama: tuple[Any, Any], options: dict[str, Any]) -> None:
    ours, theirs = (tokens(model, IDS, attention_mask=MASK, **options) for model in llama)
    assert ours == theirs


def test_text_generation_in_a_pipeline(llama: tuple[Any, Any]) -> None:
    place = str(llama[0].predictor.path)
    ours, theirs = (
        transformers.pipeline("text-generation", model=model, tokenizer=place, device="cpu")
        for model in llama
    )
    asked = {"max_new_tokens": 20, "do_sample": False}
    assert ours("the cat sat", **asked) == theirs("the cat sat", **asked)
    chat = [{"role": "user", "content": "where is it"}]
    assert ours(chat, **asked) == theirs(chat, **asked)


def test_tokens_are_streamed_and_stopped(llama: tuple[Any, Any]) -> None:
    class Seen(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    class Long(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= 15] * len(input_ids))

    found = []
    for model in llama:
        streamer = Seen()
        stop = transformers.StoppingCriteriaList([Long()])
        row = tokens(model, IDS[1:], streamer=streamer, stopping_criteria=stop)[0]
        assert streamer.tokens == row
        assert streamer.ended
        found.append(row)
    assert found[0] == found[1]
    assert len(found[0]) == 15


def test_a_prompt_that_goes_on_computes_its_new_tokens_only(llama: tuple[Any, Any]) -> None:
    model, original = llama
    read = []
    step = model.sequences._runner.step

    class Counted:
        def run(self, inputs: Any) -> Any:
            read.append(len(inputs["token_ids"]))
            return step.run(inputs)

    model.sequences._runner.step = Counted()
    try:
        first = model.generate(IDS[1:] + 50, max_new_tokens=10, do_sample=False)
        longer = torch.cat([first, torch.tensor([[20, 21]])], 1)
        assert tokens(model, longer) == tokens(original, longer)
    finally:
        model.sequences._runner.step = step
    assert read[:11] == [6, *[1] * 9, 3]


def test_logits_of_padded_rows_are_those_of_transformers(llama: tuple[Any, Any]) -> None:
    model, original = llama
    ids, mask = IDS.flip(1), MASK.flip(1)  # padded on the right
    with torch.no_grad():
        expected = original(ids, attention_mask=mask).logits
    found = model(ids, attention_mask=mask).logits
    np.testing.assert_allclose(found[mask == 1], expected[mask == 1], atol=1e-4)
    assert not found[mask == 0].any()
    with pytest.raises(InputError, match="has no use for 'output_hidden_states'"):
        model.generate(ids, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    with pytest.raises(InputError, match="expected 1 to 256 tokens, got 257"):
        model(torch.ones((1, 257), dtype=torch.int64))
    with pytest.raises(ValueError, match="max_new_token"):
        model.generate(ids, max_new_token=2)


def test_layers_with_state_go_on_from_it(tmp_path: Path) -> None:
    build("lfm2", sizes=tiny_hybrids.STATEFUL["lfm2"]).save_pretrained(tmp_path / "m")
    bytes_as_tokens(tmp_path / "m")
    model = infer.InferModelForCausalLM.from_pretrained(tmp_path / "m", export=True, **PLAN)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    for options in ({}, {"num_beams": 3}):
        assert tokens(model, IDS[1:], **options) == tokens(original, IDS[1:], **options)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_writes_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    folder = tiny_encoder_decoders.folder_of(tmp_path, name)
    model = infer.InferModelForSeq2SeqLM.from_pretrained(folder, export=True, **PLAN)
    original = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    ids, mask = IDS.flip(1), MASK.flip(1)
    for options in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        ours, theirs = (tokens(one, ids, attention_mask=mask, **options) for one in (model, original))
        assert ours == theirs
    decoder = torch.tensor([[0, 5, 6], [0, 7, 8]])
    with torch.no_grad():
        expected = original(ids, attention_mask=mask, decoder_input_ids=decoder).logits
    found = model(ids, attention_mask=mask, decoder_input_ids=decoder).logits
    np.testing.assert_allclose(found, expected, atol=1e-4)
    with pytest.raises(
        UsageError, match="an encoder-decoder of input_ids; InferModelForCausalLM opens a decoder"
    ):
        infer.InferModelForCausalLM.from_pretrained(model.predictor.path)


def test_speech_recognition_by_an_encoder_decoder(tmp_path: Path) -> None:
    folder = tiny_whisper.folder_of(tmp_path / "m")
    model = infer.InferModelForSpeechSeq2Seq.from_pretrained(folder, export=True, **PLAN)
    original = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    place = model.predictor.path
    named = {
        "tokenizer": transformers.AutoTokenizer.from_pretrained(place),
        "feature_extractor": transformers.AutoFeatureExtractor.from_pretrained(place),
        "device": "cpu",
    }
    ours, theirs = (
        transformers.pipeline("automatic-speech-recognition", model=one, **named) for one in (model, original)
    )
    sound = np.random.default_rng(0).normal(0, 0.1, 2 * 16000).astype(np.float32)
    found = ours(sound.copy())  # by five beams
    assert found == theirs(sound.copy())
    assert found["text"]
    asked = {"return_timestamps": True, "generate_kwargs": {"language": "de", "num_beams": 1}}
    assert ours(sound.copy(), **asked) == theirs(sound.copy(), **asked)


def test_a_model_that_scores_only_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "m")
    plan = infer.Plan(source=str(tmp_path / "m"), task="score", **PLAN)
    path = infer.optimize(plan, tmp_path / "scores.infer").path
    with pytest.raises(UsageError, match="can't generate"):
        infer.InferModelForCausalLM.from_pretrained(path)
