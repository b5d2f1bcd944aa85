"""Checkpoints in Hub names open as transformers opens them: experts merged, gates concatenated, prefixes renamed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.errors import SourceError
from infer.load import fill, load
from infer.load.checkpoint.transformers_key_mapping import convert_names
from infer.load.model_patches.moe_layers import checkpoint_names, split_experts
from infer.load.weight_loading.offload import StreamedExperts, stream_layers
from infer.plan import Plan
from infer.weights import Checkpoint, Weight
from infer.weights.safetensors_file import open_safetensors
from tests.support.tiny_decoders import GROUPED, WIDE, build
from tests.support.tiny_hybrids import EXPERTS, LATENT

maps_names = pytest.mark.skipif(
    find_spec("transformers.conversion_mapping") is None, reason="transformers maps names from version 5 on"
)
MOE = {**GROUPED, **EXPERTS, "num_local_experts": 4, "decoder_sparse_step": 1}
DECODERS: dict[str, dict[str, Any]] = {
    "mixtral": {**GROUPED, "num_local_experts": 3},
    "qwen2_moe": MOE,
    "qwen3_moe": {**MOE, "head_dim": 16},
    "olmoe": MOE,
    "phimoe": MOE,
    "granitemoe": MOE,
    "jamba": {**MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "deepseek_v2": {**LATENT, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "gpt_oss": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {**WIDE, "num_local_experts": 2, "intermediate_size_mlp": 96, "moe_layers": [1]},
}
IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}  # fmt: skip
IMAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("AutoModelForImageClassification", "vit", IMAGE),
    "dinov2": ("AutoModel", "dinov2", IMAGE),
    "segformer": ("AutoModelForSemanticSegmentation", "segformer", SEGFORMER),
}


def saved(model: torch.nn.Module, folder: Path) -> Checkpoint:
    model.save_pretrained(folder)  # type: ignore[operator]  # writes Hub names
    return open_safetensors(sorted(folder.glob("*.safetensors"))).weights


def check(model: torch.nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    converted = convert_names(checkpoint, model)
    assert converted is not checkpoint
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for name, value in model.state_dict().items():
        if name in tied and name not in converted:
            continue
        assert converted[name].shape == tuple(value.shape), name
        assert torch.equal(converted[name].read_as(value.dtype), value), name
        blocks = [rows for _, rows in converted[name].blocks(limit=1)]
        assert torch.equal(torch.cat(blocks) if value.dim() else blocks[0], value), name
    return converted


@maps_names
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_in_hub_names_reads_back_equal(name: str, tmp_path: Path) -> None:
    model = build(name, sizes=DECODERS[name])
    check(model, saved(model, tmp_path))


@maps_names
@pytest.mark.parametrize("name", IMAGES)
def test_an_image_model_in_hub_names_reads_back_equal(name: str, tmp_path: Path) -> None:
    import transformers

    auto, kind, sizes = IMAGES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = getattr(transformers, auto).from_config(config).eval()
    check(model, saved(model, tmp_path))


def counted(path: Path, seen: list[str]) -> dict[str, Weight]:
    """Return a checkpoint that notes the names of the tensors that are read."""

    def counting(name: str, weight: Weight) -> Weight:
        def rows(start: int, stop: int) -> torch.Tensor:
            seen.append(name)
            return weight.rows(start, stop)

        return replace(weight, read_rows=rows)

    return {name: counting(name, weight) for name, weight in open_safetensors(path).weights.items()}


GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@maps_names
def test_rows_of_merged_experts_read_only_those_experts(tmp_path: Path) -> None:
    model = build("mixtral", sizes=DECODERS["mixtral"])
    saved(model, tmp_path)
    seen: list[str] = []
    converted = convert_names(counted(tmp_path / "model.safetensors", seen), model)
    seen.clear()
    rows = converted[GATE_UP].rows(1, 2)
    assert seen == [f"model.layers.0.block_sparse_moe.experts.1.{which}.weight" for which in ("w1", "w3")]
    assert torch.equal(rows, model.state_dict()[GATE_UP][1:2])


def without(folder: Path, *endings: str) -> Checkpoint:
    path = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if not name.endswith(endings)}
    save_file(kept, path)
    return open_safetensors(path).weights


@maps_names
def test_an_absent_expert_matrix_is_refused_by_name(tmp_path: Path) -> None:
    model = build("mixtral", sizes=DECODERS["mixtral"])
    saved(model, tmp_path)
    with pytest.raises(SourceError, match=r"can't convert the checkpoint to .*gate_up_proj.*experts\.0\.w1"):
        convert_names(without(tmp_path, "layers.0.block_sparse_moe.experts.2.w3.weight"), model)


@maps_names
def test_an_absent_last_expert_is_another_shape(tmp_path: Path) -> None:
    model = build("mixtral", sizes=DECODERS["mixtral"])
    saved(model, tmp_path)
    without(
        tmp_path, *(f"layers.0.block_sparse_moe.experts.2.{which}.weight" for which in ("w1", "w2", "w3"))
    )
    with pytest.raises(
        SourceError, match=r"gate_up_proj.weight \[3, 192, 64\] in the model, \[2, 192, 64\] in the"
    ):
        load(Plan(source=str(tmp_path)))


@pytest.mark.parametrize("strategy", ["meta", "offload"])
def test_a_mixture_folder_fills_and_gives_the_same_logits(strategy: str, tmp_path: Path) -> None:
    model = build("qwen2_moe", sizes=DECODERS["qwen2_moe"])
    saved(model, tmp_path)
    loaded = load(Plan(source=str(tmp_path), data="random"))
    fill(loaded, strategy=strategy)
    ids = torch.randint(3, 300, (2, 7), generator=torch.Generator().manual_seed(1))
    assert loaded.module is not None
    with torch.no_grad():
        got = loaded.module(ids)
        torch.testing.assert_close(got.reshape(-1), model(ids).logits.reshape(-1), rtol=1e-5, atol=1e-5)


@maps_names
def test_streamed_experts_read_only_what_a_call_asks_for(tmp_path: Path) -> None:
    model = build("mixtral", sizes=DECODERS["mixtral"])
    saved(model, tmp_path)
    split = split_experts(build("mixtral", sizes=DECODERS["mixtral"]).to("meta"))
    seen: list[str] = []
    checkpoint = counted(tmp_path / "model.safetensors", seen)
    names = checkpoint_names(split)
    said = stream_layers(split, convert_names(checkpoint, model), lambda name: names.get(name, name))
    assert said.startswith("14 layers")
    layer = split.get_submodule(GATE_UP)
    assert isinstance(layer, StreamedExperts)
    seen.clear()
    x = torch.randn(3, 64)
    got = layer(x, torch.tensor([2, 0, 2]), 1)
    assert {name.split(".")[5] for name in seen} == {"0", "2"}
    weight = model.state_dict()[GATE_UP]
    torch.testing.assert_close(got, torch.einsum("sk,snk->sn", x, weight[[2, 0, 2]]), rtol=1e-5, atol=1e-5)
