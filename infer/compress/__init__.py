"""Weight quantization: formats, calibration, and models whose layers are packed.

`--quant NAME[:OPTION]` names the file `formats/NAME.py` (`int8`, `nf4`, `int4`, `fp4`, `fp8`, `cluster`), a
`quantizer.Quantizer`; `quantize_model` walks a model and swaps its layers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .quantizer import (
    Quantizer,
    Stats,
    bits_per_weight,
    carries_codes,
    check_option,
    get,
    is_weight_only,
    join,
    needs_stats,
)

if TYPE_CHECKING:
    from .calibration.data_coverage import coverage
    from .calibration.input_statistics import calibrate
    from .layer_candidates import Candidates
    from .layer_overrides import check_pins, layer_names, resolve_pins
    from .packed_layers import formats_of
    from .packing.pack_model import quantize_model
    from .packing.packing_result import PackingCache, QuantizationResult
    from .quantizable_layers import Weight
    from .rewrites.batch_norm_folding import fold_batch_norms
    from .rewrites.split_recurrent import split_recurrent
    from .rewrites.weight_norm_folding import fold_weight_norms
    from .weight_coverage import cover

_LAZY = {
    "Candidates": "layer_candidates",
    "QuantizationResult": "packing.packing_result",
    "PackingCache": "packing.packing_result",
    "Weight": "quantizable_layers",
    "calibrate": "calibration.input_statistics",
    "check_pins": "layer_overrides",
    "cover": "weight_coverage",
    "coverage": "calibration.data_coverage",
    "fold_batch_norms": "rewrites.batch_norm_folding",
    "fold_weight_norms": "rewrites.weight_norm_folding",
    "formats_of": "packed_layers",
    "layer_names": "layer_overrides",
    "quantize_model": "packing.pack_model",
    "resolve_pins": "layer_overrides",
    "split_recurrent": "rewrites.split_recurrent",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Candidates",
    "QuantizationResult",
    "Quantizer",
    "PackingCache",
    "Stats",
    "Weight",
    "bits_per_weight",
    "calibrate",
    "carries_codes",
    "check_option",
    "check_pins",
    "cover",
    "coverage",
    "fold_batch_norms",
    "fold_weight_norms",
    "formats_of",
    "get",
    "is_weight_only",
    "join",
    "layer_names",
    "needs_stats",
    "quantize_model",
    "resolve_pins",
    "split_recurrent",
]
