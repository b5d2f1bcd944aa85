"""Quantization by llama.cpp with an importance matrix, in a process of its own, decoded by the `gguf` package.

The matrix is what `llama-imatrix` writes: the mean square of each input column of every matrix of the blocks, here over
the rows that calibrate the others too. As there, the embedding, tied or not, has none. A matrix whose rows are no
multiple of 256 takes the type that llama.cpp falls back to.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.llm import gguf_writer, llama_cpp_model
from bench.quality.reference_models import ReferenceModel
from bench.shared.child_process import apart

# Names of `llama-quantize` and their numbers in enum llama_ftype.
TYPES = {
    **{"Q2_K": 10, "IQ3_XXS": 23, "IQ3_S": 26, "IQ3_M": 27, "Q3_K_S": 11, "Q3_K_M": 12},
    **{"IQ4_XS": 30, "Q4_0": 2, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18},
}
FLOAT16 = 1  # of enum ggml_type
BLOCKS = "blk."


def write_float(model: ReferenceModel, path: Path) -> None:
    """Write the float model as a GGUF file: what `llama-quantize` starts from."""
    if model.task == "text-generation":
        gguf_writer.write_checkpoint(model.folder, path)
    else:
        _write_bert(model, path)


def _write_bert(model: ReferenceModel, path: Path) -> None:
    import gguf

    config = json.loads((model.folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for name, value in model.parameters.items():
        writer.add_tensor(stored_name(model, name), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_name(model: ReferenceModel, name: str) -> str:
    """Return the name in a GGUF file of a parameter of transformers."""
    import gguf

    kind = gguf.MODEL_ARCH.LLAMA if model.task == "text-generation" else gguf.MODEL_ARCH.BERT
    layers = json.loads((model.folder / "config.json").read_text())["num_hidden_layers"]
    found = gguf.get_tensor_name_map(kind, layers).get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ValueError(f"the gguf package has no name for {name}")
    return found


def importance(model: ReferenceModel, square_means: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the importance matrix: name in the file → float32 [columns], of the matrices of the blocks."""
    found = {}
    for name, value in square_means.items():
        if f"{name}.weight" not in model.parameters:
            continue
        stored = stored_name(model, f"{name}.weight")
        if stored.startswith(BLOCKS):
            found[stored] = value.float().numpy()
    return found


def quantize(
    source: str, path: str, kind: str, matrix: dict[str, np.ndarray], float_embedding: bool, threads: int
) -> None:
    """Quantize as `llama-quantize --imatrix`; runs in a process of its own. Raises `RuntimeError` with the status.

    `float_embedding` is `--token-embedding-type f16 --output-tensor-type f16`.
    """
    library = llama_cpp_model._library()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[kind], threads
    if float_embedding:
        params.token_embedding_type = params.output_tensor_type = FLOAT16
    entries = (library.llama_model_imatrix_data * (len(matrix) + 1))()  # the last one ends the list
    for entry, (name, values) in zip(entries, matrix.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params.imatrix = entries
    status = library.llama_model_quantize(source.encode(), path.encode(), ctypes.byref(params))
    if status:
        raise RuntimeError(f"llama_model_quantize to {kind}: status {status}")


def decoded(model: ReferenceModel, path: Path, scope: str) -> tuple[dict[str, Tensor], int]:
    """Return the weights of a file by transformers' names, float32, and the bytes of those that `scope` counts."""
    import gguf

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    counted, weights, size = model.matrices(scope), {}, 0
    for name, own in model.parameters.items():
        tensor = stored[stored_name(model, name)]
        values = torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        weights[name] = _order(model, name, values.reshape(own.shape))
        size += int(tensor.n_bytes) if name in counted else 0
    return weights, size


def _order(model: ReferenceModel, name: str, values: Tensor) -> Tensor:
    """Undo llama.cpp's order of the rows of queries and keys of a Llama, halves of a head interleaved."""
    if model.task != "text-generation" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    config = json.loads((model.folder / "config.json").read_text())
    head = config["head_dim"]
    return values.reshape(-1, head // 2, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)


def contender(
    model: ReferenceModel, kind: str, scope: str, matrix: dict[str, np.ndarray], work: Path, threads: int
) -> tuple[dict[str, Tensor], int]:
    """Quantize a model to a type; return its decoded weights and the bytes that `scope` counts."""
    source, path = work / f"{model.name}.gguf", work / f"{model.name}-{kind}-{scope}.gguf"
    if not source.exists():
        write_float(model, source)
    apart(quantize, str(source), str(path), kind, matrix, scope == "blocks", threads)
    try:
        return decoded(model, path, scope)
    finally:
        path.unlink(missing_ok=True)
