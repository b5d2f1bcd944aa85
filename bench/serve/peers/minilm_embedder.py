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
    """Open a session with ONNX Runtime's default threads, and pool hidden states as sentence-transformers does."""
    import onnxruntime
    from tokenizers import Tokenizer

    import minilm

    tokenizer = Tokenizer.from_file(str(minilm.checkpoint_folder() / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(minilm.MAX_TOKENS)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def embed(texts: list[str]) -> np.ndarray:
        encoded = tokenizer.encode_batch(texts)
        mask = np.array([one.attention_mask for one in encoded], np.int64)
        feeds = {"input_ids": np.array([one.ids for one in encoded], np.int64), "attention_mask": mask}
        hidden = session.run(None, feeds)[0]
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return (pooled / np.linalg.norm(pooled, axis=1, keepdims=True)).astype(np.float32)

    return embed


def make_onnx_runtime_model(folder: Path) -> str:
    """Write MiniLM as ONNX, fused and quantized by ONNX Runtime's own tools; return the path."""
    import torch
    from transformers import AutoModel

    import minilm
    from bench.kernels import whole_models_rivals

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(
                minilm.checkpoint_folder(), dtype=torch.float32, attn_implementation="eager"
            )

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(input_ids, attention_mask).last_hidden_state
            return found

    ones = torch.ones(2, 8, dtype=torch.int64)
    axes = {0: "batch", 1: "length"}
    names = ("input_ids", "attention_mask")
    path = folder / "minilm.onnx"
    model = Hidden().eval()
    whole_models_rivals.make_onnx(
        model, dict.fromkeys(names, ones), dict.fromkeys((*names, "output"), axes), path
    )
    sizes = model.model.config
    return str(whole_models_rivals.make_ort_dynamic(path, sizes.num_attention_heads, sizes.hidden_size))
