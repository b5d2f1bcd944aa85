"""Tokenizer of a GGUF file as tokenizer.json: byte-level BPE, and SentencePiece's BPE with scores.

The file names its pre-tokenizer (`tokenizer.ggml.pre`); its pattern is that of the original tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import families
from ...errors import SourceError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
# Control tokens that end an answer, beside the one that the file names.
END_TOKENS = frozenset(
    {
        *(
            "<|eot_id|>",
            "<|eom_id|>",
            "<|im_end|>",
            "<|end|>",
            "<end_of_turn>",
            "<|endoftext|>",
            "<|end_of_text|>",
        ),
        *("<|return|>", "<EOT>", "<|end_of_role|>"),
    }
)


NO_VOCABULARY = ("no_vocab", "none")  # names of llama.cpp's converter for files of token ids only


def has_no_vocabulary(metadata: Mapping[str, Any]) -> bool:
    """Return whether the file says that it is used with token ids only."""
    return metadata.get("tokenizer.ggml.model") in NO_VOCABULARY and "tokenizer.ggml.tokens" not in metadata


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> tuple[Any, dict[str, Any]]:
    """Build the tokenizer; returns it (`tokenizers.Tokenizer`) and the content of tokenizer_config.json.

    Raises `SourceError` for vocabularies and pre-tokenizers that infer does not know.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise SourceError("the file holds no vocabulary (tokenizer.ggml.tokens)", where=str(path))
    types = _column(metadata, "token_type", len(tokens), [NORMAL] * len(tokens), path)
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types, path)
    else:
        raise SourceError(
            f"the tokenizer {kind!r} of a GGUF file is not known here; known: gpt2, llama",
            where=str(path),
            hint="Give the Hugging Face folder it was made from",
        )
    _add_special(tokenizer, tokens, types)
    config = _special_settings(metadata, tokens, path)
    pre = metadata.get("tokenizer.ggml.pre")
    named = families.known().pre_tokenizers.get(str(pre))
    begins = kind == "llama" or (named is not None and named.keeps_words)
    begins = metadata.get("tokenizer.ggml.add_bos_token", begins)
    config["add_bos_token"] = bool(begins and "bos_token" in config)
    config["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token") and "eos_token" in config)
    _add_template(tokenizer, config)
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return tokenizer, config


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end a text or an answer."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type")
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = {one for one in named if isinstance(one, int) and 0 <= one < len(tokens)}
    if types is not None and len(types) == len(tokens):
        found |= {
            index
            for index, token in enumerate(tokens)
            if token in END_TOKENS and types[index] in (CONTROL, USER_DEFINED)
        }
    return sorted(found)


def _column(metadata: Mapping[str, Any], name: str, count: int, missing: Any, path: Path) -> Any:
    """Return an array of one value per token; raise `SourceError` for another length."""
    found = metadata.get(f"tokenizer.ggml.{name}")
    if found is None:
        return missing
    if isinstance(found, str | int | float) or len(found) != count:
        raise SourceError(f"expected {count} values in tokenizer.ggml.{name}, one per token", where=str(path))
    return found.tolist() if hasattr(found, "tolist") else found


def _vocabulary(tokens: Sequence[str], path: Path) -> dict[str, int]:
    found = {token: index for index, token in enumerate(tokens)}
    if len(found) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if found[token] != index)
        raise SourceError(f"duplicate token {twice[:40]!r} in the vocabulary", where=str(path))
    return found


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre, merges = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.merges")
    known = families.known().pre_tokenizers
    named = known.get(str(pre))
    if named is None:
        raise SourceError(
            f"the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not known here; known: {', '.join(known)}",
            where=str(path),
            hint="Give the Hugging Face folder it was made from",
        )
    if not isinstance(merges, list):
        raise SourceError("the file holds no merges (tokenizer.ggml.merges)", where=str(path))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = _vocabulary(tokens, path)
    bad = next(
        (pair for pair in pairs if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys()), None
    )
    if bad is not None:
        raise SourceError(
            f"the merge {' '.join(bad)[:60]!r} is not of two tokens to a token", where=str(path)
        )
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=named.keeps_words))
    if named.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = named.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], path: Path
) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _column(metadata, "scores", len(tokens), None, path)
    if scores is None:
        raise SourceError("the file holds no scores of its tokens (tokenizer.ggml.scores)", where=str(path))
    vocabulary = _vocabulary(tokens, path)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_by_score(tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return tokenizer


def merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the merges of SentencePiece's BPE: every split of a piece into two pieces, best score first.

    SentencePiece merges the pair whose joined piece has the highest score; the leftmost of equal ones.
    """
    pieces = {
        token: scores[index]
        for index, token in enumerate(tokens)
        if types[index] in (NORMAL, USER_DEFINED, UNUSED)
    }
    found = [
        (-score, token[:cut], token[cut:])
        for token, score in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    return [(left, right) for _, left, right in sorted(found, key=lambda one: one[0])]


def _add_special(tokenizer: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    from tokenizers import AddedToken

    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def _special_settings(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for ours, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise SourceError(
                f"tokenizer.ggml.{key}_token_id is {index}, of {len(tokens)} tokens", where=str(path)
            )
        found[f"{ours}_token"] = tokens[index]
    return found


def _add_template(tokenizer: Any, config: Mapping[str, Any]) -> None:
    """Add BOS before and EOS after every text where the file says so."""
    from tokenizers import processors

    ids = {token: tokenizer.token_to_id(token) for token in config.values() if isinstance(token, str)}
    # In a template a colon and a dollar sign mean something else.
    names = {
        token: f"token {index}" if ":" in token or "$" in token else token for token, index in ids.items()
    }
    first = [names[config["bos_token"]]] if config["add_bos_token"] else []
    last = [names[config["eos_token"]]] if config["add_eos_token"] else []
    if not first and not last:
        return
    used = [token for token, name in names.items() if name in (*first, *last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{one}:1" for one in first), "$B:1", *last],
        special_tokens=[{"id": names[token], "ids": [ids[token]], "tokens": [token]} for token in used],
    )
