"""Layers slower than float on this machine: moved to a larger format, or kept float.

A format that computes faster (int8) has to win in each layer. A weight-only format saves memory, so that it stays where
all layers together are as fast as float; where they are not, those that lose most leave it, as few as will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import GateError
from ...plan import saves_memory
from ...spec import Finding
from ...workload import WORKLOAD
from .. import Weight
from ..layer_kinds import is_linear
from . import layer_timing
from .assignment import FLOAT, Mix
from .format_order import ladder, rungs
from .layer_calls import Uses, inputs_seen, steps_seen
from .layer_timing import Timed


@dataclass
class Timings:
    """Times of the layers of `mix`, each at its own numbers of rows."""

    mix: Mix
    clock: layer_timing.Clock
    uses: Uses

    def of(self, weight: Weight, format: str) -> list[Timed]:
        """Return the time of a weight's Linears in a format per batch size; empty when it has none.

        Only Linear layers are timed. An Embedding is a lookup, whose time is nothing beside a product; convolutions
        hand their int8 results on to the next, so that one alone, which converts at both ends, says little.
        """
        layers = [s.layer for s in weight.sites if is_linear(s.layer) and id(s.layer) in self.uses]
        return [
            Timed.total(
                [
                    (calls, self.clock.timed(self.mix.candidates, weight, format, shape))
                    for layer in layers
                    for shape, calls in self.uses[id(layer)][i].items()
                ]
            )
            for i in range(len(self.uses[id(layers[0])]) if layers else 0)
        ]

    def lost(self, weight: Weight, format: str) -> str | None:
        """Describe where a format is slower than float, at the worst batch size; None when nowhere."""
        found = [(t.ratio, i, t) for i, t in enumerate(self.of(weight, format)) if t.loses]
        if not found:
            return None
        _, index, timed = max(found)
        return f"{format} takes {timed.said(self.where(weight, index))}"

    def where(self, weight: Weight, index: int) -> str:
        """Describe the timed rows: `at 64 rows`, or the workload of a language model."""
        batch = self.mix.plan.batches[index]
        if self.mix.real.steps:
            return f"over {WORKLOAD} at batch {batch}"
        rows = {
            shape[0] for s in weight.sites for shape in self.uses.get(id(s.layer), [{}] * (index + 1))[index]
        }
        return f"at {', '.join(map(str, sorted(rows)))} rows"


def drop_slow(mix: Mix, free: Sequence[Weight]) -> None:
    """Decide which layers leave `plan.quant` for being slow; raise `GateError` when none stays."""
    plan = mix.plan
    mix.reporter.step("dispatch", "each layer shape against float")
    timings = Timings(mix, layer_timing.Clock(plan, mix.time), _uses(mix, free))
    whole = not mix.budgeted and saves_memory(plan.quant)
    lost, total = _together(timings, free) if whole else (_one_by_one(timings, free), [])
    clock = timings.clock
    clock.save()
    use = f", {WORKLOAD}" if mix.real.steps else ""
    why = f"{clock.said()}; on {clock.backend}, at batch {', '.join(map(str, plan.batches))}{use}"
    left = {name: mix.decisions[name] for name in lost}
    each = [Finding("dispatch", name, decision.format, why=decision.why) for name, decision in left.items()]
    mix.reporter.found([Finding("dispatch", "layer timings", len(clock.used), "timings", why), *total, *each])
    if lost and set(mix.now().values()) <= {FLOAT}:
        raise GateError(
            f"refused, slower: no layer of this model is faster than float on this machine: {lost[0]}: "
            f"{left[lost[0]].why}",
            hint="Nothing was published. --allow-slower keeps the smaller model, --quant none the float one",
        )


def _uses(mix: Mix, free: Sequence[Weight]) -> Uses:
    layers = [site.layer for weight in free for site in weight.sites]
    if mix.real.steps:
        return steps_seen(mix.model, layers, mix.real.call(1), mix.real.head, mix.plan.batches)
    return inputs_seen(mix.model, layers, [mix.real.call(size) for size in mix.plan.batches])


def _one_by_one(timings: Timings, free: Sequence[Weight]) -> list[str]:
    """Move each slow weight to the next larger format that is not slow, else float; return their names."""
    mix, plan, lost = timings.mix, timings.mix.plan, list[str]()
    wanted = dict.fromkeys([*ladder(plan), *rungs(plan)] if mix.budgeted else [plan.quant, *rungs(plan)])
    for done, weight in enumerate(free):
        mix.reporter.progress(done, len(free), weight.name)
        if not mix.budgeted and plan.quant not in mix.candidates.accepted(weight):
            continue
        kept = _fast(timings, weight, [f for f in mix.candidates.accepted(weight) if f in wanted])
        if weight.name in mix.slow and not mix.budgeted:
            _leave(mix, weight, kept)
            lost.append(weight.name)
    return lost


def _fast(timings: Timings, weight: Weight, formats: Sequence[str]) -> list[str]:
    """Filter the formats that are not slower than float, noting the others; the first suffices without a budget."""
    kept = []
    for format in formats:
        if reason := timings.lost(weight, format):
            timings.mix.slow.setdefault(weight.name, {})[format] = reason
            continue
        kept.append(format)
        if not timings.mix.budgeted:
            break
    return kept


def _leave(mix: Mix, weight: Weight, kept: Sequence[str]) -> None:
    taken, why = kept[0] if kept else FLOAT, "; ".join(mix.slow[weight.name].values())
    mix.set(weight, taken, "speed", why)


def _together(timings: Timings, free: Sequence[Weight]) -> tuple[list[str], list[Finding]]:
    """Move the slowest weights to other formats until all layers together are not slower than float.

    Returns the names of those that left it, and what the layers take together.
    """
    mix, plan, lost = timings.mix, timings.mix.plan, list[str]()
    now: dict[str, list[Timed]] = {}
    weights = {w.name: w for w in free if plan.quant in mix.candidates.accepted(w)}
    for done, (name, weight) in enumerate(weights.items()):
        mix.reporter.progress(done, len(weights), name)
        if timed := timings.of(weight, plan.quant):
            now[name] = timed
    staying = list(now)
    while staying and (index := _losing(now)) is not None:
        worst = max(staying, key=lambda name: now[name][index].seconds - now[name][index].float_seconds)
        staying.remove(worst)
        weight = weights[worst]
        mix.slow.setdefault(worst, {})[plan.quant] = (
            f"{plan.quant} takes {now[worst][index].said(timings.where(weight, index))}"
        )
        rest = [f for f in rungs(plan) if f in mix.candidates.accepted(weight)]
        kept = _fast(timings, weight, rest)
        now[worst] = timings.of(weight, kept[0]) if kept else [_as_float(t) for t in now[worst]]
        _leave(mix, weight, kept)
        lost.append(worst)
    return lost, _summary(mix, now)


def _losing(now: Mapping[str, Sequence[Timed]]) -> int | None:
    """Return the plan's batch index at which all layers together are slowest; None when at none."""
    totals = _totals(now)
    index = max(range(len(totals)), key=lambda i: totals[i].ratio)
    return index if totals[index].loses else None


def _totals(now: Mapping[str, Sequence[Timed]]) -> list[Timed]:
    return [Timed.total([(1, timed) for timed in column]) for column in zip(*now.values(), strict=True)]


def _as_float(timed: Timed) -> Timed:
    return Timed(timed.float_seconds, timed.float_seconds, 1.0, 1.0, 1.0)


def _summary(mix: Mix, now: Mapping[str, Sequence[Timed]]) -> list[Finding]:
    """Report the time of all layers together, and the layers kept although slower alone."""
    if not now:
        return []
    totals = zip(mix.plan.batches, _totals(now), strict=True)
    said = ", ".join(f"{t.ratio:.2f}x of float at batch {batch}" for batch, t in totals)
    slow = [name for name, timed in now.items() if any(t.loses for t in timed)]
    kept = f"; slower alone, kept for the memory: {', '.join(slow[:4])}" if slow else ""
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    return [Finding("dispatch", "layers together", len(now), "layers", f"{said}{kept}{more}")]
