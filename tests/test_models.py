"""Promises of the reference models: they load, are small, are good, and learned nothing held out."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

MODELS = Path(__file__).parent.parent / "models"
PERPLEXITY_BOUND = 32.0


def recipe(name):
    """Load models/NAME.py by path, the way `--model FILE.py:FACTORY` does."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", MODELS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def digits():
    return recipe("digits")


@pytest.fixture(scope="module")
def pydoc_lm():
    pytest.importorskip("transformers")
    return recipe("pydoc_lm")


@pytest.fixture(scope="module")
def corpus(pydoc_lm):
    """Return the module of the corpus and its documents, which take seconds to find."""
    module = pydoc_lm._sibling("pydoc_corpus")
    return module, module.corpus()


@pytest.fixture(scope="module")
def language_model(pydoc_lm):
    return pydoc_lm.load()


@pytest.fixture(scope="module")
def minilm():
    module = recipe("minilm")
    if module.available():
        pytest.skip(module.available())
    return module


def test_all_weights_together_stay_under_25_megabytes():
    data = [path for path in MODELS.rglob("*") if path.suffix in {".pt", ".npz", ".safetensors", ".bin"}]
    assert len(data) >= 3
    assert sum(path.stat().st_size for path in data) <= 25e6


def test_recipes_print_nothing_and_need_no_optional_package_at_import():
    for path in MODELS.glob("*.py"):
        tree = ast.parse(path.read_text())
        roots = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
        roots += [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
        assert not {"sklearn", "transformers", "tokenizers"} & {name.split(".")[0] for name in roots}


def test_digits_classifies_98_percent_of_held_out_images(digits):
    assert digits.evaluate(digits.predictor(digits.load()))["accuracy"] >= 0.98


def test_digits_builds_the_same_untrained_model_every_time(digits):
    first, second = digits.build(), digits.build()
    assert not first.training
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert digits.evaluate(digits.predictor(first))["accuracy"] < 0.5


def test_digits_has_convolutions_and_linears_of_whole_64_wide_blocks(digits):
    layers = list(digits.build().modules())
    linears = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in layers) >= 3
    assert len(linears) == 13
    assert all(layer.in_features % 64 == 0 for layer in linears)


def test_digits_exports_with_a_symbolic_batch(digits):
    image = digits.example_inputs()["image"]
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(digits.load(), (), {"image": image}, dynamic_shapes={"image": {0: batch}})
    with torch.no_grad():
        for some in (image[:1], image[:3]):
            torch.testing.assert_close(program.module()(image=some), digits.load()(image=some))


def test_digits_inputs_are_scaled_images_and_calibration_is_not_held_out(digits):
    image, calibration = digits.example_inputs()["image"], digits.calibration_inputs()["image"]
    assert image.shape == (64, 1, 8, 8)
    assert image.dtype == calibration.dtype == torch.float32
    assert 0.0 <= float(image.min()) < float(image.max()) <= 1.0
    with np.load(digits.SAMPLES) as file:
        held_out = {each.tobytes() for each in file["held_out_images"]}
        assert len(held_out) >= 359
        assert not held_out & {each.tobytes() for each in file["calibration_images"]}


def test_digits_takes_logits_as_array_tensor_or_dict(digits):
    with np.load(digits.SAMPLES) as file:
        right = np.eye(10, dtype=np.float32)[file["held_out_labels"]]
    for given in (right, torch.from_numpy(right), {"logits": right}, {"output": right}):
        assert digits.evaluate(lambda inputs, given=given: given)["accuracy"] == 1.0
    with pytest.raises(ValueError, match=r"expected logits \[360, 10\], got \[5, 10\]"):
        digits.evaluate(lambda inputs: right[:5])


def test_language_model_perplexity_is_far_below_unigram(pydoc_lm, language_model):
    figures = pydoc_lm.evaluate(pydoc_lm.logits_of(language_model))
    assert figures["perplexity"] < PERPLEXITY_BOUND
    assert figures["perplexity"] < pydoc_lm.unigram_perplexity() / 10


def test_language_model_evaluation_of_uniform_logits_is_the_vocabulary(pydoc_lm):
    figures = pydoc_lm.evaluate(lambda ids: np.zeros((*ids.shape, pydoc_lm.VOCAB), dtype=np.float32))
    assert figures["perplexity"] == pytest.approx(pydoc_lm.VOCAB, rel=1e-4)


