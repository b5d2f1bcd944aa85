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
    rows = report.get("fidelity")
    found = [_with_metric(row) for row in rows] if isinstance(rows, list) else rows
    return {**report, "format": FORMAT, "fidelity": found}


def _with_metric(row: Any) -> Any:
    """Format 1 named a metric by its label alone: `logits.top1`."""
    if not isinstance(row, dict) or not isinstance(row.get("what"), str):
        return row
    subject, _, metric = row["what"].rpartition(".")
    return {**row, "subject": subject, "metric": metric}
