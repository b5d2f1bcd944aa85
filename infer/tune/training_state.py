"""State and result of a run, and the decisions made from its counters alone: budget, best step, divergence."""

from __future__ import annotations

import msgspec

from ..errors import GateError
from .settings import TrainSettings

WINDOW = 20  # steps whose mean loss is compared
DIVERGED = 3.0  # times the lowest mean, and above the first
POINTS = 2000  # of the curve


class CurvePoint(msgspec.Struct, frozen=True):
    """One point of a learning curve: `loss` is the mean over the step's terms, `seconds` count from the start."""

    step: int
    seconds: float
    terms: int
    loss: float
    learning_rate: float
    gradient_norm: float
    held_out: float | None = None


class TrainState(msgspec.Struct, kw_only=True):
    """All of a run that is no tensor; random numbers need none of it, since each step is seeded by its number."""

    identity: dict[str, str] = {}  # digests of settings, data and parameters
    step: int = 0
    rows: int = 0
    terms: int = 0
    seconds: float = 0.0
    first_held_out: float | None = None
    best_held_out: float | None = None
    best_step: int | None = None
    worse_measures: int = 0  # since the best
    first_mean: float | None = None  # of the loss over WINDOW steps
    lowest_mean: float | None = None
    window: list[float] = []
    curve: list[CurvePoint] = []
    scaler: dict[str, float | int] = {}

    def share(self, settings: TrainSettings, total: int | None, seconds: float) -> float:
        """Return the share of the run that is done in the middle of the next step, by the nearest budget."""
        shares = [
            (self.step + 0.5) / total if total else 0.0,
            self.terms / settings.tokens if settings.tokens else 0.0,
            seconds / settings.time if settings.time else 0.0,
        ]
        return min(1.0, max(shares))

    def stopped(self, settings: TrainSettings, total: int | None, seconds: float) -> str | None:
        """Say which budget is used up, or that the held-out measure no longer falls; None while the run goes on."""
        if settings.patience and self.worse_measures >= settings.patience:
            return "early stop"
        if total is not None and self.step >= total:
            return "steps" if total == settings.steps else "epochs"
        if settings.tokens is not None and self.terms >= settings.tokens:
            return "tokens"
        return "time" if settings.time is not None and seconds >= settings.time else None

    def compare(self, held_out: float) -> bool:
        """Note a held-out measure of the current step; true where it is the best so far."""
        if self.first_held_out is None:
            self.first_held_out = held_out
        if self.best_held_out is not None and held_out >= self.best_held_out:
            self.worse_measures += 1
            return False
        self.best_held_out, self.best_step, self.worse_measures = held_out, self.step, 0
        return True

    def add(self, point: CurvePoint) -> str | None:
        """Append a point to the curve; return a sentence where the loss diverges.

        It does once the mean of the last steps is far above the lowest mean so far, and above the first.
        """
        self.curve.append(point)
        if len(self.curve) > POINTS:
            self.curve = [each for i, each in enumerate(self.curve) if i % 2 or each.held_out is not None]
        self.window = [*self.window[1 - WINDOW :], point.loss]
        if len(self.window) < WINDOW:
            return None
        mean = sum(self.window) / WINDOW
        self.first_mean = mean if self.first_mean is None else self.first_mean
        self.lowest_mean = mean if self.lowest_mean is None else min(mean, self.lowest_mean)
        if mean <= max(DIVERGED * self.lowest_mean, self.first_mean):
            return None
        return f"the loss diverges: {mean:.4g} in the mean of {WINDOW} steps, it was {self.lowest_mean:.4g}"

    def result(self, stopped: str, peak_memory: int) -> TrainResult:
        """Return the outcome of the run that ends with this state."""
        return TrainResult(
            steps=self.step,
            rows=self.rows,
            terms=self.terms,
            seconds=self.seconds,
            curve=tuple(self.curve),
            first_held_out=self.first_held_out,
            best_held_out=self.best_held_out,
            best_step=self.best_step,
            stopped=stopped,
            peak_memory=peak_memory,
        )


STOP_REASONS = {  # by `TrainResult.stopped`
    "steps": "as many as were asked for",
    "epochs": "the end of the last epoch",
    "tokens": "the limit of tokens",
    "time": "the limit of time",
    "early stop": "the held-out measure no longer fell",
    "divergence": "the loss diverged",
}


def stop_phrase(stopped: str, steps: int) -> str:
    """Return when and why a run ended, for display: "after 300 steps: the limit of time"."""
    return f"after {steps} steps: {STOP_REASONS.get(stopped, stopped)}"


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a run: `stopped` is a key of `STOP_REASONS`, `peak_memory` is in bytes.

    The model holds the parameters of the best held-out measure, or of the last step without held-out data.
    """

    steps: int
    rows: int
    terms: int
    seconds: float
    curve: tuple[CurvePoint, ...]
    first_held_out: float | None
    best_held_out: float | None
    best_step: int | None
    stopped: str
    peak_memory: int


class DivergedError(GateError):
    """A loss, gradient or measure that is no number or far above its lowest."""
