"""Hugging Face folders: the model from transformers, weights from safetensors, no code from the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import UnsafeSourceError
from ...options.values import HIDDEN_STATES
from ...plan import Plan
from ...regular_files import read_json
from ...spec import Finding
from ...weights import Checkpoint, finite, num_bytes
from .. import heads
from ..carried_files import carry
from ..checkpoint.transformers_key_mapping import convert_names
from ..checkpoint.weight_files import open_weights
from ..loaded_model import LoadedModel
from ..model_metadata import metadata, unused_generation_settings
from ..model_patches.computed_tensors import compute_unsaved
from ..model_patches.dynamic_rope import FixedFrequencies, fix_frequencies
from ..model_patches.moe_layers import checkpoint_names, split_experts
from ..quantized_weights.methods import open_quantized
from ..sentence_transformers.sentence_folder import read_sentence_folder
from ..weight_loading.meta_model import CheckpointMatch, build_on_meta, match_checkpoint
from ..weight_loading.tied_weights import KeptApart, copied_bytes, keep_apart
from .absent_architecture import with_architecture
from .folder_model import read_model, require_transformers


def load_huggingface(plan: Plan, weights: Checkpoint | None = None, where: str = "") -> LoadedModel:
    """Load config, tokenizer files and the model on the meta device, wrapped to take and give plain tensors.

    `weights`: those of the model where the folder holds none, and `where` they lie, for messages.
    """
    sentence = read_sentence_folder(Path(plan.source))
    folder = sentence.transformer
    config = read_json(folder / "config.json")
    _refuse_code(config, folder)
    require_transformers()
    stored = _open_stored(config, folder, weights)
    chosen: list[Finding] = []
    if sentence.task != "embedding":
        config, chosen = with_architecture(config, folder, stored.weights)
    described = read_model(plan, sentence, config, stored.weights)
    checkpoint = stored.weights if described.tower is None else described.tower.weights

    def build() -> tuple[nn.Module, list[Finding], FixedFrequencies | None]:
        made, found = build_on_meta(
            lambda: heads.build(described.model_class, described.settings), described.name
        )
        if plan.task == HIDDEN_STATES:
            found += heads.without_pooler(made, checkpoint)
        return compute_unsaved(made, checkpoint), found, fix_frequencies(made)

    model, findings, fixed = build()
    if fixed is not None:
        limits = {**described.config, "max_position_embeddings": fixed.longest}
        described = replace(described, config=limits)
        findings.append(fixed.finding())
    wrapped = described.wrap(model)
    converted = convert_names(checkpoint, model, str(folder))
    joined = sentence.weights(converted)
    fit = _match(wrapped, model, joined, plan.key, where or str(folder))
    apart = keep_apart(wrapped, model, fit, joined)
    inputs = described.inputs(wrapped)
    sizes = heads.size_bounds(plan, described.config, model, inputs)
    carried = carry(folder, inputs)
    findings += [
        *heads.attention_findings(model),
        *described.steps,
        *_unused_tensors(fit),
        *_kept_apart(apart),
    ]
    findings += [*chosen, *stored.findings(checkpoint), *described.findings(plan), *carried.findings]
    return LoadedModel(
        kind="huggingface",
        module=wrapped,
        checkpoint=finite(joined, where or str(folder)),
        own_names=finite(checkpoint if joined is converted else joined),
        inputs=inputs,
        outputs=described.head.outputs,
        task=described.head.task,
        sizes=sizes,
        renames=fit.renames,
        files=carried.files,
        directory=carried.directory,
        meta=metadata(described, sizes),
        preprocessor=described.preprocessor,
        stored_as=stored.method,
        weight_bytes=stored.num_bytes
        if stored.method
        else num_bytes(checkpoint) - copied_bytes(apart, joined),
        findings=tuple(findings),
        limitations=unused_generation_settings(described),
        rebuild=lambda: apart.untie(split_experts(described.wrap(build()[0]))),
    )


@dataclass(frozen=True)
class _Stored:
    """Weights as a folder stores them. `method`: of quantized ones, else ""; `num_bytes`: on disk."""

    weights: Checkpoint
    num_bytes: int
    method: str = ""
    decoded: Finding | None = None
    pickled: str = ""
    in_folder: bool = True

    def findings(self, read: Checkpoint) -> list[Finding]:
        """Return how the weights are stored; `read`: the part of them that the model takes."""
        found = [self.decoded] if self.decoded else _stored_as(read) if self.in_folder else []
        return found + ([Finding("load", "checkpoint", self.pickled)] if self.pickled else [])


def _open_stored(config: Mapping[str, Any], folder: Path, weights: Checkpoint | None) -> _Stored:
    """Open the weights of the folder, or those given; quantized ones are decoded when they are read."""
    checkpoint, pickled = (weights, "") if weights is not None else open_weights(folder)
    stored = _Stored(checkpoint, num_bytes(checkpoint), pickled=pickled, in_folder=weights is None)
    quantized = config.get("quantization_config") or config.get("quantization")
    if not quantized:
        return stored
    checkpoint, decoded = open_quantized(checkpoint, quantized, str(folder / "config.json"))
    method = str(quantized.get("quant_method", "codes"))
    return replace(stored, weights=checkpoint, method=method, decoded=decoded)


def _match(
    wrapped: nn.Module, model: nn.Module, checkpoint: Checkpoint, tower: str | None, where: str
) -> CheckpointMatch:
    """Match parameters of a wrapped model, its experts split, with stored tensors; raise `SourceError` for absent ones.

    `tower`: the prefix of its names in the folder of a model of several; `where` the weights lie, for messages.
    """
    split_experts(wrapped)
    stored = checkpoint_names(wrapped)
    found = match_checkpoint(
        wrapped, checkpoint, lambda name: _other_names(stored.get(name, name), model, tower)
    )
    found.check(where, strict=False)
    return found


def _other_names(name: str, model: nn.Module, tower: str | None) -> list[str]:
    """List checkpoint names of a wrapped parameter: with and without the base model's prefix, old LayerNorm names.

    `tower`: the prefix of its names in the folder of a model of several.
    """
    inner = name.removeprefix("model.")
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = [inner, prefix + inner, inner.removeprefix(prefix), f"model.{inner}"]
    names += [f"{tower}.{inner}"] if tower is not None else []
    old = [
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for n in names
    ]
    return names + old


def _stored_as(checkpoint: Checkpoint) -> list[Finding]:
    stored = sorted({str(weight.dtype).removeprefix("torch.") for weight in checkpoint.values()})
    findings = [
        Finding("load", "weights", num_bytes(checkpoint) / 1e6, "MB", f"stored as {', '.join(stored)}")
    ]
    if {"float16", "bfloat16"} & set(stored):
        why = "the float original is the checkpoint in float32, which holds its values exactly"
        findings.append(Finding("load", "upcast", "float32", why=why))
    return findings


def _unused_tensors(fit: CheckpointMatch) -> list[Finding]:
    if not fit.unexpected:
        return []
    left = f"the model does not use {', '.join(fit.unexpected[:8])}"
    return [Finding("load", "tensors left", len(fit.unexpected), why=left)]


def _kept_apart(apart: KeptApart) -> list[Finding]:
    if not apart.names:
        return []
    pairs = ", ".join(f"{name} to {other}" for name, other in list(apart.names.items())[:4])
    why = f"the configuration ties {pairs}, the checkpoint holds others: both are kept, as transformers does"
    return [Finding("load", "tied weights", len(apart.names), "kept apart", why)]


def _refuse_code(config: Mapping[str, Any], folder: Path) -> None:
    remote = config.get("auto_map")
    if remote:
        named = ", ".join(map(str, remote.values())) if isinstance(remote, dict) else str(remote)
        raise UnsafeSourceError(
            f"the folder needs code of its own (auto_map: {named[:200]})",
            where=str(folder / "config.json"),
            hint="Code in a model folder is never run: put it in a file of yours and name it by --model",
        )
