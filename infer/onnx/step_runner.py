"""Decode step of a language model in ONNX Runtime: inputs built from the paged form, cache bound in place.

A step whose sequences differ in length is run in parts, so that padding at most doubles what attention computes:
sequences of one new token together, others with those of the same power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..attention import PageLayout
from ..spec import TensorSpec
from .paged_attention import HIDDEN, KEY, StepForm
from .session import open_session, runtime_errors, sentence

Array = np.ndarray
_NUMBERS = {"float32": 1, "float16": 10, "bfloat16": 16}  # of onnx.TensorProto


class StepRunner:
    """Session as the runner of `paged_step`; the cache is written in place. One call at a time."""

    def __init__(self, path: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._session: Any = open_session(path, "cpu")
        metadata = self._session.get_modelmeta().custom_metadata_map
        self.form = msgspec.json.decode(metadata[KEY], type=StepForm)
        form = self.form
        self.layout = PageLayout(form.kv_heads, form.head_dim, form.page, form.kv_dtype)
        self._taken = {value.name for value in self._session.get_inputs()}

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = {n: v.numpy() for n, v in inputs.items() if n != "kv_cache"}
        counts = np.diff(arrays["query_start"])
        rows, logits = arrays["logit_rows"], None
        classes = np.ceil(np.log2(np.maximum(counts, 1)))
        for size in np.unique(classes[counts > 0]):
            chosen = np.flatnonzero((classes == size) & (counts > 0))
            part, wanted = _part(arrays, chosen, rows)
            got = self._run(part, inputs["kv_cache"])
            if logits is None:
                logits = np.zeros((len(rows), got.shape[1]), np.float32)
            logits[wanted] = got[: wanted.sum()]
        if logits is None:
            raise ValueError("expected a step of at least one token, got none")
        return {"logits": torch.from_numpy(logits)}

    def close(self) -> None:
        self._session = None

    def _run(self, part: Mapping[str, Array], cache: Tensor) -> Array:
        form, binding = self.form, self._session.io_binding()
        feeds = _indices(form, part, cache.shape[1])
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
            raise RuntimeError(f"ONNX Runtime: {sentence(error)}") from error
        return binding.get_outputs()[0].numpy()


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
    part["query_start"] = np.concatenate([[0], counts.cumsum()])
    part["logit_rows"] = where[rows[wanted]] if wanted.any() else np.zeros(1, np.int64)
    return part, wanted


def _indices(form: StepForm, part: Mapping[str, Array], num_pages: int) -> dict[str, Array]:
    """Build the inputs of the written graph except the caches."""
    page, heads = form.page, form.kv_heads
    starts, lengths = part["query_start"], part["seq_lens"].astype(np.int64)
    counts = np.diff(starts)
    longest = int(counts.max())
    scattered = np.flatnonzero(part["slot_mapping"] >= 0)
    slots = part["slot_mapping"][scattered]
    row = slots[:, None] // page * (2 * heads) + np.arange(2 * heads)
    place = np.broadcast_to(slots[:, None] % page, row.shape)
    # Right aligned: place p of a sequence is its token p - (longest - count).
    own = np.arange(longest)[None] - (longest - counts)[:, None]
    real = own >= 0
    padded = np.where(real, starts[:-1, None] + own, 0)
    position = np.where(real, (lengths - counts)[:, None] + own, -1)
    blocks = -(-int(lengths.max()) // page)
    table = np.clip(part["block_table"][:, :blocks].astype(np.int64), 0, num_pages - 1)
    feeds = {
        "token_ids": part["token_ids"],
        "positions": part["positions"],
        "logit_rows": part["logit_rows"],
        "scattered": scattered,
        "slots": np.stack([row.ravel(), place.ravel()], 1),
        "padded": padded,
        "flat": np.flatnonzero(real.ravel()),
        "pages": table[:, None] * (2 * heads) + np.arange(heads)[None, :, None],
    }
    other = np.arange(table.shape[1] * page)
    for window in form.windows:
        seen = other <= position[..., None]
        if window:
            seen &= other > position[..., None] - window
        mask = np.where(seen, np.float32(0), np.float32(HIDDEN))
        feeds[f"mask_{window}"] = np.tile(mask, (1, form.group, 1))[:, None]
    return feeds
