"""Decode and prefill of one GGUF file: our step, which computes with the file's own codes, against llama.cpp.

Both have the same weights to the bit, so that their logits may differ by the rounding of activations only. Both are
compared with the slow operators on these weights, which round nothing; nothing is timed where ours is further from them
than llama.cpp is, or far at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from bench.llm import infer_step, llama_cpp_engine, llama_cpp_model
from bench.llm.decode_prefill import FLASH, TWIN, BenchmarkCase, Engine, InferEngine, compared
from bench.llm.decoder_shapes import SHAPES
from bench.shared import child_process
from bench.shared.bars import Bar
from bench.shared.suite import THREADS

OURS = "infer"
DECODE_CONTEXT, PROMPT = 128, 512
FASTER = {"135M": 1.5, "1B": 1.2}  # decode; of prefill below
PREFILL_FASTER = 1.8
SHARE = 0.92  # of the read bandwidth, of a decode step
# So many times as far from the exact product as llama.cpp, whose steps of activations are for 32 columns, or for 256.
FARTHEST = 1.5
# The rows of 135M have no multiple of 256 columns, as K-quants need.
FORMATS = {
    "135M": ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl"),
    "1B": (
        *("q4_0", "q2_K", "q3_K_M", "q4_K_M", "q5_K_M", "q6_K", "iq4_xs"),
        *("tq2_0", "iq2_xxs", "iq3_s"),
    ),
}


@dataclass(frozen=True)
class FileCase:
    """One GGUF file and one size of work on it."""

    case: BenchmarkCase
    format: str

    @property
    def name(self) -> str:
        return f"same {self.format} file, {self.case.name}"

    @property
    def file(self) -> Path:
        return llama_cpp_engine.gguf(self.case.shape, self.format, THREADS)

    @property
    def step(self) -> Path:
        """Return the folder of our step on the codes of the file."""
        return infer_step.prepare_file(self.case.shape, self.format, self.file, THREADS)


def cases() -> Iterator[FileCase]:
    for name, formats in FORMATS.items():
        for format in formats:
            for kind, length, faster in (
                ("decode", DECODE_CONTEXT, FASTER[name]),
                ("prefill", PROMPT, PREFILL_FASTER),
            ):
                yield FileCase(BenchmarkCase(SHAPES[name], kind, length, 1, faster), format)


def prepare(work: FileCase) -> None:
    """Make and keep the GGUF file, our step on its codes and the filled caches."""
    InferEngine(work.case, work.step).close()
    _exact(work)
    for flash in (False, True) if work.case.kind == "decode" else ():
        child_process.apart(llama_cpp_engine.states, work.case.shape, work.format, flash, THREADS)


def measure(work: FileCase, seconds: float) -> list[Bar]:
    """Measure the row of one case in `seconds` of timing."""
    bar = Bar(work=work.name, rival=f"llama.cpp {work.format}", need=work.case.faster)
    if absent := llama_cpp_model.missing():
        return [msgspec.structs.replace(bar, why=absent)]
    rivals = {f"llama.cpp{flash}": (work.format, bool(flash)) for flash in FLASH}

    def wrong(_: dict[str, Tensor], errors: dict[str, float]) -> str:
        theirs = [error for name, error in errors.items() if name in rivals]
        most = min(TWIN, FARTHEST * max(theirs, default=0.0))
        if not theirs or errors[OURS] <= most:
            return ""
        away = f"{errors[OURS]:.3f} from the exact product of the file's weights"
        return f"not timed: ours is {away}, at most {most:.3f}"

    engines: dict[str, Engine] = {OURS: InferEngine(work.case, work.step)}
    share = SHARE if work.case.kind == "decode" else None
    return compared(work.case, bar, engines, rivals, _exact(work), wrong, seconds, OURS, share, {})


def _exact(work: FileCase) -> Tensor:
    """Return logits float32 [vocab] of the file's weights without rounding of activations; kept beside the step."""
    return infer_step.twin(work.step, work.case.shape.tokens.tolist()[: work.case.context + 1])
