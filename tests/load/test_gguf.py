"""GGUF files: settings, names, layout and values as transformers and the format's own package have them."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from infer import Plan, Predictor, load, optimize
from infer.errors import SourceError
from infer.load.gguf.header import read_gguf_header
from infer.load.gguf.open_gguf import open_gguf
from infer.load.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, build_tokenizer
from tests.support import tiny_decoders
from tests.support.gguf_files import write_gguf

PYDOC = Path(__file__).resolve().parents[2] / "models/pydoc_lm"

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
QUANT = gguf.GGMLQuantizationType
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 8}
# Architecture in the file, with a remark → transformers' model type, changes of its sizes, settings beside the usual.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": False}, {"rope.freq_base": 10000.0}),
    "llama (untied, biased)": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {},
    ),
    "llama (experts)": ("mixtral", {}, {"expert_count": 4, "expert_used_count": 2}),
    "llama (linear)": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "qwen2": ("qwen2", {"use_sliding_window": False}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "qwen2moe": (
        "qwen2_moe",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            "shared_expert_intermediate_size": 64,
        },
        {
            **{"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
            "expert_shared_feed_forward_length": 64,
        },
    ),
    "phi3": ("phi3", {"pad_token_id": 0}, {}),
    "gemma": ("gemma", {}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}, SOFTCAPS),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 32},
        {"attention.sliding_window": 8, "rope.freq_base": 1e6},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}, {"rope.freq_base": 2e6}),
    "olmo2": ("olmo2", {}, {}),
    "granite": (
        "granite",
        {
            **{"attention_multiplier": 0.5, "embedding_multiplier": 2.0},
            **{"residual_multiplier": 0.75, "logits_scaling": 4.0},
        },
        {"attention.scale": 0.5, "embedding_scale": 2.0, "residual_scale": 0.75, "logit_scale": 4.0},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}, {"attention.layer_norm_epsilon": 1e-5}),
}


def build(case: str) -> nn.Module:
    kind, changes, _ = CASES[case]
    sizes = tiny_decoders.SIZES.get(kind, tiny_decoders.GROUPED)
    return tiny_decoders.build(kind, sizes={**sizes, **changes})


def write(path: Path, case: str, model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    return write_gguf(path, model, case.partition(" ")[0], settings=CASES[case][2], **options)


def logits_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    loaded = load.load(Plan(source=str(path), data="random"))
    load.fill(loaded)
    assert loaded.module is not None
    with torch.no_grad():
        found = loaded.module(ids, torch.ones_like(ids)) if len(loaded.inputs) > 1 else loaded.module(ids)
    return found["logits"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = build(case)
    write(tmp_path / "m.gguf", case, model)
    ids = torch.randint(3, tiny_decoders.VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits_of(tmp_path / "m.gguf", ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llama", "gemma", "qwen3moe"])
def test_quantized_rows_in_any_blocks_are_those_of_the_file(case: str, tmp_path: Path) -> None:
    kept = write(tmp_path / "m.gguf", case, build(case), types={"norm.weight": QUANT.F32, "": QUANT.Q8_0})
    weights = open_gguf(tmp_path / "m.gguf").weights
    for name in weights:
        if ".experts." in name:
            continue
        whole = weights[name].read()
        torch.testing.assert_close(whole, kept[name].float(), rtol=0, atol=0)
        rows = len(whole)
        for start, stop in ((0, 1), (rows // 3, rows // 2 + 1), (rows - 1, rows + 5), (2, 2)):
            torch.testing.assert_close(weights[name].rows(start, stop), whole[start:stop], rtol=0, atol=0)


def test_experts_are_slices_of_one_tensor(tmp_path: Path) -> None:
    kept = write(tmp_path / "m.gguf", "qwen3moe", build("qwen3moe"), types={"": QUANT.Q4_0})
    weights = open_gguf(tmp_path / "m.gguf").weights
    gate_up = kept["model.layers.1.mlp.experts.gate_up_proj"]
    for expert in range(4):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        found = torch.cat([weights[f"{prefix}{part}_proj.weight"].read() for part in ("gate", "up")])
        torch.testing.assert_close(found, gate_up[expert], rtol=0, atol=0)


def llama3_factors(base: float, width: int, scaling: dict[str, Any]) -> np.ndarray:
    """Compute what llama.cpp's converter stores: the divisor of each frequency."""
    found = []
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    for index in range(0, width, 2):
        length = 2 * math.pi * base ** (index / width)
        smooth = (scaling["original_max_position_embeddings"] / length - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        found.append(1.0 if length < high else scaling["factor"] if length > low else between)
    return np.array(found, np.float32)


def test_factors_of_frequencies_are_llama_3s(tmp_path: Path) -> None:
    scaling = {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    }
    model = tiny_decoders.build("llama", rope_scaling=scaling)
    freqs = llama3_factors(10000.0, 16, scaling)
    assert len(set(freqs)) > 2
    write_gguf(tmp_path / "m.gguf", model, "llama", tensors={"rope_freqs.weight": freqs})
    ids = torch.randint(3, tiny_decoders.VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits_of(tmp_path / "m.gguf", ids), expected, rtol=1e-4, atol=1e-4)


def test_a_file_becomes_an_artifact_that_answers_as_its_weights(tmp_path: Path) -> None:
    model: Any = tiny_decoders.build("llama")
    kept = write_gguf(tmp_path / "m.gguf", model, "llama", types={"": QUANT.Q4_0})
    optimize(
        Plan(source=str(tmp_path / "m.gguf"), backend="eager", batches=(), data="random", kv_dtype="float32"),
        tmp_path / "m.infer",
    )
    model.load_state_dict(kept, strict=False)
    prompt = [3, 5, 60, 70, 80]
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    with Predictor.load(tmp_path / "m.infer") as predictor:
        answer = predictor.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True)
    assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()


