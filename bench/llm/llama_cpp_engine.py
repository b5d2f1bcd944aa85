"""One llama.cpp engine of the speed bars, made and used in a process of its own, which it may crash."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.llm import gguf_writer, llama_cpp_model
from bench.llm.decoder_shapes import Shape, made
from bench.shared import child_process

SPARE = 32  # positions of the cache beyond the context
CONTEXTS = (128, 2048)  # tokens after which the cache is kept


class LlamaEngine:
    """A decode step of `sequences` at `context` tokens in the cache, or the prefill of a prompt of that length."""

    def __init__(
        self, shape: Shape, format: str, flash: bool, kind: str, context: int, sequences: int, threads: int
    ) -> None:
        self._tokens, self._context_length, self._decodes = shape.tokens.tolist(), context, kind == "decode"
        kept = states(shape, format, flash, threads) if self._decodes and sequences == 1 else None
        self._model, self._last = llama_cpp_model.Model(gguf(shape, format, threads)), 0
        self._context = llama_cpp_model.Context(
            self._model, length=context + SPARE, threads=threads, sequences=sequences, flash=flash
        )
        if not self._decodes:
            self._batch = self._context.prompt(self._tokens[:context])
            return
        if kept is not None:
            self._context.restore(kept / str(context))
        else:
            self._context.decode(self._context.prompt(self._tokens[:context]))
            for sequence in range(1, sequences):
                self._context.copy(sequence)
        new = [(self._tokens[context], context, i) for i in range(sequences)]
        self._batch, self._last = self._context.batch(new, range(sequences)), sequences - 1

    def run(self) -> None:
        """Compute one step, or one prompt."""
        self._context.forget(self._context_length if self._decodes else 0)
        self._context.decode(self._batch)

    def check(self) -> np.ndarray:
        """Return the logits float32 [vocab] of the token after `context`."""
        if self._decodes:
            self.run()
            return self._context.logits([self._last])[0].clone().numpy()
        self._context.forget()
        self._context.decode(self._context.prompt(self._tokens[: self._context_length + 1]))
        return self._context.logits([self._context_length])[0].clone().numpy()


def gguf(shape: Shape, format: str, threads: int) -> Path:
    """Return the GGUF file of a shape, made the first time in a process of its own."""

    def quantized(path: Path) -> None:
        child_process.apart(llama_cpp_model.quantize, whole, path, format, threads)

    whole = made(shape.folder / "f16.gguf", lambda path: gguf_writer.write_checkpoint(shape.checkpoint, path))
    return made(shape.folder / f"{format}.gguf", quantized)


def states(shape: Shape, format: str, flash: bool, threads: int) -> Path:
    """Return a folder with llama.cpp's cache of one sequence after each of `CONTEXTS`."""

    def make(folder: Path) -> None:
        folder.mkdir()
        model, tokens = llama_cpp_model.Model(gguf(shape, format, threads)), shape.tokens.tolist()
        context = llama_cpp_model.Context(model, length=max(CONTEXTS) + SPARE, threads=threads, flash=flash)
        for length in CONTEXTS:
            context.forget()
            context.decode(context.prompt(tokens[:length]))
            context.save(folder / str(length))
        context.close()
        model.close()

    return made(shape.folder / f"{format}{'-flash' if flash else ''}-states", make)
