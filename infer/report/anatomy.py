"""Where a decode step of a language model goes, by the watch of the native chains that its layers run in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..kernels import native
from ..spec import Finding

STAGE = "decode step"
CALLS, SECONDS = 30, 1.0  # of watching, whichever is over first


def decode_step(call: Callable[[], Any], batch: int) -> list[Finding]:
    """Mean seconds of each part of `call`, as the first of the threads spends them; [] where it has no native chain."""
    call()
    native.watch_chains(on=True)
    began, calls = time.perf_counter(), 0
    while calls < CALLS and time.perf_counter() - began < SECONDS:
        call()
        calls += 1
    took = time.perf_counter() - began
    spent = native.watch_chains(on=False)
    if not any(spent):
        return []
    parts = {
        "weights": spent.multiplying + spent.quantizing,
        "attention": spent.attention,
        "between": spent.rows,
        "waiting": spent.waiting,
        "around": max(took - sum(spent), 0.0),
    }
    why = {
        "weights": "products, and rounding what is multiplied",
        "between": "norms, positions, activations, sums",
        "waiting": "for the other threads",
        "around": "the graph around the layers",
    }
    if not spent.attention:  # of a layer in several chains it is a call of its own
        del parts["attention"]
        why["around"] = "attention, and the graph around the layers"
    return [
        Finding(STAGE, f"{name} at batch {batch}", seconds / calls, "s", why.get(name, ""))
        for name, seconds in parts.items()
    ]


def shares(findings: Sequence[Finding]) -> dict[int, str]:
    """Batch size → `weights 71 %, attention 9 %, …`."""
    rows: dict[int, dict[str, float]] = {}
    for found in findings:
        name, _, batch = found.what.partition(" at batch ")
        if found.stage == STAGE and isinstance(found.value, float):
            rows.setdefault(int(batch), {})[name] = found.value
    return {
        batch: ", ".join(
            f"{name} {100 * seconds / sum(parts.values()):.0f} %" for name, seconds in parts.items()
        )
        for batch, parts in rows.items()
    }
