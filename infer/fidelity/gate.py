"""Fidelity gate: limits by metric, and the message of a failed one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..results import Metric
from .thresholds import Limits

# Metric → (field of Limits, True when larger is worse). What is not here is shown, not judged.
JUDGED: dict[str, tuple[str, bool]] = {
    "relative_error": ("relative_error", True),
    "cosine": ("cosine", False),
    "exact": ("exact", False),
    "worst_value": ("worst_value", False),
    "worst_slice_error": ("worst_slice", True),
    "worst_row_error": ("worst_row", True),
    "choice_loss": ("choice", True),
    "top1": ("top1", False),
    "kl": ("kl", True),
    "perplexity_change": ("perplexity", True),
    "schedule_error": ("schedule", True),
    "worst_token": ("worst_token", True),
}
SLICES = {
    "worst_slice_error": "error relative to its deviation",
    "worst_row_error": "error relative to its deviation",
    "choice_loss": "loss of the best class",
}  # that name a place of an output
MOSTLY = 0.999  # equal integers: from here on each one counts
ALWAYS = "schedule_error"  # judged whatever the user allows, since no format explains it


def judge(metrics: Sequence[Metric], limits: Limits, max_error: float | None) -> str | None:
    """Return the message of the first violated limit, or why nothing was judged; None where all limits are kept."""
    if reason := violated(metrics, limits, max_error):
        return reason
    rows = {metric.subject: metric.value for metric in metrics if metric.name == "rows"}
    if 0 in rows.values() and not any(_is_judged(metric) for metric in metrics):
        return f"nothing was compared: on these inputs the float model gives no values in {', '.join(rows)}"
    if limits.is_budget and max_error is None and not _has_judged(metrics, limits):
        return f"nothing was measured that --max-drop judges: {', '.join(_fields(limits))}"
    return None


def violated(metrics: Sequence[Metric], limits: Limits, max_error: float | None) -> str | None:
    """Return the message of the first violated limit, or None; further metrics can't mend it.

    A wrong shape, and a value that is finite on one side only, fail at once. `max_error`
    replaces the limit of relative_error, and then only that and schedule_error are judged. Among rows too few to
    resolve the limit of top1, a single flip is no violation; kl and relative_error still speak.
    """
    if broken := next((reason for metric in metrics if (reason := _fatal_fault(metric))), None):
        return broken
    rows = {metric.subject: metric.value for metric in metrics if metric.name == "rows"}
    for metric in metrics:
        if metric.name not in JUDGED or _is_waived(metric.name, max_error):
            continue
        reason = _violation(metric, limits, max_error, rows.get(metric.subject))
        if reason:
            return reason
    return None


def _fatal_fault(metric: Metric) -> str | None:
    """Return why no limit can save the result (it fails to run, wrong shape or dtype, non-finite values), else None."""
    if metric.name == "shape" and metric.value is False:
        return f"{metric.subject} has the wrong shape: {metric.detail}"
    if metric.name == "dtype" and metric.value is False:
        return f"{metric.subject} has another dtype: {metric.detail}"
    if metric.name == "non_finite" and metric.value:
        return (
            f"{metric.subject} has {metric.value} values that are NaN or infinite, unlike the float model's"
        )
    if metric.name == "only_float_nan" and metric.value:
        return (
            f"{metric.subject} has {metric.value} values that are NaN in the float model and numbers in the "
            "optimized one: give data for which the float model gives numbers, or mend the model"
        )
    if metric.name == "changed" and metric.value:
        return f"{metric.subject} has {metric.value} integers that differ, which no rounding explains: {_place(metric)}"
    if metric.name == "out_of_range":
        return f"{metric.subject} has the value {metric.value}, and {_place(metric)}"
    if metric.name == "runs" and metric.value is False:
        return f"the optimized model fails at {metric.subject}, unlike the float model: {metric.detail}"
    return None


def _is_judged(metric: Metric) -> bool:
    return metric.name in JUDGED and metric.value is not None


def _is_waived(metric: str, max_error: float | None) -> bool:
    return max_error is not None and metric not in ("relative_error", ALWAYS)


def _fields(limits: Limits) -> list[str]:
    """List the limits that a user's error budget replaces."""
    names = dict.fromkeys(field for field, _ in JUDGED.values() if field != JUDGED[ALWAYS][0])
    return [name for name in names if getattr(limits, name) is not None]


def _has_judged(metrics: Sequence[Metric], limits: Limits) -> bool:
    return any(JUDGED[metric.name][0] in _fields(limits) for metric in metrics if _is_judged(metric))


def limit(name: str, limits: Limits, max_error: float | None = None) -> tuple[float, bool] | None:
    """Return the limit of a metric (`kl`) and true if larger is worse; None if only shown."""
    if name not in JUDGED or _is_waived(name, max_error):
        return None
    field, larger_is_worse = JUDGED[name]
    bound = getattr(limits, field) if max_error is None or name == ALWAYS else max_error
    return None if bound is None else (bound, larger_is_worse)


def _violation(metric: Metric, limits: Limits, max_error: float | None, rows: object) -> str | None:
    known = limit(metric.name, limits, max_error)
    if known is None:
        return None
    bound, larger_is_worse = known
    whose = "by --max-error" if max_error is not None else limits.source
    if metric.value is None:
        if metric.name != "relative_error":
            return None
        return f"{metric.label} can't be known: on these inputs the float output is all zeros or not finite"
    value = metric.number
    if value is None:
        return None
    if metric.name in SLICES:
        if value <= bound:
            return None
        what = f"{SLICES[metric.name]} {value:.3g}, {bound:g} is allowed {whose}"
        return f"output {metric.subject!r}, {_place(metric)}: {what}"
    if metric.name in ("schedule_error", "worst_token"):
        return _token_violation(metric, float(value), bound, "" if metric.name == ALWAYS else f" {whose}")
    if larger_is_worse:
        return None if value <= bound else f"{metric.label} {value:.3g} is above {bound:g} allowed {whose}"
    few = metric.name == "top1" or (metric.name == "exact" and bound < MOSTLY)
    one_flip = few and isinstance(rows, int) and round((1 - value) * rows) <= 1 < rows
    if value >= bound or one_flip:
        return None
    return f"{metric.label} {_format_below(value, bound)} is below {bound:g} allowed {whose}"


def _place(metric: Metric) -> str:
    """Return where a metric was found, which its detail begins with."""
    return metric.detail.partition(":")[0]


def _token_violation(metric: Metric, value: float, bound: float, whose: str) -> str | None:
    """Check the limit of the worst token; the detail names schedule and position."""
    if value <= bound:
        return None
    if not math.isfinite(value):
        return f"{metric.detail}: logits there are NaN or infinite on one side"
    return (
        f"{metric.detail} by {value:.3g} (relative error of that token's logits), {bound:g} is allowed{whose}"
    )


def _format_below(value: float, bound: float) -> str:
    """Format a value with enough digits to differ from its limit."""
    texts = (f"{value:.3f}", f"{value:.4f}", f"{value:.6g}")
    return next((text for text in texts if float(text) < bound), repr(value))
