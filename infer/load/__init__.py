"""Source loading: identification by content, models, input specs, sample data and weights.

identify(path)      what a file or folder is, without running anything in it
load(plan)          a model whose weights are still on disk, its inputs, and real samples
fill(loaded)        gives the weights their values, by one of `STRATEGIES`
unfilled_copy(…)    the model once more, without opening the source again
read_data(spec, …)  what `--data` names, as samples
"""

from __future__ import annotations

from .identification.identify import Identified, identify
from .loaded_model import LoadedModel
from .module_copies import unfilled_copy
from .open_model import load
from .samples.read_samples import read_data
from .weight_loading.fill_weights import STRATEGIES, fill, resolve_strategy

__all__ = [
    "STRATEGIES",
    "Identified",
    "LoadedModel",
    "unfilled_copy",
    "fill",
    "identify",
    "load",
    "read_data",
    "resolve_strategy",
]
