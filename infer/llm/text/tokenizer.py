"""Tokenizers of an artifact, text to token ids and back; they need the package tokenizers, never transformers.

`Tokenizer` makes batches for encoders and truncates; `LLMTokenizer` is a language model's and never truncates.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...distribution import install
from ...errors import ArtifactError, InputError, NotUsableError
from ...regular_files import read_regular
from .languages import language_id, languages, with_source_language

MAX_BYTES = 1 << 28  # of tokenizer.json
STRIDE = 64  # tokens that two pieces of a long context share
TextOrPair = str | Sequence[str]  # a text, or two that a model compares
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
# Alphabet of byte-level tokens (GPT-2): printable Latin-1 stands for itself, the other bytes from U+0100 on.
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)
}


class Tokenizer:
    """Tokenizer of an encoder; texts longer than `max_length` tokens are cut on the right."""

    def __init__(self, path: Path, *, max_length: int, pad_id: int = 0) -> None:
        self.max_length, self.pad_id = max_length, pad_id
        self._path, self._lock = path, threading.Lock()
        self._tokenizer = _opened(path)
        self._tokenizer.enable_truncation(max_length)

    def encode(self, texts: Sequence[TextOrPair]) -> list[list[int]]:
        """Tokenize texts or pairs to lists of ids, special tokens added, cut to `max_length`."""
        return self.encode_typed(texts)[0]

    def encode_typed(self, texts: Sequence[TextOrPair]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ids and the token types of each text or pair; type 1 is the second text of a pair."""
        # Fast: without the places of tokens, a fifth less; without a post-processor it loses the types of pairs.
        fast = self._tokenizer.post_processor is not None
        encode = self._tokenizer.encode_batch_fast if fast else self._tokenizer.encode_batch
        encodings = encode(_checked(texts))
        return [one.ids for one in encodings], [one.type_ids for one in encodings]

    def batch(self, texts: Sequence[TextOrPair]) -> dict[str, np.ndarray]:
        """Return `input_ids`, `attention_mask` and `token_type_ids`, int64 [len(texts), longest].

        Padded on the right; type 1 is the second text of a pair.
        """
        return self.pad(*self.encode_typed(texts))

    def encodings(self, texts: Sequence[TextOrPair]) -> list[Any]:
        """Tokenize texts or pairs to objects with ids, type_ids, offsets and sequence_ids of their tokens."""
        return list(self._tokenizer.encode_batch(_checked(texts)))

    def windows(self, question: str, context: str, stride: int) -> list[Any]:
        """Tokenize a question with a context of any length, in pieces that share `stride` tokens of it.

        Raises `InputError` for a question that leaves no room for the context.
        """
        check_text(question, "question")
        check_text(context, "context")
        room = self.max_length - len(self._tokenizer.encode(question, "").ids)
        if room < 1:
            raise InputError(
                f"the question takes all of the {self.max_length} tokens of the model", where="question"
            )
        with self._lock:  # its truncation changes from call to call
            self._windows.enable_truncation(
                self.max_length, stride=min(stride, room // 2), strategy="only_second"
            )
            whole = self._windows.encode(question, context)
        return [whole, *whole.overflowing]

    def span_encodings(self, texts: Sequence[str], question: str | None = None) -> list[Any]:
        """Tokenize texts as `encodings` does, or the one text as the context of a question, in windows."""
        return self.encodings(texts) if question is None else self.windows(question, texts[0], STRIDE)

    @cached_property
    def _windows(self) -> Any:
        return _opened(self._path)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        return self._tokenizer.token_to_id(token)

    def pad(self, rows: list[list[int]], types: list[list[int]] | None = None) -> dict[str, np.ndarray]:
        """Return `input_ids`, `attention_mask` and `token_type_ids`, int64 [len(rows), longest], right-padded."""
        return padded(rows, types or (), pad_id=self.pad_id)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)


def padded(
    rows: Sequence[Sequence[int]],
    types: Sequence[Sequence[int]] = (),
    attended: Sequence[Sequence[int]] = (),
    *,
    pad_id: int,
) -> dict[str, np.ndarray]:
    """Return rows of token ids as `Tokenizer.pad` does; `types`, `attended`: of each token, by default 0 and 1."""
    longest = max((len(row) for row in rows), default=0)
    if len(rows) == 1:
        ids = np.array(rows, dtype=np.int64)
        mask = np.ones(ids.shape, dtype=np.int64)
    else:
        ids = np.full((len(rows), longest), pad_id, dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
    kinds = np.zeros(ids.shape, dtype=np.int64)
    for array, values in ((mask, attended), (kinds, types)):
        for i, value in enumerate(values):
            array[i, : len(value)] = value
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}


