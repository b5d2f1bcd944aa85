"""Decode and prefill of two Llama shapes: our step against llama.cpp on the same weights, in turns.

Ours has the head, and the embedding that it shares, at 8 bits like llama.cpp's files ("equal bytes"); the 4-bit head
is timed beside it. Nothing is timed while ours is far from its slow twin, or further from transformers than llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.kernels.linear_infer import relative
from bench.llm import gguf_writer, infer_step, llama_cpp_engine, llama_cpp_model
from bench.llm.decoder_shapes import SHAPES, Shape, made
from bench.shared import child_process, timing
from bench.shared.bars import Bar
from bench.shared.child_process import ChildProcess, EngineCrashed, Seconds
from bench.shared.suite import THREADS
from bench.shared.timing import Side
from infer.kernels import cpu

EQUAL = "8 bit head"
FORMATS = ("q4_0", "iq4_nl")
BEST = "llama.cpp, best of q4_0 and iq4_nl"
FARTHEST = 1.25  # ours may be so many times as far from the float original as llama.cpp
TWIN = 0.1  # and so far from its own slow twin: thirty layers of random weights make 1–2 % of any rounding
READING = "reading memory"
FLASH = ("", ", flash")
TWIN_CONTEXT = 128  # at which the slow twin is asked


@dataclass(frozen=True)
class BenchmarkCase:
    """One size: `context` tokens in the cache of each of `sequences`; of a prefill the tokens of its prompt."""

    shape: Shape
    kind: str  # "decode" or "prefill"
    context: int
    sequences: int
    faster: float
    share: float | None = None  # of the read bandwidth

    @property
    def name(self) -> str:
        many = f" {self.sequences}×" if self.sequences > 1 else " "
        return f"{self.kind} {self.shape.name}{many}{self.context}"

    @property
    def formats(self) -> tuple[str, ...]:
        return FORMATS if self.kind == "decode" else FORMATS[:1]

    @property
    def tokens(self) -> int:
        """Number of tokens that one call computes."""
        return self.sequences if self.kind == "decode" else self.context


def cases() -> Iterator[BenchmarkCase]:
    small, large = SHAPES["135M"], SHAPES["1B"]
    for context in (128, 2048):
        yield BenchmarkCase(small, "decode", context, 1, 1.8)
        yield BenchmarkCase(large, "decode", context, 1, 1.3, 0.92)
    for shape in (small, large):
        yield BenchmarkCase(shape, "decode", 128, 8, 2.2)
        for length in (128, 512, 2048):
            yield BenchmarkCase(shape, "prefill", length, 1, 1.8)


def prepare(shape: Shape) -> None:
    """Make and keep in .work/lm what takes minutes: checkpoint, logits, GGUF files, our steps, filled caches."""
    shape.logits()
    for head in infer_step.HEADS:
        folder = infer_step.prepare(shape, head, THREADS)
        _filled(shape, folder)
        infer_step.twin(folder, shape.tokens.tolist()[: TWIN_CONTEXT + 1])
    if llama_cpp_model.missing() is None:
        for format in FORMATS:
            llama_cpp_engine.gguf(shape, format, THREADS)
            for flash in (False, True):
                child_process.apart(llama_cpp_engine.states, shape, format, flash, THREADS)


def measure(case: BenchmarkCase, seconds: float) -> list[Bar]:
    """Measure every engine on one case for `seconds`, and return its bars."""
    engines: dict[str, Engine] = {
        head: InferEngine(case, infer_step.prepare(case.shape, head, THREADS)) for head in infer_step.HEADS
    }
    bar = Bar(work=case.name, rival=BEST if case.kind == "decode" else "llama.cpp q4_0", need=case.faster)
    rivals = {f"{format}{flash}": (format, bool(flash)) for format in case.formats for flash in FLASH}
    expected = case.shape.logits()[case.context]

    def wrong(logits: dict[str, Tensor], errors: dict[str, float]) -> str:
        return _wrong(case, logits, errors)

    more = {"tokens": case.tokens}
    return compared(case, bar, engines, rivals, expected, wrong, seconds, EQUAL, case.share, more)


def compared(
    case: BenchmarkCase,
    bar: Bar,
    engines: dict[str, Engine],
    rivals: dict[str, tuple[str, bool]],
    expected: Tensor,
    wrong: Callable[[dict[str, Tensor], dict[str, float]], str],
    seconds: float,
    ours: str,
    share: float | None,
    more: dict[str, Any],
) -> list[Bar]:
    """Check engines of ours and llama.cpp's, time those that are right, and close them.

    - `bar`: against the fastest of `rivals`, name → format and whether with flash attention
    - `wrong`: says from logits and their errors against `expected` why nothing is timed
    - `ours`: the engine that is compared; `share`: of the read bandwidth that it must reach; `more`: details

    A rival that crashes is named in the details, and the others go on.
    """
    absent, crashed = llama_cpp_model.missing(), dict[str, str]()
    try:
        for name, (format, flash) in rivals.items() if absent is None else ():
            try:
                engines[name] = LlamaProcess(case, format, flash)
            except EngineCrashed as error:
                crashed[name] = str(error)
        logits = surviving(engines, crashed, lambda engine: engine.check())
        errors = {name: relative(found, expected) for name, found in logits.items()}
        details: dict[str, Any] = {"relative_error": errors, "crashed": crashed, **more}
        why, timed = absent or wrong(logits, errors), None
        while not why and timed is None:
            if not set(engines) & set(rivals):
                why = "; ".join(f"{name} {how}" for name, how in crashed.items())
                break
            sides = [Side(n, e.run, lambda: expected, pid=e.pid) for n, e in engines.items()]
            try:
                timed = timing.interleaved_for([*sides, timing.reader()], seconds)
            except EngineCrashed:
                surviving(engines, crashed, lambda engine: engine.check())
        if timed is None:
            return [msgspec.structs.replace(bar, why=why, details=details)]
        best = min(set(engines) & set(rivals), key=lambda name: timed.seconds[name])
        sizes = {name: engine.num_bytes for name, engine in engines.items()}
        details |= {"bytes": sizes, "best": best, **timed._asdict()}
        return _bars(case, bar, timed.seconds, sizes, ours, best, share, details)
    finally:
        for engine in engines.values():
            engine.close()


def surviving(engines: dict[str, Any], crashed: dict[str, str], ask: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what each engine answers; those that crash move from `engines` to `crashed`, with how they ended."""
    answers = {}
    for name, engine in list(engines.items()):
        try:
            answers[name] = ask(engine)
        except EngineCrashed as error:
            crashed[name] = str(error)
            engines.pop(name).close()
    return answers


