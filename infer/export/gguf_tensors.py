"""Tensors of a transformers checkpoint by llama.cpp's names, in its order of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import NotUsableError
from ..load.gguf.architectures import Architecture
from ..load.gguf.block_types import BLOCK_TYPES
from ..load.gguf.reader import rotary_order
from ..load.weights import WeightReader
from .gguf_metadata import HINT
from .gguf_writer import NUMBERS, OutputTensor, flat_rows

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias|)")
_STACKED = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}


def output_tensors(
    reader: WeightReader, config: Mapping[str, Any], architecture: Architecture, kind: str
) -> dict[str, OutputTensor]:
    """Return the tensors of the file; matrices in `kind` where their rows are whole blocks, else in F16."""
    inner = {name: stem for stem, name in architecture.tensors.items() if "{}" not in name}
    if "block_sparse_moe.gate" in inner:
        inner["mlp.gate"] = inner["block_sparse_moe.gate"]  # its name since transformers 5
    tied = bool(config.get("tie_word_embeddings"))
    found: dict[str, OutputTensor] = {}
    for name in reader.names():
        if (tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq"):
            continue
        match = _LAYER.fullmatch(name)
        if match is not None and ".experts." in match[2]:
            found |= _experts(reader, name, match[1], match[2], kind)
            continue
        stem, ending = name.rpartition(".")[::2]
        theirs = _TOP.get(stem) if match is None else inner.get(match[2])
        if theirs is None:
            raise NotUsableError(f"{name!r} has no place in a GGUF file of {config['model_type']}", hint=HINT)
        full = f"{theirs}.{ending}" if match is None else f"blk.{match[1]}.{theirs}{match[3]}"
        found[full] = _plain(reader, name, theirs, config, architecture, kind)
    return found


def _plain(
    reader: WeightReader,
    name: str,
    theirs: str,
    config: Mapping[str, Any],
    architecture: Architecture,
    kind: str,
) -> OutputTensor:
    shape = tuple(reader.shape(name))
    if theirs == "ffn_gate_inp_shexp":
        shape = shape[-1:]
    if len(shape) < 2:
        values = reader.read(name).float().reshape(1, -1)
        if architecture.norms_plus_one and theirs.endswith("norm"):
            values = values + 1
        values = _permuted(values.t(), theirs, config, architecture).t()
        return OutputTensor("F32", shape, flat_rows(values.contiguous()))
    kind = "F32" if theirs.startswith("ffn_gate_inp") else _fitting(kind, shape[-1])
    if architecture.permuted and theirs in ("attn_q", "attn_k"):
        whole = _permuted(reader.read(name), theirs, config, architecture)
        return OutputTensor(kind, shape, flat_rows(whole))
    return OutputTensor(kind, shape, partial(reader.rows, name))


def _permuted(values: Tensor, theirs: str, config: Mapping[str, Any], architecture: Architecture) -> Tensor:
    if not architecture.permuted or theirs not in ("attn_q", "attn_k"):
        return values
    heads = config["num_attention_heads"]
    heads = heads if theirs == "attn_q" else config.get("num_key_value_heads") or heads
    return values[torch.argsort(rotary_order(len(values), heads))]


def _fitting(kind: str, columns: int) -> str:
    return kind if columns % BLOCK_TYPES[NUMBERS[kind]].block == 0 else "F16"


def _experts(reader: WeightReader, name: str, layer: str, inner: str, kind: str) -> dict[str, OutputTensor]:
    stems = _STACKED.get(inner.rpartition(".")[2])
    shape = tuple(reader.shape(name))
    if stems is None or len(shape) != 3:
        raise NotUsableError(f"experts stored as {name!r} are not written to GGUF", hint=HINT)
    made = {}
    for i, stem in enumerate(stems):
        rows = shape[1] // len(stems)

        def give(start: int, stop: int, first: int = i * rows, rows: int = rows) -> Tensor:
            held = [
                reader.rows(name, e, e + 1)[0, first : first + rows]
                for e in range(start // rows, -(-stop // rows))
            ]
            return torch.cat(held)[start % rows : start % rows + stop - start]

        made[f"blk.{layer}.{stem}.weight"] = OutputTensor(
            _fitting(kind, shape[2]), (shape[0], rows, shape[2]), give
        )
    return made
