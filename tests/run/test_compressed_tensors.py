"""Folders of compressed-tensors: what infer writes is what transformers loads, and the reverse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from infer import Plan, load
from infer.export import export_model
from tests.support import tiny_decoders
from tests.support.decoder_folders import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "attention_bias": False}
IDS = torch.arange(3, 43).reshape(2, 20)


def ours(folder: Path) -> Tensor:
    """Return the logits of a folder as infer loads it."""
    loaded = load.load(Plan(source=str(folder), data="random"))
    load.fill(loaded)
    assert loaded.module is not None
    with torch.no_grad():
        found = loaded.module(IDS)
    return found if isinstance(found, Tensor) else found[0]


def by_formula(folder: Path, dtype: torch.dtype) -> Tensor:
    """Return the logits of transformers on weights (code - 2**(bits - 1)) * scale of each group, rounded to `dtype`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    bits = config.pop("quantization_config")["config_groups"]["group_0"]["weights"]["num_bits"]
    held = load_file(folder / "model.safetensors")
    for name in [name for name in held if name.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        words, scale = held.pop(name), held.pop(f"{stem}_scale")
        rows, columns = held.pop(f"{stem}_shape").tolist()
        codes = torch.stack([words >> at & (1 << bits) - 1 for at in range(0, 32, bits)], 2)
        codes = codes.reshape(rows, scale.shape[1], columns // scale.shape[1]) - (1 << bits - 1)
        held[stem] = (codes.to(dtype) * scale.to(dtype)[:, :, None]).reshape(rows, columns)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(held, strict=False)
    assert (set(missing), unexpected) <= ({"lm_head.weight"}, [])
    model.tie_weights()
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits


def by_transformers(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_folder_has_the_logits_of_its_formula(kind: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "llama", **SIZES)
    export_model(str(source), "compressed-tensors", tmp_path / "out", kind=kind)
    expected = by_formula(tmp_path / "out", torch.bfloat16)  # the dtype of the scales
    torch.testing.assert_close(ours(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_transformers_loads_a_folder_with_equal_logits(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = checkpoint(tmp_path, "llama", **SIZES)
    export_model(str(source), "compressed-tensors", tmp_path / "out", kind=kind)
    found = by_transformers(tmp_path / "out")
    expected = by_formula(tmp_path / "out", torch.float32)  # the scales too are loaded in it
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bits", "group", "form"),
    [(4, 32, "pack-quantized"), (8, 0, "pack-quantized"), (8, 0, "int-quantized")],
)
def test_a_folder_of_the_formats_package_is_read(bits: int, group: int, form: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    write_by_package(tmp_path / "m", bits, group, form)
    torch.testing.assert_close(ours(tmp_path / "m"), by_transformers(tmp_path / "m"), rtol=1e-5, atol=1e-5)


def write_by_package(folder: Path, bits: int, group: int, form: str) -> None:
    """Quantize a tiny model by absolute maxima and save it with compressed-tensors' own compressor."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **strategy}
    model: Any = tiny_decoders.build("llama", sizes={**tiny_decoders.GROUPED, "intermediate_size": 128})
    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        ignore=["lm_head"],
        format=form,
        quantization_status="frozen",
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            blocks = module.weight.data.reshape(len(module.weight), -1, group or module.weight.shape[1])
            module.weight_scale.data = blocks.abs().amax(2) / (2 ** (bits - 1) - 0.5)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
