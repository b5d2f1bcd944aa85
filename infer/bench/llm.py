"""`infer bench` of a language model: time of a prompt and of a token by batch and context, against the roofline.

Prompts are random tokens and share nothing; the engine runs here, without its thread, so that a step can be timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from .. import device as hardware
from ..artifact import store
from ..artifact.golden import read_inputs
from ..errors import UsageError
from ..latency import Latency, Paired, decide, summarize
from ..predict.predictor import Predictor
from ..report.measurements import memory
from ..report.measurements.step_breakdown import StepBreakdown
from ..spec import Finding
from . import check_equal_outputs
from .decode_rounds import DecodeTimes, engine_for, run_round, tokens_while_reading, watch_steps

CONTEXTS = (128, 512, 2048)
LEAST_ROUNDS = 5  # of two artifacts in turns


class BatchTimes(msgspec.Struct, kw_only=True):
    """Times in seconds of `batch` prompts of `context` tokens that run together.

    `floor` is the memory-bandwidth bound of a decode step: weights and cache read once, as measured. `pair`
    compares steps, `first_pair` times to the first token, with the other artifact.
    """

    batch: int
    context: int
    first_token: Latency
    between_tokens: Latency
    prefill_per_second: float  # tokens of prompts
    decode_per_second: float  # tokens of all sequences
    kv_bytes: int  # read by a step
    floor: float
    pair: Paired | None = None
    first_pair: Paired | None = None
    budget: StepBreakdown | None = None

    @property
    def of_floor(self) -> float:
        return self.floor / self.between_tokens.p50


class LanguageBench(msgspec.Struct, kw_only=True):
    """Result of one run; it is also the JSON document. `kv_memory` holds `kv_tokens` tokens by default."""

    name: str
    backend: str
    quant: str
    against: str
    weight_bytes: int
    artifact_bytes: int
    kv_dtype: str
    kv_bytes_per_token: float
    kv_memory: int
    kv_tokens: int
    read_bandwidth: float
    threads: int
    rows: list[BatchTimes]
    memory: list[Finding]
    versions: dict[str, str]
    machine: dict[str, str]


def run(
    path: Path,
    *,
    vs: Path | None = None,
    batches: Sequence[int] = (1, 8),
    contexts: Sequence[int] | None = None,
    tokens: int = 32,
    seconds: float = 1.0,
    threads: int | None = None,
    trust_code: bool = False,
) -> LanguageBench:
    """Time each batch size at each context for about `seconds`, decoding `tokens` tokens after each prompt.

    In turns with `vs`, after the answers of both were compared: `GateError` when they differ too much.
    """
    with (
        Predictor.load(path, threads=threads, trust_code=trust_code) as ours,
        _other(vs, ours, trust_code) as other,
    ):
        shape, manifest = ours.language_model.shape, ours.manifest
        per_token = shape.bytes_per_token
        weights = sum(memory.stored_weights(path).values()) or store.size(path)
        bandwidth = hardware.read_bandwidth(manifest.device)
        rows = []
        for context in _fitting(contexts, max(batches), tokens, shape.max_positions):
            for batch in batches:
                kv = int(batch * ((context + tokens / 2) * per_token + shape.state_bytes))
                row = _measure(ours, other, batch, context, tokens, seconds)
                row.kv_bytes = kv
                row.floor = (weights + kv) / hardware.bandwidth_for(weights + kv, manifest.device)
                rows.append(row)
        engine = ours.language_model.engine
        return LanguageBench(
            name=ours.name,
            backend=manifest.backend,
            quant=manifest.plan.quant,
            against=other.name if other else "",
            weight_bytes=weights,
            artifact_bytes=store.size(path),
            kv_dtype=shape.kv_dtype,
            kv_bytes_per_token=per_token,
            kv_memory=engine.cache.nbytes,
            kv_tokens=engine.block_manager.num_pages * shape.page,
            read_bandwidth=bandwidth,
            threads=torch.get_num_threads(),
            rows=rows,
            memory=memory.probe(manifest.backend, path, manifest.device, shape=shape).findings(),
            versions=hardware.versions(),
            machine=hardware.fingerprint(manifest.device),
        )


@contextmanager
def _other(vs: Path | None, ours: Predictor, trust_code: bool) -> Iterator[Predictor | None]:
    if vs is None:
        yield None
        return
    with Predictor.load(vs, trust_code=trust_code) as other:
        if other.language_model.vocab_size != ours.language_model.vocab_size:
            raise UsageError(f"{other.name} has another vocabulary than {ours.name}")
        check_equal_outputs(ours, other.predict, read_inputs(ours.path, ours.inputs), other.name)
        yield other


def _fitting(contexts: Sequence[int] | None, batch: int, tokens: int, longest: int) -> list[int]:
    """Return the requested sizes, which must fit the context; by default the usual ones that fit."""

    def fits(context: int) -> bool:
        return context + tokens_while_reading(batch, context) + tokens <= longest

    if contexts is None:
        usual = [c for c in CONTEXTS if fits(c)]
        return usual or [max((c for c in range(1, longest) if fits(c)), default=1)]
    for context in contexts:
        if not fits(context):
            meanwhile = tokens_while_reading(batch, context)
            more = f", {meanwhile} while {batch} prompts are read," if meanwhile else ""
            raise UsageError(
                f"a context of {context}{more} and {tokens} tokens after it are more than the {longest} positions of "
                "the model"
            )
    return list(contexts)


def _measure(
    ours: Predictor, other: Predictor | None, batch: int, context: int, tokens: int, seconds: float
) -> BatchTimes:
    models = [ours.language_model] if other is None else [ours.language_model, other.language_model]
    engines = [engine_for(model, batch, context, tokens) for model in models]
    for engine in engines:  # so that nothing is done for the first time
        run_round(engine, batch, context, min(tokens, 4), seed=0)
    rounds: list[list[DecodeTimes]] = [[] for _ in engines]
    start, number = time.perf_counter(), 0
    least = 1 if other is None else LEAST_ROUNDS
    while number < least or time.perf_counter() - start < seconds * len(engines):
        number += 1
        order = range(len(engines)) if number % 2 else reversed(range(len(engines)))
        for i in order:
            rounds[i].append(run_round(engines[i], batch, context, tokens, seed=number))
    first = [summarize([s for r in own for s in r.first]) for own in rounds]
    steps = [summarize([s for r in own for s in r.steps]) for own in rounds]
    prefill = summarize([r.prefill for r in rounds[0]])
    row = BatchTimes(
        batch=batch,
        context=context,
        first_token=first[0],
        between_tokens=steps[0],
        prefill_per_second=batch * context / prefill.p50,
        decode_per_second=batch / steps[0].p50,
        kv_bytes=0,
        floor=0.0,
        budget=watch_steps(engine_for(models[0], batch, context, tokens), batch, context, tokens),
    )
    if other is not None:
        row.pair = _pair([[summarize(r.steps).p50 for r in own] for own in rounds], steps)
        row.first_pair = _pair([[r.prefill for r in own] for own in rounds], first)
    return row


def _pair(medians: list[list[float]], sides: list[Latency]) -> Paired:
    ratios = [a / max(b, 1e-12) for a, b in zip(*medians, strict=True)]
    return Paired(*decide(ratios), len(ratios), *sides)
