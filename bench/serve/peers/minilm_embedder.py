"""MiniLM for the rivals of `bench/serve/peers/comparison.py`, chosen by $PEERS_KIND and $PEERS_ARTIFACT."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

MOST = 64  # rows of a batch, as infer's own
Embed = Callable[[list[str]], np.ndarray]


def embedder() -> Embed:
    """Return texts → float32 [n, 384]: `float` in torch, padded to the longest text; `same` by infer's artifact."""
    if os.environ["PEERS_KIND"] == "float":
        import minilm

        return minilm.float_embed(MOST)
    from infer import Predictor

    predictor = Predictor.load(os.environ["PEERS_ARTIFACT"])
    predictor.warmup()
    return lambda texts: predictor.predict(predictor.tokenize(texts))[predictor.outputs[0].name]
