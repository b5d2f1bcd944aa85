"""The multiple-choice knapsack against trying every combination."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.compress.assign.knapsack import KnapsackOption, ParetoFront

items = st.lists(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1, width=16)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


def options(rows: list[list[tuple[int, float]]]) -> list[list[KnapsackOption]]:
    return [[KnapsackOption(f"{i}", size, cost) for i, (size, cost) in enumerate(row)] for row in rows]


def every(rows: list[list[KnapsackOption]]) -> list[tuple[int, float]]:
    """(size, cost) of each combination."""
    return [(sum(o.size for o in c), sum(o.cost for o in c)) for c in itertools.product(*rows)]


def total(chosen: list[KnapsackOption]) -> tuple[int, float]:
    return sum(o.size for o in chosen), sum(o.cost for o in chosen)


@given(items, st.integers(1, 300))
@settings(max_examples=150, deadline=None)
def test_knapsack_finds_the_least_cost_within_a_size(rows: list[list[tuple[int, float]]], size: int) -> None:
    front = ParetoFront(options(rows))
    fitting = [cost for taken, cost in every(options(rows)) if taken <= size]
    chosen = front.at(size)
    if not fitting:
        assert chosen is None
        return
    assert total(chosen)[0] <= size
    assert total(chosen)[1] == pytest.approx(min(fitting), abs=1e-9)


@given(items, st.floats(0, 4))
@settings(max_examples=150, deadline=None)
def test_knapsack_finds_the_smallest_size_within_a_cost(
    rows: list[list[tuple[int, float]]], cost: float
) -> None:
    fitting = [size for size, spent in every(options(rows)) if spent <= cost]
    size, spent = total(ParetoFront(options(rows)).within(cost))
    if fitting:
        assert spent <= cost * (1 + 1e-9) + 1e-9
        assert size == min(fitting)
    else:
        assert spent == pytest.approx(min(spent for _, spent in every(options(rows))))


@given(items, st.integers(1, 300))
@settings(max_examples=150, deadline=None)
def test_knapsack_with_rounded_sizes_stays_within_the_size(
    rows: list[list[tuple[int, float]]], size: int
) -> None:
    front, exact = ParetoFront(options(rows), cells=24), ParetoFront(options(rows))
    chosen = front.at(size)
    assert (chosen is None) == (exact.at(size) is None)
    if chosen is not None:
        assert total(chosen)[0] <= size
        spare = exact.at(max(size - front.unit * (len(rows) + 1), exact.smallest))
        assert total(chosen)[1] <= total(spare)[1] + 1e-9


def test_knapsack_returns_options_in_the_order_of_the_items() -> None:
    front = ParetoFront(
        [[KnapsackOption("small", 1, 5.0), KnapsackOption("large", 4, 0.0)], [KnapsackOption("only", 2, 1.0)]]
    )
    assert [o.name for o in front.at(5)] == ["small", "only"]
    assert [o.name for o in front.at(6)] == ["large", "only"]
    assert front.at(2) is None
    assert (front.smallest, front.largest) == (3, 6)


def test_dominated_options_are_never_chosen() -> None:
    front = ParetoFront([[KnapsackOption("worse", 5, 2.0), KnapsackOption("better", 4, 1.0)]])
    assert [o.name for o in front.at(100)] == ["better"]


def test_a_knapsack_of_many_real_layers_is_solved() -> None:
    rows = [
        [KnapsackOption(f, int(bits * (1 << 20)), 2.0 ** (-1.5 * bits) * (1 + i % 7)) for f, bits in
         (("cluster:3", 3.31), ("nf4", 4.17), ("cluster:6", 6.5), ("int8", 8.01), ("float", 32.0))]
        for i in range(200)
    ]  # fmt: skip
    front = ParetoFront(rows)
    budget = int(4.5 * 200 * (1 << 20))
    chosen = front.at(budget)
    assert 0.999 * budget < total(chosen)[0] <= budget
    assert total(chosen)[1] < total([row[1] for row in rows])[1]


def test_an_item_without_options_is_an_error() -> None:
    with pytest.raises(ValueError, match="without options"):
        ParetoFront([[]])
