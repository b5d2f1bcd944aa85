"""Result of one backend tried on one graph: its fidelity, what its times say, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import fidelity, latency
from ..fidelity.thresholds import limits, precision
from ..graph.row_independence import Joining
from ..latency import WORKLOAD, Paired, Timing
from ..llm.step.step_shape import StepShape
from ..plan import Plan
from ..report.measurements.step_breakdown import StepBreakdown
from ..report.rendering import formatting
from ..results import Metric, ScoresOnly
from ..spec import Finding

BUSY = "timed on a busy machine"
CHECKS = 1e-4  # seconds that the checks of a request take, which a call of a bare session lacks
BY_FAR = 0.9  # times a float form, in brief timings, below which a trial is faster beyond their noise
MUCH_SMALLER = 0.6  # of the source's size, from which on
LITTLE = 1.1  # times the time of a float form is told, not refused
UNNOTICED = 2e-4  # seconds of a call that nobody notices


@dataclass(frozen=True)
class TimesToBeat:
    """Times of another trial: as ratios to float forms, form → batch size → ratio, and its shortest calls in seconds.

    The ratios were taken when those forms had other times, perhaps on a busier machine.
    """

    ratios: Mapping[str, Mapping[int, float]]
    least: Mapping[int, float] = field(default_factory=dict)

    def counts(self, batch: int) -> bool:
        """Return whether the other trial's time at a batch size is known, which decides whether a trial lost."""
        return any(batch in by for by in self.ratios.values())


