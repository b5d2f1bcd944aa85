"""Format decisions before quantization: pins, then measured speed, then the budget."""

from __future__ import annotations

from collections.abc import Sequence

from ... import compress
from ...spec import Finding
from .. import Weight
from ..layer_overrides import FLOAT
from . import budget
from .assignment import STAGE, Assignment, Decision
from .format_order import larger_formats
from .sensitivity import LayerSensitivity
from .slow_layers import drop_slow, is_timed


def decide(assignment: Assignment) -> None:
    """Fill `assignment.decisions`; pinned layers keep their pin.

    Raises `GateError` when no layer is faster than float in a format that was asked for, `UsageError` for a pin that
    names no layer and for a budget that can't be met.
    """
    plan = assignment.plan
    if plan.quant == "none" or (assignment.calibration_set.model is None and not assignment.budgeted):
        return
    pins = compress.resolve_pins(plan.layers, compress.layer_names(assignment.model))
    assignment.decisions |= {name: Decision(format, "pin", "pinned") for name, format in pins.items()}
    free = assignment.free()
    if free and is_timed(plan):
        drop_slow(assignment, free)
    if free and assignment.budgeted:
        _budget(assignment, free)


def _budget(assignment: Assignment, free: Sequence[Weight]) -> None:
    plan = assignment.plan
    options = {w.name: found for w in free if (found := assignment.options(w, larger_formats(plan)))}
    for weight in free:
        if weight.name not in options:
            assignment.set(weight, FLOAT, "speed", "; ".join(assignment.slow[weight.name].values()))
    fixed = _fixed(assignment)
    layers = [*assignment.measure(options).layers, *fixed]
    if plan.bits is not None:
        made = budget.for_bits(layers, plan.bits)
        by, said = f"by --bits {plan.bits:g}", f"the least sum of effects within --bits {plan.bits:g}"
    else:
        made, tried = budget.for_drop(layers, plan.max_drop or 0.0, assignment.drop_together)
        probes = ", ".join(f"{bits:.2f} bits {drop:.4g}" for bits, drop in tried)
        by = f"by --max-drop {plan.max_drop:g}"
        said = f"the fewest whose measured drop is within {plan.max_drop:g}; tried {probes}"
    for weight in free:
        if weight.name in options:
            assignment.set(weight, made.formats[weight.name], "budget", by)
    assignment.reporter.found(
        [Finding(STAGE, "mean bits", round(made.bits, 4), "bits", said), _together(assignment, made)]
    )


def _together(assignment: Assignment, made: budget.BudgetSolution) -> Finding:
    """Measure the effect of all changes together, shown beside the predicted sum of single effects."""
    effect, unit = (
        assignment.effect_together(made.formats),
        assignment.measured.unit if assignment.measured else "",
    )
    why = f"measured; the sum of single effects is {made.predicted:.4g}"
    return Finding(STAGE, "effect of all layers together", effect, unit, why)


def _fixed(assignment: Assignment) -> list[LayerSensitivity]:
    """Return decided layers with one option each: they count in the mean of bits."""
    known = assignment.candidates.assigned(assignment.formats)
    fixed = []
    for weight in (w for w in assignment.candidates.weights if w.name in known):
        format, count = known[weight.name], weight.tensor.numel()
        size = (
            count * assignment.float_bytes
            if format == FLOAT
            else assignment.candidates.packing(weight, format).num_bytes
        )
        fixed.append(LayerSensitivity(weight.name, (weight.name,), count, {format: size}, {format: 0.0}))
    return fixed
