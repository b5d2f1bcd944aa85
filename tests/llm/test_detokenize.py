"""Text comes out a token at a time as it would at once, never half a character, and ends at stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from infer.llm.text.detokenize import DetokenizerFactory
from infer.llm.text.stop_strings import StopStrings, TextStream

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["▁Hello", "▁", "▁▁", "World", "!", "▁a", "é", "▁日本", "\n", "�"]


def byte_level() -> Tokenizer:
    """Make the tokenizer of pydoc_lm with two more tokens whose text is not of bytes."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "pydoc_lm" / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("Ünï", special=False)])
    return tokenizer


def sentencepiece(**changes: Any) -> Tokenizer:
    """Make a tokenizer that decodes as Llama 2 and Gemma: ▁ for spaces, bytes for unknown characters."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(["<s>", *WORDS])}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    words = ["[CLS]", "un", "##want", "##ed", ",", "runn", "##ing", ".", "do", "n't"]
    tokenizer = Tokenizer(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[CLS]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


TOKENIZERS = {f.__name__: f() for f in (byte_level, sentencepiece, metaspace, wordpiece)}


def pieces_of(name: str, prompt: list[int], tokens: list[int], *, skip: bool) -> list[str]:
    stream = DetokenizerFactory(TOKENIZERS[name]).start(prompt, skip_special=skip)
    return [*(stream.push(token) for token in tokens), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_streamed_text_pieces_join_to_the_full_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = st.integers(0, tokenizer.get_vocab_size() - 1)
    if name == "byte_level":  # mostly tokens of one byte, so that characters are cut
        ids = st.one_of(st.integers(0, 260), ids)
    tokens = data.draw(st.lists(ids, max_size=30))
    skip = data.draw(st.booleans())
    pieces = pieces_of(name, [], tokens, skip=skip)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_completion_goes_on_from_its_prompt(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=12)
    whole = {
        "byte_level": 33,
        "sentencepiece": 259,
        "metaspace": 1,
        "wordpiece": 1,
    }  # ends no character midway
    prompt = [*data.draw(ids), whole[name]]
    tokens = data.draw(ids)
    before = tokenizer.decode(prompt)
    assert before + "".join(pieces_of(name, prompt, tokens, skip=True)) == tokenizer.decode(
        [*prompt, *tokens]
    )


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_an_emoji_of_four_byte_tokens_is_decoded_as_one_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        pieces = DetokenizerFactory(tokenizer)
        single = {
            pieces.bytes_of(i): i for i in range(tokenizer.get_vocab_size()) if len(pieces.bytes_of(i)) == 1
        }
        tokens = [single[bytes([b])] for b in "🦜".encode()] + [single[b"!"]]
    else:
        tokens = [3 + b for b in "🦜".encode()] + [tokenizer.token_to_id("!")]
    shown = pieces_of(name, [], tokens, skip=True)
    assert shown[:3] == ["", "", ""]
    assert "".join(shown) == "🦜!"


def test_a_completion_cut_within_a_character_ends_with_u_fffd() -> None:
    assert pieces_of("sentencepiece", [], [3 + 0xF0, 3 + 0x9F], skip=True) == ["", "", "��"]


def shown_of(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    text = ""
    for piece in pieces:
        shown, met = stops.push(piece)
        text += shown
        if met is not None:
            return text, met
    return text + stops.flush(), None


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_stop_string_is_found_for_any_chunking(data: st.DataObject) -> None:
    words = st.text("abc", min_size=1, max_size=4)
    stops = data.draw(st.lists(words, min_size=1, max_size=3))
    text = data.draw(st.text("abcd", max_size=24))
    include = data.draw(st.booleans())
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    expected: tuple[str, str | None] = (text, None)
    if ends:
        end, size, stop = min(ends)
        expected = (text[: end if include else end + size], stop)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert shown_of(StopStrings(stops, include=include), pieces) == expected


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["\n\nHuman:"])
    assert stops.push("Yes.\n") == ("Yes.", None)
    assert stops.push("\nHu") == ("", None)
    assert stops.push("ge") == ("\n\nHuge", None)
    assert stops.push("\n\nHuman") == ("", None)
    assert stops.push(": what") == ("", "\n\nHuman:")


def test_text_before_min_tokens_is_not_searched() -> None:
    pieces = DetokenizerFactory(TOKENIZERS["metaspace"])
    stream = TextStream(pieces.start([]), StopStrings(["!"]))
    assert stream.push(WORDS.index("!") + 1, stops=False) == ("!", None)
    assert stream.push(WORDS.index("!") + 1) == ("", "!")
