"""Export: what is written is what is read back, by our reader and by the formats' own packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from infer.errors import BusyError, NotUsableError, UsageError
from infer.export import export_model
from infer.export.gguf_writer import TYPES, encode
from infer.load import load
from infer.load.gguf import open_gguf
from infer.plan import Plan
from tests.support import tiny_decoders

PYDOC = Path(__file__).resolve().parents[2] / "models/pydoc_lm"
QUANT = gguf.GGMLQuantizationType

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_bit_equal_to_those_of_the_formats_package(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    rows[0, :32] = 0
    expected = gguf.quants.quantize(rows, QUANT[kind])
    assert encode(torch.from_numpy(rows), kind).numpy().tobytes() == expected.tobytes()


def checkpoint(tmp_path: Path, kind: str, **changes: Any) -> Path:
    """Write a tiny model with the tokenizer of pydoc_lm."""
    rows = json.loads((PYDOC / "config.json").read_text())["vocab_size"]
    sizes = tiny_decoders.SIZES.get(kind, tiny_decoders.GROUPED)
    model = tiny_decoders.build(kind, sizes={**sizes, "vocab_size": rows, **changes})
    model.save_pretrained(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(PYDOC / name, tmp_path / "m" / name)
    return tmp_path / "m"


CASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "qwen3_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        "intermediate_size": 64,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_holds_the_weights_and_tokens_of_its_source(case: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path, case, **CASES[case])
    path = tmp_path / "m.gguf"
    found = export_model(str(source), "gguf", path, kind="F32")
    assert found[0].value == path.stat().st_size / 1e6
    original = load(Plan(source=str(source), data="random")).reader
    again = load(Plan(source=str(path), data="random")).reader
    assert original is not None
    assert again is not None
    for name in again.names():
        torch.testing.assert_close(again.read(name), original.read(name).float(), rtol=0, atol=1e-6)
    metadata = gguf.GGUFReader(path)
    assert str(metadata.get_field("tokenizer.chat_template").contents())  # type: ignore[union-attr]


def sentencepiece(folder: Path, rows: int, prefix: bool) -> None:
    """Replace the tokenizer of a folder by SentencePiece's BPE of few pieces, as transformers converts it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz'.,"]
    merged = ["he", "▁t", "▁the", "in", "th", "ing", "er", "▁▁"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    words += [f"<unused{index}>" for index in range(rows - len(words))]
    merges = [
        ("h", "e"),
        ("▁", "t"),
        ("▁t", "he"),
        ("i", "n"),
        ("t", "h"),
        ("in", "g"),
        ("e", "r"),
        ("▁", "▁"),
    ]
    model = models.BPE(
        vocab={word: index for index, word in enumerate(words)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    made = Tokenizer(model)
    first = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


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
    with pytest.raises(NotUsableError, match="merges are not the"):
        export_model(str(source), "gguf", tmp_path / "n.gguf", kind="F32")


def test_exports_of_other_types_read_back_as_the_package_reads_them(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "llama", attention_bias=False)
    export_model(str(source), "gguf", tmp_path / "m.gguf", kind="Q8_0")
    ours = open_gguf(tmp_path / "m.gguf").reader
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    one = stored["blk.0.ffn_up.weight"]
    expected = gguf.quants.dequantize(one.data, one.tensor_type)
    assert np.array_equal(ours.read("model.layers.0.mlp.up_proj.weight").numpy(), expected)


@pytest.mark.parametrize(("kind", "bound"), [("int4", 0.2), ("int8", 0.01)])
def test_packed_folders_are_read_as_compressed_tensors(kind: str, bound: float, tmp_path: Path) -> None:
    source = checkpoint(
        tmp_path, "llama", attention_bias=False, hidden_size=128, intermediate_size=256, head_dim=32
    )
    export_model(str(source), "compressed-tensors", tmp_path / "out", kind=kind)
    original, again = (load(Plan(source=str(path), data="random")) for path in (source, tmp_path / "out"))
    assert again.stored_as == "compressed-tensors"
    name = "model.layers.1.mlp.up_proj.weight"
    assert original.reader is not None
    assert again.reader is not None
    wanted, found = original.reader.read(name).float(), again.reader.read(name).float()
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


def test_what_a_form_has_no_place_for_is_refused(tmp_path: Path) -> None:
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
    with pytest.raises(UsageError, match="takes an artifact"):
        export_model(str(source), "onnx", tmp_path / "o")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "there"]


def test_a_setting_that_a_reader_would_not_find_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "llama", attention_bias=False, hidden_act="relu")
    with pytest.raises(NotUsableError, match="no place for hidden_act = relu"):
        export_model(str(source), "gguf", tmp_path / "m.gguf")
