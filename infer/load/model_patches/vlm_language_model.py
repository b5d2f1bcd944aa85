"""Language tower of a checkpoint of several modalities, opened as a model of text; its other towers are left out.

Such folders name an architecture that ends in ForConditionalGeneration, and the sizes of the tower are under
`text_config`, or beside `vision_config` in older ones. Text alone goes through the tower as it goes through the whole
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import families
from ...errors import SourceError
from ...spec import Finding
from ...weights import Checkpoint, Weight

ENDING = "ForConditionalGeneration"
# Prefixes of the tower's tensors, the first that fits counts → what they are in the causal model.
_PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.": "model.",
    "lm_head.": "lm_head.",
    **{f"model.{name}.": f"model.{name}." for name in ("embed_tokens", "layers", "norm")},
}


def has_tower(config: Mapping[str, Any], architecture: str) -> bool:
    """Tell if a config.json is that of a decoder with towers of other modalities."""
    if config.get("is_encoder_decoder") or not architecture.endswith(ENDING):
        return False
    beside = isinstance(config.get("vision_config"), dict) and "num_hidden_layers" in config
    return isinstance(config.get("text_config"), dict) or beside


def tower_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of the tower by itself, with the architecture and special tokens of the whole model."""
    kept = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")
    return {
        **config,
        **config.get("text_config", {}),
        **{name: config[name] for name in kept if config.get(name) is not None},
    }


def tower_settings(settings: Any, tower: LanguageTower, where: str) -> Any:
    """Return transformers' configuration of the tower; raises `SourceError` where it has no causal model for it."""
    from transformers import AutoModelForCausalLM

    text = _causal(settings.get_text_config(decoder=True))
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise SourceError(
            f"transformers has no causal language model for the language tower, a {text.model_type}",
            where=where,
            hint="Save the language model as a folder of its own",
        )
    if getattr(text, "use_bidirectional_attention", None) is True:
        raise SourceError(
            f"the language tower, a {text.model_type}, attends in both directions within the prompt",
            where=where,
            hint="Only towers whose attention is causal are opened",
        )
    text.tie_word_embeddings = not any(name.startswith("lm_head.") for name in tower.weights)
    return text


def _causal(text: Any) -> Any:
    """Return the configuration of the causal model of a tower: of a family's where transformers has none for it.

    The rotary embedding of such a tower reads three positions (time, height, width), which are equal for text.
    """
    from transformers import AutoConfig

    towers = families.known().towers
    if text.model_type not in towers:
        return text
    name, own = towers[text.model_type]
    values = {
        key: value for key, value in text.to_dict().items() if key not in ("model_type", "architectures")
    }
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if isinstance(rope, dict):
            kind = rope.get("rope_type", rope.get("type"))
            kept = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved", "type")}
            values[key] = {**kept, "rope_type": "default" if kind == "mrope" else kind}
    return AutoConfig.for_model(name, **{**values, **own})


@dataclass(frozen=True)
class LanguageTower:
    """Weights of the language tower by the names of a causal model; `left` lists those of the other towers."""

    weights: Checkpoint
    left: list[str]

    def finding(self, architecture: str) -> Finding:
        towers = sorted(
            {".".join(name.split(".")[:2]).removeprefix("model.").partition(".")[0] for name in self.left}
        )
        why = f"of {architecture}; {len(self.left)} tensors of {', '.join(towers) or 'no other tower'} are left out"
        return Finding("load", "language tower", len(self.weights), "tensors", why)


def language_tower(checkpoint: Checkpoint) -> LanguageTower:
    """Return the tower that a checkpoint holds."""
    weights: dict[str, Weight] = {}
    left: list[str] = []
    for name, weight in checkpoint.items():
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            left.append(name)
        else:
            weights[_PREFIXES[prefix] + name.removeprefix(prefix)] = weight
    return LanguageTower(weights, left)
