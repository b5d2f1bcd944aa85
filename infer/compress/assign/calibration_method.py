"""Method of calibration of one run: chosen by what is at hand, and carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ... import compress
from ...errors import NotUsableError
from ...plan import INVENTED, Plan
from ..calibration.layer_statistics import LayerStats


def choose(plan: Plan, has_model: bool, has_rows: bool) -> tuple[str, str]:
    """Return one of "none", "diagonal", "gptq" and "guided", and the reason.

    `has_model`: the weights of a torch model are in memory; `has_rows`: there are rows that do not judge. Raises
    `NotUsableError` where a method was asked for and there is no model.
    """
    if plan.calibrate != "auto":
        if not has_model and plan.calibrate != "none":
            raise NotUsableError(
                "a model can be calibrated only when its weights are in memory",
                hint="Leave out --calibrate, or use --load meta",
            )
        return plan.calibrate, "asked for"
    if not has_model:
        return "none", "the weights are not in memory"
    if plan.data in INVENTED:
        return "none", "invented inputs say nothing about what a layer sees"
    if not has_rows:
        return "none", "there are no rows but those that judge"
    return (
        "guided",
        "error feedback by gradients; --calibrate gptq, diagonal or none is faster and less faithful",
    )


def collect(
    plan: Plan,
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    outputs: Sequence[str],
    task: str,
    way: str,
    why: str,
) -> tuple[Mapping[str, LayerStats], str, str]:
    """Run a method; return the statistics by layer, the method that made them and the reason.

    A model without gradients is calibrated by gptq instead, unless `guided` was asked for: then `NotUsableError`.
    """
    if way == "guided":
        try:
            seen = compress.calibrate(model, batches, hessian=True, outputs=outputs, task=task)
        except NotUsableError as error:
            if plan.calibrate != "auto":
                raise
            way, why = "gptq", f"error feedback; {error.message}"
        else:
            return seen, way, why
    return compress.calibrate(model, batches, hessian=way == "gptq"), way, why
