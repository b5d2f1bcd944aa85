"""Queue items of several requests: same batches, limits and refusals as single ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from infer.serve.batching import batch_queue
from infer.serve.batching.queue_items import QueueItem
from infer.serve.fast_path.fast_request import GroupItem, RequestGroup
from tests.support.manual_clock_queue import ManualClockQueue


class Owner(RequestGroup):
    """Owner of an item whose results are not read; its requests are names."""

    def __init__(self, requests: list[str]) -> None:
        self.requests = requests  # type: ignore[assignment]

    def split_off(self, count: int, item: QueueItem) -> Owner:
        taken, self.requests = Owner(self.requests[:count]), self.requests[count:]
        return taken


def put(clocked: ManualClockQueue, names: list[str], together: bool, **options: Any) -> None:
    """Queue requests of `rows` rows each, as one item or as one item each."""
    rows, elements = options["rows"], options["elements"]
    deadline = clocked.clock.now + options["timeout"]

    def item(names: list[str]) -> QueueItem:
        array = np.array([[int(name[1:])] for name in names for _ in range(rows)])
        count, work = len(array), (len(array), elements, len(array) * elements * 4)
        rest = deadline, options["priority"], Owner(names), 0
        return GroupItem({"x": array}, {"batch": count}, options["key"], *work, *rest, requests=len(names))

    items = [item(names)] if together else [item([name]) for name in names]
    clocked.queue.insert(items)


def requests_with_rows(items: list[QueueItem]) -> list[tuple[str, list[int]]]:
    """Return requests in the order of their rows, with these."""
    found = []
    for whole in items:
        for item in whole.split() if whole.requests > 1 else [whole]:
            name = item.owner if isinstance(item.owner, str) else item.owner.requests[0]
            found.append((name, item.inputs["x"].ravel().tolist()))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_items_of_several_requests_give_the_batches_of_single_ones(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batch_queue, "LOOK_PAST", 1000
    )  # entries: of single requests there are more to look past
    dice, desks = (
        random.Random(seed),
        [ManualClockQueue(max_batch=8, max_batch_elements=96) for _ in range(2)],
    )
    for clocked in desks:
        clocked.measured(0.01, 0.02)
    number, seen = 0, 0
    for _ in range(60):
        if dice.random() < 0.55:
            names = [f"r{number + at}" for at in range(dice.randint(1, 9))]
            number += len(names)
            options: dict[str, Any] = {
                "rows": dice.randint(1, 3),
                "elements": dice.choice([1, 4, 16]),
                "timeout": dice.choice([0.05, 0.2, 0.5, 60]),
                "priority": dice.choice([1, 2, 2, 2]),
                "key": dice.choice("kkl"),
            }
            for clocked, together in zip(desks, (True, False), strict=True):
                put(clocked, names, together, **options)
        else:
            takens = [clocked.queue.take() for clocked in desks]
            assert requests_with_rows(takens[0].items) == requests_with_rows(takens[1].items)
            assert sorted(requests_with_rows(takens[0].expired)) == sorted(
                requests_with_rows(takens[1].expired)
            )
            assert takens[0].reason == takens[1].reason
            seen += len(takens[0].items)
            for clocked in desks:
                clocked.clock.now += 0.03
                clocked.queue.finish(0.0)
        one, two = (
            (clocked.queue.requests, clocked.queue.rows, clocked.queue.bytes, clocked.ahead())
            for clocked in desks
        )
        assert one == two
    assert seen


def test_a_request_cancelled_in_an_item_removes_only_its_own_rows() -> None:
    clocked = ManualClockQueue()
    put(clocked, ["r1", "r2", "r3"], True, rows=1, elements=4, timeout=60, priority=2, key="k")
    ((*_, waiting),) = clocked.queue.tenant("").items()
    assert clocked.queue.drop(waiting, 1)
    assert (clocked.queue.requests, clocked.queue.rows, clocked.queue.bytes) == (2, 2, 32)
    (item,) = clocked.run(0.1)
    assert requests_with_rows([item]) == [("r1", [1]), ("r3", [3])]
    assert item.sizes == {"batch": 2}
    assert not clocked.queue.drop(item, 0)  # it runs


def test_the_last_request_of_a_late_item_is_tried_when_the_queue_is_empty() -> None:
    clocked = ManualClockQueue()
    clocked.measured(1.0, 1.0)
    put(clocked, ["r1", "r2", "r3"], True, rows=1, elements=4, timeout=0.5, priority=2, key="k")
    taken = clocked.queue.take()
    assert (requests_with_rows(taken.expired), requests_with_rows(taken.items)) == (
        [("r1", [1]), ("r2", [2])],
        [("r3", [3])],
    )
