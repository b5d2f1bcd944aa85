"""Hugging Face folders: tiny random ones, made here, give the logits of transformers itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from infer.errors import NotUsableError, SourceError, UnsafeSourceError, UsageError
from infer.load import STRATEGIES, LoadedModel, fill, load
from infer.plan import Plan

WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
    "at",
]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def save(model: PreTrainedModel, folder: Path, *, half: bool = False, shard: str = "5GB") -> Path:
    (model.half() if half else model).save_pretrained(folder, max_shard_size=shard)
    model.float().eval()
    return folder


def add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"[PAD]": 0, "[UNK]": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def add_sentence_modules(folder: Path, mode: str, *, normalize: bool) -> None:
    kinds = ["Transformer", "Pooling"] + (["Normalize"] if normalize else [])
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("mean_tokens", "cls_token", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def llama(tied: bool = True, **changes: object) -> LlamaForCausalLM:
    shape = {"num_key_value_heads": 2, "max_position_embeddings": 96, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(**SMALL, **shape, **changes)).eval()


def opened(folder: Path, **options: object) -> LoadedModel:
    loaded = load(Plan(source=str(folder), data="random", **options))
    fill(loaded)
    return loaded


@torch.no_grad()
def assert_same_logits(loaded: LoadedModel, model: PreTrainedModel, **inputs: torch.Tensor) -> None:
    got = loaded.module(**{spec.name: inputs[spec.name] for spec in loaded.inputs})
    torch.testing.assert_close(got, model(**inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_gives_the_logits_of_transformers(tmp_path: Path, tied: bool, half: bool) -> None:
    model = llama(tied)
    loaded = opened(save(model, tmp_path, half=half))
    assert (loaded.task, loaded.outputs) == ("text-generation", ("logits",))
    assert [spec.format() for spec in loaded.inputs] == ["input_ids=int64[batch,seq]"]
    assert loaded.sizes == {"batch": (1, 64), "seq": (1, 96)}
    inner = loaded.module.model
    assert (inner.lm_head.weight is inner.model.embed_tokens.weight) == tied
    assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}
    assert any(f.what == "upcast" for f in loaded.findings) == half
    assert_same_logits(loaded, model, input_ids=IDS)


def test_right_padding_does_not_reach_real_tokens(tmp_path: Path) -> None:
    model = llama()
    loaded = opened(save(model, tmp_path))
    with torch.no_grad():
        got = loaded.module(input_ids=IDS)[1, :3]
        want = model(input_ids=IDS[1:, :3]).logits[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_sliding_window_of_a_model_is_kept(tmp_path: Path) -> None:
    config = MistralConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=64, sliding_window=3)
    model = MistralForCausalLM(config).eval()
    loaded = opened(save(model, tmp_path))
    assert not loaded.module.own_mask
    assert_same_logits(loaded, model, input_ids=torch.randint(0, 64, (2, 12)))


def test_gpt2_without_a_base_prefix_in_the_checkpoint_loads(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)).eval()
    save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in state.items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(opened(tmp_path), model, input_ids=IDS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_checkpoints_load_equal_by_every_strategy(tmp_path: Path, strategy: str) -> None:
    model = llama()
    save(model, tmp_path, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_logits(opened(tmp_path, load=strategy), model, input_ids=IDS)


def test_a_classifier_honours_its_mask_and_names_its_labels(tmp_path: Path) -> None:
    config = BertConfig(**SMALL, max_position_embeddings=40, id2label={0: "no", 1: "yes"})
    model = BertForSequenceClassification(config).eval()
    loaded = opened(save(model, tmp_path))
    assert loaded.task == "classification"
    assert loaded.meta["labels"] == ["no", "yes"]
    types = (torch.arange(IDS.shape[1]) > 2).long().expand_as(IDS)
    assert_same_logits(loaded, model, input_ids=IDS, attention_mask=MASK, token_type_ids=types)


@pytest.mark.parametrize(
    ("mode", "normalize"), [("mean_tokens", True), ("cls_token", False), ("max_tokens", True)]
)
@torch.no_grad()
def test_pooling_and_normalisation_are_inside_the_graph(tmp_path: Path, mode: str, normalize: bool) -> None:
    model = BertModel(BertConfig(**SMALL, max_position_embeddings=40)).eval()
    save(model, tmp_path)
    add_sentence_modules(tmp_path, mode, normalize=normalize)
    loaded = opened(tmp_path)
    assert (loaded.task, loaded.outputs) == ("embedding", ("embedding",))
    hidden = model(input_ids=IDS, attention_mask=MASK).last_hidden_state
    rows = [hidden[i, : MASK[i].sum()] for i in range(2)]
    pool = {
        "mean_tokens": lambda r: r.mean(0),
        "cls_token": lambda r: r[0],
        "max_tokens": lambda r: r.amax(0),
    }
    want = torch.stack([pool[mode](row) for row in rows])
    want = torch.nn.functional.normalize(want, dim=-1) if normalize else want
    torch.testing.assert_close(loaded.module(IDS, MASK), want, rtol=1e-5, atol=1e-5)


def test_unused_tensors_of_a_larger_checkpoint_are_reported(tmp_path: Path) -> None:
    model = BertModel(BertConfig(**SMALL, max_position_embeddings=40)).eval()
    save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    old = {f"bert.{k}".replace("LayerNorm.weight", "LayerNorm.gamma"): v for k, v in state.items()}
    old = {k.replace("LayerNorm.bias", "LayerNorm.beta"): v for k, v in old.items() if "pooler" not in k}
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = opened(tmp_path)
    left = next(f for f in loaded.findings if f.what == "tensors left")
    assert (left.value, left.why) == (1, "the model does not use bert.embeddings.position_ids")
    with torch.no_grad():
        hidden = model(input_ids=IDS, attention_mask=MASK).last_hidden_state[0].mean(0)
    want = torch.nn.functional.normalize(hidden, dim=-1)
    torch.testing.assert_close(loaded.module(IDS, MASK)[0], want, rtol=1e-4, atol=1e-5)


def test_tokenizer_files_and_limits_travel_along(tmp_path: Path) -> None:
    save(llama(pad_token_id=0, bos_token_id=1, eos_token_id=2), tmp_path)
    add_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 50}))
    (tmp_path / "notes.md").write_text("not carried")
    loaded = opened(tmp_path, max_length=80)
    assert set(loaded.files) == {
        "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"
    }  # fmt: skip
    assert loaded.sizes["seq"] == (1, 80)
    meta = {name: loaded.meta[name] for name in ("max_length", "pad_id", "bos_id", "eos_id", "vocab_size")}
    assert meta == {"max_length": 50, "pad_id": 0, "bos_id": 1, "eos_id": 2, "vocab_size": 64}


def test_text_shipped_with_the_folder_becomes_samples(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    add_tokenizer(tmp_path)
    with pytest.raises(UsageError, match=r"no real inputs.*at --data\. Give some: --data texts\.txt"):
        load(Plan(source=str(tmp_path), data="required"))
    assert load(Plan(source=str(tmp_path))).samples_from == "texts of ours"
    (tmp_path / "samples.txt").write_text(" ".join(WORDS * 30))
    loaded = load(Plan(source=str(tmp_path)))
    assert loaded.samples_from == str(tmp_path / "samples.txt")
    assert loaded.samples["input_ids"].shape == (6, 96)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UnsafeSourceError, match=r"auto_map: evil\.Model"):
        load(Plan(source=str(tmp_path), data="random", trust_code=True))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"architectures": ["LlamaForX"]}, SourceError, "infer has no task for the head of LlamaForX"),
        ({"architectures": ["LlamaForMaskedLM"]}, SourceError, "transformers has no LlamaForMaskedLM"),
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            SourceError,
            "quantized by .aqlm., which infer does not",
        ),
        (
            {"is_encoder_decoder": True},
            SourceError,
            "LlamaForCausalLM is an encoder-decoder model; infer opens those",
        ),
        ({"architectures": ["CLIPTextModel"]}, SourceError, "CLIPTextModel has no projection"),
        ({"model_type": None}, SourceError, "names no `model_type`"),
        ({"model_type": "unheard-of"}, SourceError, "transformers can't read the configuration: "),
        ({"hidden_size": "wide"}, SourceError, "transformers can't read the configuration: .*hidden_size"),
        ({"hidden_size": 64}, SourceError, "of another shape: model.model.embed_tokens.weight"),
        ({"num_hidden_layers": 3}, SourceError, "9 missing in the checkpoint: model.model.layers.2"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, change: dict, error: type, text: str) -> None:
    save(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=text):
        load(Plan(source=str(tmp_path), data="random"))


def test_without_transformers_the_error_names_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import infer.load.sources.folder_model as folder_model

    save(llama(), tmp_path)
    monkeypatch.setattr(folder_model, "find_spec", lambda name: None)
    with pytest.raises(NotUsableError, match=r"pip install 'infer-engine\[hf\]'"):
        load(Plan(source=str(tmp_path), data="random"))
