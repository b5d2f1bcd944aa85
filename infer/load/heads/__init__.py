"""Heads of transformers models: task, class, and a wrapper with named tensors, for each architecture.

`table.py` lists them, `build.py` makes the model, `inputs.py` wraps it and names its inputs.
"""

from __future__ import annotations

from .build import attention_findings, base_class, build, choose, class_named, other_class
from .dual_towers import choose_tower, whole_config, whole_finding, whole_meta
from .inputs import input_specs, num_channels, size_bounds, wrap
from .table import (
    DUAL_TOWERS,
    FEATURES,
    PIXELS,
    SOUND,
    Head,
    architecture,
    candidates,
    no_task,
)
from .tensors import ANY_TENSORS, TENSORS, TensorsModel, tensor_inputs, tensors_finding, without_pooler

__all__ = [
    "ANY_TENSORS",
    "DUAL_TOWERS",
    "FEATURES",
    "PIXELS",
    "SOUND",
    "TENSORS",
    "TensorsModel",
    "Head",
    "architecture",
    "attention_findings",
    "base_class",
    "build",
    "candidates",
    "choose",
    "choose_tower",
    "class_named",
    "input_specs",
    "no_task",
    "num_channels",
    "other_class",
    "size_bounds",
    "tensor_inputs",
    "tensors_finding",
    "whole_config",
    "whole_finding",
    "whole_meta",
    "without_pooler",
    "wrap",
]
