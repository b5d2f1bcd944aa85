"""Reader of report.json files that earlier versions of `infer` wrote: each is brought to the current format."""

from __future__ import annotations

from typing import Any

FORMAT = 2


def upgrade(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report in the current format; what it lacks is derived from the labels that it was written with.

    Anything that is not a report comes back as it is, for the decoder to refuse.
    """
    if report.get("format") != 1:
        return report
    made = {**report, "format": FORMAT}
    for name, change in (("fidelity", _with_metric), ("layers", _with_decider), ("findings", _with_stage)):
        if isinstance(rows := report.get(name), list):
            made[name] = [change(row) if isinstance(row, dict) else row for row in rows]
    return made


def _with_metric(row: dict[str, Any]) -> dict[str, Any]:
    """Format 1 named a metric by its label alone: `logits.top1`."""
    subject, _, metric = str(row.get("what")).rpartition(".")
    return {**row, "subject": subject, "metric": metric}


def _with_decider(row: dict[str, Any]) -> dict[str, Any]:
    """Format 1 said who decided the format of a layer by how the reason begins."""
    why, is_float = str(row.get("why", "")), row.get("format") == "float"
    by = "speed" if why else ""
    for start, name in (("pinned", "pin"), ("by --", "budget"), ("rose ", "sensitivity")):
        by = name if why.startswith(start) else by
    return {**row, "by": "refused" if by == "speed" and is_float and " of float " not in why else by}


def _with_stage(row: dict[str, Any]) -> dict[str, Any]:
    """Format 1 kept the backends that were tried, and the layers, among the findings of other stages."""
    stage, what, unit = (str(row.get(name, "")) for name in ("stage", "what", "unit"))
    if stage == "lower" and what.startswith(("tried ", "refused ")):
        return {**row, "stage": "backend"}
    if stage == "shrink" and unit == "relative rms" and what != "weight error":
        return {**row, "stage": "layer"}
    return row
