"""Tied weights whose checkpoint holds several values: torch's load_state_dict and transformers decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from infer import Plan
from infer.load import STRATEGIES, LoadedModel, fill, load, unfilled_copy

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
CODE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.b.weight = self.c.weight = self.a.weight
    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
INPUTS = {"x": "float32[batch,8]"}
"""


def opened(source: Path, strategy: str = "meta", **options: Any) -> LoadedModel:
    loaded = load(Plan(source=str(source), data="random", **options))
    fill(loaded, strategy=strategy)
    return loaded


def net(folder: Path) -> tuple[nn.Module, str]:
    (folder / "net.py").write_text(CODE)
    scope: dict[str, Any] = {}
    exec(CODE, scope)  # noqa: S102 - the text of net.py
    return scope["Net"]().eval(), f"{folder / 'net.py'}:Net"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("held", [("a", "b", "c"), ("a", "b"), ("b",), ("c", "a")])
def test_of_two_names_of_one_tensor_the_last_wins_as_in_torch(
    held: tuple[str, ...], kind: str, strategy: str, tmp_path: Path
) -> None:
    module, factory = net(tmp_path)
    state = {"a.bias": torch.randn(8)} | {f"{name}.weight": torch.randn(8, 8) for name in held}
    path = tmp_path / f"m.{kind}"
    torch.save(state, path) if kind == "pt" else save_file(state, path)
    module.load_state_dict(state, strict=False)
    loaded = opened(path, strategy, model=factory)
    x = torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(x), module(x))
    said = [f.why for f in loaded.findings if "load_state_dict" in str(f.value) + f.why]
    assert bool(said) == (len(held) > 1)


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_shared_tensor_of_a_state_dict_counts_once(kind: str, tmp_path: Path) -> None:
    module, factory = net(tmp_path)
    state = module.state_dict()
    path = tmp_path / f"m.{kind}"
    torch.save(state, path) if kind == "pt" else save_file({k: v.clone() for k, v in state.items()}, path)
    loaded = opened(path, model=factory)
    assert loaded.weight_bytes == (64 + 8) * 4
    assert not [f for f in loaded.findings if "load_state_dict" in str(f.value) + f.why]
    assert loaded.module.c.weight is loaded.module.a.weight


def changed(folder: Path, *, settings: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
    """Write tensors into a saved folder (None removes one) and settings into its configuration."""
    path = folder / "model.safetensors"
    state = load_file(path)
    for name, value in tensors.items():
        state.pop(name, None)
        if value is not None:
            state[name] = value.contiguous()
    save_file(state, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | (settings or {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def both(loaded: LoadedModel, folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Return infer's logits, those of transformers' own from_pretrained, of the same ids."""
    import transformers

    theirs = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    given = {spec.name: IDS for spec in loaded.inputs if spec.dtype == "int64"}
    given |= {key: torch.ones_like(IDS) for key in given if "mask" in key}
    given |= {key: torch.zeros_like(IDS) for key in given if "token_type" in key}
    with torch.no_grad():
        ours = loaded.module(**given)
        return (ours if isinstance(ours, Tensor) else ours[0]), theirs(**given).logits


def saved(folder: Path, name: str, **sizes: Any) -> Path:
    import transformers

    found = getattr(transformers, name)
    torch.manual_seed(0)
    found(found.config_class(**sizes)).save_pretrained(folder)
    return folder


BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64, "decoder_start_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64,
    "decoder_start_token_id": 0,
}  # fmt: skip
TABLE = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
OTHER = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
FORMS = {
    "llama, head of its own": ("LlamaForCausalLM", SIZES, {"lm_head.weight": OTHER}),
    "llama, head alone": ("LlamaForCausalLM", SIZES, {"lm_head.weight": OTHER, "model.embed_tokens.weight": None}),
    "gpt2": ("GPT2LMHeadModel", GPT2, {"lm_head.weight": OTHER}),
    "bert": ("BertForMaskedLM", SIZES, {"cls.predictions.decoder.weight": OTHER}),
    "bert, bias": ("BertForMaskedLM", SIZES, {"cls.predictions.decoder.bias": TABLE[0, :1].repeat(64)}),
    "bart, head": ("BartForConditionalGeneration", BART, {"lm_head.weight": OTHER}),
    "bart, decoder": ("BartForConditionalGeneration", BART, {"model.decoder.embed_tokens.weight": OTHER}),
    "bart, no shared": (
        "BartForConditionalGeneration",
        BART,
        {"model.shared.weight": None, "model.encoder.embed_tokens.weight": TABLE, "lm_head.weight": OTHER},
    ),
    "t5, head": ("T5ForConditionalGeneration", T5, {"lm_head.weight": OTHER}),
    "t5, encoder": ("T5ForConditionalGeneration", T5, {"encoder.embed_tokens.weight": OTHER, "lm_head.weight": TABLE}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_different_matrices_of_tied_names_are_kept_as_transformers_does(form: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    name, sizes, tensors = FORMS[form]
    tied = {"tie_word_embeddings": True}
    folder = changed(saved(tmp_path, name, **{**sizes, **tied}), settings=tied, **tensors)
    loaded = opened(folder)
    ours, theirs = both(loaded, folder, name)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    copy = unfilled_copy(loaded)
    fill(copy, strategy="meta")
    torch.testing.assert_close(both(copy, folder, name)[0], ours, rtol=0, atol=0)
    assert any(f.what == "tied weights" for f in loaded.findings) == ("alone" not in form)


def test_an_equal_head_beside_a_tied_embedding_is_shared_and_counts_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = saved(tmp_path, "LlamaForCausalLM", **SIZES, tie_word_embeddings=True)
    once = opened(folder)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    loaded = opened(changed(folder, **{"lm_head.weight": table.clone()}))
    inner = loaded.module.model
    assert inner.lm_head.weight is inner.model.embed_tokens.weight
    assert loaded.weight_bytes == once.weight_bytes
