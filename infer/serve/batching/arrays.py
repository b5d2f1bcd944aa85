"""Named numpy arrays of one request or batch, and a predictor run on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
BATCH = "batch"  # symbolic size of the first dimension of batched tensors


def run_arrays(predictor: Any, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Call `predictor.predict`; bfloat16 arrays are uint16 here and torch tensors there."""
    if not any(spec.dtype == "bfloat16" for spec in (*predictor.inputs, *predictor.outputs)):
        return predictor.predict(dict(arrays))
    import torch

    given: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for spec in predictor.inputs:
        if spec.dtype == "bfloat16":
            given[spec.name] = given[spec.name].view(torch.bfloat16)
    outputs = predictor.predict(given)
    for name, value in outputs.items():
        outputs[name] = (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()
    return outputs
