"""Fallback after a failed fidelity gate: the most sensitive layers move to int8, to 16 bits, or to float.

How far the sum of effects has to fall follows from how far the gate was missed; the fewest bytes that bring it there
are a knapsack again. Each round is measured anew by the gate. Rounds are bounded, and so are the bytes that may come
back: when little is left of what the format would save, refusing it is the honest answer. The verdict says what share
of the weights has which format.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ... import compress
from ...fidelity import excess
from ...fidelity.thresholds import limits
from ...results import Metric
from ...spec import Finding
from .. import Weight
from ..layer_overrides import FLOAT
from . import budget
from .assignment import STAGE, Assignment
from .format_order import HALF, fallback_formats
from .sensitivity import LayerSensitivity
from .slow_layers import note_slow

MAX_ROUNDS = 4
SECONDS = 30.0  # of measuring effects, which decide what is tried next, not what is published
MOST_BYTES = 2.5  # times those of the format asked for: int8 may take 16 bits, or half of it become float
MARGIN = 0.8  # of the effect that would just do


def raise_formats(assignment: Assignment, metrics: Sequence[Metric]) -> str:
    """Change `assignment.decisions` so that the gate may pass and return ""; or the reason why no layer can move.

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
    if HALF in fallback_formats(assignment.plan):
        note_slow(assignment, free, HALF)
    known = _measured_effects(assignment, free, now)
    layers = [known[w.name] for w in free]
    target = sum(layer.effect[now[layer.name]] for layer in layers) / over * MARGIN
    finer = fallback_formats(assignment.plan)
    for formats in ([*finer, FLOAT], finer):  # float where it needs to be, else the finest that saves bytes
        made = budget.raise_to_target(layers, now, target, formats)
        higher = [w for w in free if made.formats[w.name] != now[w.name]]
        if not higher:
            return "no layer can rise any further"
        risen = assignment.risen | {w.name for w in higher}
        growth = _growth(assignment, risen | {w.name for w in free}, now | made.formats)
        if growth <= MOST_BYTES:
            break
    else:
        times = f"{growth:.1f} times the bytes of {assignment.plan.quant}"
        return f"the weights would take {times}; at most {MOST_BYTES:g} times may"
    assignment.risen, assignment.num_rounds = risen, assignment.num_rounds + 1
    unit = assignment.measured.unit if assignment.measured else ""
    for weight in higher:
        old, new, effect = now[weight.name], made.formats[weight.name], known[weight.name].effect
        why = f"{old} → {new}: alone it costs {effect[old]:.3g} → {effect[new]:.3g} {unit}"
        assignment.set(weight, new, "sensitivity", f"rose {why}")
        assignment.reporter.found([Finding(STAGE, f"rises {weight.name}", new, why=why)])
    return ""


def _growth(assignment: Assignment, names: Collection[str], formats: Mapping[str, str]) -> float:
    """Return the bytes of the weights `names` in `formats` over those that they take in the format asked for."""
    asked = assignment.plan.quant
    total = wanted = 0
    for weight in assignment.candidates.weights:
        if weight.name in names and asked in assignment.candidates.accepted(weight):
            wanted += assignment.candidates.packing(weight, asked).num_bytes
            format = formats[weight.name]
            whole = weight.tensor.numel() * assignment.float_bytes
            total += whole if format == FLOAT else assignment.candidates.packing(weight, format).num_bytes
    return total / max(wanted, 1)


def _measured_effects(
    assignment: Assignment, weights: Sequence[Weight], now: Mapping[str, str]
) -> dict[str, LayerSensitivity]:
    """Return the effects of every format that each weight may have, by weight; measured where one is missing."""
    finer = fallback_formats(assignment.plan)
    wanted = {w.name: list(dict.fromkeys([now[w.name], *assignment.options(w, finer)])) for w in weights}
    known = {layer.name: layer for layer in (assignment.measured.layers if assignment.measured else [])}
    if all(name in known and set(formats) <= known[name].effect.keys() for name, formats in wanted.items()):
        return known
    return {layer.name: layer for layer in assignment.measure(wanted, SECONDS).layers}


def _reason_to_stop(assignment: Assignment) -> str:
    if assignment.plan.quant == "none":
        return "nothing is quantized"
    if assignment.calibration_set.model is None:
        return "layers rise only where the float model is in memory"
    if assignment.plan.bits is not None:
        return f"--bits {assignment.plan.bits:g} leaves no room for layers to rise"
    if not assignment.calibration_set.calibration:
        return "there are no rows beside those that judge"
    return f"layers rose {MAX_ROUNDS} times" if assignment.num_rounds >= MAX_ROUNDS else ""
