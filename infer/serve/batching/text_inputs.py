"""Text for models with a tokenizer: tokens made off the event loop, rows of like length run together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import InputError
from ..service import Service
from .collate import length_bucket
from .results import InferResult, concatenate_results
from .run_arrays import Arrays
from .tensor_engine import DEFAULT_PRIORITY, TensorEngine

INLINE_CHARACTERS = 2000  # less is tokenised sooner than a thread is woken


def takes_text(engine: TensorEngine) -> bool:
    """Whether the model carries a tokenizer and all its inputs come from it."""
    padding = engine.layout.padding
    return bool(padding) and set(engine.layout.inputs) <= set(padding)


async def tokenize(service: Service, engine: TensorEngine, texts: list[str]) -> Arrays:
    """`input_ids` and, if the model takes it, `attention_mask`: [len(texts), longest]."""
    if not texts:
        raise InputError("expected at least one text")
    if len(texts) > service.limits.max_queue_rows:
        raise InputError(f"expected at most {service.limits.max_queue_rows} texts, got {len(texts)}")
    if engine.texts is not None:
        arrays = engine.predictor.pad(await engine.texts.encode(texts, True, "texts"))
    elif sum(map(len, texts)) < INLINE_CHARACTERS:
        arrays = engine.predictor.tokenize(texts)
    else:
        arrays = await asyncio.get_running_loop().run_in_executor(
            service.pool, engine.predictor.tokenize, texts
        )
    return {name: arrays[name] for name in engine.layout.inputs}


def from_ids(engine: TensorEngine, rows: list[list[int]], where: str) -> Arrays:
    """Token ids as they came, padded to the longest row."""
    longest = max(map(len, rows))
    size = vocabulary_size(engine.predictor)
    arrays = {
        name: np.full((len(rows), longest), pad, dtype=np.int64)
        for name, pad in engine.layout.padding.items()
    }
    for index, row in enumerate(rows):
        if not row:
            raise InputError("expected at least one token", where=f"{where}[{index}]")
        if min(row) < 0 or max(row) >= size:
            raise InputError(f"a token id must be 0 to {size - 1}", where=f"{where}[{index}]")
        for name, array in arrays.items():
            array[index, : len(row)] = row if name == "input_ids" else int(name == "attention_mask")
    return {name: arrays[name] for name in engine.layout.inputs}


def vocabulary_size(predictor: Any) -> int:
    """How many token ids there are, from the manifest; int32's range where it doesn't say."""
    meta = getattr(predictor.manifest, "meta", None) or {}
    return int(meta.get("vocab_size") or 2**31)


def count_tokens(arrays: Arrays) -> int:
    """Tokens, padding not counted."""
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
    """The rows in their order; those of one length bucket go together, cut to their own longest."""
    groups = _groups(arrays) if engine.layout.ragged and not _has_ragged_output(engine) else []
    if len(groups) < 2:
        return await engine.infer(arrays, timeout=timeout, priority=priority, tenant=tenant)
    running = [
        asyncio.ensure_future(engine.infer(part, timeout=timeout, priority=priority, tenant=tenant))
        for _, part in groups
    ]
    try:
        answers = await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
    order = np.argsort(np.concatenate([rows for rows, _ in groups]), kind="stable")
    whole = concatenate_results(answers)
    return replace(whole, outputs={name: array[order] for name, array in whole.outputs.items()})


def _groups(arrays: Arrays) -> list[tuple[np.ndarray, Arrays]]:
    """(row numbers, their tensors) per length bucket; one group when lengths can't be told."""
    mask = arrays.get("attention_mask")
    if mask is None or len(mask) < 2:
        return []
    lengths = mask.sum(axis=1)
    buckets = np.array([length_bucket(int(length)) for length in lengths])
    groups = []
    for size in np.unique(buckets):
        rows = np.flatnonzero(buckets == size)
        longest = int(lengths[rows].max())
        groups.append((rows, {name: np.ascontiguousarray(a[rows, :longest]) for name, a in arrays.items()}))
    return groups


def _has_ragged_output(engine: TensorEngine) -> bool:
    return any(engine.layout.ragged & set(spec.shape) for spec in engine.layout.outputs.values())