def _bars(
    case: BenchmarkCase,
    bar: Bar,
    took: dict[str, float],
    sizes: dict[str, float],
    ours: str,
    best: str,
    share: float | None,
    details: dict[str, Any],
) -> list[Bar]:
    """Return the bar against the best rival and, of a decode step, that of the memory's bandwidth in the same turns."""
    bandwidth = timing.READ_BYTES / took[READING]
    shares = {name: size / took[name] / bandwidth for name, size in sizes.items()}
    if case.kind == "decode":
        details |= {"read_bandwidth": bandwidth, "bandwidth_share": shares}
    got = took[best] / took[ours]
    bars = [msgspec.structs.replace(bar, got=got, ours=took[ours], theirs=took[best], details=details)]
    if share is not None:
        least = sizes[ours] / bandwidth
        unit = "of the read bandwidth"
        bars.append(
            Bar(work=bar.work, rival=READING, need=share, got=shares[ours], unit=unit, ours=took[ours], theirs=least,
                details=details)
        )  # fmt: skip
    return bars


def _wrong(case: BenchmarkCase, logits: dict[str, Tensor], errors: dict[str, float]) -> str:
    """Return the reason why nothing is timed, or an empty string."""
    tokens = case.shape.tokens.tolist()
    found = []
    for head in infer_step.HEADS if case.context == TWIN_CONTEXT else ():
        slow = infer_step.twin(infer_step.prepare(case.shape, head, THREADS), tokens[: case.context + 1])
        if (away := relative(logits[head], slow)) > TWIN:
            found.append(f"{head} is {away:.3f} from its slow twin")
    most = FARTHEST * max(
        (error for name, error in errors.items() if name not in infer_step.HEADS), default=0.0
    )
    if most:
        far = [head for head in infer_step.HEADS if errors[head] > most]
        found += [
            f"{head} is {errors[head]:.3f} from the float model, llama.cpp {most / FARTHEST:.3f}"
            for head in far
        ]
    return f"not timed: {', '.join(found)}" if found else ""