def test_a_file_without_a_vocabulary_takes_token_ids(tmp_path: Path) -> None:
    model: Any = tiny_decoders.build("llama")
    write_gguf(tmp_path / "m.gguf", model, "llama", vocabulary=False)
    opened = open_gguf(tmp_path / "m.gguf")
    assert not list(opened.folder.glob("tokenizer*"))
    assert json.loads((opened.folder / "config.json").read_text())["eos_token_id"] is None
    ids = torch.randint(3, tiny_decoders.VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits_of(tmp_path / "m.gguf", ids), expected, rtol=1e-4, atol=1e-4)


def test_damaged_weights_name_the_file_not_its_temporary_folder(tmp_path: Path) -> None:
    model: Any = tiny_decoders.build("llama")
    model.model.layers[0].mlp.up_proj.weight.data[3] = torch.nan
    write_gguf(tmp_path / "m.gguf", model, "llama")
    loaded = load.load(Plan(source=str(tmp_path / "m.gguf"), data="random"))
    with pytest.raises(SourceError, match="finite weights") as caught:
        load.fill(loaded)
    assert caught.value.where == str(tmp_path / "m.gguf")


def test_a_split_model_is_joined_from_its_parts(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", build("llama"))
    whole = open_gguf(tmp_path / "m.gguf").weights
    paths = split(tmp_path / "m.gguf", tmp_path)
    parts = open_gguf(paths[0]).weights
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[name].read(), weight.read()) for name, weight in whole.items())
    with pytest.raises(SourceError, match="is part 1 of 2"):
        open_gguf(paths[1])
    paths[1].unlink()
    with pytest.raises(SourceError, match="lacks 'm-00002-of-00002.gguf' beside it"):
        open_gguf(paths[0])


