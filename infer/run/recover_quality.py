"""The stage behind `--recover`, between quantization and capture: training against the outputs of the float model."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from ..compress import assign
from ..errors import NotUsableError
from ..options.values import recovery_budget
from ..plan import Plan
from ..reporter import Reporter
from ..spec import Finding
from ..tune.recovery.recover import RecoveryBudget, recover

STAGE = "recover"


def recover_quality(
    plan: Plan, module: nn.Module, known: assign.CalibrationSet, reporter: Reporter
) -> list[Finding]:
    """Train the quantized `module` in place on rows outside the evaluation set; return the findings of the training.

    Raises `NotUsableError` for weights that are streamed from disk, and what `recover` raises.
    """
    if known.model is None:
        raise NotUsableError(
            "recovery runs the float model, and its weights are not in memory",
            hint="Leave out --recover, or use --load meta",
        )
    reporter.step(STAGE, f"training against the float model, {plan.recover}")
    seconds, terms = recovery_budget(plan.recover)
    with TemporaryDirectory(prefix="infer-recover-") as folder:
        return recover(
            module,
            known.model,
            known.training or known.calibration,
            known.outputs,
            known.task,
            RecoveryBudget(seconds, terms),
            Path(folder),
            seed=plan.seed,
            reporter=reporter,
        )