def table(bars: Sequence[Bar]) -> str:
    """Return Markdown: tokens per second of every engine, and the bandwidth share of a decode step."""
    heads = [*infer_step.HEADS, *(f"{f}{flash}" for f in FORMATS for flash in ("", ", flash"))]
    lines = ["| tokens per second | " + " | ".join(heads) + " | read GB/s | quiet turns |"]
    lines.append("|" + "---|" * (len(heads) + 3))
    for bar in bars:
        seconds = bar.details.get("seconds")
        if not seconds or bar.unit != Bar(work="", rival="", need=0).unit:
            continue
        shares = bar.details.get("bandwidth_share", {})
        cells = [
            _cell(bar.details["tokens"] / seconds[n], shares.get(n))
            if n in seconds
            else bar.details.get("crashed", {}).get(n, "")
            for n in heads
        ]
        reading = timing.READ_BYTES / seconds[READING] / 1e9
        quiet = f"{min(bar.details['quiet'].values())} of {bar.details['rounds']}"
        lines.append(f"| {bar.work} | " + " | ".join(cells) + f" | {reading:.1f} | {quiet} |")
    return "\n".join(lines) + "\n"


def _cell(rate: float, share: float | None) -> str:
    return f"{rate:.0f}" if share is None else f"{rate:.0f} ({share:.0%})"


class Engine:
    """One engine of a comparison: `run` is one call, timed here or, with `pid`, in the process of that id."""

    num_bytes: int  # that a decode step reads
    pid: int | None = None  # of a process of its own
    run: Callable[[], object]

    def check(self) -> Tensor:
        """Return the logits float32 [vocab] of the token after `context`."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class InferEngine(Engine):
    """Our step in this process."""

    def __init__(self, case: BenchmarkCase, folder: Path) -> None:
        caches = _filled(case.shape, folder)
        tokens = case.shape.tokens.tolist()
        self._step = infer_step.InferStep(folder, length=case.context + 1, sequences=case.sequences)
        self.num_bytes = self._step.num_bytes + case.sequences * self._step.kv_bytes(case.context)
        if case.kind == "decode":
            self._step.restore(load_file(caches)[str(case.context)])
            self.run = self._step.decoding(tokens[case.context], case.context, case.sequences)
            self._checked = self.run
        else:
            self.run = self._step.prefill(tokens[: case.context])
            self._checked = self._step.prefill(tokens[: case.context + 1])

    def check(self) -> Tensor:
        return self._checked()[-1]

    def close(self) -> None:
        self._step.close()


class LlamaProcess(Engine):
    """llama.cpp in a process of its own, from its start: reading the file, too, can crash it."""

    def __init__(self, case: BenchmarkCase, format: str, flash: bool) -> None:
        path = llama_cpp_engine.gguf(
            case.shape, format, THREADS
        )  # before the child, which starts none itself
        self._child = ChildProcess(
            llama_cpp_engine.LlamaEngine,
            *(case.shape, format, flash),
            *(case.kind, case.context, case.sequences, THREADS),
        )
        self.pid = self._child.pid
        per_token = 2 * 2 * case.shape.sizes["num_key_value_heads"] * case.shape.sizes["head_dim"]
        cached = per_token * case.shape.sizes["num_hidden_layers"] * (case.context + 1) * case.sequences
        self.num_bytes = gguf_writer.tensor_bytes(path) + cached

    def run(self) -> Seconds:
        return self._child.timed("run")

    def check(self) -> Tensor:
        return torch.from_numpy(self._child.call("check"))

    def close(self) -> None:
        self._child.close()


def _filled(shape: Shape, folder: Path) -> Path:
    """Return the cache of one sequence of the step in `folder` after the first 128 and 2048 tokens."""

    def make(path: Path) -> None:
        kept, tokens = {}, shape.tokens.tolist()
        for context in (128, 2048):
            step = infer_step.InferStep(folder, length=context + 1)
            step.prefill(tokens[:context])()
            kept[str(context)] = step.cache.clone()
            step.close()
        save_file(kept, path)

    return made(folder / f"caches-{cpu.fingerprint()}.safetensors", make)
