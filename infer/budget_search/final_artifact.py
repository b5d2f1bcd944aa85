"""Publication of the winner's artifact at the requested path, with the record of the search in its report."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..artifact import store
from ..artifact.manifest import read_manifest
from ..budgets import Budgets
from ..options import command_line
from ..plan import Plan
from ..report import document
from ..report.rendering import html
from ..report.search_record import Candidate, Measured, SearchRecord, TrialRecord
from ..run.publish import Outcome
from . import finalists
from .feasibility import Limit, misses, objective_text
from .known_trials import KnownTrials

Costs = Sequence[float | None]  # smaller is better; None is unknown and counts as worst
_REPORT = ("report.json", "report.html")
_SEALED = (store.MANIFEST, store.SIGNATURE)


def publish_best(artifact: Path, record: SearchRecord, folder: Path, output: Path) -> Outcome:
    """Move the winner into the staged `folder`, write its report anew with `record`, and publish it at `output`."""
    manifest = msgspec.structs.replace(read_manifest(artifact), name=output.name.removesuffix(".infer"))
    report = document.decode((artifact / "report.json").read_bytes())
    for path in list(artifact.iterdir()):
        if path.name not in (*_REPORT, *_SEALED):
            shutil.move(path, folder / path.name)
    shutil.rmtree(folder / "search", ignore_errors=True)
    report = msgspec.structs.replace(report, search=record)
    (folder / "report.json").write_bytes(document.encode(report))
    (folder / "report.html").write_text(html.render_html(report))
    return Outcome(output, store.publish(folder, output, manifest), report)


def search_record(
    known: KnownTrials, best: Candidate, output: str, *, took: float, interrupted: str
) -> SearchRecord:
    """Make the record of a search that chose `best`; `took` seconds, `output` names the artifact."""
    records = mark(list(known.records.values()), known.budgets, known.limits, best)
    parts = [
        f"{best.label}: {objective_text(known.records[best], known.budgets)}, best of the trials within budgets"
    ]
    parts += [sure] if (sure := finalists.confidence(records, best)) else []
    return SearchRecord(
        budgets=known.budgets,
        max_drop=known.plan.max_drop,
        max_error=known.plan.max_error,
        trials=tuple(records),
        took=took,
        why="; ".join(parts),
        interrupted=interrupted,
        command=search_command(known.plan, known.budgets, output),
    )


def mark(
    records: Sequence[TrialRecord],
    budgets: Budgets,
    limits: Sequence[Limit] = (),
    chosen: Candidate | None = None,
) -> list[TrialRecord]:
    """Mark the trials of the Pareto front (latency, throughput, memory, size, error), the chosen one, and the budgets
    that each misses.
    """
    sequences, tokens = budgets.cache_tokens
    complete = [r for r in records if r.outcome == "published" and r.measured is not None]
    costs = [_costs(r.measured, sequences, tokens) for r in complete if r.measured is not None]
    best = {complete[index].candidate for index in pareto_front(costs)}
    return [
        msgspec.structs.replace(
            record,
            on_front=record.candidate in best,
            chosen=record.candidate == chosen,
            misses=() if record.measured is None else misses(record.measured, limits),
        )
        for record in records
    ]


def may_win(known: KnownTrials) -> set[Candidate]:
    """Return the trials whose artifacts are kept: the front, the best, and those near enough to be compared with it."""
    kept = {r.candidate for r in mark(list(known.records.values()), known.budgets) if r.on_front}
    kept |= {r.candidate for r in finalists.nearest(known)}
    return kept if known.best is None else kept | {known.best.candidate}


def _costs(found: Measured, sequences: int, tokens: int) -> Costs:
    """Return what the front minimizes."""
    rate = found.throughput
    quality = (
        -found.score if found.score is not None else found.error if found.error is not None else found.drop
    )
    memory = found.memory_with_cache(sequences, tokens)
    return found.latency, None if rate is None else -rate, memory, found.size, quality


def search_command(plan: Plan, budgets: Budgets, output: str) -> str:
    """Return the command line that repeats the search."""
    source, *options = command_line(plan)
    asked = msgspec.structs.replace(budgets, keep_best=False, fresh=False)
    return shlex.join(["infer", "optimize", source, "--output", output, *options, *command_line(asked)])


def pareto_front(points: Sequence[Costs]) -> list[int]:
    """Return the indices, in order, of the points that no other one dominates; of equal points the first.

    Points are sorted by their costs, so that a point can be dominated only by one before it: O(n log n + n f) for a
    front of f.
    """
    known = [tuple(math.inf if c is None or math.isnan(c) else float(c) for c in point) for point in points]
    kept: list[int] = []
    for index in sorted(range(len(known)), key=lambda i: (known[i], i)):
        if not any(_no_worse(known[other], known[index]) for other in kept):
            kept.append(index)
    return sorted(kept)


def _no_worse(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))
