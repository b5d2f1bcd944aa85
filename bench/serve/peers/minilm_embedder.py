"""MiniLM for the rivals of `bench/serve/peers/comparison.py`, chosen by $PEERS_KIND and $PEERS_ARTIFACT."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

MOST = 64  # rows of a batch, as infer's own
Embed = Callable[[list[str]], np.ndarray]


def embedder() -> Embed:
    """Return texts → float32 [n, 384].

    `float` in torch, padded to the longest text; `ort` by ONNX Runtime's own int8 model, likewise; `same` by infer's
    artifact.
    """
    kind, artifact = os.environ["PEERS_KIND"], os.environ["PEERS_ARTIFACT"]
    if kind == "float":
        import minilm

        return minilm.float_embed(MOST)
    if kind == "ort":
        return _onnx_runtime(artifact)
    from infer import Predictor

    predictor = Predictor.load(artifact)
    predictor.warmup()
    return lambda texts: predictor.predict(predictor.tokenize(texts))[predictor.outputs[0].name]


def _onnx_runtime(path: str) -> Embed:
    """Return the int8 model of ONNX Runtime's own tools behind its tokenizer, padded to the longest text."""
    import torch
    from tokenizers import Tokenizer

    import minilm
    from bench.kernels import whole_models_rivals

    tokenizer = Tokenizer.from_file(str(minilm.checkpoint_folder() / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(minilm.MAX_TOKENS)
    call = whole_models_rivals.open_ort(Path(path))

    def embed(texts: list[str]) -> np.ndarray:
        encoded = tokenizer.encode_batch(texts)
        ids = torch.tensor([one.ids for one in encoded])
        mask = torch.tensor([one.attention_mask for one in encoded])
        return call({"input_ids": ids, "attention_mask": mask}).numpy()

    return embed
