"""Adapters of each kind that PEFT makes: the logits of PEFT's own model, or a refusal that names the field."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infer.errors import SourceError
from infer.llm.lora import config as adapter_config
from infer.llm.lora.adapters import Adapters
from infer.llm.step.paged_step import capture_step, with_adapters
from infer.llm.step.probe import probe
from tests.llm.test_lora import logits, together
from tests.support.tiny_decoders import build

peft = pytest.importorskip("peft", reason="pip install 'infer-engine[dev]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT and transformers have many to give
PROMPT = [5, 6, 7, 9, 11]
TARGETS = ["q_proj", "v_proj", "down_proj"]
GPT2 = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
FIRST = "model.layers.0.self_attn.q_proj"

SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {FIRST: 2, "down_proj": 6}},
    "rank_pattern as an expression": {"rank_pattern": {r".*\.1\..*": 2, "v_.*|.*down_proj": 5}},
    "alpha_pattern": {"alpha_pattern": {FIRST: 32, "down_proj": 1}},
    "alpha_pattern as an expression": {"alpha_pattern": {r"^model\.layers\.0\..*": 32, r"(v|down)_proj": 1}},
    "alpha_pattern, two that match": {"alpha_pattern": {r"layers\.\d+\.self_attn\.[qv]_proj": 2, "q_proj": 64}},
    "alpha_pattern of part of a name": {"alpha_pattern": {"proj": 64, "self_attn": 64}},
    "alpha_pattern with rslora": {"use_rslora": True, "alpha_pattern": {"q.*": 3}, "rank_pattern": {"v_proj": 1}},
    "layers_to_transform": {"layers_to_transform": [1]},
    "layers_to_transform, a number": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "exclude_modules": {"exclude_modules": ["v_proj"]},
    "exclude_modules as an expression": {"exclude_modules": r".*layers\.0.*"},
    "target_modules as an expression": {"target_modules": r".*layers\.\d\.(?:self_attn|mlp)\.(q|down)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "init_lora_weights false": {"init_lora_weights": False},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "eva": {"init_lora_weights": "eva"},
    "mica": {"init_lora_weights": "mica"},
    "dropout": {"lora_dropout": 0.5},
    "ensure_weight_tying": {"ensure_weight_tying": True},
    "corda_config without corda": {"corda_config": peft.tuners.lora.config.CordaConfig()},
    "gpt2": GPT2,
    "gpt2, an expression": {**GPT2, "alpha_pattern": {r"attn\.c_.*": 64}},
}  # fmt: skip
RESIDUAL = ["pissa", "pissa_niter_4", "olora"]
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "corda": ("init_lora_weights 'corda'", {"init_lora_weights": "corda"}),
    "lora_ga": ("init_lora_weights 'lora_ga'", {"init_lora_weights": "lora_ga"}),
    "loftq": ("init_lora_weights 'loftq'", {"init_lora_weights": "loftq"}),
    "an initialization of tomorrow": ("init_lora_weights 'nova'", {"init_lora_weights": "nova"}),
    "dora": ("use_dora", {"use_dora": True}),
    "bias all": ("bias 'all'", {"bias": "all"}),
    "bias lora_only": ("bias 'lora_only'", {"bias": "lora_only"}),
    "modules_to_save": ("modules_to_save", {"modules_to_save": ["lm_head"]}),
    "lora_bias": ("lora_bias", {"lora_bias": True}),
    "trainable tokens": ("trainable_token_indices", {"trainable_token_indices": [1, 2]}),
    "layer_replication": ("layer_replication", {"layer_replication": [[0, 2], [1, 2]]}),
    "target_parameters": ("target_parameters", {"target_parameters": ["mlp.experts.down_proj"]}),
    "activated LoRA": ("alora_invocation_tokens", {"alora_invocation_tokens": [3, 4]}),
    "arrow": ("arrow_config", {"arrow_config": {"top_k": 3}}),
    "qalora": ("use_qalora", {"use_qalora": True}),
    "bdlora": ("use_bdlora", {"use_bdlora": {"nblocks": 2}}),
    "kasa": ("kasa_config", {"kasa_config": {"beta": 0.1}}),
    "velora": ("velora_config", {"velora_config": {"num_groups": 4}}),
    "monteclora": ("monteclora_config", {"monteclora_config": {"num_samples": 8}}),
    "megatron": ("megatron_config", {"megatron_config": {"x": 1}}),
    "a field of tomorrow": ("'use_nova' is an unknown field", {"use_nova": True}),
    "a number in a field of tomorrow": ("'nova_scale' is an unknown field", {"nova_scale": 0}),
    "another rank": ("has rank 4, but r and rank_pattern say 8", {"r": 8}),
    "another rank by a pattern": ("rank_pattern say 2", {"rank_pattern": {"q_proj": 2}}),
    "a layer left out": ("no target of the adapter", {"target_modules": ["q_proj", "v_proj"]}),
    "a layer excluded": ("no target of the adapter", {"exclude_modules": ["q_proj"]}),
    "layers left out": ("no target of the adapter", {"layers_to_transform": [1]}),
    "alpha of text": ("lora_alpha", {"lora_alpha": "16"}),
    "alpha that is true": ("lora_alpha", {"lora_alpha": True}),
    "rslora of text": ("use_rslora", {"use_rslora": "false"}),
    "patterns in a list": ("alpha_pattern", {"alpha_pattern": ["q_proj"]}),
    "a pattern that is none": ("no regular expression", {"alpha_pattern": {"q_proj(": 3}}),
    "a pattern that backtracks": ("too long to match", {"alpha_pattern": {"(a+)+x": 3}}),
    "a choice that backtracks": ("too long to match", {"target_modules": "(?:mo|m|o|del)*x"}),
    "a back-reference": ("too long to match", {"rank_pattern": {r"(.*)\1x": 3}}),
    "many repeats": ("too long to match", {"target_modules": ".*" * 20 + "x"}),
}  # fmt: skip


class Base:
    """A tiny decoder and its exported step with room for one adapter of rank 8."""

    def __init__(self, name: str) -> None:
        from tests.llm.test_lora import Graph

        self.model = build(name)
        shape = with_adapters(self.model, probe(self.model, page=4, kv_dtype="float32"), 1, 8)
        self.graph = Graph.__new__(Graph)
        captured = capture_step(self.model, shape)
        self.graph.shape, self.graph._model_runner = shape, captured.callable()

    def loaded(self, folder: Path) -> torch.Tensor:
        """Return the logits after the prompt, with the adapter of a folder."""
        assert self.graph.shape.adapters is not None
        adapters = Adapters(self.graph.shape.adapters)
        adapters.load("x", folder)
        return together(self.graph, adapters, [PROMPT], [1])[0]


@pytest.fixture(scope="module")
def llama() -> Base:
    return Base("llama")


@pytest.fixture(scope="module")
def gpt2() -> Base:
    return Base("gpt2")


def trained(model: nn.Module, **fields: Any) -> Any:
    """PEFT's model with an adapter whose weights moved away from where they began."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": TARGETS, **fields})
    torch.manual_seed(7)
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if ".lora_" in name:
                parameter += torch.randn_like(parameter) * 0.2
    return tuned.eval()