def split(path: Path, folder: Path) -> list[Path]:
    """Split a file in two as llama.cpp's gguf-split does: metadata in the first part, tensors in both."""
    reader = gguf.GGUFReader(path)
    middle = len(reader.tensors) // 2
    found = []
    for number, tensors in enumerate((reader.tensors[:middle], reader.tensors[middle:])):
        found.append(folder / f"m-{number + 1:05d}-of-00002.gguf")
        writer = gguf.GGUFWriter(found[-1], "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                inner = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], inner)
        for key, value in (("no", number), ("count", 2)):
            writer.add_uint16(f"split.{key}", value)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return found


def test_byte_level_tokens_are_those_of_the_original(tmp_path: Path) -> None:
    import tokenizers

    model = tiny_decoders.build("llama", sizes={**tiny_decoders.GROUPED, "vocab_size": 4096})
    write_gguf(tmp_path / "m.gguf", model, "llama", tokenizer=PYDOC / "tokenizer.json")
    source = open_gguf(tmp_path / "m.gguf")
    found = tokenizers.Tokenizer.from_file(str(source.folder / "tokenizer.json"))
    original = tokenizers.Tokenizer.from_file(str(PYDOC / "tokenizer.json"))
    for text in (*TEXTS, (PYDOC / "README.md").read_text()):
        assert found.encode(text).ids == original.encode(text).ids
        assert found.decode(found.encode(text).ids) == text


TEXTS = [
    "",
    " ",
    "a",
    "  two  spaces\n\ttab",
    "naïve café",
    "日本語 🙂 e\u0301",
    "it's 12345 o'clock",
    "the the",
]


def test_pieces_are_merged_by_score_as_sentencepiece_does() -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merged = ["▁t", "he", "▁the", "in", "▁a", "th", "▁th", "ing", "▁▁", "▁in", "er", "her", "▁her"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz'12345"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(merged) + len(letters))]
    tokens = [*words, *merged, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged))] + [-99.0] * len(letters)
    metadata = {
        **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores},
        **{"tokenizer.ggml.token_type": types, "tokenizer.ggml.bos_token_id": 1},
    }
    tokenizer, settings = build_tokenizer(metadata, Path("m.gguf"))
    assert settings["add_bos_token"]
    rng = random.Random(0)
    sentences = [
        " ".join(rng.choices(["the", "her", "thing", "ink", "aether", "  in"], k=6)) for _ in range(50)
    ]
    for text in (*TEXTS, *sentences):
        ids = tokenizer.encode(text).ids
        assert ids == [1, *merge_greedily(text, dict(zip(tokens, scores, strict=True)), tokens)]
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("begin", ["<|begin|:", "$A", "<s>"])
def test_a_text_begins_with_a_token_of_any_characters(begin: str) -> None:
    metadata = {
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": []},
        **{
            "tokenizer.ggml.tokens": [begin, "a", "b"],
            "tokenizer.ggml.token_type": [CONTROL, NORMAL, NORMAL],
        },
        **{"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0},
        **{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
    }
    tokenizer, _ = build_tokenizer(metadata, Path("m.gguf"))
    assert tokenizer.encode("ab").ids == [0, 1, 2, 0]


def merge_greedily(text: str, scores: dict[str, float], tokens: list[str]) -> list[int]:
    """Join the neighbours whose piece has the best score, the leftmost of equal ones, until none is a piece."""
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (-scores[a + b], at)
            for at, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if a + b in scores and a in scores and b in scores
        ]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[int] = []
    for piece in pieces:
        found += [tokens.index(piece)] if piece in scores else [3 + byte for byte in piece.encode()]
    return found


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "setting": ({"attention.clamp_kqv": 8.0}, "the setting llama.attention.clamp_kqv = 8"),
    "partial rotation": ({"rope.dimension_count": 8}, "rope.dimension_count = 8 of heads of 16"),
    "values": ({"attention.value_length": 8}, "value_length = 8 beside keys of 16"),
    "embedder": ({"pooling_type": 3}, "an embedding model"),
    "positions": ({"rope.scaling.type": "su", "rope.scaling.factor": 2.0}, "positions scaled by 'su'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_change_the_numbers_are_refused(name: str, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    write_gguf(tmp_path / "m.gguf", build("llama"), "llama", settings=settings)
    with pytest.raises(SourceError, match=message) as caught:
        open_gguf(tmp_path / "m.gguf")
    assert "Hugging Face folder" in str(caught.value.hint)


def test_unknown_architectures_and_tensors_are_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_rot_embd.weight": np.ones(4, np.float32)}
    write_gguf(tmp_path / "m.gguf", build("llama"), "llama", tensors=extra)
    with pytest.raises(SourceError, match="tensor 'blk.0.attn_rot_embd.weight' of llama"):
        open_gguf(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        SourceError, match="architecture 'rwkv6', which infer does not know; known: arcee, .* llama,"
    ):
        open_gguf(tmp_path / "other.gguf")


def header(
    entries: bytes = b"", count: int = 0, tensors: bytes = b"", *, held: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, held, count) + entries + tensors


def key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def tensor(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    return key(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty header": (b"GGUF\3\0\0\0", "bytes of header at 8, got a file of 8: truncated"),
    "version 1": (header(version=1), "got a version 1"),
    "big-endian": (header(version=3 << 24), "got a big-endian file"),
    "many tensors": (header(held=1 << 40), "expected at most 262144 tensors"),
    "many keys": (header(count=1 << 40), "expected at most 65536 key and value pairs"),
    "long key": (header(struct.pack("<Q", 1 << 60), 1), "bytes of a string"),
    "type of a value": (header(key("a") + struct.pack("<I", 77), 1), "unknown type 77 of the value of 'a'"),
    "same key": (header((key("a") + struct.pack("<Ii", 5, 1)) * 2, 2), "duplicate key 'a'"),
    "not UTF-8": (header(struct.pack("<Q", 2) + b"\xff\xfe", 1), "expected UTF-8"),
    "boolean 2": (header(key("a") + struct.pack("<IB", 7, 2), 1), "expected 0 or 1"),
    "long array": (header(key("a") + struct.pack("<IIQ", 9, 4, 1 << 61), 1), "more than the file can hold"),
    "many strings": (header(key("a") + struct.pack("<IIQ", 9, 8, 1 << 61), 1), "more than the file can hold"),
    "nested array": (header(key("a") + struct.pack("<IIQ", 9, 9, 1), 1), "got arrays"),
    "alignment": (header(key("general.alignment") + struct.pack("<II", 4, 3), 1), "power of two"),
    "five sizes": (header(b"", 0, tensor("t", [1] * 5, 0, 0), held=1), "at most 4 dimensions of 't'"),
    "size 0": (header(b"", 0, tensor("t", [0], 0, 0), held=1), "expected sizes above 0"),
    "overflow": (header(b"", 0, tensor("t", [1 << 40, 1 << 40], 0, 0), held=1), "overflow"),
    "half a block": (
        header(b"", 0, tensor("t", [48], 2, 0), held=1),
        r"rows of 't' \(Q4_0\) to be a multiple of 32",
    ),
    "unread type": (header(b"", 0, tensor("t", [64], 40, 0), held=1), "has type NVFP4"),
    "dropped type": (header(b"", 0, tensor("t", [32], 4, 0), held=1), "dropped by ggml"),
    "offset": (header(b"", 0, tensor("t", [1], 0, 8), held=1), "not a multiple of 32"),
    "past the end": (header(b"", 0, tensor("t", [1], 0, 0), held=1), "truncated"),
    "same tensor": (header(b"", 0, tensor("t", [1], 0, 0) * 2, held=2), "duplicate tensor 't'"),
    "overlap": (
        header(b"", 0, tensor("t", [16], 0, 0) + tensor("u", [1], 0, 32), held=2) + bytes(200),
        "'u' overlaps 't'",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_headers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_gguf_header(tmp_path / "m.gguf")


def test_changed_bytes_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", build("llama"))
    content = (tmp_path / "m.gguf").read_bytes()
    end = min(one.offset for one in read_gguf_header(tmp_path / "m.gguf").tensors.values())
    rng, refused = random.Random(0), 0
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(end)] = rng.randrange(256)
        cut = rng.randrange(end) if rng.random() < 0.1 else len(changed)
        (tmp_path / "n.gguf").write_bytes(changed[:cut])
        try:
            source = open_gguf(tmp_path / "n.gguf")
        except SourceError:
            refused += 1
        else:
            json.loads((source.folder / "config.json").read_text())
    assert refused > 100
