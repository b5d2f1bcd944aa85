"""Fallback after a failed fidelity gate: the most sensitive layers move to int8, or to float.

How far the sum of effects has to fall follows from how far the gate was missed; the fewest bytes that bring it there
are a knapsack again. Each round is measured anew by the gate. Rounds are bounded, and so is what may rise: when most of
a model has left the format that was asked for, refusing it is the honest answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import compress
from ...fidelity import excess
from ...results import Metric
from ...spec import Finding
from ...thresholds import limits
from . import budget
from .assignment import FLOAT, STAGE, Mix
from .format_order import rungs

MOST_RISES = 4
MOST_RISEN = 0.5  # of the weights
MARGIN = 0.8  # of the effect that would just do


def rise(mix: Mix, metrics: Sequence[Metric]) -> str | None:
    """Change `mix.decisions` so that the gate may pass; return the reason when no layer can move.

    `metrics` are those of the comparison that failed. Pinned layers stay as they are.
    """
    reason = _hopeless(mix)
    if reason:
        return reason
    over = excess(metrics, limits(mix.plan, mix.real.task), mix.plan.max_error)
    if not 1 < over < float("inf"):
        return "raising layers can't cure it"
    now = mix.now()
    pinned = set(mix.candidates.assigned(compress.resolve_pins(mix.plan.layers, mix.candidates.names)))
    free = [w for w in mix.candidates.weights if w.name not in pinned and now[w.name] != FLOAT]
    if not free:
        return "every layer is pinned, or float already"
    wanted = {w.name: list(dict.fromkeys([now[w.name], *mix.options(w, rungs(mix.plan))])) for w in free}
    known = {layer.name: layer for layer in (mix.measured.layers if mix.measured else [])}
    if any(
        name not in known or not set(formats) <= known[name].effect.keys() for name, formats in wanted.items()
    ):
        known = {layer.name: layer for layer in mix.measure(wanted).layers}
    layers = [known[w.name] for w in free]
    target = sum(layer.effect[now[layer.name]] for layer in layers) / over * MARGIN
    made = budget.risen(layers, now, target, [*rungs(mix.plan), FLOAT])
    higher = [w for w in free if made.formats[w.name] != now[w.name]]
    risen = mix.risen | {w.name for w in higher}
    count = {w.name: w.tensor.numel() for w in mix.candidates.weights}
    share = sum(count[name] for name in risen) / sum(count.values())
    if not higher:
        return "no layer can rise any further"
    if share > MOST_RISEN:
        return (
            f"{share:.0%} of the weights would have to leave {mix.plan.quant}; at most {MOST_RISEN:.0%} may"
        )
    mix.risen, mix.num_rises = risen, mix.num_rises + 1
    unit = mix.measured.unit if mix.measured else ""
    for weight in higher:
        old, new, effect = now[weight.name], made.formats[weight.name], known[weight.name].effect
        why = f"{old} → {new}: alone it costs {effect[old]:.3g} → {effect[new]:.3g} {unit}"
        mix.set(weight, new, "sensitivity", f"rose {why}")
        mix.reporter.found([Finding(STAGE, f"rises {weight.name}", new, why=why)])
    return None


def _hopeless(mix: Mix) -> str | None:
    if mix.plan.quant == "none":
        return "nothing is quantized"
    if mix.real.model is None:
        return "layers rise only where the float model is in memory"
    if mix.plan.bits is not None:
        return f"--bits {mix.plan.bits:g} leaves no room for layers to rise"
    if not mix.real.calibration:
        return "there are no rows beside those that judge"
    return f"layers rose {MOST_RISES} times" if mix.num_rises >= MOST_RISES else None
