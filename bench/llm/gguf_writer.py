"""GGUF files of Llama checkpoints: float16, without a vocabulary (token ids go in and logits come out)."""

from __future__ import annotations

import json
from pathlib import Path

from infer.export.gguf_metadata import architecture_for, model_metadata
from infer.export.gguf_tensors import TensorWriter
from infer.export.gguf_writer import write_gguf
from infer.load.gguf.header import read_gguf_header
from infer.weights.safetensors_file import open_safetensors

FLOAT16 = 1  # of enum llama_ftype


def write_checkpoint(checkpoint: Path, path: Path) -> None:
    """Write a Hugging Face Llama folder as one file, a few rows in memory at a time.

    Raises `ValueError` for another architecture, scaled rope or biases, `NotUsableError` for a tensor that has no place
    in the file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
    if (
        config["model_type"] != "llama"
        or rope != "default"
        or config.get("attention_bias")
        or config.get("mlp_bias")
    ):
        raise ValueError(
            f"expected a Llama with plain rope and no biases, got {config['model_type']}, rope {rope}"
        )
    _, architecture = architecture_for("llama")
    weights = open_safetensors(sorted(checkpoint.glob("*.safetensors"))).weights
    metadata = model_metadata(config, path.stem)
    metadata |= {"general.file_type": FLOAT16, "tokenizer.ggml.model": "no_vocab"}
    write_gguf(path, metadata, TensorWriter(weights, config, architecture, "F16").tensors())


def tensor_bytes(path: Path) -> int:
    """Return the bytes of the weights in a GGUF file."""
    return sum(tensor.num_bytes for tensor in read_gguf_header(path).tensors.values())
