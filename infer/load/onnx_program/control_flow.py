"""If, Loop and Scan: subgraphs are run in Python, so a captured program has the branch and steps of its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .operators import Node, operator
from .values import Sizes, Unsupported, as_tensor, is_static

MOST_STEPS = 1 << 20


def _truth(value: Any) -> bool:
    """Return a condition; of a tensor it is read, which no capture follows."""
    return bool(value.list()[0]) if isinstance(value, Sizes) else bool(value.reshape(-1)[0])


@operator("If")
def if_(node: Node, blocks: Mapping[str, Any], values: Mapping[str, Any], condition: Any) -> tuple[Any, ...]:
    """Run one branch; of two, both as branches of one operator would need equal shapes."""
    if len(blocks) == 1:
        (branch,) = blocks.values()
    else:
        branch = blocks["then_branch" if _truth(condition) else "else_branch"]
    return tuple(branch.run({}, values))


@operator("Loop")
def loop(
    node: Node, blocks: Mapping[str, Any], values: Mapping[str, Any], limit: Any = None, condition: Any = None,
    *state: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the body until its condition fails or the trip count is reached; stack what it gives at each step."""
    body, count = blocks["body"], len(state)
    trips: Any = (
        MOST_STEPS
        if limit is None
        else (limit.list() if isinstance(limit, Sizes) else limit.reshape(-1).tolist())[0]
    )
    carried, going = list(state), condition is None or _truth(condition)
    gathered: list[list[Tensor]] = [[] for _ in range(len(body.outputs) - 1 - count)]
    step = 0
    while going and step < trips:
        given = [Sizes.of(step), Sizes.of(True, torch.bool), *carried]
        found = body.run(dict(zip(body.inputs, given, strict=True)), values)
        going, carried = _truth(found[0]), list(found[1 : 1 + count])
        for rows, value in zip(gathered, found[1 + count :], strict=True):
            rows.append(as_tensor(value))
        step += 1
    return *carried, *(_stacked(rows) for rows in gathered)


def _stacked(rows: list[Tensor]) -> Tensor:
    if not rows:
        raise Unsupported("a loop without a step, whose outputs have no known shape")
    return torch.stack(rows)


@operator("Scan", since=9)
def scan(node: Node, blocks: Mapping[str, Any], values: Mapping[str, Any], *inputs: Any) -> tuple[Any, ...]:
    """Run the body over slices of the scanned inputs and stack its other outputs."""
    body, scanned = blocks["body"], node.get("num_scan_inputs")
    given = [as_tensor(value) for value in inputs]
    state, sequences = given[: len(given) - scanned], given[len(given) - scanned :]
    axes = node.get("scan_input_axes") or [0] * scanned
    backward = node.get("scan_input_directions") or [0] * scanned
    count = len(body.outputs) - len(state)
    steps = sequences[0].shape[axes[0]]
    gathered: list[list[Tensor]] = [[] for _ in range(count)]
    for step in range(int(steps) if is_static(steps) else steps):
        parts = [
            x.select(axis, x.shape[axis] - 1 - step if back else step)
            for x, axis, back in zip(sequences, axes, backward, strict=True)
        ]
        found = [
            as_tensor(v) for v in body.run(dict(zip(body.inputs, [*state, *parts], strict=True)), values)
        ]
        state = found[: len(state)]
        for rows, value in zip(gathered, found[len(state) :], strict=True):
            rows.append(value)
    out_axes = node.get("scan_output_axes") or [0] * count
    out_backward = node.get("scan_output_directions") or [0] * count
    outputs = [
        torch.stack(rows[::-1] if back else rows, axis)
        for rows, axis, back in zip(gathered, out_axes, out_backward, strict=True)
    ]
    return *state, *outputs
