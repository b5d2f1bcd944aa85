"""Fallback after a failed fidelity gate: the most sensitive layers move to int8, or to float.

How far the sum of effects has to fall follows from how far the gate was missed; the fewest bytes that bring it there
are a knapsack again. Each round is measured anew by the gate. Rounds are bounded, and so is what may rise: when most of
a model has left the format that was asked for, refusing it is the honest answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ... import compress
from ...fidelity import excess
from ...fidelity.thresholds import limits
from ...results import Metric
from ...spec import Finding
from .. import Weight
from . import budget
from .assignment import FLOAT, STAGE, Assignment
from .format_order import fallback_formats
from .sensitivity import LayerSensitivity

MAX_ROUNDS = 4
MAX_RAISED_SHARE = 0.5  # of the weights
MARGIN = 0.8  # of the effect that would just do


def raise_formats(assignment: Assignment, metrics: Sequence[Metric]) -> str | None:
    """Change `assignment.decisions` so that the gate may pass; return the reason when no layer can move.

    `metrics` are those of the comparison that failed. Pinned layers stay as they are.
    """
    reason = _reason_to_stop(assignment)
    if reason:
        return reason
    over = excess(
        metrics, limits(assignment.plan, assignment.calibration_set.task), assignment.plan.max_error
    )
    if not 1 < over < float("inf"):
        return "raising layers can't cure it"
    now = assignment.now()
    pinned = set(
        assignment.candidates.assigned(
            compress.resolve_pins(assignment.plan.layers, assignment.candidates.names)
        )
    )
    free = [w for w in assignment.candidates.weights if w.name not in pinned and now[w.name] != FLOAT]
    if not free:
        return "every layer is pinned, or float already"
    known = _measured_effects(assignment, free, now)
    layers = [known[w.name] for w in free]
    target = sum(layer.effect[now[layer.name]] for layer in layers) / over * MARGIN
    made = budget.raise_to_target(layers, now, target, [*fallback_formats(assignment.plan), FLOAT])
    higher = [w for w in free if made.formats[w.name] != now[w.name]]
    risen = assignment.risen | {w.name for w in higher}
    count = {w.name: w.tensor.numel() for w in assignment.candidates.weights}
    share = sum(count[name] for name in risen) / sum(count.values())
    if not higher:
        return "no layer can rise any further"
    if share > MAX_RAISED_SHARE:
        quant = assignment.plan.quant
        return f"{share:.0%} of the weights would have to leave {quant}; at most {MAX_RAISED_SHARE:.0%} may"
    assignment.risen, assignment.num_rounds = risen, assignment.num_rounds + 1
    unit = assignment.measured.unit if assignment.measured else ""
    for weight in higher:
        old, new, effect = now[weight.name], made.formats[weight.name], known[weight.name].effect
        why = f"{old} → {new}: alone it costs {effect[old]:.3g} → {effect[new]:.3g} {unit}"
        assignment.set(weight, new, "sensitivity", f"rose {why}")
        assignment.reporter.found([Finding(STAGE, f"rises {weight.name}", new, why=why)])
    return None


def _measured_effects(
    assignment: Assignment, weights: Sequence[Weight], now: Mapping[str, str]
) -> dict[str, LayerSensitivity]:
    """Return the effects of every format that each weight may have, by weight; measured where one is missing."""
    finer = fallback_formats(assignment.plan)
    wanted = {w.name: list(dict.fromkeys([now[w.name], *assignment.options(w, finer)])) for w in weights}
    known = {layer.name: layer for layer in (assignment.measured.layers if assignment.measured else [])}
    if all(name in known and set(formats) <= known[name].effect.keys() for name, formats in wanted.items()):
        return known
    return {layer.name: layer for layer in assignment.measure(wanted).layers}


def _reason_to_stop(assignment: Assignment) -> str | None:
    if assignment.plan.quant == "none":
        return "nothing is quantized"
    if assignment.calibration_set.model is None:
        return "layers rise only where the float model is in memory"
    if assignment.plan.bits is not None:
        return f"--bits {assignment.plan.bits:g} leaves no room for layers to rise"
    if not assignment.calibration_set.calibration:
        return "there are no rows beside those that judge"
    return f"layers rose {MAX_ROUNDS} times" if assignment.num_rounds >= MAX_ROUNDS else None
