"""Heads of transformers models: task, class, and a wrapper with named tensors, for each architecture.

`table.py` lists them, `build.py` makes the model, `inputs.py` wraps it and names its inputs.
"""

from __future__ import annotations

from .build import attention_findings, build, choose
from .dual_towers import choose_tower, whole_config, whole_finding, whole_meta
from .inputs import input_specs, num_channels, size_bounds, wrap
from .table import DUAL_TOWERS, FEATURES, PIXELS, SOUND, Head, architecture, candidates

__all__ = [
    "DUAL_TOWERS",
    "FEATURES",
    "PIXELS",
    "SOUND",
    "Head",
    "architecture",
    "attention_findings",
    "build",
    "candidates",
    "choose",
    "choose_tower",
    "input_specs",
    "num_channels",
    "size_bounds",
    "whole_config",
    "whole_finding",
    "whole_meta",
    "wrap",
]
