"""Perplexity and bytes of pydoc_lm: ours through the paged engine, GGUF files of the same weights by llama.cpp itself.

Both read the same windows of held-out text, none of which calibrated anything, and both score the same tokens. Bytes
are those of the weights in the file, the tied embedding once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.llm import gguf_writer, infer_step, llama_cpp_model
from bench.llm.decoder_shapes import WORK, made
from bench.shared.bars import Bar
from bench.shared.child_process import EngineCrashed, apart
from bench.shared.repository import MODELS
from infer import compress, plugins
from infer.compress import assign
from infer.llm import StepShape
from infer.llm.engine.engine import Engine
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.plan import Plan
from infer.run import stages

MODEL = "pydoc_lm"
NAME = f"4 bit file of {MODEL}"
SOURCE = MODELS / MODEL
RIVALS = ("q4_0", "q4_K_M", "iq4_nl")
FLOAT = "float"
OURS: dict[str, dict[str, object]] = {
    FLOAT: {},
    "int8": {"quant": "int8"},
    "nf4": {"quant": "nf4"},
    "cluster:4": {"quant": "cluster:4"},
    "4.1 bits": {"bits": 4.1},
    "4.5 bits": {"bits": 4.5},
}
THREADS = 2
BACKEND = "eager"
KV_BYTES = 1 << 28
EQUAL = 0.002  # of float: relative difference of the perplexities of llama.cpp and transformers


def measure() -> list[Bar]:
    """Return a bar for each rival, against the best of ours that is smaller than it; all figures in the details."""
    rows = windows()
    ours = {n: (infer_step.weight_bytes(_folder(n)), engine_perplexity(_folder(n), rows)) for n in OURS}
    details = {"ours": ours, "windows": list(rows.shape), "transformers": transformers_perplexity(rows)}
    if reason := llama_cpp_model.missing():
        return [_bar(rival, why=reason, details=details) for rival in RIVALS]
    try:
        theirs = {
            f: (gguf_writer.tensor_bytes(gguf(f)), apart(llama_perplexity, gguf(f), rows.numpy()))
            for f in ("f16", *RIVALS, "q8_0")
        }
    except EngineCrashed as error:
        return [_bar(rival, why=f"llama.cpp {error}", details=details) for rival in RIVALS]
    details["llama.cpp"] = theirs
    away = theirs["f16"][1] / details["transformers"] - 1
    if abs(away) > EQUAL or abs(ours[FLOAT][1] / details["transformers"] - 1) > EQUAL:
        why = f"the float models differ: llama.cpp {theirs['f16'][1]:.3f}, ours {ours[FLOAT][1]:.3f}"
        return [_bar(rival, why=why, details=details) for rival in RIVALS]
    bars = []
    for rival in RIVALS:
        size, perplexity = theirs[rival]
        smaller = {name: own for name, (num_bytes, own) in ours.items() if num_bytes < size and name != FLOAT}
        if not smaller:
            bars.append(_bar(rival, why=f"none of ours is smaller than {size} bytes", details=details))
            continue
        name = min(smaller, key=lambda name: smaller[name])
        own = details | {"compared": name}
        bars.append(
            _bar(rival, got=smaller[name] / perplexity, ours=smaller[name], theirs=perplexity, details=own)
        )
    return bars


def prepare() -> None:
    """Make and keep our steps and the GGUF files."""
    for name in OURS:
        _folder(name)
    if llama_cpp_model.missing() is None:
        for format in ("f16", *RIVALS, "q8_0"):
            gguf(format)


def windows() -> Tensor:
    """Return int64 [rows, 128]: those of the samples that `infer optimize` judges by."""
    plan = Plan(source=str(SOURCE), quant="nf4", backend="eager", device="cpu")
    return stages.load(stages.resolve(plan))[0].samples["input_ids"]


def gguf(format: str) -> Path:
    whole = made(WORK / MODEL / "f16.gguf", lambda path: gguf_writer.write_checkpoint(SOURCE, path))
    if format == "f16":
        return whole
    return made(
        WORK / MODEL / f"{format}.gguf",
        lambda path: apart(llama_cpp_model.quantize, whole, path, format, THREADS),
    )


def engine_perplexity(folder: Path, rows: Tensor) -> float:
    """Measure perplexity through the engine: paged cache, pieces of prompts, mixed batches."""
    shape = msgspec.json.decode((folder / "shape.json").read_bytes(), type=StepShape)
    runner = plugins.get("backends", BACKEND).open(folder, "cpu")
    engine = Engine(runner, shape, tokenizer=None, eos_ids=(), kv_bytes=KV_BYTES)
    for index, row in enumerate(rows):
        scoring = Sampling(max_tokens=0, prompt_logprobs=0)
        engine.submit(Request(id=str(index), prompt=row.tolist(), sampling=scoring))
    logprobs: list[float] = []
    while not engine.idle:
        for output in engine.step():
            logprobs += [one.logprob for one in output.prompt_logprobs if one is not None]
    runner.close()
    if len(logprobs) != rows.shape[0] * (rows.shape[1] - 1):
        raise SystemExit(f"the engine scored {len(logprobs)} tokens of {rows.numel()}")
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def llama_perplexity(path: Path, tokens: np.ndarray, threads: int = THREADS) -> float:
    """Measure perplexity by llama.cpp, tokens int64 [rows, length]; runs in a process of its own."""
    rows = torch.from_numpy(tokens)
    model = llama_cpp_model.Model(path)
    length = rows.shape[1]
    context = llama_cpp_model.Context(model, length=length, threads=threads)

    def logits(row: Tensor) -> Tensor:
        context.forget()
        context.decode(context.batch([(t, i, 0) for i, t in enumerate(row.tolist())], range(length)))
        return context.logits(range(length))

    found = _perplexity(rows, logits)
    context.close()
    model.close()
    return found


def transformers_perplexity(rows: Tensor, folder: Path = SOURCE) -> float:
    """Return the perplexity of rows int64 [n, length] by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return _perplexity(rows, lambda row: model(row[None]).logits[0])


