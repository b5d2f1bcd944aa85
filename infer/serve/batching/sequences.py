"""States of sequences that clients carry on call by call: `sequence_id` of KServe and Triton.

A sequence belongs to the tenant that began it: its id means nothing to any other. Their number and memory are bounded,
and one that is idle for too long is forgotten. Calls of one sequence run one after another; those of several share
batches like any others.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...errors import DeadlineError, InputError, NotFoundError, OverloadedError
from ..limits import ServeLimits
from .collate import Arrays

MOST_WAITING = 64  # calls of one sequence


class SequenceCall(NamedTuple):
    """Sequence that a request belongs to, and whether the request begins or ends it."""

    id: int | str
    start: bool = False
    end: bool = False


@dataclass(eq=False)
class Sequence:
    """One sequence of a tenant. `state`: by input; empty at its beginning."""

    state: Arrays = field(default_factory=dict)
    used: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0

    @property
    def size(self) -> int:
        return sum(array.nbytes for array in self.state.values())


class Sequences:
    """Open sequences of one model, on the event loop only. `states`: input → output that it comes from.

    `shared_by_tenants`: one tenant has at most half of the places.
    """

    def __init__(
        self,
        states: Mapping[str, str],
        limits: ServeLimits,
        clock: Callable[[], float],
        *,
        shared_by_tenants: bool = False,
    ) -> None:
        self._states, self._limits, self._clock = dict(states), limits, clock
        self._each = max(limits.max_sequences // 2, 1) if shared_by_tenants else limits.max_sequences
        self._open: OrderedDict[tuple[str, int | str], Sequence] = OrderedDict()  # the longest idle first

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def turn(
        self, tenant: str, call: SequenceCall, arrays: Arrays, timeout: float
    ) -> AsyncIterator[tuple[Arrays, Callable[[Arrays], None], float]]:
        """Wait for the sequence's turn; yield the inputs with its state, what takes the outputs, and the seconds left.

        Raises `InputError` for a model without state and for a state given in the middle, `NotFoundError` for an id
        that is not open, `OverloadedError` where there are too many, `DeadlineError` where its turn does not come.
        """
        if not self._states:
            raise InputError(
                "parameter sequence_id is not supported: this model carries no state",
                where="request.parameters.sequence_id",
            )
        began = self._clock()
        key = tenant, call.id
        sequence = self._begin(key) if call.start else self._find(key)
        if sequence.waiting >= MOST_WAITING:
            raise OverloadedError(f"{sequence.waiting} calls wait for sequence {call.id!r}")
        sequence.waiting += 1
        try:
            async with asyncio.timeout(timeout):
                await sequence.turn.acquire()
        except TimeoutError as error:
            raise DeadlineError("the request's deadline passed while it waited for its sequence") from error
        finally:
            sequence.waiting -= 1
        try:
            if self._open.get(key) is not sequence:
                raise _unknown(call.id, self._limits.sequence_idle_seconds)
            given = sorted(set(arrays) & set(self._states))
            if given and sequence.state:
                raise InputError(
                    f"the sequence carries the state {given[0]!r}",
                    where="request.inputs",
                    hint="Leave it out, or give it with sequence_start",
                )

            def keep(outputs: Arrays) -> None:
                sequence.state = {name: np.array(outputs[source]) for name, source in self._states.items()}

            yield {**arrays, **sequence.state}, keep, timeout - (self._clock() - began)
            if call.end:
                self._forget(key, sequence)
            else:
                self._bound_memory(key, sequence)
        finally:
            if not sequence.state:  # its first call failed
                self._forget(key, sequence)
            sequence.used = self._clock()
            if self._open.get(key) is sequence:
                self._open.move_to_end(key)
            sequence.turn.release()

    def _find(self, key: tuple[str, int | str]) -> Sequence:
        self._forget_idle()
        found = self._open.get(key)
        if found is None:
            raise _unknown(key[1], self._limits.sequence_idle_seconds)
        return found

    def _begin(self, key: tuple[str, int | str]) -> Sequence:
        """Open a sequence, in place of one of that id: calls of it that wait find it gone."""
        self._forget_idle()
        own = (
            sum(tenant == key[0] for tenant, _ in self._open)
            if self._each < self._limits.max_sequences
            else 0
        )
        if key not in self._open and (len(self._open) >= self._limits.max_sequences or own >= self._each):
            raise OverloadedError(
                f"{own or len(self._open)} sequences are open",
                retry_after=max(self._limits.sequence_idle_seconds / 10, 1.0),
                hint="End those that are over with sequence_end, or raise --limit max_sequences",
            )
        self._open[key] = sequence = Sequence(used=self._clock())
        self._open.move_to_end(key)
        return sequence

    def _forget_idle(self) -> None:
        oldest = self._clock() - self._limits.sequence_idle_seconds
        for key, sequence in list(self._open.items()):
            if sequence.used > oldest:
                return
            if not sequence.turn.locked() and not sequence.waiting:
                del self._open[key]

    def _bound_memory(self, key: tuple[str, int | str], sequence: Sequence) -> None:
        whole = sum(one.size for one in self._open.values())
        if whole > self._limits.max_sequence_bytes:
            self._forget(key, sequence)
            raise OverloadedError(
                f"the states of {len(self._open) + 1} sequences take {whole} bytes",
                hint="End those that are over with sequence_end, or raise --limit max_sequence_bytes",
            )

    def _forget(self, key: tuple[str, int | str], sequence: Sequence) -> None:
        if self._open.get(key) is sequence:
            del self._open[key]
        sequence.state = {}


def _unknown(id: int | str, seconds: float) -> NotFoundError:
    return NotFoundError(
        f"no sequence {str(id)[:64]!r} is open: not begun here, ended, or idle for {math.ceil(seconds)} s",
        where="request.parameters.sequence_id",
        hint="Begin it with sequence_start: true",
    )