@dataclass
class Trial:
    """Result of a trial; `folder` holds the compiled form until it is published."""

    backend: str
    folder: Path
    fidelity: list[Metric]
    golden: dict[str, dict[str, Tensor]]
    size: int  # bytes that the artifact would hold of it
    source_size: int | None = field(default=None, kw_only=True)  # bytes of the source; None: not known
    reads: int  # bytes of weights that one call reads
    changed: bool  # quantized or in another dtype: then being slower than the baseline counts
    latency: list[Timing] = field(default_factory=list)
    baseline: str = ""
    prompt: Paired | None = None  # of a language model: one step of the workload's prompt
    forms: dict[str, dict[int, float]] = field(default_factory=dict)  # float form → batch size → seconds
    findings: list[Finding] = field(default_factory=list)
    steps: list[StepBreakdown] = field(default_factory=list)  # of a language model, by batch size
    quantized: str = ""  # see `Lowered`
    more_exact: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)  # see `Lowered`
    runner: Any = None
    task: str = "tensors"
    shape: StepShape | None = None  # of a language model lowered as a step, which can generate
    scores_only: ScoresOnly | None = None  # of one that can't
    dtype: str = ""  # compute dtype where it is not the plan's
    backend_options: Mapping[str, str] = field(default_factory=dict)  # that it was lowered with
    cautious: str = ""  # why its backend runs it with an option that costs speed
    kept_by: str = "--allow-slower"  # the option for which a slower trial is kept; "" where none asks for it
    untested: str = ""  # outputs that the samples do not make change
    ended: str = ""  # the violated limit after which nothing more was compared
    compared: str = ""  # on how many rows, where a slow model was compared on few
    rounding: str = ""  # the limit that is kept only beyond what rounding of the inputs does in the original
    joining: Joining = Joining("padded")  # which requests may share a batch of it
    brief: dict[int, float] = field(default_factory=dict)  # seconds by batch size, before pairs are made
    ahead_of_time: str = ""  # how a form was compared that can't run here, and so is not timed

    @property
    def seconds(self) -> float:
        """Sum of the latencies over the batch sizes of the plan."""
        return sum(self.typical.values()) if self.latency else math.inf

    @property
    def typical(self) -> dict[int, float]:
        """Seconds by batch size, comparable among trials.

        They are the ratio to a float form times the seconds of that form, which are the same for all trials.
        """
        return {
            t.batch: t.pair.ratio * self.forms[t.rival][t.batch] if t.rival in self.forms else t.pair.a.p50
            for t in self.latency
        }

    @property
    def name(self) -> str:
        """Backend, and the compute dtype where it is not the plan's."""
        return f"{self.backend} {self.dtype}".rstrip()

    @property
    def gain(self) -> float:
        """Time of the fastest float forms over this trial's, summed over the batch sizes; 0 where it was not timed."""
        timed = [(t.batch, self.forms[t.rival][t.batch]) for t in self.latency if t.rival in self.forms]
        return sum(seconds for _, seconds in timed) / self.seconds if timed else 0.0

    def loses_to(self, form: str) -> bool:
        """Return true if the trial is slower than a float form at any batch size."""
        return any(t.rival == form and t.pair.verdict == "slower" for t in self.latency)

    def times_slower(self, other: TimesToBeat) -> float | None:
        """Return how many times slower this is, at least, than another trial; None where no batch size can be compared.

        The lower ends of the intervals and the shortest calls count, whichever says less, and the batch size at which
        this does best.
        """
        ratios = []
        for t in self.latency:
            if (ratio := other.ratios.get(t.rival, {}).get(t.batch)) is not None:
                ratios.append(t.pair.low / ratio)
                if t.batch in other.least:
                    ratios.append(t.pair.a.min / other.least[t.batch])
        return min(ratios, default=None)

    @property
    def slower(self) -> bool:
        """Slower than the fastest float form that was tried, at a batch size of the plan; of a language model decoding,
        or the prompts and answers of the declared workload together. Of a smaller model a loss that its size makes up
        for does not count, and one float form has to beat it: one that loses at another batch size is no better choice.
        """
        lost = [t for t in self.latency if self._is_slower(t) and not self._makes_up_for(t)]
        if self.smaller and self.shape is None:
            return self.changed and any(not self._beats(t.rival) for t in lost)
        return self.changed and bool(lost)

    def _beats(self, form: str) -> bool:
        """Return whether this is faster than a float form at any batch size, by pairs where they were made with it."""
        ours = self.typical
        return any(
            t.pair.verdict == "faster"
            if t.rival == form
            else form in self.forms and ours[t.batch] < BY_FAR * self.forms[form][t.batch]
            for t in self.latency
        )

    @property
    def smaller(self) -> bool:
        """Return whether it takes less room than the source, by more than nobody notices."""
        return self.source_size is not None and self.size < latency.FASTER * self.source_size

    def gains_nothing(self, plan: Plan) -> bool:
        """Return whether what the user has today is the better choice, as far as it was timed.

        A form that differs from the original has to be faster at a batch size, beyond noise, or smaller. The unchanged
        model on a backend that was named, and the codes of a source that is quantized, must not take longer, by more
        than noise and by more than anybody fails to notice. With "auto" the unchanged one is the fastest there is.
        """
        if plan.allow_slower or not self.latency:
            return False
        if not self.changed or plan.quant == "keep":
            return plan.backend != "auto" and any(
                self._is_slower(t) and t.pair.a.p50 - t.pair.b.p50 > UNNOTICED for t in self.latency
            )
        pairs = [t.pair for t in self.latency] + ([] if self.prompt is None else [self.prompt])
        return not self.smaller and all(pair.verdict != "faster" for pair in pairs)

    def brought(self) -> str:
        """Say what it brought: `ort within noise at batch 1, 1.25x slower at batch 8, 2.90 MB (3.3x smaller)`."""
        ratio = "" if self.source_size is None else f" ({formatting.smaller(self.source_size, self.size)})"
        return f"{self.name} {self._speeds()}, {formatting.size(self.size)}{ratio}"

    def _sizes(self) -> str:
        if self.source_size is None:
            return formatting.size(self.size)
        ratio = formatting.smaller(self.source_size, self.size)
        return (
            f"{formatting.size(self.size)} where the source has {formatting.size(self.source_size)} ({ratio})"
        )

    def _is_slower(self, timing: Timing) -> bool:
        return timing.pair.verdict == "slower" or self._request_slower(timing)

    def _makes_up_for(self, timing: Timing) -> bool:
        """Return whether the size is worth the time lost: what checks take of any smaller form, a little of one that is
        much smaller. Sessions of one and the same file differ by 5 %; a step of a language model has no checks.
        """
        if self.shape is not None or not self.smaller or self.source_size is None:
            return False
        by_checks = timing.pair.a.p50 - timing.pair.b.p50 <= CHECKS
        return by_checks or (timing.pair.ratio <= LITTLE and self.size <= MUCH_SMALLER * self.source_size)

    def _request_slower(self, timing: Timing) -> bool:
        """Return True when whole requests of the declared workload, prompts and answers, take longer."""
        if self.prompt is None:
            return False
        steps = WORKLOAD.steps(timing.batch)
        decoding = steps.pop(timing.batch, 0)
        parts: list[tuple[float, Paired]] = [(decoding, timing.pair)]
        parts += [(count * tokens / WORKLOAD.chunk, self.prompt) for tokens, count in steps.items()]
        floats = sum(count * pair.b.p50 for count, pair in parts)
        return sum(count * pair.b.p50 * pair.low for count, pair in parts) > latency.SLOWER * floats

    @property
    def busy(self) -> str:
        """Say that other processes disturbed the timing in spite of waiting; "" where they did not."""
        missing = max((t.missing for t in self.latency), default=0.0)
        return f"{BUSY}: other processes took {missing:.1f} processors" if missing else ""

    @property
    def verdict(self) -> str:
        """Verdict: `2.1x faster at batch 1, same at batch 8 against the fastest float form (inductor float32)`."""
        return f"{self._speeds()} against {self.baseline}" if self.latency else "not timed"

    def _speeds(self) -> str:
        parts = [f"{_speed(t.pair)} at batch {t.batch}" for t in self.latency]
        if self.prompt is not None:
            parts.append(f"reading a prompt {_speed(self.prompt)}")
        return f"{'' if self.shape is None else 'decoding '}{', '.join(parts)}"

    def unfaithful(self, plan: Plan) -> str | None:
        """Return which limit of the plan is violated; what ended the comparison early stays a reason for any plan."""
        return self.violates(plan) or self.ended or None

    def violates(self, plan: Plan) -> str | None:
        """Return which limit of the plan is violated, as far as it was compared."""
        judged_plan = plan.with_(dtype=self.dtype) if self.dtype else plan
        return fidelity.judge(self.fidelity, limits(judged_plan, self.task), plan.max_error)

    def failure(self, plan: Plan) -> str | None:
        lost = self.changed and (self.gains_nothing(plan) or (self.slower and not plan.allow_slower))
        return self.unfaithful(plan) or (f"{self.verdict}, {self._sizes()}" if lost else None)

    def verdicts(self, plan: Plan, captured: Sequence[str] = ()) -> list[str]:
        """Return the headline findings; `captured`: limitations that come from the capture of the model."""
        allowed = (
            f"--max-drop {plan.max_drop:g}"
            if plan.max_drop is not None
            else f"the limits of {precision(plan)}"
        )
        forms = [self.verdict, *self._forms_tried(), self._sizes()]
        return [*self.limitations(plan), *captured, *forms, f"fidelity within {allowed}"]

    def limitations(self, plan: Plan) -> list[str]:
        """List what the artifact can't do, or does worse than the original."""
        lines = [sentence for sentence in (self.ahead_of_time, self.cautious) if sentence]
        lines += [] if self.scores_only is None else [f"scores text only: {self.scores_only.reason}"]
        lines += [self.joining.limitation] if self.joining.why else []
        lines += [sentence for sentence in (self.rounding, self.compared, self.untested) if sentence]
        lines += [self.busy] if self.busy else []
        if self.slower:
            lines.append(f"kept although slower ({self.kept_by})" if self.kept_by else "slower than float")
        elif self.gains_nothing(plan.with_(allow_slower=False)):
            kept = f"kept although it gains nothing ({self.kept_by})" if self.kept_by else "no gain"
            lines.append(kept if self.changed else f"unchanged, and slower than {self.baseline}")
        return lines

    def _forms_tried(self) -> list[str]:
        """Return the float forms with their times, where there were several."""
        if len(self.forms) < 2:
            return []
        each = [
            f"{name} {', '.join(formatting.seconds(s) for s in seconds.values())}"
            for name, seconds in self.forms.items()
        ]
        sizes = ", ".join(str(t.batch) for t in self.latency)
        return [f"float forms tried, at batch {sizes}: {'; '.join(each)}"]

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
            self.runner = None


def _speed(pair: latency.Paired) -> str:
    if pair.verdict == "faster":
        return f"{pair.speedup:.2f}x faster"
    if pair.verdict == "slower":
        return f"{formatting.slowdown(pair)} slower"
    return pair.verdict
