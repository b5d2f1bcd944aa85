"""MiniLM for the rivals of `bench/serve/peers/comparison.py`, chosen by $PEERS_KIND and $PEERS_ARTIFACT."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

MOST = 64  # rows of a batch, as infer's own
Embed = Callable[[list[str]], np.ndarray]


def embedder() -> Embed:
    """Return texts → float32 [n, 384]: `float` in torch, padded to the longest text; `same` by infer's artifact."""
    if os.environ["PEERS_KIND"] == "float":
        import minilm

        return minilm.float_embed(MOST)
    from infer import Predictor
    from infer.text import Tokenizer

    folder = Path(os.environ["PEERS_ARTIFACT"])
    predictor = Predictor.load(folder)
    predictor.warmup()
    length = json.loads((folder / "manifest.json").read_text())["meta"]["max_length"]
    tokenizer = Tokenizer(folder / "tokenizer.json", max_length=length)
    return lambda texts: predictor.predict(tokenizer.batch(texts))[predictor.outputs[0].name]
