"""Export: what is written is what is read back, by our reader and by the formats' own packages."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.errors import BusyError, NotUsableError, UsageError
from infer.export import export_model
from infer.export.gguf_writer import TYPES, encode
from infer.load import load
from infer.load.gguf.open_gguf import open_gguf
from infer.plan import Plan
from tests.support.decoder_folders import ARCHITECTURES, PYDOC, checkpoint, sentencepiece

QUANT = gguf.GGMLQuantizationType

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_bit_equal_to_those_of_the_formats_package(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    rows[0, :32] = 0
    expected = gguf.quants.quantize(rows, QUANT[kind])
    assert encode(torch.from_numpy(rows), kind).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "case",
    ["llama", "qwen3", "gemma2", "qwen3_moe", "mixtral", "cohere", "phi", "nemotron", "exaone4", "lfm2"],
)
def test_a_gguf_file_holds_the_weights_and_tokens_of_its_source(case: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path, case, **ARCHITECTURES[case])
    path = tmp_path / "m.gguf"
    found = export_model(str(source), "gguf", path, kind="F32")
    assert found[0].value == path.stat().st_size / 1e6
    original = load(Plan(source=str(source), data="random")).checkpoint
    again = load(Plan(source=str(path), data="random")).checkpoint
    assert original is not None
    assert again is not None
    for name in again:
        torch.testing.assert_close(again[name].read(), original[name].read().float(), rtol=0, atol=1e-6)
    metadata = gguf.GGUFReader(path)
    assert str(metadata.get_field("tokenizer.chat_template").contents())  # type: ignore[union-attr]
    types = metadata.get_field("tokenizer.ggml.token_type").types  # type: ignore[union-attr]
    assert types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]  # llama.cpp opens no others


@pytest.mark.parametrize("prefix", [True, False], ids=["a space before", "as it is"])
def test_pieces_of_sentencepiece_are_written_with_their_scores(prefix: bool, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    source = checkpoint(tmp_path, "llama", attention_bias=False)
    rows = json.loads((source / "config.json").read_text())["vocab_size"]
    sentencepiece(source, rows, prefix)
    export_model(str(source), "gguf", tmp_path / "m.gguf", kind="F32")
    metadata = gguf.GGUFReader(tmp_path / "m.gguf")
    field = lambda name: metadata.get_field(f"tokenizer.ggml.{name}").contents()  # type: ignore[union-attr]  # noqa: E731
    assert field("model") == "llama"
    assert field("add_space_prefix") == prefix
    again = open_gguf(tmp_path / "m.gguf")
    found = Tokenizer.from_file(str(again.folder / "tokenizer.json"))
    original = Tokenizer.from_file(str(source / "tokenizer.json"))
    for text in ("the thing, in here.", "  tether  ing", "naïve 🙂\n"):
        assert found.encode(text).ids == original.encode(text).ids
    content = json.loads((source / "tokenizer.json").read_text())
    content["model"]["merges"].append(["t", "her"])
    content["model"]["vocab"]["ther"] = content["model"]["vocab"].pop("<unused0>")
    content["model"]["vocab"]["her"] = content["model"]["vocab"].pop("<unused1>")
    (source / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(NotUsableError, match="merges that the scores"):
        export_model(str(source), "gguf", tmp_path / "n.gguf", kind="F32")


def test_exports_of_other_types_read_back_as_the_package_reads_them(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "llama", attention_bias=False)
    export_model(str(source), "gguf", tmp_path / "m.gguf", kind="Q8_0")
    ours = open_gguf(tmp_path / "m.gguf").weights
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    one = stored["blk.0.ffn_up.weight"]
    expected = gguf.quants.dequantize(one.data, one.tensor_type)
    assert np.array_equal(ours["model.layers.0.mlp.up_proj.weight"].read().numpy(), expected)


@pytest.mark.parametrize(("kind", "bound"), [("int4", 0.2), ("int8", 0.01)])
def test_packed_folders_are_read_as_compressed_tensors(kind: str, bound: float, tmp_path: Path) -> None:
    source = checkpoint(
        tmp_path, "llama", attention_bias=False, hidden_size=128, intermediate_size=256, head_dim=32
    )
    export_model(str(source), "compressed-tensors", tmp_path / "out", kind=kind)
    original, again = (load(Plan(source=str(path), data="random")) for path in (source, tmp_path / "out"))
    assert again.stored_as == "compressed-tensors"
    name = "model.layers.1.mlp.up_proj.weight"
    assert original.checkpoint is not None
    assert again.checkpoint is not None
    wanted, found = original.checkpoint[name].read().float(), again.checkpoint[name].read().float()
    assert 0 < float((found - wanted).norm() / wanted.norm()) < bound


def test_a_gguf_file_becomes_a_folder_that_transformers_opens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = checkpoint(tmp_path, "llama", attention_bias=False)
    export_model(str(source), "gguf", tmp_path / "m.gguf", kind="F32")
    export_model(str(tmp_path / "m.gguf"), "hf", tmp_path / "out", kind="F32")
    wanted, found = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (source, tmp_path / "out"))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, wanted(ids).logits, rtol=1e-4, atol=1e-5)


def test_values_that_a_format_can_not_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ggfu"):
        export_model(str(PYDOC), "ggfu", tmp_path / "m")
    with pytest.raises(UsageError, match="Q9"):
        export_model(str(PYDOC), "gguf", tmp_path / "m", kind="Q9")
    source = checkpoint(tmp_path, "gpt_neox")
    with pytest.raises(NotUsableError, match="no GGUF architecture for a model of type 'gpt_neox'"):
        export_model(str(source), "gguf", tmp_path / "m.gguf")
    (tmp_path / "there").write_text("")
    with pytest.raises(BusyError, match="exists"):
        export_model(str(source), "gguf", tmp_path / "there")
    with pytest.raises(UsageError, match="expected an artifact for --to onnx"):
        export_model(str(source), "onnx", tmp_path / "o")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "there"]


def test_a_setting_that_a_reader_would_not_find_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "llama", attention_bias=False, hidden_act="relu")
    with pytest.raises(NotUsableError, match="no place for hidden_act = relu"):
        export_model(str(source), "gguf", tmp_path / "m.gguf")


def test_a_head_that_differs_from_its_tied_embedding_is_exported(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "llama", attention_bias=False)
    path = source / "model.safetensors"
    held = load_file(path)
    embedding = held["model.embed_tokens.weight"]
    save_file({**held, "lm_head.weight": torch.randn_like(embedding.float())}, path, {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    export_model(str(source), "gguf", tmp_path / "m.gguf", kind="F32")
    export_model(str(source), "hf", tmp_path / "again", kind="F32")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False
    wanted = load_file(path)["lm_head.weight"]
    for made in (tmp_path / "m.gguf", tmp_path / "again"):
        weights = load(Plan(source=str(made), data="random")).checkpoint
        assert weights is not None
        torch.testing.assert_close(weights["lm_head.weight"].read().float(), wanted)
