"""Scaling of rotary positions in a GGUF file, as transformers' settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import SourceError

FOLDER_HINT = "Give the Hugging Face folder it was made from"
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def refused(path: Path, what: str) -> SourceError:
    """Return the refusal of something that a reader of the file would have to take into account."""
    return SourceError(
        f"{what}: infer does not read this from a GGUF file", where=str(path), hint=FOLDER_HINT
    )


def rope_settings(
    factors: Mapping[str, list[float]],
    config: Mapping[str, Any],
    own: Mapping[str, Any],
    path: Path,
) -> dict[str, Any]:
    """Return the scaling of rotary positions: linear, YaRN, or factors of frequencies.

    `factors`: those of `ROPE_FACTORS` that the file holds.
    """
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", 0.0)
    original = own.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in factors:
        both = factors["rope_freqs.weight"]
        return {
            "rope_scaling": {
                **{"rope_type": "longrope", "short_factor": both, "long_factor": both, "factor": 1.0},
                **{
                    "attention_factor": 1.0,
                    "original_max_position_embeddings": config["max_position_embeddings"],
                },
            }
        }
    if len(factors) == 2:
        long, short = (factors[name] for name in ROPE_FACTORS[1:])
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "type": "longrope",
            "short_factor": short,
            "long_factor": long,
        }
        if "rope.scaling.attn_factor" in own:
            scaling["attention_factor"] = own["rope.scaling.attn_factor"]
        return {"rope_scaling": scaling}
    if kind == "linear" and factor:
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn" and factor and original and "rope.scaling.attn_factor" not in own:
        return {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
        }
    if kind != "none" or factors:
        raise refused(path, f"positions scaled by {kind!r} (factor {factor}, original length {original})")
    return {}
