"""Quantized checkpoints, read as decoded float weights.

`quantization_config` of config.json names the method; each has a file here that finds its tensors and decodes rows.
"""

from __future__ import annotations

from .methods import open_quantized

__all__ = ["open_quantized"]
