"""llama.cpp on a GGUF file through its own C interface, in the library that llama-cpp-python carries.

`quantize` is llama.cpp's own; weights are repacked as it does by default. Outputs are logits of token ids.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.distribution import install
from infer.load.gguf.header import read_gguf_header

FORMATS = {  # of enum llama_ftype
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q2_K": 10,
    "q3_K_M": 12,
    "q4_K_M": 15,
    "q5_K_M": 17,
    "q6_K": 18,
    "iq2_xxs": 19,
    "iq4_nl": 25,
    "iq3_s": 26,
    "iq4_xs": 30,
    "tq2_0": 37,
}
WEIGHED = ("iq2_xxs",)  # made with an importance matrix only


def missing() -> str | None:
    """Return the reason why llama.cpp cannot be measured, or None."""
    if importlib.util.find_spec("llama_cpp") is None:
        return f"llama-cpp-python is not installed ({install('bench')}; it compiles for ten minutes)"
    return None


def versions() -> dict[str, str]:
    """Return the versions of the package and of the library in it."""
    if missing() is not None:
        return {}
    said = _library().llama_version().decode()
    return {"llama-cpp-python": importlib.metadata.version("llama-cpp-python"), "llama.cpp": said}


@cache
def _library() -> Any:
    from llama_cpp import llama_cpp

    llama_cpp.llama_log_set(_quiet, None)
    llama_cpp.llama_backend_init()
    return llama_cpp


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _quiet(level: int, text: bytes, data: int) -> None:
    """Drop llama.cpp's log, a line for every tensor."""


def quantize(source: Path, path: Path, format: str, threads: int) -> None:
    """Quantize as `llama-quantize SOURCE PATH FORMAT`; where an importance matrix is needed, with equal importance."""
    library = _library()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread = FORMATS[format], threads
    if format in WEIGHED:
        equal = _equal_importance(source)
        params.imatrix = equal
    status = library.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params))
    if status:
        raise RuntimeError(f"llama_model_quantize to {format}: status {status}")


def _equal_importance(source: Path) -> Any:
    """Return an importance of one for every column of every matrix: entries that end with one without a name."""
    kind = _library().llama_model_imatrix_data
    shapes = {
        name: one.shape for name, one in read_gguf_header(source).tensors.items() if len(one.shape) == 2
    }
    entries = (kind * (len(shapes) + 1))()
    for entry, (name, shape) in zip(entries, shapes.items(), strict=False):
        ones = (ctypes.c_float * shape[-1])(*[1.0] * shape[-1])
        entry.name, entry.data, entry.size = name.encode(), ones, shape[-1]
    return entries


class Model:
    """An opened GGUF file, its weights repacked for this CPU as llama.cpp does by default."""

    def __init__(self, path: Path) -> None:
        self.library = _library()
        params = self.library.llama_model_default_params()
        params.n_gpu_layers = 0
        self.pointer = self.library.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise RuntimeError(f"llama.cpp can't open {path}")
        self.vocab = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.pointer))

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokens that the file begins and ends texts with."""
        data, vocab = text.encode(), self.library.llama_model_get_vocab(self.pointer)
        found = (ctypes.c_int32 * (len(data) + 8))()
        count = self.library.llama_tokenize(vocab, data, len(data), found, len(found), True, True)
        return list(found[:count])

    def close(self) -> None:
        """Free the model, after its contexts."""
        self.library.llama_model_free(self.pointer)


class Context:
    """Cache of `sequences` × `length` tokens in float16, each sequence apart, and the threads that compute."""

    def __init__(
        self, model: Model, *, length: int, threads: int, sequences: int = 1, flash: bool = True
    ) -> None:
        self._lib, self.vocab = model.library, model.vocab
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = length * sequences, sequences
        params.n_batch = max(length, params.n_ubatch)
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash)
        params.kv_unified, params.no_perf = False, True
        self._context = self._lib.llama_init_from_model(model.pointer, params)
        if not self._context:
            raise RuntimeError("llama.cpp can't make a context")
        self._memory = self._lib.llama_get_memory(self._context)
        self._batches: list[Any] = []

    def batch(self, tokens: Sequence[tuple[int, int, int]], logits: Sequence[int]) -> Any:
        """Build a batch of (token, position, sequence); logits are computed at the indices `logits`."""
        made = self._lib.llama_batch_init(len(tokens), 0, 1)
        self._batches.append(made)
        made.n_tokens = len(tokens)
        for index, (token, position, sequence) in enumerate(tokens):
            made.token[index], made.pos[index] = token, position
            made.n_seq_id[index], made.seq_id[index][0] = 1, sequence
            made.logits[index] = 0
        for index in logits:
            made.logits[index] = 1
        return made

    def decode(self, batch: Any) -> None:
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}")
        self._lib.llama_synchronize(self._context)

    def logits(self, indices: Sequence[int]) -> Tensor:
        """Return float32 [len(indices), vocab] of the tokens at those indices of the last batch."""
        kind = ctypes.c_float * self.vocab
        rows = [self._lib.llama_get_logits_ith(self._context, index).contents for index in indices]
        found = [
            torch.frombuffer(kind.from_address(ctypes.addressof(row)), dtype=torch.float32) for row in rows
        ]
        return torch.stack(found)

    def prompt(self, tokens: Sequence[int]) -> Any:
        """Build the batch of the first sequence from its start, with logits of the last token."""
        return self.batch([(token, index, 0) for index, token in enumerate(tokens)], [len(tokens) - 1])

    def forget(self, start: int = 0) -> None:
        """Drop what is cached from position `start` on, in all sequences."""
        if start == 0:  # recurrent states have no other way back
            self._lib.llama_memory_clear(self._memory, False)
        else:
            self._lib.llama_memory_seq_rm(self._memory, -1, start, -1)

    def save(self, path: Path) -> None:
        """Save the cache of the first sequence."""
        size = self._lib.llama_state_seq_get_size(self._context, 0)
        data = (ctypes.c_uint8 * size)()
        self._lib.llama_state_seq_get_data(self._context, data, size, 0)
        path.write_bytes(bytes(data))

    def restore(self, path: Path) -> None:
        """Load what `save` wrote with a context of one sequence into one of one sequence."""
        data = path.read_bytes()
        held = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if not self._lib.llama_state_seq_set_data(self._context, held, len(data), 0):
            raise RuntimeError(f"llama.cpp can't restore {path}")

    def copy(self, sequence: int) -> None:
        """Copy the cache of the first sequence to another."""
        self._lib.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def close(self) -> None:
        for batch in self._batches:
            self._lib.llama_batch_free(batch)
        self._lib.llama_free(self._context)
