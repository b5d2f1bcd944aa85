"""Text as samples: windows of tokens for language models, one padded row per paragraph for encoders."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...distribution import install
from ...errors import InputError, NotUsableError, SourceError, UsageError
from ...library_errors import first_sentence
from ...regular_files import MAX_JSON, read_json, read_regular
from ...spec import CHOICES, DECODER_IDS, TEXT_INPUTS
from .confined_tokenizer import tokens_of
from .sample_split import MAX_ROWS

if TYPE_CHECKING:
    from ..loaded_model import LoadedModel

WINDOW = 128
T = TypeVar("T")
_PARAGRAPHS = re.compile(r"\n\s*\n")


def tokenize(texts: list[str], loaded: LoadedModel, most: int | None = None) -> dict[str, Tensor]:
    """Tokenize to int64 [rows, seq] per text input of the model; at most `most` rows (128), spread evenly."""
    most = most or MAX_ROWS
    if "tokenizer.json" not in loaded.files:
        raise UsageError(
            "text needs a model with a tokenizer.json", where="--data", hint="Give arrays: --data x.npz"
        )
    foreign = [spec.name for spec in loaded.inputs if spec.name not in TEXT_INPUTS]
    if foreign:
        raise UsageError(
            f"text can't be made into {foreign[0]!r}", where="--data", hint="Give arrays: --data x.npz"
        )
    window = min(WINDOW, int(loaded.meta.get("max_length", WINDOW)))
    pad_id = loaded.meta.get("pad_id")
    encode = _encoder(loaded.files["tokenizer.json"])
    if loaded.meta.get("lower_case"):
        texts = [text.lower() for text in texts]
    if loaded.task == "text-generation":
        rows = _windows([row for row, _ in encode(texts, None)], window)
        types = [[0] * len(row) for row in rows]
    else:
        pieces: list[Any] = _spread(_pieces(texts), most)
        if loaded.task == "multiple-choice":
            pieces = _questions(_pieces(texts), most)
        elif loaded.task == "question-answering":
            pieces = list(itertools.pairwise(pieces)) or [(pieces[0], pieces[0])] if pieces else []
        elif any(spec.name == "token_type_ids" for spec in loaded.inputs) and loaded.task == "classification":
            pieces = _paired(pieces)
        encoded = [pair for pair in encode(pieces, window) if pair[0]]
        rows, types = [row for row, _ in encoded], [kinds for _, kinds in encoded]
        if loaded.task == "fill-mask":
            rows = _masked(rows, _mask_id(loaded))
    if not rows:
        raise InputError("expected text, got no token of any", where="--data", hint="Is the file empty?")
    found = _padded(_spread(rows, most), int(pad_id or 0))
    shape = found["input_ids"].shape
    found["token_type_ids"] = _padded(_spread(types, most), 0)["input_ids"]
    found["position_ids"] = torch.arange(shape[1]).expand(shape).contiguous()
    # An encoder-decoder is judged on texts that it repeats.
    start = torch.tensor(loaded.meta.get("decoder_start_ids") or [0])[:1].expand(shape[0], 1)
    found[DECODER_IDS] = torch.cat([start, found["input_ids"][:, :-1]], 1)
    return {spec.name: found[spec.name] for spec in loaded.inputs}


def tokenize_candidates(texts: list[str], loaded: LoadedModel) -> dict[str, Tensor]:
    """Tokenize the texts that images are compared with: int64 [texts, seq] of each text input."""
    return _padded(tokenize_lines(texts, loaded), int(loaded.meta.get("pad_id") or 0))


def tokenize_lines(texts: list[str], loaded: LoadedModel) -> list[list[int]]:
    """Tokenize texts to token ids of each, special tokens added."""
    if "tokenizer.json" not in loaded.files:
        raise UsageError(
            "text needs a model with a tokenizer.json", where="--data", hint="Give arrays: --data x.npz"
        )
    limit = int(loaded.meta.get("max_length", WINDOW))
    return [ids for ids, _ in _encoder(loaded.files["tokenizer.json"])(texts, limit)]


def _encoder(path: Path) -> Callable[[list[Any], int | None], list[tuple[list[int], list[int]]]]:
    """Return a function (texts or pairs, max tokens) → token ids and token types of each, once the tokenizer opens."""
    if find_spec("tokenizers") is None:
        raise NotUsableError("text as data needs the package tokenizers", hint=install("hf"))
    import tokenizers

    data = read_regular(path, MAX_JSON)
    try:
        tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # of no class of its own
        raise SourceError(f"the tokenizer can't be read: {first_sentence(error)}", where=str(path)) from error
    return lambda texts, limit: tokens_of(path, texts, limit)


def _mask_id(loaded: LoadedModel) -> int | None:
    """Return the id of the mask token, None where the tokenizer has none."""
    found = read_json(loaded.files["tokenizer.json"])
    token = loaded.meta.get("mask_token", "[MASK]")
    added = {entry["content"]: int(entry["id"]) for entry in found.get("added_tokens", [])}
    return added.get(token)


def _masked(rows: list[list[int]], mask_id: int | None) -> list[list[int]]:
    """Replace every seventh token by the mask, as in training (15 %)."""
    if mask_id is None:
        return rows
    return [[mask_id if i % 7 == 3 else token for i, token in enumerate(row)] for row in rows]


def _padded(rows: list[list[int]], pad_id: int) -> dict[str, Tensor]:
    """Pad rows on the right to the longest; the mask is 1 on real tokens."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def _windows(documents: list[list[int]], window: int) -> list[list[int]]:
    """Concatenate all tokens and cut them into full windows, so that no padding is judged."""
    tokens = [token for document in documents for token in document]
    size = min(window, len(tokens))
    return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)] if size else []


def _pieces(texts: list[str]) -> list[str]:
    """Split texts into paragraphs; into lines where a text has only one paragraph."""
    found: list[str] = []
    for text in texts:
        parts = [part.strip() for part in _PARAGRAPHS.split(text) if part.strip()]
        found += parts if len(parts) > 1 else [line.strip() for line in text.splitlines() if line.strip()]
    return found


def _paired(pieces: list[str]) -> list[str | tuple[str, str]]:
    """Replace alternate paragraphs by a pair with the next one: single texts and pairs are both judged."""
    found: list[str | tuple[str, str]] = list(pieces)
    for index in range(0, len(pieces) - 1, 2):
        found[index] = (pieces[index], pieces[index + 1])
    return found


def _questions(pieces: list[str], most: int) -> list[tuple[str, str]]:
    """Return paragraphs with the four that follow them as the choices of a question; the first follow the last."""
    count = len(pieces)
    if 0 < count <= CHOICES:
        raise InputError(
            f"expected at least {CHOICES + 1} paragraphs, a question and {CHOICES} choices, got {count}",
            where="--data",
        )
    asked = range(0, count, max(1, -(-count * CHOICES // most)))
    return [(pieces[i], pieces[(i + step) % count]) for i in asked for step in range(1, CHOICES + 1)]


def _spread(items: list[T], most: int) -> list[T]:
    if len(items) <= most:
        return items
    return [items[i * len(items) // most] for i in range(most)]
