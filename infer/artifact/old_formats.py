"""Readers of the documents of earlier versions of `infer`: each is brought to the current format.

Until format 2 of the report, what code decides on stood in labels that people read. Only this file reads them.
"""

from __future__ import annotations

from typing import Any

REPORT_FORMAT = 2
Row = dict[str, Any]


def upgrade_report(report: Row) -> Row:
    """Return a report.json in the current format; other JSON is returned unchanged, for the decoder to refuse."""
    if report.get("format") != 1:
        return report
    made = {**report, "format": REPORT_FORMAT}
    for name, change in (("fidelity", _with_metric), ("layers", _with_decider), ("findings", _with_stage)):
        if isinstance(rows := report.get(name), list):
            made[name] = [change(row) if isinstance(row, dict) else row for row in rows]
    rows = [row for row in made.get("findings") or () if isinstance(row, dict)]
    verdict = [line for line in report.get("verdict") or () if isinstance(line, str)]
    made["limitations"] = [line for line in verdict if line.startswith(("scores text only", "kept although"))]
    return {
        **made,
        "memory": _memory(rows),
        "ceiling": _ceiling(rows),
        "steps": _steps(rows),
        "cache": _cache(rows),
    }


def upgrade_manifest(manifest: Row) -> Row:
    """Return a manifest.json with the fields that earlier versions kept among the findings."""
    findings = manifest.get("findings")
    if not isinstance(findings, list):
        return manifest
    rows = [row for row in findings if isinstance(row, dict)]
    made = dict(manifest)
    sources = [
        row.get("value") for row in rows if (row.get("stage"), row.get("what")) == ("load", "inputs from")
    ]
    if "samples_from" not in manifest and sources:
        made["samples_from"] = str(sources[-1])
    scores = [row for row in rows if row.get("what") == "generation" and row.get("why")]
    if "scores_only" not in manifest and scores:
        made["scores_only"] = {"reason": scores[-1]["why"], "by_model": scores[-1].get("stage") == "capture"}
    return made


def _with_metric(row: Row) -> Row:
    """Read a metric that was named by its label alone: `logits.top1`."""
    subject, _, metric = str(row.get("what")).rpartition(".")
    return {**row, "subject": subject, "metric": metric}


def _with_decider(row: Row) -> Row:
    """Infer the decider of a layer's format (pin, budget, timing) from the first words of its reason."""
    why, is_float = str(row.get("why", "")), row.get("format") == "float"
    by = "speed" if why else ""
    for start, name in (("pinned", "pin"), ("by --", "budget"), ("rose ", "sensitivity")):
        by = name if why.startswith(start) else by
    return {**row, "by": "refused" if by == "speed" and is_float and " of float " not in why else by}


def _with_stage(row: Row) -> Row:
    """Move findings of tried backends and of layers to the stages of their own, which earlier versions lacked."""
    stage, what, unit = (str(row.get(name, "")) for name in ("stage", "what", "unit"))
    if stage == "lower" and what.startswith(("tried ", "refused ")):
        return {**row, "stage": "backend"}
    if stage == "shrink" and unit == "relative rms" and what != "weight error":
        return {**row, "stage": "layer"}
    return row


def _of(rows: list[Row], stage: str) -> dict[str, Row]:
    return {str(row.get("what")): row for row in rows if row.get("stage") == stage}


def _memory(rows: list[Row]) -> Row | None:
    found = _of(rows, "memory")
    if not found:
        return None
    names = (
        "weights",
        "runtime",
        "opened",
        "run",
        "steady",
        "peak",
        "gpu steady",
        "gpu peak",
        "gpu reserved",
    )
    made: Row = {name.replace(" ", "_"): found[name].get("value") for name in names if name in found}
    made["open_seconds"] = found.get("open time", {}).get("value")
    about = str(found.get("peak", {}).get("why", ""))
    return made | ({"failure": about} if made.get("peak") is None else {"method": about})


def _ceiling(rows: list[Row]) -> Row | None:
    found = _of(rows, "ceiling")
    if not {"weight bytes", "read bandwidth", "multiply peak"} <= found.keys():
        return None
    floors = []
    for what, row in found.items():
        batch, why = what.removeprefix("floor batch "), str(row.get("why", ""))
        if batch.isdigit():
            bound = "compute" if why.startswith("compute") else "memory"
            cached = bound == "memory" and "in cache" in why
            floors.append(
                {"batch": int(batch), "seconds": row.get("value"), "bound": bound, "in_cache": cached}
            )
    peak = found["multiply peak"]
    return {
        "weight_bytes": found["weight bytes"].get("value"),
        "read_bandwidth": found["read bandwidth"].get("value"),
        "multiply_peak": peak.get("value"),
        "peak_source": str(peak.get("why", "")),
        "floors": floors,
    }


def _steps(rows: list[Row]) -> list[Row]:
    """Rename fields of step times: `between` is `rows` now and `around` `other`; `weights` once counted activations."""
    made: dict[int, Row] = {}
    names = {"between": "rows", "around": "other"}
    for what, row in _of(rows, "decode step").items():
        name, _, batch = what.partition(" at batch ")
        if batch.isdigit() and name in ("weights", "attention", "waiting", *names):
            made.setdefault(int(batch), {"batch": int(batch)})[names.get(name, name)] = row.get("value")
    return list(made.values())


def _cache(rows: list[Row]) -> Row | None:
    found = _of(rows, "capture").get("KV cache")
    if found is None:
        return None
    dtype = str(found.get("why", "")).partition(",")[0]
    return {"dtype": dtype, "bytes_per_token": found.get("value")}
