"""Configurations without `architectures`: the class of transformers that the stored tensors fit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import SourceError
from ...spec import Finding
from ...weights import Checkpoint
from ..checkpoint.transformers_key_mapping import convert_names
from .folder_model import read_settings

GENERATING = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForCausalLM")
HEADS = (
    *(
        f"AutoModelFor{head}"
        for head in ("SequenceClassification", "TokenClassification", "QuestionAnswering")
    ),
    *(f"AutoModelFor{head}" for head in ("MaskedLM", "MultipleChoice", "ImageClassification", "CTC")),
    *(f"AutoModelFor{head}" for head in ("ObjectDetection", "SemanticSegmentation", "AudioClassification")),
)
LACKED = ("position_ids", "token_type_ids", "final_logits_bias")  # by many checkpoints, which need them not


def with_architecture(
    config: dict[str, Any], folder: Path, checkpoint: Checkpoint
) -> tuple[dict[str, Any], list[Finding]]:
    """Return the configuration with the class that the stored tensors fit, and the finding that says so.

    Of classes that fit the one that uses most tensors is taken, and one that generates before its base model. Raises
    `SourceError` where several with a head fit, or none.
    """
    if config.get("architectures"):
        return config, []
    settings = read_settings(folder)
    known, base = _classes(settings), _mapped("AutoModel", settings)
    fitting = {
        name: used
        for name, found in known.items()
        if (used := _used(found, settings, checkpoint, folder, is_base=found is base))
    }
    most = max(fitting.values(), default=0)
    best = [name for name, used in fitting.items() if used == most]
    if len(best) == 2 and known[best[1]] is base:
        best = best[:1]
    if len(best) != 1:
        fits = (
            f"its tensors fit {' and '.join(best)} alike"
            if best
            else f"its tensors fit none of {', '.join(known) or 'no class'}"
        )
        example = (best or list(known) or ["BertForSequenceClassification"])[0]
        raise SourceError(
            f"the configuration names no architectures, and {fits}",
            where=str(folder / "config.json"),
            hint=f'Add the class of the model to config.json: "architectures": ["{example}"]',
        )
    why = f"the configuration names none, and the checkpoint has the {most} tensors of this class"
    return {**config, "architectures": best}, [Finding("load", "architecture", best[0], why=why)]


def _mapped(auto: str, settings: Any) -> Any:
    import transformers

    model_class = getattr(transformers, auto)._model_mapping.get(type(settings), None)
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _classes(settings: Any) -> dict[str, Any]:
    """List the classes of a configuration by name: those that generate, those with a head, the base model."""
    masked = _mapped("AutoModelForMaskedLM", settings) is not None
    generating = [auto for auto in GENERATING if auto != GENERATING[-1] or not masked or settings.is_decoder]
    classes = (_mapped(auto, settings) for auto in (*generating, *HEADS, "AutoModel"))
    return {model_class.__name__: model_class for model_class in classes if model_class is not None}


def _used(found: Any, settings: Any, checkpoint: Checkpoint, folder: Path, *, is_base: bool) -> int:
    """Return how many stored tensors a class uses, 0 where it lacks one or one has another shape."""
    with torch.device("meta"):
        model = found._from_config(copy.deepcopy(settings))
    prefix = f"{model.base_model_prefix}."
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    stored = convert_names(checkpoint, model, str(folder))
    held = {_new_name(name).removeprefix(prefix): weight.shape for name, weight in stored.items()}
    lacked, used = (*LACKED, "pooler") if is_base else LACKED, 0
    for name, value in model.state_dict().items():
        own = name.removeprefix(prefix)
        if held.get(own) == tuple(value.shape):
            used += 1
        elif own in held or (name not in tied and not any(part in own for part in lacked)):
            return 0
    return used


def _new_name(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