@pytest.mark.parametrize("variant", SAME)
def test_logits_of_lora_variants_equal_peft(
    variant: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base: Base = request.getfixturevalue("gpt2" if variant.startswith("gpt2") else "llama")
    trained(base.model, **SAME[variant]).save_pretrained(tmp_path)
    expected = logits(peft.PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path).eval(), PROMPT)
    assert (expected - logits(base.model, PROMPT)).abs().max() > 1e-2
    assert torch.allclose(base.loaded(tmp_path), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("init", RESIDUAL)
def test_an_adapter_of_changed_base_weights_is_refused_until_converted(
    init: str, llama: Base, tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=init)
    torch.manual_seed(7)
    tuned = peft.get_peft_model(copy.deepcopy(llama.model), config)
    start = tmp_path / "start"
    tuned.peft_config["default"].init_lora_weights = True  # as PEFT's guide on conversion has it
    tuned.save_pretrained(start)
    tuned.peft_config["default"].init_lora_weights = init
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if ".lora_" in name:
                parameter += torch.randn_like(parameter) * 0.2
    tuned.save_pretrained(tmp_path / "own")
    with pytest.raises(SourceError, match=f"init_lora_weights '{init}'") as refused:
        llama.loaded(tmp_path / "own")
    assert "path_initial_model_for_weight_conversion" in str(refused.value.hint)
    expected = logits(tuned.eval(), PROMPT)
    tuned.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=start)
    assert torch.allclose(llama.loaded(tmp_path / "converted"), expected, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def plain(llama: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    trained(llama.model).save_pretrained(folder)
    return folder


def changed(plain: Path, folder: Path, **fields: Any) -> Path:
    config = json.loads((plain / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    (folder / "adapter_model.safetensors").write_bytes((plain / "adapter_model.safetensors").read_bytes())
    return folder


@pytest.mark.parametrize("variant", REFUSED)
def test_unsupported_lora_fields_are_refused_by_name(
    variant: str, llama: Base, plain: Path, tmp_path: Path
) -> None:
    said, fields = REFUSED[variant]
    began = time.monotonic()
    with pytest.raises(SourceError, match=said):
        llama.loaded(changed(plain, tmp_path, **fields))
    assert time.monotonic() - began < 60


def test_empty_values_of_unknown_lora_fields_are_ignored(llama: Base, plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path, nova=None, use_nova=False, nova_list=[], nova_config={})
    assert torch.equal(llama.loaded(folder), llama.loaded(plain))


def test_each_field_of_this_release_of_peft_is_in_a_table() -> None:
    known = adapter_config._READ | adapter_config._NO_EFFECT | set(adapter_config._OFF)
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= known


def test_an_adapter_with_a_layer_twice_is_refused(llama: Base, plain: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed(plain, tmp_path)
    tensors = load_file(plain / "adapter_model.safetensors")
    key = next(key for key in tensors if key.endswith(".lora_A.weight"))
    tensors[key.replace("lora_A.weight", "lora_A.other.weight")] = torch.zeros_like(tensors[key])
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(SourceError, match="two lora_A"):
        llama.loaded(folder)
