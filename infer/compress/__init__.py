"""Weight quantization: formats, calibration, and models whose layers are packed.

`--quant NAME[:OPTION]` names the file `formats/NAME.py` (`int8`, `nf4`, `int4`, `fp4`, `fp8`, `cluster`), a
`quantizer.Quantizer`; `quantize_model` walks a model and swaps its layers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .quantizer import Quantizer as Quantizer
from .quantizer import Stats as Stats
from .quantizer import bits_per_weight as bits_per_weight
from .quantizer import carries_codes as carries_codes
from .quantizer import check_option as check_option
from .quantizer import get as get
from .quantizer import is_weight_only as is_weight_only
from .quantizer import join as join
from .quantizer import needs_stats as needs_stats

if TYPE_CHECKING:
    from .calibration.data_coverage import coverage as coverage
    from .calibration.input_statistics import calibrate as calibrate
    from .layer_candidates import Candidates as Candidates
    from .layer_overrides import check_pins as check_pins
    from .layer_overrides import layer_names as layer_names
    from .layer_overrides import resolve_pins as resolve_pins
    from .packed_layers import formats_of as formats_of
    from .packing.pack_model import quantize_model as quantize_model
    from .packing.packing_result import PackingCache as PackingCache
    from .packing.packing_result import QuantizationResult as QuantizationResult
    from .quantizable_layers import Weight as Weight
    from .rewrites.batch_norm_folding import fold_batch_norms as fold_batch_norms
    from .rewrites.split_recurrent import split_recurrent as split_recurrent
    from .rewrites.weight_norm_folding import fold_weight_norms as fold_weight_norms
    from .weight_coverage import cover as cover

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
