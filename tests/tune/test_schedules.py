"""Learning rates over a run."""

from __future__ import annotations

import pytest

from infer.tune.schedules import factor
from infer.tune.settings import SCHEDULES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_rises_in_the_warmup_and_never_leaves_its_bounds(schedule: str) -> None:
    shares = [i / 100 for i in range(101)]
    factors = [factor(schedule, share, 0.1) for share in shares]
    assert factors[:11] == sorted(factors[:11])
    assert factors[10] == pytest.approx(1.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert all(0 <= each <= 1 for each in factors)


def test_each_schedule_ends_where_it_says() -> None:
    assert factor("cosine", 1.0, 0.1) == pytest.approx(0.1)
    assert factor("linear", 1.0, 0.1) == 0
    assert factor("wsd", 0.8, 0.1) == pytest.approx(1.0)
    assert factor("wsd", 0.9, 0.1) == pytest.approx(0.5)
    assert factor("constant", 1.0, 0.0) == 1
    assert factor("cosine", 0.0, 1.0) > 0
