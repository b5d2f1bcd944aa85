"""Division of the memory for caches: pages of keys and values, and rows of the state of models with state layers."""

from __future__ import annotations

from typing import NamedTuple, Self

from ....errors import ResourceError
from ...step.step_shape import StepShape
from ..scheduling.engine_limits import EngineLimits
from .block_manager import ENOUGH_TOKENS, default_budget, pages_for

STATE_SHARE = 2  # at most one of so many bytes is for states, where there are pages too
SNAPSHOT_SHARE = 4  # of the rows, where memory is short
MAX_SNAPSHOTS = 64


class CacheSizes(NamedTuple):
    """Sizes of the caches of an engine. A running sequence takes two rows, of which a step reads one and writes one."""

    pages: int
    max_running: int
    snapshots: int = 0

    @property
    def state_rows(self) -> int:
        return 2 * self.max_running + self.snapshots

    @classmethod
    def divide(cls, shape: StepShape, limits: EngineLimits, budget_bytes: int | None, device: str) -> Self:
        """Divide `budget_bytes` (None: a share of what is free), with fewer sequences where the states need it.

        Raises `ResourceError` when there is no room for one page, or for the state of one sequence.
        """
        page_bytes, row_bytes = shape.layers * shape.page_bytes, shape.state_bytes
        snapshots = MAX_SNAPSHOTS if limits.prefix_cache else 0
        wanted = cls(0, limits.max_running, snapshots).state_rows * row_bytes
        if budget_bytes is None:
            budget_bytes = default_budget(page_bytes, shape.page, shape.max_positions, device, wanted)
        if not row_bytes:
            return cls(pages_for(budget_bytes, page_bytes), limits.max_running)
        rows = budget_bytes // (STATE_SHARE if page_bytes else 1) // row_bytes
        if rows < 2:
            raise ResourceError(
                f"the caches got {budget_bytes} bytes, but the state of one sequence takes {2 * row_bytes}",
                hint="Give more memory",
            )
        running = rows * (SNAPSHOT_SHARE - 1) // SNAPSHOT_SHARE // 2 if snapshots else rows // 2
        running = min(limits.max_running, max(running, 1))
        sizes = cls(0, running, min(rows - 2 * running, snapshots))
        if page_bytes:
            pages = pages_for(budget_bytes - sizes.state_rows * row_bytes, page_bytes)
        else:  # they take no memory, but tokens are counted by them
            pages = -(-max(ENOUGH_TOKENS, shape.max_positions) // shape.page)
        return sizes._replace(pages=pages)
