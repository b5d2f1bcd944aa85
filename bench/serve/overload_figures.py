"""Figures, bars and a table of `overload.py` and `overload_llm.py`, from the rows of their client."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.serve.open_loop_client import CLOSED, LOST

DRAWS, CERTAIN = 4000, (0.05, 0.95)
SHARES = {1.0: 0.98, 1.5: 0.97, 2.0: 0.95, 5.0: 0.90, 10.0: 0.85}  # of the best goodput
REJECT_MS = {2.0: 20.0, 10.0: 50.0}
BACK = 1.0  # seconds after a peak until p99 is as before
TOLERATED = 1.1  # times the p99 of before
WINDOW = 20  # requests that must be as before


def p99(values: np.ndarray) -> float:
    return float(np.quantile(values, 0.99)) if len(values) else float("nan")


def figures(rows: np.ndarray, seconds: float, slo: float) -> dict[str, float]:
    """Summarize all requests that were due in `seconds`.

    Times in ms; accepted: answered with anything but a refusal. Offered and goodput are in requests of average cost.
    """
    due, sent, finished, status, right, refusal, cost = rows.T
    took, refused = finished - due, np.isin(status, (429, 503))
    accepted = np.isin(status, (200, 504))
    good = (status == 200) & (right == 1) & (took <= slo)
    return {
        "offered": float(cost.sum()) / seconds,
        "goodput": float(cost[good].sum()) / seconds,
        "accepted": float(accepted.mean()),
        "p50_ms": 1e3 * float(np.median(took[accepted])) if accepted.any() else float("nan"),
        "p99_ms": 1e3 * p99(took[accepted]),
        "late": float((accepted & ~good).sum()),
        "wrong": float(((status == 200) & (right == 0)).sum()),
        "other": float((~accepted & ~refused).sum()),
        "reject_p99_ms": 1e3 * p99(refusal[~np.isnan(refusal)]),
        "unanswered": float(np.isin(status, (LOST, CLOSED)).sum()),
        "sent_late_p99_ms": 1e3 * p99((sent - due)[~np.isnan(sent)]),
    }


def together(runs: list[np.ndarray], seconds: float, slo: float) -> dict[str, Any]:
    """Merge all rounds of one rung, each of so many seconds, into one run; `goodputs` and `offereds`: of each."""
    found: dict[str, Any] = {**figures(np.concatenate(runs), seconds * len(runs), slo)}
    parts = [figures(rows, seconds, slo) for rows in runs]
    found |= {f"{what}s": [part[what] for part in parts] for what in ("goodput", "offered")}
    return {key: rounded(value) for key, value in found.items()}


def rounded(value: Any) -> Any:
    return [rounded(one) for one in value] if isinstance(value, list) else round(value, 3)


def share(found: dict[str, Any], steady: list[str]) -> None:
    """Add to each rung its share of the best goodput of `steady`, with an interval.

    Of what was offered where that is less. The interval is a bootstrap over rounds (Efron, 1979); what ran once has
    none.
    """
    rounds = len(found[steady[0]]["goodputs"])
    drawn = np.random.default_rng(0).integers(0, rounds, (DRAWS, rounds))
    drawn[0] = range(rounds)
    best = np.max([np.take(found[name]["goodputs"], drawn).mean(1) for name in steady], axis=0)
    for row in found.values():
        repeated = len(row["goodputs"]) == rounds > 1
        good, offered = (
            np.take(row[what], drawn if repeated else drawn * 0).mean(1) for what in ("goodputs", "offereds")
        )
        shares = good / np.minimum(best, offered)
        row["share"] = rounded(shares[0])
        row["interval"] = rounded(list(np.quantile(shares, CERTAIN))) if repeated else []


def holds(rows: np.ndarray, slo: float) -> bool:
    """Return True if the server holds this rate: at most 1 % late, refused or lost."""
    due, _, finished, status = rows.T[:4]
    return bool(((status == 200) & (finished - due <= slo)).mean() >= 0.99)


def took(rows: np.ndarray) -> np.ndarray:
    """Return seconds from the due time to the answer, of requests that were answered."""
    good = rows[rows[:, 3] == 200]
    return good[:, 2] - good[:, 0]


def back_after(rows: np.ndarray, begin: float, end: float, before: float) -> float:
    """Return seconds from `begin` until `WINDOW` requests in a row, but one, are answered as fast as `before`."""
    chosen = rows[(rows[:, 0] >= begin) & (rows[:, 0] < end)]
    fine = (chosen[:, 3] == 200) & (chosen[:, 2] - chosen[:, 0] <= TOLERATED * before)
    for first in range(len(chosen) - WINDOW + 1):
        if fine[first : first + WINDOW].sum() >= WINDOW - 1:
            return float(chosen[first, 0] - begin) if first else 0.0
    return float("inf")


def missed(found: dict[str, Any], slo: float) -> list[str]:
    """Return a sentence for each bar that is missed."""
    words = []
    for name, row in found.items():
        times = times_of(name)
        if row["share"] < SHARES.get(times, 0.0):
            sure = ", with its interval" if row["interval"] and row["interval"][1] < SHARES[times] else ""
            words.append(f"{name}: goodput {row['share']:.2f} of the best, not {SHARES[times]}{sure}")
        if times in REJECT_MS and row["reject_p99_ms"] > REJECT_MS[times]:
            words.append(
                f"{name}: p99 to a refusal {row['reject_p99_ms']:.0f} ms, not {REJECT_MS[times]:.0f}"
            )
        if times in REJECT_MS and row["p99_ms"] > 1e3 * slo:
            words.append(f"{name}: p99 of the accepted {row['p99_ms']:.0f} ms is above the SLO")
        if row.get("recovery", 0.0) > BACK:
            words.append(f"{name}: as before only after {row['recovery']:.1f} s")
        words += [f"{name}: {row[what]:.0f} {what}" for what in ("unanswered", "wrong", "other") if row[what]]
    return words


def times_of(name: str) -> float:
    """Return 2 for "2 C", 0 for what is no rung."""
    return float(name.split(" ")[0]) if name.endswith(" C") and name[0].isdigit() else 0.0


def markdown(what: str, c: float, slo: float, found: dict[str, Any], words: list[str]) -> str:
    lines = [
        f"{what}; C = {c:.0f} requests/s, SLO = {1e3 * slo:.0f} ms (3 x p99 at 0.7 C). Late: accepted and not right "
        "within the SLO. Rates are in requests of average cost. Share: of the best rung's goodput, or of what was "
        "offered where that is less; in brackets the interval of nine tenths. Sent late: the client's own p99.\n",
        "| load | offered/s | goodput/s | share of best | accepted | p50, p99 of accepted, ms | late "
        "| p99 to a refusal, ms | unanswered, wrong | recovery, s | sent late, ms |",
        "|" + "---|" * 11,
    ]
    for name, row in found.items():
        back = f"{row['recovery']:.2f}" if "recovery" in row else ""
        interval = " ({:.2f}-{:.2f})".format(*row["interval"]) if row["interval"] else ""
        refusal = "" if np.isnan(row["reject_p99_ms"]) else f"{row['reject_p99_ms']:.1f}"
        lines.append(
            f"| {name} | {row['offered']:.0f} | {row['goodput']:.1f} | {row['share']:.2f}{interval} "
            f"| {100 * row['accepted']:.0f} % | {row['p50_ms']:.0f}, {row['p99_ms']:.0f} | {row['late']:.0f} "
            f"| {refusal} | {row['unanswered']:.0f}, {row['wrong']:.0f} | {back} "
            f"| {row['sent_late_p99_ms']:.1f} |"
        )
    bars = [f"- missed: {word}" for word in words] or ["All bars are reached."]
    return "\n".join([*lines, "", *bars]) + "\n"
