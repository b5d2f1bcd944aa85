"""Codes in exports: carried over to blocks of GGUF and to compressed-tensors as the source holds them."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from infer import Plan, Predictor, optimize
from infer.artifact import store
from infer.errors import ArtifactError, InferError, NotUsableError
from infer.export import export_model
from infer.export.artifact_source import open_artifact
from infer.export.gguf_codes import CarriedCodes, carry
from infer.export.packed_linears import PackedLinear, carried
from infer.load import load
from infer.load.gguf.block_types import BLOCK_TYPES
from infer.load.gguf.open_gguf import open_gguf
from infer.weights import StoredCodes
from tests.fuzz.quantization_configs import damaged
from tests.support import tiny_decoders
from tests.support.decoder_folders import checkpoint
from tests.support.gguf_files import CODEBOOKS, write_gguf
from tests.support.quantized_layers import CASES, compressed, opened
from tests.support.random_blocks import moderate_blocks

QUANT = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give


@pytest.mark.parametrize("kind", [name for name, block in BLOCK_TYPES.items() if block.holds_codes])
def test_codes_of_a_block_type_come_back_in_it(kind: str) -> None:
    block = BLOCK_TYPES[kind]
    raw = moderate_blocks(block, 8 * 256 // block.block)
    codes = StoredCodes(
        *(kind, (8, 256)),
        lambda start, stop: {
            name: part if name == "table" else part[start:stop] for name, part in block.rows(raw, 8).items()
        },
    )
    found = carry(codes)
    assert isinstance(found, CarriedCodes)
    assert (found.type, found.error) == (kind, 0)
    order = torch.randperm(8)
    expected = raw.reshape(8, -1)[order]
    assert torch.equal(found.encoded(order), expected)


@pytest.mark.parametrize("case", CASES)
def test_codes_of_folders_come_back_as_packed_integers(case: str) -> None:
    parts, weight, settings = CASES[case]((64, 128), torch.Generator().manual_seed(0))
    codes = opened(parts, settings)["layer.weight"].codes()
    assert codes is not None
    found = carried(codes)
    kept = ("gptq", "awq", "int8 rows", "packed", "mxfp4", "nvfp4")
    if isinstance(found, str):
        assert not case.startswith(kept), found
        return
    one, error = found
    assert isinstance(one, PackedLinear)
    assert error < 1e-6
    again = opened(
        {name.removeprefix("layer."): part for name, part in one.parts("layer").items()},
        compressed("pack-quantized", num_bits=one.bits),
    )
    assert {n: (t.dtype, tuple(t.shape)) for n, t in one.parts("layer").items()} == one.metas("layer")
    wanted = weight.to(codes.dtype)
    torch.testing.assert_close(again["layer.weight"].read(), wanted, rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**SIZES, "attention_bias": False, "num_hidden_layers": 1}
    return checkpoint(tmp_path_factory.mktemp("source"), "llama", **sizes)


def artifact(source: Path, path: Path, quant: str) -> Path:
    plan = Plan(source=str(source), backend="eager", data="random", kv_dtype="float32", batches=())
    return optimize(plan.with_(allow_slower=True, max_error=0.5, quant=quant), path).path


def answer(path: Path) -> tuple[list[int], list[float]]:
    with Predictor.load(path) as predictor:
        found = predictor.generate(
            [3, 5, 60, 70, 80], max_tokens=8, temperature=0, ignore_eos=True, logprobs=1
        )
    return list(found.token_ids), [one.logprob for one in found.logprobs or []]


def weights(source: Path) -> dict[str, Tensor]:
    weights = load(Plan(source=str(source), data="random")).checkpoint
    assert weights is not None
    return {name: weights[name].read().float() for name in weights}


CARRIED = {"int8:weight": "Q8_0", "int4": "Q4_0", "int4:16": "Q6_K", "nf4": "Q8_0", "fp4": "Q6_K"}


@pytest.mark.parametrize("quant", CARRIED)
def test_an_artifact_becomes_files_of_its_codes(quant: str, folder: Path, tmp_path: Path) -> None:
    made = artifact(folder, tmp_path / "m.infer", quant)
    held = open_artifact(made).weights
    findings = export_model(str(made), "gguf", tmp_path / "m.gguf")
    way = "converted" if quant == "nf4" else "carried over"
    assert [one.what for one in findings] == ["GGUF", f"{quant} {way} to {CARRIED[quant]}"]
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    own = weights(tmp_path / "m.gguf")
    one = stored["blk.0.ffn_down.weight"]
    assert one.tensor_type == QUANT[CARRIED[quant]]
    theirs = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy())
    assert torch.equal(theirs, own["model.layers.0.mlp.down_proj.weight"])
    bound = 0.01 if quant == "nf4" else 2.0**-10
    for name in held:
        wanted = held[name].read().float()
        assert float((own[name] - wanted).norm() / wanted.norm()) <= bound
    findings = export_model(str(made), "compressed-tensors", tmp_path / "m")
    bits = 4 if quant.startswith("int4") else 8
    assert findings[1].what == f"{quant} {way} to int{bits}"
    own = weights(tmp_path / "m")
    for name in held:
        wanted = held[name].read().float()
        if quant == "nf4":
            assert float((own[name] - wanted).norm() / wanted.norm()) <= 0.02
        else:
            torch.testing.assert_close(own[name], wanted, rtol=1e-6 if quant == "fp4" else 0, atol=0)


def test_an_exported_artifact_is_optimized_to_the_same_answers(folder: Path, tmp_path: Path) -> None:
    made = artifact(folder, tmp_path / "m.infer", "int8:weight")
    export_model(str(made), "compressed-tensors", tmp_path / "m")
    again = artifact(tmp_path / "m", tmp_path / "again.infer", "keep")
    held, found = open_artifact(made).weights, open_artifact(again).weights
    assert all(torch.equal(held[name].read(), found[name].read()) for name in held)
    decoded = artifact(tmp_path / "m", tmp_path / "decoded.infer", "float")  # its activations stay float too
    (ids, wanted), (ids_again, logprobs) = answer(made), answer(decoded)
    assert ids == ids_again
    assert wanted == pytest.approx(logprobs, abs=1e-5)


TYPES = {
    **{"q_proj.weight": QUANT.Q4_0, "v_proj.weight": QUANT.Q8_0, "gate_proj.weight": QUANT.Q4_1},
    **{"up_proj.weight": QUANT.Q5_0, "norm.weight": QUANT.F32, "embed_tokens.weight": QUANT.Q8_0},
    **{"o_proj.weight": QUANT.Q5_1, "": QUANT.BF16},
}


@pytest.mark.parametrize("types", [TYPES, CODEBOOKS], ids=["blocks", "codebooks"])
def test_a_gguf_file_goes_through_an_artifact_unchanged(
    types: dict[str, gguf.GGMLQuantizationType], tmp_path: Path
) -> None:
    sizes = {**tiny_decoders.GROUPED, **SIZES, "num_hidden_layers": 1, "attention_bias": False}
    sizes = {**sizes, "vocab_size": 4096, "tie_word_embeddings": True}
    tokenizer = Path(__file__).resolve().parents[2] / "models/pydoc_lm/tokenizer.json"
    model = tiny_decoders.build("llama", sizes=sizes)
    write_gguf(tmp_path / "m.gguf", model, "llama", types=types, tokenizer=tokenizer)
    made = artifact(tmp_path / "m.gguf", tmp_path / "m.infer", "keep")
    export_model(str(made), "gguf", tmp_path / "again.gguf")
    export_model(str(tmp_path / "m.gguf"), "gguf", tmp_path / "direct.gguf")
    files = [gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors for name in ("m", "again", "direct")]
    first, *others = ({one.name: one for one in tensors} for tensors in files)
    for other in others:
        assert other.keys() == first.keys()
        for name, one in first.items():
            assert other[name].tensor_type == one.tensor_type, name
            assert np.array_equal(other[name].data, one.data), name
    assert open_gguf(tmp_path / "again.gguf").stored_as == open_gguf(tmp_path / "m.gguf").stored_as


def test_codes_of_experts_are_carried_over(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 64}
    source = checkpoint(tmp_path, "qwen3_moe", **sizes, num_hidden_layers=1)
    made = artifact(source, tmp_path / "m.infer", "int4")
    held = open_artifact(made).weights
    findings = export_model(str(made), "gguf", tmp_path / "m.gguf")
    assert [one.what for one in findings[1:]] == ["int4 carried over to Q4_0"]
    own = weights(tmp_path / "m.gguf")
    for name in held:
        wanted = held[name].read().float()
        assert float((own[name] - wanted).norm() / wanted.norm()) <= 2.0**-10
    findings = export_model(str(made), "hf", tmp_path / "decoded", kind="F32")
    assert [one.what for one in findings[1:]] == ["int4 decoded to F32"]
    own = weights(tmp_path / "decoded")
    assert all(torch.equal(own[name], held[name].read().float()) for name in held)


def test_experts_that_transformers_has_by_columns_are_turned_back(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "gpt_oss", intermediate_size=64, num_hidden_layers=2)
    held = open_artifact(artifact(source, tmp_path / "m.infer", "int8:weight")).weights
    wanted = weights(source)
    for name in held:
        found = held[name].read().float()
        assert float((found - wanted[name]).norm()) <= 0.01 * float(wanted[name].norm()), name


def test_artifacts_that_are_not_exported_say_why(folder: Path, tmp_path: Path) -> None:
    made = artifact(folder, tmp_path / "m.infer", "int8:weight")
    path = made / "weights" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="sha256"):
        export_model(str(made), "gguf", tmp_path / "m.gguf")
    path.unlink()
    with pytest.raises(
        NotUsableError, match="compiled for eager, holds its weights in the compiled form only"
    ):
        export_model(str(made), "gguf", tmp_path / "m.gguf")


def test_packed_tensors_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "verify", lambda *_: None)  # as if the hashes of the manifest were right
    refused = 0
    for quant in ("int4", "int8:weight"):
        made = artifact(folder, tmp_path / f"{quant.partition(':')[0]}.infer", quant)
        path = made / "weights" / "model.safetensors"
        held, stem = load_file(path), "model.model.layers.0.mlp.up_proj.packed."
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        for seed in range(12):
            rng = random.Random(seed)
            parts = {name: part for name, part in held.items() if name.startswith(stem)}
            others = {name: part for name, part in held.items() if name not in parts}
            path.unlink()
            save_file(others | damaged(parts, rng), path, metadata)
            try:
                weights = open_artifact(made).weights
                weights["model.layers.0.mlp.up_proj.weight"].read()
                codes = weights["model.layers.0.mlp.up_proj.weight"].codes()
                assert codes is not None
                carry(codes)
                carried(codes)
            except InferError:
                refused += 1
    assert 4 < refused < 24
