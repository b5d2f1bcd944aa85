"""Decode and prefill of one GGUF file: our step, which computes with the file's own codes, against llama.cpp.

Both have the same weights to the bit, so that their logits may differ by the rounding of activations only. Both are
compared with the slow operators on these weights, which round nothing; nothing is timed where ours is further from them
than llama.cpp is, or far at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from bench.kernels.linear_infer import relative
from bench.llm import infer_step, llama_cpp_engine, llama_cpp_model
from bench.llm.decode_prefill import (
    READING,
    THREADS,
    TWIN,
    BenchmarkCase,
    Engine,
    InferEngine,
    LlamaProcess,
    surviving,
)
from bench.llm.decoder_shapes import SHAPES
from bench.shared import child_process, timing
from bench.shared.bars import Bar
from bench.shared.timing import Side

OURS = "infer"
DECODE_CONTEXT, PROMPT = 128, 512
FASTER = {"135M": 1.5, "1B": 1.2}  # decode; of prefill below
PREFILL_FASTER = 1.8
SHARE = 0.92  # of the read bandwidth, of a decode step
# So many times as far from the exact product as llama.cpp: a step of activations is for 64 columns, not 32 or 256.
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
    engines: dict[str, Engine] = {}
    try:
        engines[OURS] = InferEngine(work.case, work.step)
        for flash in (False, True):
            name = "llama.cpp, flash" if flash else "llama.cpp"
            engines[name] = LlamaProcess(work.case, work.format, flash)
        return _measured(work, bar, engines, seconds)
    finally:
        for engine in engines.values():
            engine.close()


def _measured(work: FileCase, bar: Bar, engines: dict[str, Engine], seconds: float) -> list[Bar]:
    crashed: dict[str, str] = {}
    logits = surviving(engines, crashed, lambda engine: engine.check())
    rivals = [name for name in engines if name != OURS]
    if not rivals:
        return [msgspec.structs.replace(bar, why="; ".join(f"{name} {how}" for name, how in crashed.items()))]
    exact = _exact(work)
    errors = {name: relative(found, exact) for name, found in logits.items()}
    details: dict[str, Any] = {"relative_error": errors, "crashed": crashed}
    most = min(TWIN, FARTHEST * max(errors[name] for name in rivals))
    if errors[OURS] > most:
        why = f"not timed: ours is {errors[OURS]:.3f} from the exact product of the file's weights, at most {most:.3f}"
        return [msgspec.structs.replace(bar, why=why, details=details)]
    sides = [Side(n, e.run, lambda: logits[OURS], pid=e.pid) for n, e in engines.items()]
    timed = timing.interleaved_for([*sides, timing.reader()], seconds)
    ours, theirs = timed.seconds[OURS], min(timed.seconds[name] for name in rivals)
    sizes = {n: e.num_bytes for n, e in engines.items()}
    details |= {"file": timed._asdict(), "bytes": sizes}
    bars = [msgspec.structs.replace(bar, got=theirs / ours, ours=ours, theirs=theirs, details=details)]
    return (
        bars if work.case.kind != "decode" else [*bars, _roofline(work, sizes[OURS], timed.seconds, details)]
    )


def _roofline(work: FileCase, num_bytes: int, seconds: dict[str, float], details: dict[str, Any]) -> Bar:
    """Return the share of the memory's bandwidth in the same turns that a decode step reaches; `theirs`: all of it."""
    bandwidth = timing.READ_BYTES / seconds[READING]
    least, rival = num_bytes / bandwidth, min(s for n, s in seconds.items() if n not in (OURS, READING))
    details |= {
        "read_bandwidth": bandwidth,
        "most": rival / least,
    }  # times llama.cpp's speed that its bytes allow
    share = least / seconds[OURS]
    return Bar(
        work=work.name,
        rival="reading memory",
        need=SHARE,
        got=share,
        unit="of the read bandwidth",
        ours=seconds[OURS],
        theirs=least,
        details=details,
    )


def _exact(work: FileCase) -> Tensor:
    """Return logits float32 [vocab] of the file's weights without rounding of activations; kept beside the step."""
    return infer_step.twin(work.step, work.case.shape.tokens.tolist()[: work.case.context + 1])
