"""Before anything is quantized: what the user pinned, what is fast enough on this machine, what the budget allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import quant
from ..errors import GateError
from ..quant import Weight
from ..spec import Finding
from . import budget, dispatch
from .ladder import ladder, rungs
from .mix import FLOAT, STAGE, Mix
from .sensitivity import Layer


def decide(mix: Mix) -> None:
    """Fill `mix.formats`. A layer that the plan pins is never decided otherwise.

    Raises `GateError` when no layer is faster than float in a format that was asked for, `UsageError` for a pin that
    names no layer and for a budget that can't be met.
    """
    plan = mix.plan
    if plan.quant == "none" or (mix.real.model is None and not mix.budgeted):
        return
    mix.formats |= quant.resolve_pins(plan.layers, quant.layer_names(mix.model))
    mix.why |= dict.fromkeys(mix.formats, "pinned")
    free = mix.free()
    if free and plan.batches and not plan.allow_slower:
        _dispatch(mix, free)
    if free and mix.budgeted:
        _budget(mix, free)


def _dispatch(mix: Mix, free: Sequence[Weight]) -> None:
    """Layers that lose to float in `plan.quant` take the next larger format that does not, else stay float."""
    plan = mix.plan
    mix.say.step("dispatch", "each layer shape against float")
    clock = dispatch.Clock(plan, mix.time)
    layers = [site.layer for weight in free for site in weight.sites]
    seen = dispatch.inputs_seen(mix.model, layers, [mix.real.call(size) for size in plan.batches])
    wanted = list(
        dict.fromkeys([*ladder(plan), *rungs(plan)] if mix.budgeted else [plan.quant, *rungs(plan)])
    )
    lost: list[Finding] = []
    for done, weight in enumerate(free):
        mix.say.progress(done, len(free), weight.name)
        if not mix.budgeted and plan.quant not in mix.candidates.accepted(weight):
            continue
        kept = _fast(mix, clock, weight, [f for f in mix.candidates.accepted(weight) if f in wanted], seen)
        slow = mix.slow.get(weight.name)
        if slow and not mix.budgeted:
            taken, why = kept[0] if kept else FLOAT, "; ".join(slow.values())
            mix.set(weight, taken, why)
            lost.append(Finding("dispatch", weight.name, taken, why=why))
    clock.save()
    why = f"{clock.said()}; on {clock.backend}, at batch {', '.join(map(str, plan.batches))}"
    mix.say.found([Finding("dispatch", "layer timings", len(clock.used), "timings", why), *lost])
    if lost and set(mix.now().values()) <= {FLOAT}:
        raise GateError(
            f"refused, slower: no layer of this model is faster than float on this machine: {lost[0].what}: "
            f"{lost[0].why}",
            hint="Nothing was published. --allow-slower keeps the smaller model, --quant none the float one",
        )


def _fast(
    mix: Mix,
    clock: dispatch.Clock,
    weight: Weight,
    formats: Sequence[str],
    seen: Mapping[int, list[tuple[int, ...]]],
) -> list[str]:
    """The formats that don't lose to float. Without a budget the first one is enough."""
    kept = []
    for format in formats:
        reason = dispatch.slower(clock, mix.candidates, weight, format, seen)
        if reason:
            mix.slow.setdefault(weight.name, {})[format] = reason
            continue
        kept.append(format)
        if not mix.budgeted:
            break
    return kept


def _budget(mix: Mix, free: Sequence[Weight]) -> None:
    plan = mix.plan
    options = {w.name: found for w in free if (found := mix.options(w, ladder(plan)))}
    for weight in free:
        if weight.name not in options:
            mix.set(weight, FLOAT, "; ".join(mix.slow[weight.name].values()))
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
            mix.set(weight, made.formats[weight.name], by)
    mix.say.found([Finding(STAGE, "mean bits", round(made.bits, 4), "bits", said), _together(mix, made)])


def _together(mix: Mix, made: budget.Assignment) -> Finding:
    """Effects add up only nearly: what all changes do together is measured, and stands beside the sum."""
    effect, unit = mix.effect_together(made.formats), mix.measured.unit if mix.measured else ""
    why = f"measured; the sum of single effects is {made.predicted:.4g}"
    return Finding(STAGE, "effect of all layers together", effect, unit, why)


def _fixed(mix: Mix) -> list[Layer]:
    """Layers that are decided already: they count in the mean of bits, with one option each."""
    known = mix.candidates.assigned(mix.formats)
    fixed = []
    for weight in (w for w in mix.candidates.weights if w.name in known):
        format, count = known[weight.name], weight.tensor.numel()
        size = (
            count * mix.float_bytes if format == FLOAT else mix.candidates.packing(weight, format).num_bytes
        )
        fixed.append(Layer(weight.name, (weight.name,), count, {format: size}, {format: 0.0}))
    return fixed
