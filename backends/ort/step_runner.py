"""Decode step of a language model, and encoder of its sources, in ONNX Runtime: inputs built from the paged form.

The cache is bound in place.

A step whose sequences differ in length is run in parts, so that padding at most doubles what attention computes:
sequences of one new token together, others with those of the same power of two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from infer.attention import PageLayout
from infer.onnx.ort_session import USUAL, SessionSettings, clean_error_message, open_session, runtime_errors
from infer.spec import TensorSpec

from .layers.paged_attention import HIDDEN, KEY, StepForm

Array = np.ndarray
_NUMBERS = {"float32": 1, "float16": 10, "bfloat16": 16}  # of onnx.TensorProto


class _CacheRunner:
    """Session whose caches are bound where they lie. One call at a time."""

    def __init__(
        self,
        path: Path,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        settings: SessionSettings = USUAL,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._session: Any = open_session(path, "cpu", settings=settings)
        metadata = self._session.get_modelmeta().custom_metadata_map
        self.form = msgspec.json.decode(metadata[KEY], type=StepForm)
        form = self.form
        self.layout = PageLayout(form.kv_heads, form.head_dim, form.page, form.kv_dtype)
        self._taken = {value.name for value in self._session.get_inputs()}

    def close(self) -> None:
        self._session = None

    def _run(self, feeds: Mapping[str, Array], cache: Tensor) -> Array:
        form, binding = self.form, self._session.io_binding()
        for name in self._taken:
            if name in feeds:
                binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name]))
        kind, layout = _NUMBERS[form.kv_dtype], self.layout
        if cache.shape[0] != form.layers or cache.shape[2] != layout.num_bytes or not cache.is_contiguous():
            raise ValueError(f"expected a contiguous cache of pages {layout}, got shape {list(cache.shape)}")
        shape = [cache.shape[1] * 2 * form.kv_heads, form.page, form.head_dim]
        binding.bind_output(self.outputs[0].name, "cpu")
        for layer in range(form.layers):
            address = cache[layer].data_ptr()
            binding.bind_input(f"cache_{layer}", "cpu", 0, kind, shape, address)
            binding.bind_output(f"cache_{layer}_new", "cpu", 0, kind, shape, address)
        try:
            self._session.run_with_iobinding(binding)
        except runtime_errors() as error:
            raise RuntimeError(f"ONNX Runtime: {clean_error_message(error)}") from error
        logits: Array = binding.get_outputs()[0].numpy()
        return logits


class OrtStepRunner(_CacheRunner):
    """Session as the runner of `paged_step`; the cache is written in place. One call at a time."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = {n: v.numpy() for n, v in inputs.items() if n != "kv_cache"}
        counts = np.diff(arrays["query_start"])
        rows, logits, cache = arrays["logit_rows"], None, inputs["kv_cache"]
        classes = np.ceil(np.log2(np.maximum(counts, 1)))
        for size in np.unique(classes[counts > 0]):
            chosen = np.flatnonzero((classes == size) & (counts > 0))
            part, wanted = _part(arrays, chosen, rows)
            got = self._run(_indices(self.form, part, cache.shape[1], self._taken), cache)
            if logits is None:
                logits = np.zeros((len(rows), got.shape[1]), np.float32)
            logits[wanted] = got[: wanted.sum()]
        if logits is None:
            raise ValueError("expected a step of at least one token, got none")
        return {"logits": torch.from_numpy(logits)}


