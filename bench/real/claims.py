"""Truth of the claims in a verdict: each number of a report beside the one that was measured again.

Nothing here is of infer's gate: errors are computed by numpy in double precision, from outputs of the published file
and of the artifact on inputs that the gate hasn't seen. A number is true within its noise: an error up to `ERROR` times
the claimed one and within its limit, a ratio of times within the quartiles of ours, widened by `SPEED`. Milliseconds
are those of a machine whose clock and neighbours change from minute to minute: what the original takes now over what
the report says that it took is the machine's own factor, up to `MACHINE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ERROR = 2.0  # times the claimed error of the worst row, on other inputs
WORST = {
    "relative_error": "relative_error_max",
    "cosine": "cosine_min",
}  # what a report says of the worst row
ROUNDING = 1e-5  # of relative error and of 1 - cosine: below it every number is rounding
SPEED = 0.15  # of a ratio, either way
CLOCK = 1.6  # times the claimed seconds
MACHINE = 3.0  # times that it may be slower or faster than when the report was made
MEMORY = 1.3
SIZE = 0.02
MEGABYTE = 1e6


class Claim(msgspec.Struct):
    """One number of a verdict, what was measured of it, and whether it is true."""

    what: str
    said: str
    found: str
    holds: bool


class Timed(msgspec.Struct):
    """Seconds of a call of either side in turns, and quartiles of the ratio ours ÷ original over the rounds."""

    batch: int
    ours: float
    original: float
    ratio: float
    low: float
    high: float


def relative_error(outputs: np.ndarray, original: np.ndarray) -> float:
    """Return the Frobenius norm of the difference over that of the original; inf where other values are finite."""
    a, b = outputs.astype(np.float64), original.astype(np.float64)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    kept = np.isfinite(b)
    return float(np.linalg.norm(a[kept] - b[kept]) / max(np.linalg.norm(b[kept]), 1e-30))


def cosine(outputs: np.ndarray, original: np.ndarray) -> float:
    """Return the mean over rows of the cosine."""
    a, b = (
        np.atleast_2d(v.astype(np.float64)).reshape(len(np.atleast_1d(v)), -1) for v in (outputs, original)
    )
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    both_zero = (np.linalg.norm(a, axis=1) == 0) & (np.linalg.norm(b, axis=1) == 0)
    return float(np.where(both_zero, 1.0, (a * b).sum(1) / np.maximum(norms, 1e-300)).mean())


def top1(outputs: np.ndarray, original: np.ndarray) -> float:
    """Return the share of rows with the same largest value."""
    return float(np.mean(outputs.argmax(-1) == original.argmax(-1)))


def fidelity_claims(
    said: Sequence[Mapping[str, Any]], ours: Mapping[str, np.ndarray], original: Mapping[str, np.ndarray]
) -> list[Claim]:
    """Compare the errors of a report with those of other inputs; outputs by their names there, all rows together."""
    found = []
    measures = {"relative_error": relative_error, "cosine": cosine, "top1": top1}
    for line in said:
        subject, metric, value, limit = line["subject"], line["metric"], line["value"], line["limit"]
        if subject not in ours or metric not in measures or value is None:
            continue
        worst_row = _value(said, subject, WORST.get(metric, ""))
        if (
            metric == "relative_error"
        ):  # a state gathers errors from call to call, which lines of their own say
            value = max([value, worst_row, *(more["value"] for more in said if _is_of_calls(more, metric))])
        elif metric == "cosine":
            value = min(value, worst_row or value)
        if metric == "top1" and original[subject].ndim < 2:
            continue
        got = measures[metric](ours[subject], original[subject])
        away = (lambda v: v) if metric == "relative_error" else (lambda v: 1 - v)
        slack = (
            ROUNDING
            if metric != "top1"
            else 2 / max(original[subject].size // original[subject].shape[-1], 1)
        )
        close = away(got) <= max(ERROR * away(value), away(value) + slack)
        within = limit is None or away(got) <= max(away(limit), ROUNDING)
        about = f"{value:.4g}" + (f" (limit {limit:g})" if limit is not None else "")
        found.append(Claim(f"{subject}.{metric}", about, f"{got:.4g}", bool(close and within)))
    return found


def _value(said: Sequence[Mapping[str, Any]], subject: str, metric: str) -> float:
    """Return what a report says of an output by one measure; 0 where it says nothing."""
    known = (line["value"] for line in said if (line["subject"], line["metric"]) == (subject, metric))
    return next(known, 0.0) or 0.0


def _is_of_calls(line: Mapping[str, Any], metric: str) -> bool:
    return line["metric"] == metric and str(line["subject"]).startswith("call ") and line["value"] is not None


def speed_claims(said: Sequence[Mapping[str, Any]], baseline: str, timed: Sequence[Timed]) -> list[Claim]:
    """Compare a report's times with ours ÷ original, at the shapes of the report.

    `baseline` is what the report compares with. Where that isn't the original's own runtime, it is the fastest float
    form, and the original can't be faster than it.
    """
    found = []
    again = {one.batch: one for one in timed}
    for line in said:
        here = again.get(line["batch"])
        if here is None:
            continue
        pair, batch = line["pair"], line["batch"]
        same = pair["ratio"] >= here.low * (1 - SPEED)
        if is_plain(baseline):
            same = same and pair["ratio"] <= here.high * (1 + SPEED)
        ratio = f"{here.ratio:.2f} [{here.low:.2f}, {here.high:.2f}]"
        said_ratio = f"{pair['ratio']:.2f} [{pair['low']:.2f}, {pair['high']:.2f}] of {baseline}"
        found.append(Claim(f"batch {batch} time ÷ original", said_ratio, ratio, bool(same)))
        machine = here.original / pair["b"]["p50"] if is_plain(baseline) else 1.0
        factors = (1.0, min(max(machine, 1 / MACHINE), MACHINE))
        claimed = pair["a"]["p50"]
        close = any(here.ours / CLOCK <= claimed * factor <= here.ours * CLOCK for factor in factors)
        found.append(
            Claim(
                f"batch {batch} ms",
                f"{claimed * 1e3:.3g}",
                f"{here.ours * 1e3:.3g}, the original taking {machine:.2f} of what it took then",
                bool(close),
            )
        )
    return found


def is_plain(baseline: str) -> bool:
    """Return True if a report's baseline is the published file's own runtime."""
    return baseline in ("ONNX Runtime", "torch eager", "eager", "eager float32", "torch")


def size_claims(report: Mapping[str, Any], folder: Path) -> list[Claim]:
    """Compare the size with the bytes of the folder, less the report itself, which is written last."""
    bytes_ = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    reports = sum(path.stat().st_size for path in folder.glob("report.*"))
    said = report["size"] + report["rows_size"]
    close = (bytes_ - reports) * (1 - SIZE) <= said <= bytes_ * (1 + SIZE) + 4096
    return [Claim("size MB", f"{said / MEGABYTE:.3g}", f"{bytes_ / MEGABYTE:.3g}", bool(close))]


def memory_claims(report: Mapping[str, Any], peak: float, seconds: float) -> list[Claim]:
    """Compare the peak of a fresh process and the seconds of opening."""
    memory = report.get("memory") or {}
    found = []
    if memory.get("peak") and peak:
        close = memory["peak"] / MEMORY <= peak <= memory["peak"] * MEMORY
        said, got = memory["peak"] / MEGABYTE, peak / MEGABYTE
        found.append(Claim("peak MB", f"{said:.0f}", f"{got:.0f}", bool(close)))
    if memory.get("open_seconds") and seconds:
        close = seconds <= CLOCK * memory["open_seconds"] + 0.05
        said = memory["open_seconds"]
        found.append(Claim("opens in ms", f"{said * 1e3:.0f}", f"{seconds * 1e3:.0f}", bool(close)))
    return found


def untrue(claims: Sequence[Claim]) -> list[str]:
    """Return a line for each claim that does not hold."""
    return [f"{c.what}: said {c.said}, found {c.found}" for c in claims if not c.holds]
