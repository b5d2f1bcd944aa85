"""Tensors of a transformers checkpoint by llama.cpp's names, in its order of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import NotUsableError
from ..families import GgufLayout
from ..load.gguf.block_types import BLOCK_TYPES
from ..load.gguf.reader import rotary_order
from ..weights import Checkpoint
from .exact_float import smallest_exact
from .gguf_codes import carry
from .gguf_metadata import HINT
from .gguf_writer import KEEP, OutputTensor, encode, flat_rows
from .source_report import SourceReport
from .stored_rows import Difference, blocks_of

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias|)")
_STACKED = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
Rows = Callable[[Tensor], Tensor]  # numbers of rows int64 [n] → these rows


@dataclass
class TensorWriter:
    """Names, rows and types of the tensors of a file.

    Matrices are in `kind` where their rows are whole blocks, else in F16.
    Of kind "keep", and where codes fit `kind`, codes of the source are carried over; `report` lists them.
    """

    weights: Checkpoint
    config: Mapping[str, Any]
    layout: GgufLayout
    kind: str
    report: SourceReport = field(default_factory=SourceReport)

    def tensors(self) -> dict[str, OutputTensor]:
        """Return the tensors by their names in the file."""
        inner = {name: stem for stem, name in self.layout.tensors.items() if "{}" not in name}
        if "block_sparse_moe.gate" in inner:
            inner["mlp.gate"] = inner["block_sparse_moe.gate"]  # its name since transformers 5
        top = {name: stem for stem, name in self.layout.top.items()}
        tied = bool(self.config.get("tie_word_embeddings"))
        found: dict[str, OutputTensor] = {}
        for name in self.weights:
            if (tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq"):
                continue
            match = _LAYER.fullmatch(name)
            if match is not None and ".experts." in match[2]:
                found |= self._experts(name, match[1], match[2])
                continue
            stem, ending = name.rpartition(".")[::2]
            theirs = top.get(stem) if match is None else inner.get(match[2])
            if theirs is None:
                raise NotUsableError(
                    f"{name!r} has no place in a GGUF file of {self.config['model_type']}", hint=HINT
                )
            full = f"{theirs}.{ending}" if match is None else f"blk.{match[1]}.{theirs}{match[3]}"
            found[full] = self._plain(name, theirs)
        return found

    def _plain(self, name: str, theirs: str) -> OutputTensor:
        shape = tuple(self.weights[name].shape)
        if (axis := self.layout.unit_axes.get(theirs)) is not None:
            shape = (*shape[:axis], *shape[axis + 1 :])
            values = self.weights[name].read().float()
            return OutputTensor("F32", shape, flat_rows(values.reshape(-1, shape[-1])))
        if len(shape) < 2:
            values = self.weights[name].read().float().reshape(1, -1)
            if self.layout.norms_plus_one and theirs.endswith("norm") and name.endswith(".weight"):
                values = values + 1
            if (order := self._order(theirs, values.shape[1])) is not None:
                values = values[:, order]
            return OutputTensor("F32", shape, flat_rows(values.contiguous()))
        order = self._order(theirs, shape[0])
        if theirs.startswith("ffn_gate_inp"):
            return OutputTensor("F32", shape, self.weights[name].rows)
        if order is None:
            return self._matrix(name, shape, torch.arange(shape[0]), self.weights[name].rows)
        held = order

        def rows(start: int, stop: int) -> Tensor:
            wanted = held[start:stop]
            low = int(wanted.min())
            return self.weights[name].rows(low, int(wanted.max()) + 1)[wanted - low]

        return self._matrix(name, shape, held, rows)

    def _order(self, theirs: str, rows: int) -> Tensor | None:
        """Return which row of transformers lies at each place of the file, int64 [rows]; None in sequence."""
        if not self.layout.permuted or theirs not in ("attn_q", "attn_k"):
            return None
        heads = self.config["num_attention_heads"]
        heads = heads if theirs == "attn_q" else self.config.get("num_key_value_heads") or heads
        return torch.argsort(rotary_order(rows, heads))

    def _matrix(
        self, name: str, shape: tuple[int, ...], order: Tensor, rows: Callable[[int, int], Tensor]
    ) -> OutputTensor:
        """Return a tensor of codes carried over, or of rows in float; `order`: the flat rows of the source."""
        codes = self.weights[name].codes()
        if codes is None:
            kind = self.kind if self.kind != KEEP else self._exact(shape, rows)
            return OutputTensor(_fitting(kind, shape[-1]), shape, rows)
        found = carry(codes, "" if self.kind == KEEP else self.kind)
        if not isinstance(found, str):
            held = found
            self.report.carried(codes.kind, held.type, held.error)
            return OutputTensor(held.type, shape, rows, lambda start, stop: held.encoded(order[start:stop]))
        kind = _fitting("Q8_0" if self.kind == KEEP else self.kind, shape[-1])
        self.report.converted(codes.kind, kind, self._error(kind, shape, rows), found, name)
        return OutputTensor(kind, shape, rows)

    def _exact(self, shape: tuple[int, ...], rows: Callable[[int, int], Tensor]) -> str:
        count = torch.Size(shape[:-1]).numel()
        return smallest_exact(rows(int(at[0]), int(at[-1]) + 1) for at in blocks_of(count, shape[-1]))

    def _error(self, kind: str, shape: tuple[int, ...], rows: Callable[[int, int], Tensor]) -> float:
        found, block = Difference(), BLOCK_TYPES[kind]
        for at in blocks_of(torch.Size(shape[:-1]).numel(), shape[-1]):
            wanted = rows(int(at[0]), int(at[-1]) + 1).float()
            again = block.decode(encode(wanted, kind).reshape(-1, block.num_bytes))
            found.add(again.reshape(wanted.shape), wanted)
        return found.error

    def _experts(self, name: str, layer: str, inner: str) -> dict[str, OutputTensor]:
        stems = _STACKED.get(inner.rpartition(".")[2])
        shape = tuple(self.weights[name].shape)
        if stems is None or len(shape) != 3:
            raise NotUsableError(f"experts stored as {name!r} are not written to GGUF", hint=HINT)
        made = {}
        for i, stem in enumerate(stems):
            rows = shape[1] // len(stems)

            def give(start: int, stop: int, first: int = i * rows, rows: int = rows) -> Tensor:
                held = [
                    self.weights[name].rows(e, e + 1)[0, first : first + rows]
                    for e in range(start // rows, -(-stop // rows))
                ]
                return torch.cat(held)[start % rows : start % rows + stop - start]

            order = (torch.arange(shape[0])[:, None] * shape[1] + i * rows + torch.arange(rows)).flatten()
            made[f"blk.{layer}.{stem}.weight"] = self._matrix(name, (shape[0], rows, shape[2]), order, give)
        return made


def _fitting(kind: str, columns: int) -> str:
    return kind if columns % BLOCK_TYPES[kind].block == 0 else "F16"
