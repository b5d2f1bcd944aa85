"""Format assignment within a budget of bits or of fidelity: solved on measured effects, verified as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import UsageError
from .knapsack import KnapsackOption, ParetoFront
from .sensitivity import LayerSensitivity

PROBES = 8  # whole-model measurements of one search; each halves the range of sizes
Drop = Callable[[dict[str, str]], float]  # first layer name → format: the drop of the whole model


@dataclass(frozen=True)
class BudgetSolution:
    """First layer name → format; `predicted` is the sum of the effects of single layers."""

    formats: dict[str, str]
    num_bytes: int
    bits: float
    predicted: float


def front(layers: Sequence[LayerSensitivity]) -> ParetoFront:
    """Build the knapsack front: every layer's formats as options of bytes against effect."""
    return ParetoFront(
        [[KnapsackOption(f, layer.size[f], effect) for f, effect in layer.effect.items()] for layer in layers]
    )


def for_bits(layers: Sequence[LayerSensitivity], bits: float) -> BudgetSolution:
    """Return the assignment of least predicted effect within `bits` per weight on average; floats count in full.

    Raises `UsageError` when the smallest formats need more.
    """
    count = sum(layer.num_weights for layer in layers)
    solved = front(layers)
    chosen = solved.at(int(bits * count / 8))
    if chosen is None:
        least = solved.smallest * 8 / count
        raise UsageError(
            f"--bits {bits:g} is too few: the smallest formats of these layers take {least:.3f} bits per weight",
            hint=f"Give --bits {least + 0.01:.2f} or more, or a smaller format with --quant",
        )
    return _solution(layers, chosen)


def for_drop(
    layers: Sequence[LayerSensitivity], allowed: float, drop: Drop, probes: int = PROBES
) -> tuple[BudgetSolution, list[tuple[float, float]]]:
    """Return the smallest assignment whose measured drop is within `allowed`, and (bits, drop) of each tried.

    Effects grow as sizes shrink, so the search halves the range of sizes; an assignment counts only as measured.
    When even the largest is not good enough, that one is given.
    """
    solved = front(layers)
    low, high = solved.smallest, solved.largest
    best = _solution(layers, solved.at(high) or [])
    tried: list[tuple[float, float]] = []
    for _ in range(probes):
        size = (low + high) // 2 if tried else low
        made = _solution(layers, solved.at(size) or [])
        measured = drop(made.formats)
        tried.append((made.bits, measured))
        if measured <= allowed:
            best, high = made, made.num_bytes
        else:
            low = size
        if high - low <= max(solved.unit, (solved.largest - solved.smallest) >> 9):
            break
    return best, tried


def _solution(layers: Sequence[LayerSensitivity], chosen: Sequence[KnapsackOption]) -> BudgetSolution:
    formats = {layer.name: option.name for layer, option in zip(layers, chosen, strict=True)}
    size, count = sum(option.size for option in chosen), sum(layer.num_weights for layer in layers)
    return BudgetSolution(formats, size, size * 8 / max(count, 1), sum(option.cost for option in chosen))


def raise_to_target(
    layers: Sequence[LayerSensitivity], now: dict[str, str], target: float, fallback_formats: Sequence[str]
) -> BudgetSolution:
    """Return the assignment of fewest added bytes that reaches the effect sum `target`.

    Layers keep their format or take a larger one. Without such an assignment, the one of least effect is
    returned.
    """
    items = []
    for layer in layers:
        own = now[layer.name]
        better = [r for r in fallback_formats if r in layer.effect and layer.size[r] > layer.size[own]]
        items.append([KnapsackOption(f, layer.size[f], layer.effect[f]) for f in (own, *better)])
    return _solution(layers, ParetoFront(items).within(target))
