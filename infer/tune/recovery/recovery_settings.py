"""Choices of a recovery from its budget: what is trained, batch, precision, rate, and when codes become final."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ... import device as hardware
from ...device import memory
from ...graph.program import flatten
from ..data.rows import TensorRows
from ..objective import Rows
from ..settings import TrainSettings
from .objectives import RecoveryObjective, Taught

RATE, BATCH, MEASURES = 1e-3, 8, 6
CODE_BATCH = 16  # rows: decoding and updating every weight costs as much as several rows of a small model
CODE_RATE = (
    0.042  # times the root of the terms of a step for each code: less is known of each, fewer may move
)
CODE_RATES = (2e-4, 4e-3)  # the lowest and the highest
LAYERS_SHARE = 0.8  # of the budget, for layers one after another where codes of the whole model have no room
FEWEST_CODE_STEPS = 60  # fewer disturb more codes than they mend
CODE_BYTES = 33  # of a trained code: position, gradient, two moments, its best step, weight, temporaries
BACKWARD = 2.5  # time of a step by that of both models' forward passes
PROBE = 4  # rows whose forward passes are timed
LOGITS_AT_ONCE = 1 << 26  # numbers of outputs of one forward pass
NOISE = 0.05  # of bfloat16, as a share of the divergence to be mended


@dataclass(frozen=True)
class RecoveryBudget:
    """Time in seconds, or terms (tokens of a language model, rows of another) to train on."""

    seconds: float | None = None
    terms: int | None = None


def split_budget(budget: RecoveryBudget) -> tuple[RecoveryBudget, RecoveryBudget]:
    """Return the budgets of layers one after another, and of the whole model without codes afterwards."""
    parts = []
    for share in (LAYERS_SHARE, 1 - LAYERS_SHARE):
        seconds = None if budget.seconds is None else budget.seconds * share
        terms = None if budget.terms is None else max(int(budget.terms * share), 1)
        parts.append(RecoveryBudget(seconds, terms))
    return parts[0], parts[1]


@dataclass(frozen=True)
class Call:
    """Forward passes of both models, by row: terms of the loss, numbers of outputs, seconds; and their precision."""

    terms: float
    size: float
    seconds: float
    device: str
    precision: str

    def steps(self, batch: int, budget: RecoveryBudget) -> int:
        """Return about how many steps of `batch` rows the budget has, at least one."""
        if budget.terms is not None:
            return max(int(budget.terms / max(self.terms * batch, 1)), 1)
        return max(int((budget.seconds or 0) / (self.seconds * BACKWARD * batch)), 1)


@torch.no_grad()
def measure_call(objective: Taught, batch: Mapping[str, Any], device: str, size: int, rows: int) -> Call:
    """Choose the precision, and time forward passes of a batch of `rows` rows and `size` numbers of outputs in it."""
    precision = "float32" if hardware.why_slow("bfloat16", device) else objective.precision(batch, NOISE)
    times = []
    for _ in range(2):  # the first call allocates and compiles
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            _, terms = objective.loss(batch)
        times.append(time.perf_counter() - begin)
    seconds = objective.MODELS * min(times)
    return Call(int(terms) / rows, size / rows, seconds / rows, device, precision)


@torch.no_grad()
def measure_model(objective: RecoveryObjective, training: TensorRows) -> Call:
    """Measure forward passes of both models on a few rows."""
    batch = training.batch(list(range(min(PROBE, len(training)))))
    outputs = flatten(objective.model(**batch))
    size, rows = sum(each.numel() for each in outputs), len(next(iter(batch.values())))
    return measure_call(objective, batch, outputs[0].device.type, size, rows)


def few_steps(call: Call, batch: int, budget: RecoveryBudget) -> str:
    """Say why the budget is too short to train codes in steps of `batch` rows; empty where it is not."""
    steps = call.steps(batch, budget)
    if steps >= FEWEST_CODE_STEPS:
        return ""
    return f"the budget has about {steps} steps, codes need {FEWEST_CODE_STEPS}"


def no_room(codes: int, device: str) -> str:
    """Say why the memory has no room to train so many codes at once; empty where it has."""
    needed, available = CODE_BYTES * codes, memory.memory_available(device)
    if needed <= available:
        return ""
    return f"their states need {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free"


def recovery_settings(
    call: Call, training: Rows, budget: RecoveryBudget, seed: int, *, codes: int, batch: int | None = None
) -> TrainSettings:
    """Choose batch, rate, precision, and how often held-out rows are measured; `codes`: how many are trained."""
    batch = min(batch or (CODE_BATCH if codes else BATCH), len(training))
    fit = max(int(LOGITS_AT_ONCE / max(call.size, 1)), 1)
    steps = call.steps(batch, budget)
    return TrainSettings(
        time=budget.seconds,
        tokens=budget.terms,
        batch=batch,
        micro_batch=min(batch, fit),
        learning_rate=_code_rate(call.terms * batch / codes) if codes else RATE,
        precision=call.precision if codes else "float32",
        schedule="linear" if codes else "cosine",
        measure_every=max(steps // MEASURES, 1),
        seed=seed,
    )


def _code_rate(terms_per_code: float) -> float:
    low, high = CODE_RATES
    return min(max(CODE_RATE * math.sqrt(terms_per_code), low), high)
