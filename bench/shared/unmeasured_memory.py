"""Runs without the process that measures memory, which takes longer than the rest of a small model's."""

from __future__ import annotations

from infer.report.measurements.forked_memory import ForkingProbe
from infer.report.measurements.memory import Memory


def skip_memory() -> None:
    """Have no later run of this process measure the memory of its artifact."""
    ForkingProbe.start = lambda *_: None  # type: ignore[method-assign, assignment]
    ForkingProbe.probe = lambda *_, **__: Memory(failure="not measured here")  # type: ignore[method-assign, assignment]
