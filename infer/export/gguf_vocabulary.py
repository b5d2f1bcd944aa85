"""Vocabulary, special tokens and chat template of a Hugging Face folder as metadata of a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import families
from ..errors import NotUsableError, SourceError
from ..load.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    build_tokenizer,
    merges_by_score,
)
from ..regular_files import read_json

_BYTE = re.compile("<0x[0-9A-F]{2}>")
HINT = "Use --to hf, which keeps the tokenizer as it is"
# Texts that tell the pre-tokenizers apart: digits, contractions, cases, spaces, line ends, other scripts.
PROBES = (
    *(
        "Hello, World!",
        "I'll've won't CAN'T 1234567 3.14",
        "  two  spaces\n\n\nlines\r\n\t tab",
        "naïve café ﬁne",
    ),
    *(
        "中文字符 日本語 한국어",
        "def f(x):\n    return x**2  # ok",
        "helloWorld HTTPServer fooBAR",
        "a1b22c333 #$%&*()!!",
    ),
    *(
        "ЗДРАВСТВУЙ мир",
        "emoji 🙂👍🏽!",
        "e\u0301 decomposed",
        "x/y//z\n/",
        "   ",
        "\n \n",
        "don't DON'T it's",
    ),
)


def vocabulary_metadata(folder: Path, rows: int) -> dict[str, Any]:
    """Return the keys of the tokenizer in a folder, for an embedding of `rows` rows.

    Raises `NotUsableError` for a tokenizer that is neither byte-level BPE with a pre-tokenizer that llama.cpp names nor
    SentencePiece's BPE.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotUsableError(
            "the folder holds no tokenizer.json, and a GGUF file needs a vocabulary", where=str(folder)
        )
    original = Tokenizer.from_file(str(path))
    content = read_json(path)
    model = content.get("model", {})
    pieces = bool(model.get("byte_fallback"))
    if model.get("type") != "BPE" or pieces == _is_byte_level(content):
        raise NotUsableError(
            f"the tokenizer ({model.get('type')}) is neither byte-level BPE nor SentencePiece's BPE with bytes, those "
            "that are written to GGUF",
            where=str(path),
            hint=HINT,
        )
    settings = (
        read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    )
    found = _tokens(content, original, rows)
    if pieces:
        del found["tokenizer.ggml.merges"]
        found |= _scores(content, found, path)
    found |= _special(settings, original)
    key = "tokenizer.ggml.add_space_prefix" if pieces else "tokenizer.ggml.pre"
    # The first name of each way to split: many are equal.
    splits = families.known().pre_tokenizers
    named = {way: name for name, way in reversed(list(splits.items()))}
    for value in (True, False) if pieces else reversed(named.values()):
        tried = {**found, key: value}
        if _agrees(tried, original, path):
            return tried | _template(folder, settings)
    known = "with or without a space before the text" if pieces else f"known: {', '.join(splits)}"
    raise NotUsableError(
        f"expected a pre-tokenizer that GGUF has a name for, got another one; {known}",
        where=str(path),
        hint=HINT,
    )


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    return "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])


def _tokens(content: Mapping[str, Any], original: Any, rows: int) -> dict[str, Any]:
    added = {token["content"]: token for token in content.get("added_tokens", [])}
    tokens, types = [], []
    for index in range(rows):
        token = original.id_to_token(index)
        if token is None:
            tokens.append(f"[PAD{index}]")
            types.append(UNUSED)
            continue
        own = added.get(token)
        tokens.append(token)
        types.append(NORMAL if own is None else CONTROL if own.get("special") else USER_DEFINED)
    merges = [one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]]
    return {
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens},
        **{"tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges},
    }


def _scores(content: Mapping[str, Any], found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return types and scores of SentencePiece's BPE, which tokenizer.json holds as the order of the merges.

    A piece has minus the rank of the first merge that makes it. Raises `NotUsableError` where the merges are not those
    that follow from scores.
    """
    tokens, types = found["tokenizer.ggml.tokens"], list(found["tokenizer.ggml.token_type"])
    merges = [
        tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in content["model"]["merges"]
    ]
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    unknown = content["model"].get("unk_token")
    for index, token in enumerate(tokens):
        if token == unknown:
            types[index] = UNKNOWN
        elif _BYTE.fullmatch(token):
            types[index] = BYTE
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    made = merges_by_score(tokens, types, scores)
    in_order = all(ranks["".join(a)] <= ranks["".join(b)] for a, b in zip(merges, merges[1:], strict=False))
    if set(made) != set(merges) or not in_order:
        raise NotUsableError(
            f"expected the {len(made)} merges that the scores of SentencePiece imply, got {len(merges)} others",
            where=str(path),
            hint=HINT,
        )
    return {
        **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.token_type": types},
        "tokenizer.ggml.scores": scores,
    }


def _special(settings: Mapping[str, Any], original: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{ours}_token")
        text = token.get("content") if isinstance(token, dict) else token
        index = original.token_to_id(text) if isinstance(text, str) else None
        if index is not None:
            found[f"tokenizer.ggml.{theirs}_token_id"] = index
    ids = original.encode("a").ids
    plain = original.encode("a", add_special_tokens=False).ids
    bos, eos = (found.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    found["tokenizer.ggml.add_bos_token"] = bos is not None and ids[:1] == [bos] and plain[:1] != [bos]
    found["tokenizer.ggml.add_eos_token"] = eos is not None and ids[-1:] == [eos] and plain[-1:] != [eos]
    return found


def _agrees(metadata: Mapping[str, Any], original: Any, path: Path) -> bool:
    try:
        again, _ = build_tokenizer(metadata, path)
    except SourceError as error:
        raise NotUsableError(
            f"the vocabulary can't be written to GGUF: {error.message}", where=str(path)
        ) from error
    return all(again.encode(text).ids == original.encode(text).ids for text in PROBES)


def _template(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / "chat_template.jinja"
    text = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    return {"tokenizer.chat_template": text} if isinstance(text, str) else {}
