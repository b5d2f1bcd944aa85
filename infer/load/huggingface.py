"""Hugging Face folders: the model from transformers, weights from safetensors, no code from the folder."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import NotUsableError, SourceError, UnsafeSourceError
from ..plan import Plan
from ..regular_files import MAX_JSON, read_regular
from ..spec import Finding, TensorSpec
from .converted_names import convert_names
from .expert_layers import checkpoint_names, split_experts
from .hf_wrappers import Classifier, Decoder, Encoder, PairClassifier
from .length_rope import FixedFrequencies, fix_frequencies
from .loaded_model import LoadedModel
from .meta_model import CheckpointMatch, build_on_meta, match_checkpoint
from .sentence_transformers import SentenceFolder, read_sentence_folder, score_activation
from .weight_files import open_weights
from .weights import FiniteReader, WeightReader, num_bytes

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
)
TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "classification",
}
_OTHER_MODALITIES = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "bbox", "image")
LARGE_VOCAB = 10**30  # tokenizers say "no limit" by numbers above this


def load_huggingface(plan: Plan) -> LoadedModel:
    """Load config, tokenizer files and the model on the meta device, wrapped to take and give plain tensors."""
    sentence = read_sentence_folder(Path(plan.source))
    folder = sentence.transformer
    config = read_json(folder / "config.json")
    _refuse_code(config, folder)
    task = task_of(config, folder, sentence.task)
    if find_spec("transformers") is None:
        raise NotUsableError(
            "a Hugging Face folder needs the package transformers", hint="pip install 'infer[hf]'"
        )
    reader, pickled = open_weights(folder)
    settings = _settings(folder)

    def build() -> tuple[nn.Module, list[Finding], FixedFrequencies | None]:
        made, found = build_on_meta(
            lambda: _from_config(settings, task, sentence.sparse), _architecture(config)
        )
        return made, found, fix_frequencies(made)

    model, findings, fixed = build()
    if fixed is not None:
        config = {**config, "max_position_embeddings": fixed.longest}
        findings.append(fixed.finding())
    if task != "text-generation":
        _refuse_other_modalities(model, config, folder)
    wrapped = _wrap(model, task, sentence)
    joined = sentence.reader(convert_names(reader, model, str(folder)))
    split_experts(wrapped)
    stored = checkpoint_names(wrapped)
    fit = match_checkpoint(wrapped, joined, lambda name: _other_names(stored.get(name, name), model))
    fit.check(str(folder), strict=False)
    findings += _said(reader, fit)
    findings += [Finding("load", "checkpoint", pickled)] if pickled else []
    return LoadedModel(
        kind="huggingface",
        module=wrapped,
        reader=FiniteReader(joined, str(folder)),
        inputs=_inputs(wrapped),
        samples={},
        samples_from="",
        outputs=("embedding",) if task == "embedding" else ("logits",),
        task=task,
        sizes=_sizes(plan, config),
        renames=fit.renames,
        files={name: folder / name for name in CARRIED if (folder / name).is_file()},
        meta=_meta(plan, config, task, sentence),
        weight_bytes=num_bytes(reader),
        findings=findings,
        rebuild=lambda: split_experts(_wrap(build()[0], task, sentence)),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `SourceError` for anything else."""
    try:
        found = json.loads(read_regular(path, MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"expected JSON: {error}", where=str(path)) from error
    if not isinstance(found, dict):
        raise SourceError(f"expected a JSON object, got {type(found).__name__}", where=str(path))
    return found


def task_of(config: Mapping[str, Any], folder: Path, known: str = "") -> str:
    """Derive the task from `architectures` of config.json, if not `known`; raise `SourceError` for unsupported ones."""
    name = _architecture(config)
    if config.get("quantization_config"):
        method = config["quantization_config"]
        named = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise SourceError(
            f"the checkpoint is quantized already ({named})",
            where=str(folder / "config.json"),
            hint="Give the original float checkpoint: quantizing twice only loses more",
        )
    if config.get("is_encoder_decoder"):
        raise SourceError(
            f"{name} is an encoder-decoder model; only encoders and decoders are opened from a folder",
            where=str(folder / "config.json"),
            hint="Give the state dict of the half you need and --model file.py:factory",
        )
    if known:
        return known
    for ending, task in TASKS.items():
        if name.endswith(ending):
            return task
    if name.endswith("Model"):
        return "embedding"
    raise SourceError(
        f"expected an architecture ending in {', '.join(TASKS)} or Model, got {name!r}",
        where=str(folder / "config.json"),
        hint="Export it with torch.export, or give its state dict and --model file.py:factory",
    )


def _architecture(config: Mapping[str, Any]) -> str:
    found = config.get("architectures")
    if isinstance(found, list) and found and isinstance(found[0], str):
        return found[0]
    return f"{config.get('model_type', 'no')} model without architectures"


def _refuse_code(config: Mapping[str, Any], folder: Path) -> None:
    remote = config.get("auto_map")
    if remote:
        named = ", ".join(map(str, remote.values())) if isinstance(remote, dict) else str(remote)
        raise UnsafeSourceError(
            f"the folder wants code of its own to be run (auto_map: {named[:200]})",
            where=str(folder / "config.json"),
            hint="Code in a model folder is never run: put it in a file of yours and name it by --model",
        )


def _settings(folder: Path) -> Any:
    """Load the configuration object of transformers."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _from_config(settings: Any, task: str, sparse: bool) -> nn.Module:
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
    )

    kinds = {"text-generation": AutoModelForCausalLM, "classification": AutoModelForSequenceClassification}
    auto: Any = kinds.get(task, AutoModelForMaskedLM if sparse else AutoModel)

    def made(attention: str) -> nn.Module:
        own = copy.deepcopy(settings)  # a model writes into its configuration
        model: Any = auto.from_config(own, attn_implementation=attention, dtype=torch.float32)
        model.tie_weights()
        return model

    try:
        return made("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return made("eager")  # attention in the model's own code


def _wrap(model: nn.Module, task: str, sentence: SentenceFolder) -> nn.Module:
    if task == "text-generation":
        return Decoder(model).eval()
    if task == "classification":
        return (PairClassifier if _has_token_types(model) else Classifier)(model).eval()
    # The pooler's output is not the embedding, and many checkpoints lack its weights.
    if getattr(model, "pooler", None) is not None:
        setattr(model, "pooler", None)  # noqa: B010
    return Encoder(model, sentence.head(), sparse=sentence.sparse).eval()


def _other_names(name: str, model: nn.Module) -> list[str]:
    """List checkpoint names of a wrapped parameter: with and without the base model's prefix, old LayerNorm names."""
    inner = name.removeprefix("model.")
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = [inner, prefix + inner, inner.removeprefix(prefix), f"model.{inner}"]
    old = [
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for n in names
    ]
    return names + old


def _said(reader: WeightReader, fit: CheckpointMatch) -> list[Finding]:
    stored = sorted({str(reader.dtype(name)).removeprefix("torch.") for name in reader.names()})
    findings = [Finding("load", "weights", num_bytes(reader) / 1e6, "MB", f"stored as {', '.join(stored)}")]
    if {"float16", "bfloat16"} & set(stored):
        why = "the float original is the checkpoint in float32, which holds its values exactly"
        findings.append(Finding("load", "upcast", "float32", why=why))
    if fit.unexpected:
        left = f"the model does not use {', '.join(fit.unexpected[:8])}"
        findings.append(Finding("load", "tensors left", len(fit.unexpected), why=left))
    return findings


def _inputs(wrapped: nn.Module) -> tuple[TensorSpec, ...]:
    """Return the specs of the wrapper's inputs: token ids, and for encoders mask and token types."""
    names = inspect.signature(wrapped.forward).parameters
    return tuple(TensorSpec(name, "int64", ("batch", "seq")) for name in names)


def _has_token_types(model: nn.Module) -> bool:
    types = getattr(getattr(model, "config", None), "type_vocab_size", 0) or 0
    return types > 1 and "token_type_ids" in inspect.signature(model.forward).parameters


def _refuse_other_modalities(model: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Raise `SourceError` for a model that reads images or sound, by the inputs of its own forward."""
    names = [n for n in inspect.signature(model.forward).parameters if n in _OTHER_MODALITIES]
    if names:
        raise SourceError(
            f"expected a model of text, but {_architecture(config)} takes {', '.join(names)}",
            where=str(folder / "config.json"),
            hint="Save its text half as a folder of its own, or give the model with --model file.py:factory and name "
            "its tensors with --input",
        )


def _sizes(plan: Plan, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    positions = config.get("max_position_embeddings")
    longest = min(plan.max_length, positions) if isinstance(positions, int) else plan.max_length
    return {"batch": (1, plan.max_batch), "seq": (1, longest)}


def _meta(plan: Plan, config: dict[str, Any], task: str, sentence: SentenceFolder) -> dict[str, Any]:
    """Collect the metadata that serving needs, as JSON: limits, token ids, labels, pooling."""
    folder, limits = sentence.transformer, [_sizes(plan, config)["seq"][1]]
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        found = read_json(folder / name).get(key) if (folder / name).is_file() else None
        if isinstance(found, int | float) and 0 < found < LARGE_VOCAB:
            limits.append(int(found))
    meta: dict[str, Any] = {
        "architecture": _architecture(config),
        "model_type": config.get("model_type"),
        "max_length": min(limits),
        "vocab_size": config.get("vocab_size"),
        "problem_type": config.get("problem_type"),
        "pad_id": config.get("pad_token_id"),
        "bos_id": config.get("bos_token_id"),
        "eos_id": config.get("eos_token_id"),
    }
    if isinstance(config.get("id2label"), dict):
        meta["labels"] = [
            str(label) for _, label in sorted(config["id2label"].items(), key=lambda kv: int(kv[0]))
        ]
    if task == "classification" and (named := score_activation(config, folder / "config.json")):
        meta["activation"] = named
    return meta | (sentence.meta() if task != "text-generation" else {})
