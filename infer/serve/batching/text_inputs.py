"""Text inputs of tensor models: tokenization off the event loop, padded rows of similar length in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from ...errors import InputError
from ...llm.text.embedding_prompts import with_prompt
from ...llm.text.tokenizer import TextOrPair, padded
from .collate import Arrays, Collator, length_bucket
from .infer_result import InferResult, concatenate_results
from .tensor_engine import DEFAULT_PRIORITY, TensorEngine


async def tokenize(engine: TensorEngine, given: Sequence[TextOrPair], *, max_texts: int) -> Arrays:
    """Return `input_ids`, `attention_mask` and `token_type_ids`, as far as the model takes them.

    Each is int64 [len(texts), longest]. The model's prompt is put before each text. Raises `InputError` for no text and
    for more than `max_texts`, and for a model that takes none.
    """
    texts = with_prompt(given, engine.info.meta, None)
    if not texts:
        raise InputError("expected at least one text")
    if len(texts) > max_texts:
        raise InputError(f"expected at most {max_texts} texts, got {len(texts)}")
    return padded_rows(engine, *await engine.tokenizer.encode_typed(texts, "texts"))


def padded_rows(
    engine: TensorEngine, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] = ()
) -> Arrays:
    """Return those of `input_ids`, `attention_mask` and `token_type_ids` that the model takes, padded to one length."""
    arrays = padded(rows, types, pad_id=engine.collator.padding["input_ids"])
    return {name: array for name, array in arrays.items() if name in engine.collator.inputs}


def from_ids(engine: TensorEngine, rows: list[list[int]], where: str) -> Arrays:
    """Return `input_ids`, `attention_mask` and `token_type_ids` of rows of token ids, padded to the longest."""
    size = int(engine.info.meta.get("vocab_size") or 2**31)
    for index, row in enumerate(rows):
        if not row:
            raise InputError("expected at least one token", where=f"{where}[{index}]")
        if min(row) < 0 or max(row) >= size:
            raise InputError(f"a token id must be 0 to {size - 1}", where=f"{where}[{index}]")
    return padded_rows(engine, rows)


def count_tokens(arrays: Arrays) -> int:
    """Return the number of tokens without padding."""
    if "attention_mask" in arrays:
        return int(arrays["attention_mask"].sum())
    return next(iter(arrays.values())).size


async def infer_rows(
    engine: TensorEngine,
    arrays: Arrays,
    *,
    timeout: float,
    priority: int = DEFAULT_PRIORITY,
    tenant: str = "",
) -> InferResult:
    """Run rows of texts in their order, in groups that may share a batch, each cut to its longest row.

    Where requests may not be joined, a text is a request of its own: see `Collator`.
    """
    groups = _groups(arrays, engine.collator)
    if len(groups) < 2:
        given = {name: arrays[name] for name in engine.collator.inputs}
        return await engine.infer(given, timeout=timeout, priority=priority, tenant=tenant)
    tasks = [
        asyncio.ensure_future(engine.infer(part, timeout=timeout, priority=priority, tenant=tenant))
        for _, part in groups
    ]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    order = np.argsort(np.concatenate([rows for rows, _ in groups]), kind="stable")
    return concatenate_results(results, lambda arrays: _same_width(arrays)[order])


def _groups(arrays: Arrays, collator: Collator) -> list[tuple[np.ndarray, Arrays]]:
    """Return (row numbers, their tensors) of each group of rows that may share a batch; empty where all of them may.

    Rows of a model that computes padding are grouped by length bucket, unless that leaves outputs of several widths.
    """
    count = len(next(iter(arrays.values())))
    if count < 2 or collator.packed:
        return []
    lengths = _lengths(arrays, collator.padding)
    if not collator.batched:
        kinds = np.arange(count)
    elif not collator.lengths:
        return []
    elif not collator.ragged:
        kinds = lengths
    elif any(collator.ragged & set(spec.shape) for spec in collator.outputs.values()):
        return []
    else:
        kinds = np.array([length_bucket(int(length)) for length in lengths])
    groups = []
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        longest = int(lengths[rows].max()) if collator.lengths else None
        part = {name: np.ascontiguousarray(arrays[name][rows, :longest]) for name in collator.inputs}
        groups.append((rows, part))
    return groups


def _lengths(arrays: Arrays, padding: Mapping[str, int]) -> np.ndarray:
    """Return the length of each row: up to the last token that is attended to, or is another than that of padding."""
    ids = arrays["input_ids"]
    real = (ids != padding["input_ids"]) | (arrays.get("attention_mask", 0) != 0)
    return np.asarray(np.where(real, np.arange(1, ids.shape[1] + 1), 1).max(axis=1))


def _same_width(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate rows of outputs, those of shorter texts filled up with zeros."""
    widest = np.max([array.shape[1:] for array in arrays], axis=0, initial=0).tolist()
    padded = [
        np.pad(
            array, [(0, 0), *((0, wide - have) for wide, have in zip(widest, array.shape[1:], strict=True))]
        )
        for array in arrays
    ]
    return np.concatenate(padded)