class LLMTokenizer:
    """Tokenizer of a language model: texts of any length, ids back to text, and bytes of single tokens.

    `tokenizer` is the `tokenizers.Tokenizer` itself, without truncation and padding.
    """

    def __init__(self, path: Path) -> None:
        self.tokenizer = _opened(path)
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = False
        self.vocab_size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {number: token.content for number, token in added.items() if token.special}
        self._added = {number: token.content for number, token in added.items()}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokenize a text; `special` adds the begin token and the like. Raises `InputError`."""
        check_text(text, "text")
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Detokenize; incomplete characters are U+FFFD, an id outside the vocabulary raises `InputError`."""
        for index, number in enumerate(ids):
            if self.piece(number) is None:
                raise InputError(f"no token has the id {number}", where=f"ids[{index}]")
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    @cached_property
    def languages(self) -> dict[str, int]:
        """Token ids of the languages of a translation model, by name; empty for any other."""
        return languages(self.special)

    def translated(
        self, ids: Sequence[int], src_lang: str | None, tgt_lang: str | None
    ) -> tuple[list[int], int | None]:
        """Return a source in the language named, and the token of the language to translate into, or None.

        Raises `InputError` for a language that the tokenizer has no token for.
        """
        known = self.languages
        forced = None if tgt_lang is None else language_id(known, tgt_lang, "tgt_lang")
        if src_lang is None:
            return list(ids), forced
        return with_source_language(ids, known, language_id(known, src_lang, "src_lang")), forced

    def piece(self, number: int) -> str | None:
        """Return the token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`), or None."""
        return self.tokenizer.id_to_token(number) if 0 <= number < 1 << 31 else None

    def token_bytes(self, number: int) -> bytes:
        """Return the bytes that the token adds to a text, maybe part of a character; empty for no token."""
        piece = self.piece(number)
        if piece is None:
            return b""
        if number in self._added:
            return self._added[number].encode()
        if "ByteLevel" in self._decoders:
            return b"".join(bytes([BYTE_LEVEL[c]]) if c in BYTE_LEVEL else c.encode() for c in piece)
        if len(piece) == 6 and piece.startswith("<0x") and "ByteFallback" in self._decoders:
            return bytes([int(piece[3:5], 16)])
        return self._spelled(piece).encode()

    def _spelled(self, piece: str) -> str:
        if {"Metaspace", "Replace"} & self._decoders:
            return piece.replace("\u2581", " ")
        if "WordPiece" in self._decoders:
            return piece.removeprefix("##") if piece.startswith("##") else f" {piece}"
        return piece

    @cached_property
    def _decoders(self) -> set[str]:
        """Types of the decoder and its parts, as tokenizer.json names them."""
        found = json.loads(self.tokenizer.to_str()).get("decoder") or {}
        parts = [found, *found.get("decoders", [])]
        return {part.get("type", "") for part in parts}


def _checked(texts: Sequence[TextOrPair]) -> list[Any]:
    """Return texts and pairs as the library takes them; raise `InputError` for what is neither."""
    rows: list[Any] = []
    for index, row in enumerate(texts):
        pair = isinstance(row, list | tuple) and len(row) == 2
        for part in row if pair else (row,):
            check_text(part, f"texts[{index}]")  # type: ignore[arg-type]
        rows.append(tuple(row) if pair else row)
    return rows


def check_text(text: str, where: str) -> None:
    """Raise `InputError` unless it is text that has an UTF-8 form."""
    if not isinstance(text, str):
        raise InputError(f"expected text, got {type(text).__name__}", where=where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError("expected valid Unicode, got a lone surrogate", where=where) from error


def _opened(path: Path) -> Any:
    if find_spec("tokenizers") is None:
        raise NotUsableError("text needs the package tokenizers", hint=install("serve"))
    import tokenizers

    data = read_regular(path, MAX_BYTES, error=ArtifactError)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # of no class of its own
        said = str(error)[:200]
        raise ArtifactError(f"the tokenizer can't be read: {said}", where=str(path)) from error
    tokenizer.no_padding()
    return tokenizer