def test_language_model_linears_are_whole_64_wide_blocks(pydoc_lm, language_model):
    linears = [layer for layer in language_model.modules() if isinstance(layer, torch.nn.Linear)]
    assert all(size % 64 == 0 for layer in linears for size in layer.weight.shape)
    assert 5e6 <= sum(param.numel() for param in language_model.parameters()) <= 10e6
    assert json.loads((pydoc_lm.checkpoint_folder() / "config.json").read_text())["dtype"] == "float16"


def test_held_out_ids_are_whole_rows_of_known_tokens(pydoc_lm):
    ids = pydoc_lm.held_out_ids(3, 100)
    assert ids.shape == (3, 100)
    assert ids.dtype == torch.int64
    assert 0 <= int(ids.min()) <= int(ids.max()) < pydoc_lm.VOCAB
    assert int(ids[0, 0]) == 0
    with pytest.raises(ValueError, match=r"asked for 100000 rows of 256 tokens, samples\.txt holds \d+"):
        pydoc_lm.held_out_ids(100_000)


def test_language_model_continues_a_documentation_sentence(language_model, pydoc_lm):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pydoc_lm.checkpoint_folder() / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("The file is opened for reading and").ids])
    likely = pydoc_lm.logits_of(language_model)(ids)[0, -1].argmax()
    assert tokenizer.decode([int(likely)]) == " writing"


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox.",
        "def f(x):\n\tif x:\n        return x ** 2  # no\n\n\n",
        "naïve 東京 😀 \u200b é \r\n\x00 ﷽ 𝔘",
        "   leading and trailing   ",
        "",
    ],
)
def test_tokenizer_round_trips_any_text(pydoc_lm, text):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    plain = Tokenizer.from_file(str(pydoc_lm.checkpoint_folder() / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(pydoc_lm.checkpoint_folder())
    ids = plain.encode(text).ids
    assert ids[0] == auto.bos_token_id == 0
    assert auto.eos_token_id == 1
    assert ids == auto(text).input_ids
    assert plain.decode(ids) == auto.decode(ids, skip_special_tokens=True) == text


def test_corpus_keeps_held_out_text_out_of_training(corpus):
    module, documents = corpus
    held_out = {doc.name for doc in documents if doc.held_out}
    learned = {doc.name for doc in documents if not doc.held_out}
    assert held_out
    assert not held_out & learned
    secret = {key for doc in documents if doc.held_out for key in module._paragraph_keys(doc.text)}
    shown = {key for doc in documents if not doc.held_out for key in module._paragraph_keys(doc.text)}
    assert len(secret) > 100
    assert not secret & shown


def test_samples_are_documents_two_blank_lines_apart(pydoc_lm):
    texts = pydoc_lm.samples()
    size = (pydoc_lm.checkpoint_folder() / "samples.txt").stat().st_size
    assert 24_000 <= size <= 41_000
    assert len(texts) >= 10
    assert all(text == text.strip("\n") and "\n\n\n" not in text for text in texts)


def test_minilm_finds_every_paraphrase(minilm):
    figures = minilm.evaluate(minilm.float_embed())
    assert figures["retrieval_order"] == 1.0
    assert figures["mean_cosine_gap"] > 0.25


def test_random_embeddings_find_few_paraphrases(minilm):
    rows = np.random.default_rng(0)
    assert minilm.evaluate(lambda texts: rows.normal(size=(len(texts), 384)))["retrieval_order"] <= 0.25
    with pytest.raises(ValueError, match=r"expected embeddings \[n, 384\], got \[12, 3\]"):
        minilm.evaluate(lambda texts: np.ones((len(texts), 3)))


def test_minilm_sentences_are_english_of_many_lengths(minilm):
    texts = minilm.sentences()
    lengths = [len(text) for text in texts]
    assert len(texts) >= 60
    assert min(lengths) < 40 < 300 < max(lengths)
    assert (minilm.checkpoint_folder() / "model.safetensors").exists()


def test_calibration_and_evaluation_texts_are_disjoint(minilm, pydoc_lm, corpus, monkeypatch):
    monkeypatch.syspath_prepend(str(MODELS))
    keys, found = corpus[0]._paragraph_keys, corpus[1]
    monkeypatch.setattr(pydoc_lm, "corpus", lambda: found)
    judging = {key for text in pydoc_lm.samples() for key in keys(text)}
    documents = pydoc_lm.calibration()
    assert len(documents) >= pydoc_lm.NUM_CALIBRATION
    assert not {key for text in documents for key in keys(text)} & judging
    sentences = minilm.calibration()
    assert len(sentences) >= 64
    assert not set(sentences) & set(minilm.sentences())
