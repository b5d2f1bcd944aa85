"""Distance of a comparison from its limits, and the label-free drop that --max-drop limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..results import Metric
from .gate import ALWAYS, limit
from .thresholds import SLICE_ROOM, TOP1_TASKS, Limits

# Metrics that go with the error itself; the others go with its square, as effects do.
FIRST_ORDER = (
    "relative_error",
    "worst_token",
    "worst_slice_error",
    "worst_row_error",
    "choice_loss",
    "top1",
    "exact",
    "worst_value",
)
NAN = ("non_finite", "only_float_nan", "changed", "out_of_range")
METRIC = {"text-generation": "perplexity_change", **dict.fromkeys(TOP1_TASKS, "top1")}


def drop(metrics: Sequence[Metric], task: str) -> float:
    """Return the drop of the worst output: perplexity increase, changed best classes, or relative error, by task.

    A slice of an output counts as well, in its own units: see `SLICE_ROOM`.

    Infinite when it could not be measured.
    """
    name = METRIC.get(task, "relative_error")
    values = [metric.number for metric in metrics if metric.name == name]
    known = [float(value) for value in values if value is not None]
    if not known or len(known) < len(values):
        return math.inf
    if name == "relative_error":
        slices = [metric.number for metric in metrics if metric.name == "worst_slice_error"]
        known += [value / SLICE_ROOM for value in slices if value is not None]
    return 1 - min(known) if name == "top1" else max(known)


def excess(metrics: Sequence[Metric], limits: Limits, max_error: float | None) -> float:
    """Return the factor by which effects (KL, squared error) must fall to meet every limit; up to 1 when met.

    Infinite for a wrong shape, for values that are not finite and for a step that depends on its schedule, which no
    smaller error cures.
    """
    most = 0.0
    for metric in metrics:
        if (metric.name in ("shape", "dtype", "runs") and metric.value is False) or (
            metric.name in NAN and metric.value
        ):
            return math.inf
        judged, value = limit(metric.name, limits, max_error), metric.number
        if judged is None or value is None:
            continue
        bound, larger_is_worse = judged
        room, used = (bound, value) if larger_is_worse else (1 - bound, 1 - value)
        share = used / room if room > 0 else math.inf if used > 0 else 0.0
        if metric.name == ALWAYS and share > 1:
            return math.inf
        most = max(most, share**2 if metric.name in FIRST_ORDER else share)
    return most
