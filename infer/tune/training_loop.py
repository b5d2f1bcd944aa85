"""Training loop: steps, held-out measures and checkpoints until a budget is used up."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..device import memory
from ..errors import InferError, NotUsableError, UsageError
from ..library_errors import as_resource_error
from ..reporter import Reporter
from ..spec import Finding
from . import checkpoints
from .data.rows import rows_of_step
from .memory.memory_plan import MemoryPlan
from .objective import Objective, Rows
from .prepared_model import PreparedModel
from .settings import TrainSettings
from .training_environment import missing
from .training_state import CurvePoint, DivergedError, TrainResult, TrainState, stop_phrase

STAGE = "train"
DECAY = 0.2  # share of the run in which wsd falls
FLOOR = 0.1  # of the largest learning rate, at the end of cosine


def train(
    objective: Objective,
    rows: Rows,
    held_out: Rows | None,
    settings: TrainSettings,
    folder: Path,
    reporter: Reporter | None = None,
    plan: MemoryPlan | None = None,
    *,
    keep_best: bool = False,
    before_step: Callable[[float], None] | None = None,
) -> TrainResult:
    """Minimize the objective in place; go on from the newest checkpoint of `folder` where there is one.

    `before_step` gets the share of the run that is done. The peak memory of the first step is reported beside that of
    `plan`. With `keep_best` a loss that diverges ends the run at its best held-out measure, the start at worst, instead
    of raising.

    Raises `GateError` for a loss that is no number or diverges, `ResourceError` for memory or disk that ran out,
    `UsageError` for a checkpoint of another run. On Ctrl-C a checkpoint is written before `KeyboardInterrupt`.
    """
    if why := missing():
        raise NotUsableError(why)
    if not len(rows):
        raise UsageError("no rows to train on")
    try:
        with torch.random.fork_rng(), Interrupt() as interrupt:
            run = TrainingRun(objective, rows, held_out, settings, folder, reporter or Reporter(), plan)
            run.before_step = before_step
            try:
                return run.until_stopped(interrupt)
            except DivergedError:
                if not keep_best or run.state.best_step is None:
                    raise
                return run.finish_at_best("divergence")
    except InferError:
        raise
    except Exception as error:
        if refusal := as_resource_error(error):
            refusal.hint = f"{refusal.hint}. Checkpoints stay in {folder}"
            raise refusal from error
        raise


class TrainingRun:
    """One run over its steps; each process of a distributed run has one, and all take the same decisions."""

    def __init__(
        self,
        objective: Objective,
        rows: Rows,
        held_out: Rows | None,
        settings: TrainSettings,
        folder: Path,
        reporter: Reporter,
        plan: MemoryPlan | None = None,
    ) -> None:
        self.plan = plan
        self.rows, self.settings, self.folder, self.reporter = rows, settings, folder, reporter
        self.held_out = held_out if held_out is not None and len(held_out) else None
        self.model = PreparedModel(objective, settings)
        reporter.found(self.model.findings)
        self.state = TrainState(identity=checkpoints.identity(settings, rows, self.model.parameters))
        self.total = settings.total_steps(len(rows))
        self.before_step: Callable[[float], None] | None = None

    def until_stopped(self, interrupt: Interrupt) -> TrainResult:
        """Run steps until a budget is used up, the held-out measure stops falling, or Ctrl-C."""
        self._resume()
        self.reporter.step(STAGE, f"{len(self.rows)} rows, {self.settings.batch} in a step")
        memory.reset_peak()
        saved = time.perf_counter()
        self._start = saved - self.state.seconds
        if self.state.step == 0:
            self._measure()
        while (stopped := self.state.stopped(self.settings, self.total, self._seconds())) is None:
            self._step()
            self._compare_with_plan()
            if self.model.agreed(interrupt.asked):
                self._save()
                raise KeyboardInterrupt(
                    f"interrupted after step {self.state.step}; nothing was published. The checkpoint stays in "
                    f"{self.folder}, and the same command goes on from it"
                )
            if self.model.agreed(time.perf_counter() - saved >= self.settings.checkpoint_every):
                self._save()
                saved = time.perf_counter()
        return self._finish(stopped)

    def _step(self) -> None:
        """Do one optimizer step, and a held-out measure where one is due."""
        state, settings = self.state, self.settings
        share = state.share(settings, self.total, self._seconds())
        if self.before_step is not None:
            self.before_step(share)
        rate = settings.learning_rate * factor(settings.schedule, share, settings.warmup)
        numbers = rows_of_step(self.rows, state.rows, settings.batch, settings.seed)
        loss, terms = self.model.accumulate(self.rows, numbers, state.step)
        state.step += 1
        if not math.isfinite(loss):
            raise self._failed(f"the loss is {loss}")
        norm = self.model.clip(terms)
        if not math.isfinite(norm) and self.model.accelerator.scaler is None:
            raise self._failed(f"the norm of the gradient is {norm}")
        self.model.update(rate)
        state.rows, state.terms = state.rows + len(numbers), state.terms + terms
        state.seconds = time.perf_counter() - self._start
        held_out = self._measure() if state.step % settings.measure_every == 0 else None
        point = CurvePoint(state.step, state.seconds, state.terms, loss, rate, norm, held_out)
        if diverged := state.add(point):
            raise self._failed(diverged)
        self._show(point, share)

    def _compare_with_plan(self) -> None:
        """Report the peak after the first step of this process beside the planned one."""
        if self.plan is not None:
            self.reporter.found([self.plan.compared(self.model.peak_memory())])
            self.plan = None

    def _measure(self) -> float | None:
        """Measure on held-out data and keep the parameters of the best step."""
        if self.held_out is None:
            return None
        value = self.model.measure(self.held_out)
        if not math.isfinite(value):
            raise self._failed(f"the held-out measure is {value}")
        if self.state.compare(value):
            tensors = self.model.whole_parameters()
            if self.model.is_main:
                checkpoints.save_best(self.folder, self.state.step, tensors)
        return value

    def _failed(self, what: str) -> DivergedError:
        tried = f"learning rate {self.settings.learning_rate:g}, {self.settings.precision}"
        return DivergedError(
            f"{what} at step {self.state.step} ({tried}); nothing was published",
            hint=f"Try a lower --learning-rate, a lower --clip or float32; checkpoints stay in {self.folder}",
        )

    def _show(self, point: CurvePoint, share: float) -> None:
        left = point.seconds / max(share, 1e-6) * (1 - share)
        best = self.state.best_held_out
        parts = [f"loss {point.loss:.4g}", *([] if best is None else [f"held-out {best:.4g}"])]
        parts += [f"{left:.0f} s left", f"{memory.rss() / 1e6:.0f} MB"]
        self.reporter.progress(round(1000 * share), 1000, f"step {point.step}: {', '.join(parts)}")

    def _seconds(self) -> float:
        """Return the seconds so far, of the first process where only they decide."""
        return self.state.seconds if self.settings.time is None else self.model.agreed(self.state.seconds)

    def _save(self) -> None:
        if (scaler := self.model.accelerator.scaler) is not None:
            self.state.scaler = scaler.state_dict()
        tensors = self.model.run_tensors()
        if self.model.is_main:
            checkpoints.save_checkpoint(self.folder, self.state, tensors)
        self.model.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        if self.settings.fresh and self.model.is_main:
            checkpoints.remove_checkpoints(self.folder)
        self.model.accelerator.wait_for_everyone()
        if (found := checkpoints.load_checkpoint(self.folder, self.state.identity)) is None:
            return
        self.state, tensors = found
        self.model.restore(tensors)
        if self.state.scaler and self.model.accelerator.scaler is not None:
            self.model.accelerator.scaler.load_state_dict(self.state.scaler)
        self.reporter.found([Finding(STAGE, "resumed at step", self.state.step, why=f"from {self.folder}")])

    def _finish(self, stopped: str) -> TrainResult:
        """Measure a last time, put the best parameters back and say how it went."""
        state = self.state
        if state.step % self.settings.measure_every:
            self._measure()
        self._save()
        if state.best_step not in (None, state.step):
            checkpoints.restore_best(self.folder, state.best_step, self.model.parameters)
        return self._result(stopped)

    def finish_at_best(self, stopped: str) -> TrainResult:
        """Put the best parameters back without a last measure."""
        checkpoints.restore_best(self.folder, self.state.best_step or 0, self.model.parameters)
        return self._result(stopped)

    def _result(self, stopped: str) -> TrainResult:
        result = self.state.result(stopped, self.model.peak_memory())
        self.model.accelerator.free_memory()
        self.reporter.found([Finding(STAGE, "stopped", stop_phrase(stopped, result.steps))])
        return result


def factor(schedule: str, share: float, warmup: float) -> float:
    """Return the factor of the learning rate at `share` (0 to 1) of the run.

    It rises linearly to 1 during `warmup`. cosine then falls to `FLOOR`, linear to 0; wsd (Hu et al. 2024, MiniCPM)
    stays and falls linearly to 0 in the last fifth; constant stays.
    """
    share = min(max(share, 0.0), 1.0)
    if share < warmup:
        return max(share / warmup, 0.01)  # a run whose budget is time starts at share 0
    rest = (share - warmup) / (1 - warmup) if warmup < 1 else 0.0
    if schedule == "cosine":
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * rest)) / 2
    if schedule == "linear":
        return 1 - rest
    if schedule == "wsd":
        return min(1.0, (1 - share) / DECAY)
    return 1.0


class Interrupt:
    """Ctrl-C as a request that is met between two steps; a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a job in the background
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
