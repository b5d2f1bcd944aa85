"""Texts and tables of a search: the front, every trial with its outcome, and its command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..budgets import Budgets
from ..options import fields
from .rendering import formatting
from .rendering.text_layout import Column
from .search_record import Measured, SearchRecord, TrialRecord

COLUMNS = (
    *(Column(""), Column("trial"), Column("latency", right=True), Column("per second", right=True, drop=1)),
    *(
        Column("memory", right=True),
        Column("size", right=True),
        Column("loss", right=True),
        Column("outcome"),
    ),
)
CAPTION = "Every trial; loss is against the float original"
CHOSEN, FRONT = "chosen", "front"
_ORDER = {"published": 0, "refused": 1, "skipped": 3}


def ranked(record: SearchRecord) -> list[TrialRecord]:
    """Sort trials: the chosen one, the front by latency, other results, refusals and crashes, what was skipped."""
    return sorted(
        record.trials,
        key=lambda r: (
            not r.chosen,
            _ORDER.get(r.outcome, 2),
            not r.on_front,
            _latency(r),
            r.candidate.label,
        ),
    )


def backends(record: SearchRecord) -> list[str]:
    """List the backends of all trials."""
    return sorted({trial.candidate.backend for trial in record.trials})


def _latency(record: TrialRecord) -> float:
    measured = record.measured
    return float("inf") if measured is None or measured.latency is None else measured.latency


def cells(trial: TrialRecord, record: SearchRecord) -> tuple[str, ...]:
    """Return the row of a trial, under `COLUMNS`."""
    mark = CHOSEN if trial.chosen else FRONT if trial.on_front else ""
    measured = trial.measured or Measured()
    rate = measured.throughput
    memory = measured.memory_with_cache(*record.budgets.cache_tokens)
    return (
        mark,
        trial.candidate.label,
        formatting.seconds(measured.latency),
        "-" if rate is None else f"{rate:,.0f}",
        formatting.size(memory),
        formatting.size(measured.size),
        loss_text(measured, record),
        outcome(trial),
    )


def outcome(trial: TrialRecord) -> str:
    """Write how a trial ended and why; of one that missed budgets what they would have to be."""
    known = " (known from an earlier run)" if trial.from_journal else ""
    known += f" (on {trial.node})" if trial.node else ""
    if trial.outcome == "published":
        if trial.misses:
            return f"would need {' and '.join(trial.misses)}{known}"
        compared = in_turns(trial)
        return f"within the budgets{known}{compared and f'; {compared}'}"
    return f"{trial.outcome}: {trial.reason}{known}"


def in_turns(trial: TrialRecord) -> str:
    """Write how a trial compared in turns: `takes 1.12x the time of ort int8 (1.10 to 1.15)`; "" for the fastest."""
    turns = trial.turns
    if turns is None or turns.against == trial.candidate.label:
        return ""
    interval = f"({turns.low:.2f} to {turns.high:.2f})"
    if turns.verdict == "slower":
        return f"takes {turns.ratio:.2f}x the time of {turns.against} {interval}"
    relation = "as fast as" if turns.verdict == "same" else "within noise of"
    return f"{relation} {turns.against} {interval}"


def loss(measured: Measured, record: SearchRecord) -> float | None:
    """Return the quality measure of a trial: the user's score, else a budgeted drop, else the error."""
    if record.budgets.metric is not None:
        return measured.score
    return measured.drop if record.max_drop is not None else measured.error


def loss_name(record: SearchRecord) -> str:
    if record.budgets.metric is not None:
        return "score"
    return "drop" if record.max_drop is not None else "relative error"


def loss_text(measured: Measured, record: SearchRecord) -> str:
    return loss_value_text(loss(measured, record), is_score=record.budgets.metric is not None)


def loss_value_text(value: float | None, *, is_score: bool) -> str:
    """Write a score as it is, a loss in percent."""
    if value is None:
        return "-"
    return f"{value:.4g}" if is_score else f"{100 * value:.2g} %"


def budget_texts(record: SearchRecord) -> list[str]:
    """Write the budgets as they were given, `--max-latency 5ms`."""
    written = []
    for field in fields(Budgets):
        value = getattr(record.budgets, field.name)
        if field.name.startswith(("max_", "min_")) and value is not None:
            written.append(f"{field.flag} {field.texts(value)[0]}")
    written += [] if record.max_drop is None else [f"--max-drop {100 * record.max_drop:g}%"]
    written += [] if record.max_error is None else [f"--max-error {record.max_error:g}"]
    return written


def summary(record: SearchRecord) -> str:
    """Summarize a search: `12 trials in 3.4 s: 5 measured (3 on the front), 6 skipped, 1 crashed`."""
    counts = Counter(trial.outcome for trial in record.trials)
    front = sum(trial.on_front for trial in record.trials)
    known = sum(trial.from_journal for trial in record.trials)
    parts = [f"{counts.pop('published', 0)} measured ({front} on the front)"]
    parts += [f"{count} {name}" for name, count in counts.items()]
    parts += [f"{known} known from earlier runs"] if known else []
    over = f"; interrupted by {record.interrupted}" if record.interrupted else ""
    return f"{len(record.trials)} trials in {formatting.seconds(record.took)}: {', '.join(parts)}{over}"


def front_line(record: SearchRecord, *, most: int = 3) -> str:
    """Name the other trials of the front with their figures, for one line of a screen."""
    others = [t for t in ranked(record) if t.on_front and not t.chosen]
    shown = [
        f"{t.candidate.label} {formatting.seconds((t.measured or Measured()).latency)} "
        f"{formatting.size((t.measured or Measured()).size)} {loss_text(t.measured or Measured(), record)}"
        for t in others[:most]
    ]
    rest = f", {len(others) - most} more" if len(others) > most else ""
    return "; ".join(shown) + rest


def commands(record: SearchRecord) -> list[tuple[str, str]]:
    """List trial and command of every one that can be made again."""
    return [(t.candidate.label, t.command) for t in ranked(record) if t.outcome == "published" and t.command]


def rows(record: SearchRecord) -> Sequence[tuple[str, ...]]:
    """Return the rows of all trials."""
    return [cells(trial, record) for trial in ranked(record)]
