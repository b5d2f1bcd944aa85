"""Rotary positions whose frequencies depend on the length of the sequence: kept at those of short sequences.

With `rope_type` dynamic or longrope transformers computes other frequencies once a sequence is longer than the length
of pretraining, for all of its tokens at once. A KV cache holds keys that were rotated before, and one step holds
sequences of many lengths. So the frequencies of short sequences are kept, which are exact, and the context ends where
others would begin. Likewise with other models that a family says are exact up to a length.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from ... import families
from ...spec import Finding

_BY_LENGTH = ("dynamic", "longrope")


class FixedFrequencies(NamedTuple):
    """Longest sequence computed exactly, the limit of the configuration, and the behaviour beyond it."""

    longest: int
    allowed: int
    why: str

    def finding(self) -> Finding:
        more = f" of {self.allowed}" if self.allowed > self.longest else ""
        return Finding("load", "context", self.longest, f"tokens{more}", self.why)


def fix_frequencies(model: nn.Module) -> FixedFrequencies | None:
    """Keep the frequencies of short sequences in every rotary embedding of `model`.

    The configuration's `max_position_embeddings` becomes the longest sequence for which they are exact. Returns None
    where no frequencies depend on the length.
    """
    limits: dict[int, str] = {}
    for module in model.modules():
        kinds = _kinds(module)
        forward = inspect.unwrap(type(module).forward)  # without transformers' `dynamic_rope_update`
        if not kinds or forward is type(module).forward:
            continue
        setattr(module, "forward", MethodType(forward, module))  # noqa: B010 - an attribute of this object alone
        for layer, kind in kinds.items():
            why = f"{kind} positions: the frequencies of longer sequences depend on their length"
            limits[_limit(module, layer, kind)] = why
    config: Any = model.config
    if not getattr(config, "text_encoder", None):  # of two configurations of texts, none is that of the model
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
    allowed = int(getattr(config, "max_position_embeddings", None) or 0)
    exact = families.known().exact_lengths.get(getattr(config, "model_type", ""))
    if exact is not None and (limit := exact(config)) is not None:
        limits[limit[0]] = limit[1]
    if not limits:
        return None
    longest = min(limits)
    allowed = allowed or longest
    config.max_position_embeddings = min(longest, allowed)
    return FixedFrequencies(min(longest, allowed), allowed, limits[longest])


def _kinds(module: Any) -> dict[str | None, str]:
    """Return the kind of rotary embedding that depends on the length, by type of layer where they differ."""
    kind = getattr(module, "rope_type", None)
    named = kind if isinstance(kind, dict) else {None: kind}
    return {layer: name for layer, name in named.items() if isinstance(name, str) and name in _BY_LENGTH}


def _limit(module: Any, layer: str | None, kind: str) -> int:
    if kind == "dynamic":
        return int(module.original_max_seq_len)
    config = module.config
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    settings = settings if layer is None else settings.get(layer, {})
    found = settings.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(found or module.original_max_seq_len)
