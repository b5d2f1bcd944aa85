"""Folders of sentence-transformers: tiny random ones, made here, give that library's own vectors and scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")

from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infer.errors import SourceError, UnsafeSourceError
from infer.llm.text.embedding_prompts import with_prompt
from infer.llm.text.tokenizer import Tokenizer as TextTokenizer
from infer.load import LoadedModel, fill, load
from infer.load.identification.identify import identify
from infer.load.sentence_transformers.pooling_layers import MODES
from infer.plan import Plan
from infer.tasks.score_activation import activation_of, scores_of

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and sentence-transformers have many to give

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the of and a to in is you that it he was".split()  # noqa: SIM905 - a word is a token
TEXTS = ["the of and a", "to", "you that it he was in is the of and", "a to in"]
PAIRS = [("the of", "and a to in is"), ("you", "that"), ("it he was", "the")]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 40,
}


def tokenizer(last: str = "[CLS] $A [SEP]", **options: Any) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    special = [("[CLS]", 2), ("[SEP]", 3)]
    inner.post_processor = processors.TemplateProcessing(single=last, pair=pair, special_tokens=special)
    options["model_input_names"] = ["input_ids", "attention_mask", "token_type_ids"]  # as BERT's own has
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, mask_token="[MASK]", model_max_length=40, **named, **options
    )


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    BertModel(BertConfig(**SMALL)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def opened(folder: Path) -> LoadedModel:
    loaded = load(Plan(source=str(folder), data="random"))
    fill(loaded)
    return loaded


def inputs_of(loaded: LoadedModel, texts: list[Any]) -> dict[str, torch.Tensor]:
    text = TextTokenizer(loaded.files["tokenizer.json"], max_length=loaded.meta["max_length"])
    found = text.batch(with_prompt(texts, loaded.meta))
    return {spec.name: torch.from_numpy(found[spec.name]) for spec in loaded.inputs}


@torch.no_grad()
def answers(loaded: LoadedModel, texts: list[Any]) -> np.ndarray:
    return loaded.module(**inputs_of(loaded, texts)).numpy()


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("modes", [*MODES, ("cls", "max", "mean")], ids=str)
def test_every_pooling_equals_sentence_transformers(bert: Path, tmp_path: Path, modes: Any) -> None:
    theirs = SentenceTransformer(modules=[Transformer(str(bert)), Pooling(32, modes)], device="cpu")
    theirs.save_pretrained(str(tmp_path / "m"))
    loaded = opened(tmp_path / "m")
    assert (loaded.task, loaded.outputs, loaded.meta["normalize"]) == ("embedding", ("embedding",), False)
    close(answers(loaded, TEXTS), theirs.encode(TEXTS))


def test_layers_after_the_pooling_keep_their_order_and_weights(bert: Path, tmp_path: Path) -> None:
    after = [
        Dense(32, 16, activation_function=torch.nn.GELU()),
        LayerNorm(16),
        Dense(16, 8, bias=False),
        Normalize(),
    ]
    theirs = SentenceTransformer(modules=[Transformer(str(bert)), Pooling(32), *after], device="cpu")
    theirs.save_pretrained(str(tmp_path / "m"))
    loaded = opened(tmp_path / "m")
    assert loaded.meta["normalize"]
    close(answers(loaded, TEXTS), theirs.encode(TEXTS))


def test_a_dense_layer_with_a_projected_residual_is_kept(bert: Path, tmp_path: Path) -> None:
    theirs = SentenceTransformer(
        modules=[Transformer(str(bert)), Pooling(32), Dense(32, 12, use_residual=True)], device="cpu"
    )
    theirs.save_pretrained(str(tmp_path / "m"))
    close(answers(opened(tmp_path / "m"), TEXTS), theirs.encode(TEXTS))


def test_a_causal_model_with_modules_is_an_embedder(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer("$A [SEP]", padding_side="left").save_pretrained(tmp_path / "base")
    modules = [Transformer(str(tmp_path / "base")), Pooling(32, "lasttoken"), Normalize()]
    prompts = {"query": "you that ", "document": ""}
    theirs = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    theirs.save_pretrained(str(tmp_path / "m"))
    config_path = tmp_path / "m" / "config.json"  # as the published folders name it
    config_path.write_text(config_path.read_text().replace('"Qwen3Model"', '"Qwen3ForCausalLM"'))
    loaded = opened(tmp_path / "m")
    assert loaded.task == "embedding"
    close(answers(loaded, TEXTS), theirs.encode(TEXTS))
    given = with_prompt(TEXTS, loaded.meta, "query")
    close(answers(loaded, given), theirs.encode(TEXTS, prompt_name="query"))
    right = inputs_of(loaded, TEXTS)
    left = {}
    for name, value in right.items():
        rows = [
            torch.roll(row, int((mask == 0).sum()))
            for row, mask in zip(value, right["attention_mask"], strict=True)
        ]
        left[name] = torch.stack(rows)
    with torch.no_grad():
        close(loaded.module(**left).numpy(), theirs.encode(TEXTS))


def test_a_cross_encoder_gives_the_scores_of_the_library(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = BertForSequenceClassification(BertConfig(**SMALL, num_labels=1))
    with torch.no_grad():
        model.classifier.weight.mul_(50)  # or all scores are nearly one half
    model.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    theirs = CrossEncoder(str(tmp_path / "base"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "m"))
    for folder in (tmp_path / "m", tmp_path / "base"):
        loaded = opened(folder)
        assert (loaded.task, activation_of(loaded.meta, 1)) == ("classification", "sigmoid")
        close(scores_of(answers(loaded, PAIRS), "sigmoid")[:, 0], theirs.predict(PAIRS))


@pytest.mark.parametrize("place", ["sentence_transformers", "sbert_ce_default_activation_function"])
def test_the_activation_of_a_cross_encoder_is_read_from_its_config(tmp_path: Path, place: str) -> None:
    BertForSequenceClassification(BertConfig(**SMALL, num_labels=1)).save_pretrained(tmp_path)
    named = "torch.nn.modules.linear.Identity"
    config = json.loads((tmp_path / "config.json").read_text())
    config[place] = {"activation_fn": named} if place == "sentence_transformers" else named
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert activation_of(opened(tmp_path).meta, 1) == "identity"


@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_splade_gives_the_sparse_vectors_of_the_library(
    tmp_path: Path, strategy: Any, activation: Any
) -> None:
    torch.manual_seed(3)
    BertForMaskedLM(BertConfig(**SMALL)).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    transformer = Transformer(str(tmp_path / "base"), transformer_task="fill-mask")
    theirs = SparseEncoder(
        modules=[transformer, SpladePooling(strategy, activation_function=activation)], device="cpu"
    )
    theirs.save_pretrained(str(tmp_path / "m"))
    loaded = opened(tmp_path / "m")
    assert loaded.meta["sparse"] is True
    close(answers(loaded, TEXTS), theirs.encode(TEXTS, convert_to_sparse_tensor=False).numpy())


def test_texts_are_in_lower_case_where_the_folder_asks_for_it(bert: Path, tmp_path: Path) -> None:
    theirs = SentenceTransformer(
        modules=[Transformer(str(bert), do_lower_case=True), Pooling(32)], device="cpu"
    )
    theirs.save_pretrained(str(tmp_path / "m"))
    limits = tmp_path / "m" / "sentence_bert_config.json"
    limits.write_text(json.dumps({"max_seq_length": 9, "do_lower_case": True}))
    shutil.copy(bert / "tokenizer.json", tmp_path / "m" / "tokenizer.json")
    loaded = opened(tmp_path / "m")
    assert (loaded.meta["max_length"], loaded.meta["lower_case"]) == (9, True)
    close(answers(loaded, ["The OF and"]), theirs.encode(["the of and"]))


def test_a_default_prompt_is_put_before_every_text(bert: Path, tmp_path: Path) -> None:
    theirs = SentenceTransformer(
        modules=[Transformer(str(bert)), Pooling(32)],
        prompts={"q": "the of "},
        default_prompt_name="q",
        device="cpu",
    )
    theirs.save_pretrained(str(tmp_path / "m"))
    close(answers(opened(tmp_path / "m"), TEXTS), theirs.encode(TEXTS))


def test_a_transformer_in_a_folder_of_its_own_is_found(bert: Path, tmp_path: Path) -> None:
    theirs = SentenceTransformer(modules=[Transformer(str(bert)), Pooling(32)], device="cpu")
    theirs.save_pretrained(str(tmp_path / "m"))
    inner = tmp_path / "m" / "0_Transformer"
    inner.mkdir()
    for path in list((tmp_path / "m").iterdir()):
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(inner / path.name)
    edit(tmp_path / "m" / "modules.json", lambda modules: modules[0].update(path="0_Transformer"))
    assert identify(tmp_path / "m").kind == "huggingface"
    close(answers(opened(tmp_path / "m"), TEXTS), theirs.encode(TEXTS))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


REFUSED: list[tuple[str, Callable[[Any], Any], str]] = [
    ("modules.json", lambda m: m[1].update(type="sentence_transformers.models.LSTM"), "got 'LSTM'"),
    ("modules.json", lambda m: m[1].update(path="../other"), "outside the folder"),
    ("modules.json", lambda m: m.pop(1), "expected one pooling"),
    ("modules.json", lambda m: m.reverse(), "expected one Transformer, first"),
    ("modules.json", lambda m: m.append("x"), "expected a list of modules"),
    ("1_Pooling/config.json", lambda c: c.update(pooling_mode="median"), "got 'median'"),
    ("2_Dense/config.json", lambda c: c.update(activation_function="os.system"), "got 'os.system'"),
    ("2_Dense/config.json", lambda c: c.update(in_features="x"), "in_features as a positive integer"),
    (
        "2_Dense/config.json",
        lambda c: c.update(module_input_name="token_embeddings"),
        "works on 'token_embeddings'",
    ),
    ("2_Dense/config.json", lambda c: c.update(out_features=7), "of another shape"),
    ("config_sentence_transformers.json", lambda c: c.update(default_prompt_name="x"), "prompts do not hold"),
    ("config_sentence_transformers.json", lambda c: c.update(prompts=["x"]), "prompts as an object of texts"),
]


@pytest.fixture(scope="module")
def projected(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projected") / "m"
    modules = [Transformer(str(bert)), Pooling(32), Dense(32, 16)]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(("file", "change", "sentence"), REFUSED, ids=[case[2] for case in REFUSED])
def test_an_unsupported_sentence_transformers_module_is_refused(
    projected: Path, tmp_path: Path, file: str, change: Callable[[Any], Any], sentence: str
) -> None:
    shutil.copytree(projected, tmp_path / "m")
    edit(tmp_path / "m" / file, change)
    with pytest.raises(SourceError, match=sentence):
        load(Plan(source=str(tmp_path / "m"), data="random"))


def test_a_module_of_the_folders_own_code_is_not_run(projected: Path, tmp_path: Path) -> None:
    shutil.copytree(projected, tmp_path / "m")
    edit(tmp_path / "m" / "modules.json", lambda m: m[1].update(type="my_code.Pooling"))
    with pytest.raises(UnsafeSourceError, match="my_code.Pooling"):
        load(Plan(source=str(tmp_path / "m"), data="random"))


def test_a_module_without_weights_is_refused(projected: Path, tmp_path: Path) -> None:
    shutil.copytree(projected, tmp_path / "m")
    (tmp_path / "m" / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="of the module"):
        load(Plan(source=str(tmp_path / "m"), data="random"))
