"""Text of a language model: nothing is cut, ids come back as the text they were, single tokens are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.errors import InputError
from infer.llm.text.generation_config import GenerationConfig
from infer.llm.text.tokenizer import LLMTokenizer, Tokenizer

PYDOC = Path(__file__).resolve().parents[2] / "models/pydoc_lm"
WORDS = [
    "",
    "a",
    "  two  spaces\n\ttab",
    "naïve café — “quotes”",
    "日本語 🙂 e\u0301",
    "x" * 9000,
    "\x00 NUL",
]


@pytest.fixture(scope="module")
def text() -> LLMTokenizer:
    return LLMTokenizer(PYDOC / "tokenizer.json")


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> LLMTokenizer:
    """Pieces and bytes as SentencePiece models have them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = ["<unk>", "▁the", "re", "▁", "<0xC3>", "<0xA9>", "a"]
    model = models.BPE({piece: i for i, piece in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    made.save(str(path))
    return LLMTokenizer(path)


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces and token types as BERT has them."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "a",
        "o",
        "##n",
        "##e",
        "question",
        "answer",
        "word",
        "x",
        "y",
    ]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    path = tmp_path_factory.mktemp("wordpiece") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("words", WORDS)
def test_text_of_any_length_round_trips(text: LLMTokenizer, words: str) -> None:
    ids = text.encode(words)
    assert ids[0] == 0
    assert ids[1:] == text.encode(words, special=False)
    assert text.decode(ids) == words


def test_encoder_texts_are_truncated_by_the_tokenizer(text: LLMTokenizer) -> None:
    tokenizer = Tokenizer(PYDOC / "tokenizer.json", max_length=8)
    assert tokenizer.encode([WORDS[-2]]) == [text.encode(WORDS[-2])[:8]]


@pytest.mark.parametrize(
    "texts",
    [
        ["one", "größer 日本 \U0001f600", "", "a  b\tc\n", "word " * 200],
        [("a question", "its answer"), ("x " * 90, "y " * 3)],
        ["alone", ("first", "second")],
    ],
)
def test_ids_of_an_encoder_are_those_found_with_their_places(wordpiece: Path, texts: list) -> None:
    for path in (PYDOC / "tokenizer.json", wordpiece):
        encoder = Tokenizer(path, max_length=64)
        slow = encoder.encodings(texts)
        assert encoder.encode_typed(texts) == ([one.ids for one in slow], [one.type_ids for one in slow])


def test_a_pair_has_token_types_without_a_post_processor(tmp_path: Path) -> None:
    """The second text of a pair is of type 1, as transformers' tokenizers give it."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers

    made = Fast(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", max_length=3)
    assert tokenizer.encode_typed([("a b", "b a"), "a"]) == ([[0, 1, 0], [0]], [[0, 1, 1], [0]])


@pytest.mark.parametrize("rows", [[[5, 6, 7]], [[]], [[5], [6, 7, 8]], [[5, 6], [7, 8]], []])
def test_padded_rows_hold_ids_mask_and_types(rows: list[list[int]]) -> None:
    encoder = Tokenizer(PYDOC / "tokenizer.json", max_length=64, pad_id=9)
    longest = max(map(len, rows), default=0)
    types = [[1] * len(row) for row in rows]
    padded = encoder.pad(rows, types)
    for name, pad, given in (
        ("input_ids", 9, rows),
        ("attention_mask", 0, types),
        ("token_type_ids", 0, types),
    ):
        assert padded[name].dtype == "int64"
        assert padded[name].shape == (len(rows), longest)
        assert padded[name].tolist() == [row + [pad] * (longest - len(row)) for row in given]


def test_special_tokens_are_left_out_unless_wanted(text: LLMTokenizer) -> None:
    assert text.special == {0: "<|begin|>", 1: "<|end|>", 2: "<|pad|>"}
    assert text.decode([0, 1]) == ""
    assert text.decode([0, 1], skip_special=False) == "<|begin|><|end|>"
    assert text.encode("<|end|>", special=False) == [1]


def test_an_id_outside_the_vocabulary_has_no_piece(text: LLMTokenizer) -> None:
    assert text.vocab_size == 4096
    assert text.piece(4096) is None
    assert text.piece(-1) is None


@pytest.mark.parametrize("words", WORDS)
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(text: LLMTokenizer, words: str) -> None:
    ids = text.encode(words, special=False)
    assert b"".join(map(text.token_bytes, ids)) == words.encode()


def test_bytes_of_sentencepiece_tokens(metaspace: LLMTokenizer) -> None:
    made = [metaspace.token_bytes(i) for i in range(1, 7)]
    assert made == [b" the", b"re", b" ", b"\xc3", b"\xa9", b"a"]
    assert metaspace.decode([1, 2, 4, 5]) == " there" + "é" or metaspace.decode([4, 5]) == "é"


@pytest.mark.parametrize("ids", [[4096], [-1], [5, 10**9]])
def test_an_id_outside_the_vocabulary_is_named(text: LLMTokenizer, ids: list[int]) -> None:
    with pytest.raises(InputError, match=rf"no token has the id {ids[-1]} - at ids\[{len(ids) - 1}\]"):
        text.decode(ids)


def test_inputs_that_are_not_text_are_refused(text: LLMTokenizer) -> None:
    with pytest.raises(InputError, match="a lone surrogate - at text"):
        text.encode("half \ud83d")
    with pytest.raises(InputError, match="expected text, got bytes"):
        text.encode(b"bytes")  # type: ignore[arg-type]


def test_end_tokens_are_read_from_every_file_that_names_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 9, "bos_token_id": 3}')
    assert GenerationConfig.open(tmp_path) == GenerationConfig((9,), 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6], "top_p": 0.9, "top_k": null}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<e>"}, "pad_token": "<p>"}')
    found = GenerationConfig.open(tmp_path, {"<e>": 7, "<p>": 8})
    assert found == GenerationConfig((5, 6, 7), 3, 8, {"top_p": 0.9})


def test_given_parameters_override_recommended_ones() -> None:
    config = GenerationConfig(sampling={"temperature": 0.6, "top_p": 0.9})
    made = config.complete({"temperature": 0.0, "top_p": None, "stop": "\n", "max_tokens": 7})
    assert (made.temperature, made.top_p, made.stop, made.max_tokens) == (0.0, 0.9, ("\n",), 7)


@pytest.mark.parametrize("given", [{"temperature": "hot"}, {"max_tokens": 1.5}, {"stop": [1]}])
def test_a_parameter_of_the_wrong_kind_is_named(given: dict) -> None:
    with pytest.raises(InputError, match=f"at {next(iter(given))}"):
        GenerationConfig().complete(given)
