"""Hugging Face folders: the model from transformers, weights from safetensors, no code from the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ...distribution import install
from ...errors import NotUsableError, UnsafeSourceError
from ...options.values import HIDDEN_STATES
from ...plan import Plan
from ...regular_files import read_json
from ...spec import DECODER_IDS, Finding, TensorSpec
from ...weights import Checkpoint, finite, num_bytes
from .. import heads
from ..checkpoint.transformers_key_mapping import convert_names
from ..checkpoint.weight_files import open_weights
from ..converted_tokenizer import ConvertedTokenizer, convert_tokenizer
from ..heads.image_decoders import vision_config
from ..hf_preprocessor import Preprocessor, preprocessing_finding, read_preprocessor
from ..loaded_model import LoadedModel
from ..model_metadata import (
    head_metadata,
    metadata,
    unused_generation_settings,
)
from ..model_patches.base_encoder_decoders import without_logits_bias
from ..model_patches.dynamic_rope import FixedFrequencies, fix_frequencies
from ..model_patches.moe_layers import checkpoint_names, split_experts
from ..model_patches.sinusoidal_positions import compute_position_tables
from ..quantized_weights.methods import open_quantized
from ..sentence_transformers.sentence_folder import read_sentence_folder
from ..weight_loading.meta_model import CheckpointMatch, build_on_meta, match_checkpoint
from ..weight_loading.tied_weights import KeptApart, copied_bytes, keep_apart
from .absent_architecture import with_architecture
from .huggingface_class import ModelPart, choose_class, choose_part, possible_heads

CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "merges.txt",
    "vocab.json",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def carried_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that an artifact carries along, by name."""
    return {name: folder / name for name in CARRIED if (folder / name).is_file()}


def load_huggingface(plan: Plan, weights: Checkpoint | None = None, where: str = "") -> LoadedModel:
    """Load config, tokenizer files and the model on the meta device, wrapped to take and give plain tensors.

    `weights`: those of the model where the folder holds none, and `where` they lie, for messages.
    """
    sentence = read_sentence_folder(Path(plan.source))
    folder = sentence.transformer
    config = read_json(folder / "config.json")
    _refuse_code(config, folder)
    require_transformers()
    stored = _open_stored(config, folder, weights) if not config.get("architectures") else None
    chosen: list[Finding] = []
    if stored is not None and sentence.task != "embedding":
        config, chosen = with_architecture(config, folder, stored.weights)
    possible, refusal = possible_heads(config, folder, sentence)
    stored = stored or _open_stored(config, folder, weights)
    part = choose_part(plan, config, folder, sentence, possible, stored.weights)
    name, settings, config = part.name, part.settings, part.config
    checkpoint = stored.weights if part.tower is None else part.tower.weights
    head, model_class, given = choose_class(plan, part, folder, refusal)
    preprocessor, steps = read_preprocessing(folder, head, settings)

    def build() -> tuple[nn.Module, list[Finding], FixedFrequencies | None]:
        made, found = build_on_meta(lambda: heads.build(model_class, settings), name)
        if name.endswith("Model"):
            made = without_logits_bias(made)
        if plan.task == HIDDEN_STATES:
            found += heads.without_pooler(made, checkpoint)
        return compute_position_tables(made, list(checkpoint)), found, fix_frequencies(made)

    def wrap(model: nn.Module) -> nn.Module:
        if given:
            return heads.TensorsModel(model, [spec.name for spec in given]).eval()
        return heads.wrap(model, head, sentence, preprocessor)

    model, findings, fixed = build()
    if fixed is not None:
        config = {**config, "max_position_embeddings": fixed.longest}
        findings.append(fixed.finding())
    wrapped = wrap(model)
    converted = convert_names(checkpoint, model, str(folder))
    joined = sentence.weights(converted)
    fit = _match(wrapped, model, joined, plan.key, where or str(folder))
    apart = keep_apart(wrapped, model, fit, joined)
    findings += [*heads.attention_findings(model), *steps, *_unused_tensors(fit), *_kept_apart(apart)]
    findings += [
        *chosen,
        *stored.findings(checkpoint),
        *_class_findings(plan, part, head, model_class, given),
    ]
    inputs = given or heads.input_specs(wrapped, preprocessor)
    sizes = heads.size_bounds(plan, config, model, inputs)
    meta = metadata(config, head.task, sentence, sizes) | head_metadata(head, preprocessor, settings, folder)
    has_text = any(spec.name in ("input_ids", DECODER_IDS) for spec in inputs)
    tokenizer = convert_tokenizer(folder) if has_text else ConvertedTokenizer({}, [])
    findings += tokenizer.findings
    return LoadedModel(
        kind="huggingface",
        module=wrapped,
        checkpoint=finite(joined, where or str(folder)),
        own_names=finite(checkpoint if joined is converted else joined),
        inputs=inputs,
        outputs=head.outputs,
        task=head.task,
        sizes=sizes,
        renames=fit.renames,
        files={**carried_files(folder), **tokenizer.files},
        directory=tokenizer.directory,
        meta=meta,
        preprocessor=preprocessor,
        stored_as=stored.method,
        weight_bytes=stored.num_bytes
        if stored.method
        else num_bytes(checkpoint) - copied_bytes(apart, joined),
        findings=tuple(findings),
        limitations=tuple(unused_generation_settings(config, folder))
        if head.task == "text-generation"
        else (),
        rebuild=lambda: apart.untie(split_experts(wrap(build()[0]))),
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


def _class_findings(
    plan: Plan, part: ModelPart, head: heads.Head, model_class: type, given: tuple[TensorSpec, ...]
) -> list[Finding]:
    """Return why this part of the folder and this class were chosen, where that is not the usual one."""
    found = [] if part.tower is None else [part.tower.finding(part.name)]
    found += [heads.whole_finding()] if head == heads.DUAL_TOWERS else []
    if given:
        return [*found, heads.tensors_finding(part.name, given, asked=plan.task == HIDDEN_STATES)]
    return [*found, *heads.other_class(part.name, model_class)]


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


def read_preprocessing(
    folder: Path, head: heads.Head, settings: Any
) -> tuple[Preprocessor | None, list[Finding]]:
    """Read the preprocessing of images or sound; text has its tokenizer."""
    if head.reads not in (heads.PIXELS, heads.SOUND, heads.FEATURES):
        return None, []
    if head.task == "video-classification":
        why = "infer decodes no video files"
        return None, [preprocessing_finding(None, why)]
    found, why = read_preprocessor(folder, head.reads, heads.num_channels(vision_config(settings)))
    return found, [preprocessing_finding(found, why)]


def require_transformers() -> None:
    """Raise `NotUsableError` where the package transformers is absent."""
    if find_spec("transformers") is None:
        raise NotUsableError("a Hugging Face folder needs the package transformers", hint=install("hf"))


def _refuse_code(config: Mapping[str, Any], folder: Path) -> None:
    remote = config.get("auto_map")
    if remote:
        named = ", ".join(map(str, remote.values())) if isinstance(remote, dict) else str(remote)
        raise UnsafeSourceError(
            f"the folder needs code of its own (auto_map: {named[:200]})",
            where=str(folder / "config.json"),
            hint="Code in a model folder is never run: put it in a file of yours and name it by --model",
        )
