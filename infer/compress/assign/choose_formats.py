"""Format decisions before quantization: pins, then measured speed, then the budget."""

from __future__ import annotations

from collections.abc import Sequence

from ... import compress
from ...spec import Finding
from .. import Weight
from . import budget
from .assignment import FLOAT, STAGE, Decision, Mix
from .format_order import ladder
from .sensitivity import Layer
from .slow_layers import drop_slow


def decide(mix: Mix) -> None:
    """Fill `mix.decisions`; pinned layers keep their pin.

    Raises `GateError` when no layer is faster than float in a format that was asked for, `UsageError` for a pin that
    names no layer and for a budget that can't be met.
    """
    plan = mix.plan
    if plan.quant == "none" or (mix.real.model is None and not mix.budgeted):
        return
    pins = compress.resolve_pins(plan.layers, compress.layer_names(mix.model))
    mix.decisions |= {name: Decision(format, "pin", "pinned") for name, format in pins.items()}
    free = mix.free()
    if free and plan.batches and not plan.allow_slower:
        drop_slow(mix, free)
    if free and mix.budgeted:
        _budget(mix, free)


def _budget(mix: Mix, free: Sequence[Weight]) -> None:
    plan = mix.plan
    options = {w.name: found for w in free if (found := mix.options(w, ladder(plan)))}
    for weight in free:
        if weight.name not in options:
            mix.set(weight, FLOAT, "speed", "; ".join(mix.slow[weight.name].values()))
    fixed = _fixed(mix)
    layers = [*mix.measure(options).layers, *fixed]
    if plan.bits is not None:
        made = budget.for_bits(layers, plan.bits)
        by, said = f"by --bits {plan.bits:g}", f"the least sum of effects within --bits {plan.bits:g}"
    else:
        made, tried = budget.for_drop(layers, plan.max_drop or 0.0, mix.drop_together)
        probes = ", ".join(f"{bits:.2f} bits {drop:.4g}" for bits, drop in tried)
        by = f"by --max-drop {plan.max_drop:g}"
        said = f"the fewest whose measured drop is within {plan.max_drop:g}; tried {probes}"
    for weight in free:
        if weight.name in options:
            mix.set(weight, made.formats[weight.name], "budget", by)
    mix.reporter.found([Finding(STAGE, "mean bits", round(made.bits, 4), "bits", said), _together(mix, made)])


def _together(mix: Mix, made: budget.Assignment) -> Finding:
    """Measure the effect of all changes together, shown beside the predicted sum of single effects."""
    effect, unit = mix.effect_together(made.formats), mix.measured.unit if mix.measured else ""
    why = f"measured; the sum of single effects is {made.predicted:.4g}"
    return Finding(STAGE, "effect of all layers together", effect, unit, why)


def _fixed(mix: Mix) -> list[Layer]:
    """Return decided layers with one option each: they count in the mean of bits."""
    known = mix.candidates.assigned(mix.formats)
    fixed = []
    for weight in (w for w in mix.candidates.weights if w.name in known):
        format, count = known[weight.name], weight.tensor.numel()
        size = (
            count * mix.float_bytes if format == FLOAT else mix.candidates.packing(weight, format).num_bytes
        )
        fixed.append(Layer(weight.name, (weight.name,), count, {format: size}, {format: 0.0}))
    return fixed