def _perplexity(rows: Tensor, logits: Callable[[Tensor], Tensor]) -> float:
    """Return the perplexity of every token of a row but its first."""
    losses = [F.cross_entropy(logits(row)[:-1].float(), row[1:], reduction="sum").item() for row in rows]
    return math.exp(math.fsum(losses) / (rows.shape[0] * (rows.shape[1] - 1)))


def _folder(name: str) -> Path:
    """Return the step in plain torch: the numbers of the compiled form, without compiling."""

    def make(folder: Path) -> None:
        folder.mkdir()
        infer_step.lower(str(SOURCE), folder, THREADS, backend=BACKEND, allow_slower=True, **OURS[name])

    key = f"{name.replace(' ', '-').replace(':', '-')}-{infer_step.digest((compress, assign))}"
    return made(WORK / MODEL / key, make)


def _bar(rival: str, **values: object) -> Bar:
    unit = "of its perplexity, at fewer bytes"
    return Bar(work=NAME, rival=f"GGUF {rival}", need=1.0, below=True, unit=unit, **values)


def table(bar: Bar) -> str:
    """Return Markdown: bytes and perplexity of every file."""
    float_ = bar.details["transformers"]
    lines = ["| file | bytes of weights | perplexity | change |", "|---|---|---|---|"]
    lines.append(f"| transformers, float32 | | {float_:.3f} | |")
    for engine in ("ours", "llama.cpp"):
        for name, (size, perplexity) in bar.details.get(engine, {}).items():
            lines.append(
                f"| {engine} {name} | {size:,} | {perplexity:.3f} | {perplexity / float_ - 1:+.2%} |"
            )
    return "\n".join(lines) + "\n"