class OrtEncoderRunner(_CacheRunner):
    """Session as the runner of the encoder of an encoder-decoder; keys and values are written in place."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = {n: v.numpy() for n, v in inputs.items() if n != "kv_cache"}
        feeds = arrays | _slots(self.form, arrays["slot_mapping"])
        return {self.outputs[0].name: torch.from_numpy(self._run(feeds, inputs["kv_cache"]))}


def _part(arrays: Mapping[str, Array], chosen: Array, rows: Array) -> tuple[dict[str, Array], Array]:
    """Extract the step of some sequences, and which of the wanted rows (bool) it yields; at least one."""
    starts = arrays["query_start"].astype(np.int64)
    counts = np.diff(starts)[chosen]
    tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
    where = np.full(starts[-1], -1, np.int64)
    where[tokens] = np.arange(len(tokens))
    wanted = where[rows] >= 0
    part = {name: arrays[name][tokens] for name in ("token_ids", "positions", "slot_mapping")}
    part |= {name: arrays[name][chosen] for name in ("block_table", "seq_lens")}
    # Tokens of one sequence have one source.
    part |= {name: arrays[name][starts[chosen]] for name in ("source_table", "source_lens") if name in arrays}
    part["query_start"] = np.concatenate([[0], counts.cumsum()])
    part["logit_rows"] = where[rows[wanted]] if wanted.any() else np.zeros(1, np.int64)
    return part, wanted


def _slots(form: StepForm, slot_mapping: Array) -> dict[str, Array]:
    """Build the inputs that say which tokens are written, and where."""
    scattered = np.flatnonzero(slot_mapping >= 0)
    slots = slot_mapping[scattered]
    row = slots[:, None] // form.page * (2 * form.kv_heads) + np.arange(2 * form.kv_heads)
    place = np.broadcast_to(slots[:, None] % form.page, row.shape)
    return {"scattered": scattered, "slots": np.stack([row.ravel(), place.ravel()], 1)}


def _pages(form: StepForm, table: Array, lengths: Array, num_pages: int) -> Array:
    """Return the rows of the keys of each sequence, int64 [batch, kv_heads, blocks]."""
    blocks = -(-int(lengths.max()) // form.page)
    pages = np.clip(table[:, :blocks].astype(np.int64), 0, num_pages - 1)
    indices: Array = pages[:, None] * (2 * form.kv_heads) + np.arange(form.kv_heads)[None, :, None]
    return indices


def _indices(
    form: StepForm, part: Mapping[str, Array], num_pages: int, taken: Collection[str]
) -> dict[str, Array]:
    """Build the inputs of the written graph, which takes those named `taken`, except the caches."""
    starts, lengths = part["query_start"], part["seq_lens"].astype(np.int64)
    counts = np.diff(starts)
    longest = int(counts.max())
    # Right aligned: place p of a sequence is its token p - (longest - count).
    own = np.arange(longest)[None] - (longest - counts)[:, None]
    real = own >= 0
    position = np.where(real, (lengths - counts)[:, None] + own, -1)
    feeds = {
        "token_ids": part["token_ids"],
        "positions": part["positions"],
        "logit_rows": part["logit_rows"],
        "padded": np.where(real, starts[:-1, None] + own, 0),
        "flat": np.flatnonzero(real.ravel()),
        "pages": _pages(form, part["block_table"], lengths, num_pages),
        **_slots(form, part["slot_mapping"]),
    }
    other = np.arange(feeds["pages"].shape[2] * form.page)
    for window in form.windows:
        seen = other <= position[..., None]
        if window:
            seen &= other > position[..., None] - window
        feeds[f"mask_{window}"] = np.tile(_hiding(seen), (1, form.group, 1))[:, None]
    if "distances" in taken:
        feeds["distances"] = np.maximum(position[..., None] - other, 0)
    if "places" in taken:
        feeds["places"] = (other - (lengths[:, None] - 1)).astype(np.float32)[:, None, None]
    if "source_pages" in taken:
        rows = part["source_lens"]
        feeds["source_pages"] = _pages(form, part["source_table"], rows, num_pages)
        read = np.arange(feeds["source_pages"].shape[2] * form.page) < rows[:, None]
        feeds["source_mask"] = _hiding(read)[:, None, None]
    return feeds


def _hiding(seen: Array) -> Array:
    return np.where(seen, np.float32(0), np.float32(HIDDEN))
