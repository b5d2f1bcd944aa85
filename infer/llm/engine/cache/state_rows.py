"""Rows of the state cache of models with state layers: references, the rows of a step, snapshots for the prefix cache.

A written row is never written again while a sequence holds it. A step reads the row of each sequence and writes
a fresh one, which becomes the sequence's own when the step has succeeded: a step that fails is run again from what was
there before, a fork shares its parent's row, and a snapshot is one more reference, without any copy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from ....errors import InferError
from ..sequence import Sequence


class StateRows:
    """References to the rows of `cache` float32 [rows, floats]; at most `snapshots` rows are snapshots.

    Pages of `page` tokens; without `snapshots` no prefix can be read from the cache.
    """

    def __init__(self, cache: Tensor, page: int, snapshots: int) -> None:
        self.cache, self.page, self.max_snapshots = cache, page, snapshots
        self.ref_counts = [0] * cache.shape[0]
        self._free = list(range(cache.shape[0] - 1, -1, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        self._num_written = 0  # rows of the step that runs which become snapshots

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def inputs(self, work: Many[tuple[Sequence, int]]) -> dict[str, Tensor]:
        """Take the rows that a step writes, and return its state inputs; `work`: sequences and their new tokens.

        A prompt leaves a snapshot behind at its last whole page.
        """
        segments: list[tuple[int, int, int, int]] = []
        at = 0
        for sequence, count in work:
            done, read, end = sequence.num_computed_tokens, sequence.state_row, at + count
            border = self._border(sequence, count)
            if border and (row := self._take_for_snapshot()) is not None:
                sequence.written_rows.append((border, row))
                segments.append((at, at + border - done, read, row))
                at, read = at + border - done, row
            row = self._take()
            sequence.written_rows.append((done + count, row))
            segments.append((at, end, read, row))
            at = end
        return {"state_cache": self.cache, "state_segments": torch.tensor(segments, dtype=torch.int64)}

    def _border(self, sequence: Sequence, count: int) -> int:
        """Return the length at which a snapshot is taken within the next `count` tokens of a sequence, 0 for none.

        The last token of a prompt is always computed, so that a snapshot behind it would not serve the same prompt.
        """
        done, prompt = sequence.num_computed_tokens, sequence.state.prompt_length
        end = done + count
        border = (min(end, prompt - 1) if done < prompt else 0) // self.page * self.page
        return border if self.max_snapshots and done < border < end else 0

    def commit(self, sequence: Sequence) -> None:
        """Adopt the row of the last computed token; keep rows at page ends as snapshots, release the others."""
        done, written = sequence.num_computed_tokens, sequence.written_rows
        self._num_written -= len(written) - 1
        for tokens, row in written:
            if self.max_snapshots and tokens % self.page == 0 and tokens <= done:
                self._snapshot(sequence, tokens, row)
            if tokens == done:
                self.assign(sequence, row)
            self.release(row)
        written.clear()

    def drop_written(self, sequences: Iterable[Sequence]) -> None:
        """Discard the state rows that a failed step wrote."""
        for sequence in sequences:
            self._num_written -= max(len(sequence.written_rows) - 1, 0)
            for _, row in sequence.written_rows:
                self.release(row)
            sequence.written_rows.clear()

    def assign(self, sequence: Sequence, row: int) -> None:
        """Point the sequence at `row`, one reference more, and release the row that it had; -1: no state."""
        if row >= 0:
            self.ref_counts[row] += 1
        if sequence.state_row >= 0:
            self.release(sequence.state_row)
        sequence.state_row = row

    def stop(self, sequence: Sequence) -> None:
        """Release all rows of a sequence that ends or is preempted."""
        self.drop_written([sequence])
        self.assign(sequence, -1)

    def release(self, row: int) -> None:
        """Drop one reference; a row without any is free."""
        self.ref_counts[row] -= 1
        if self.ref_counts[row] == 0:
            self._free.append(row)

    def last_snapshot(self, hashes: Many[bytes]) -> int:
        """Return the length of the longest prefix of these page hashes that ends at a snapshot."""
        return next((n for n in range(len(hashes), 0, -1) if hashes[n - 1] in self._snapshots), 0)

    def restore(self, sequence: Sequence, page_hash: bytes) -> None:
        """Start a sequence from the snapshot at the end of this page."""
        self._snapshots.move_to_end(page_hash)
        self.assign(sequence, self._snapshots[page_hash])

    def _take(self) -> int:
        row = self._free.pop()
        self.ref_counts[row] = 1
        return row

    def _take_for_snapshot(self) -> int | None:
        """Return a row for a snapshot, evicting the least recently used one; None when none can be evicted."""
        if not self._make_room():
            return None
        self._num_written += 1
        return self._take()

    def _make_room(self) -> bool:
        """Evict snapshots until one more fits; False where snapshots of this step fill the room."""
        while self._snapshots and len(self._snapshots) + self._num_written >= self.max_snapshots:
            self._forget(next(iter(self._snapshots)))
        return len(self._snapshots) + self._num_written < self.max_snapshots

    def _snapshot(self, sequence: Sequence, tokens: int, row: int) -> None:
        """Keep the row under the hash of the page that ends there; one of a completion replaces the one before."""
        page_hash = sequence.page_hash(tokens // self.page - 1, self.page)
        if page_hash in self._snapshots:
            return
        if tokens > sequence.state.prompt_length:
            if sequence.snapshot in self._snapshots:
                self._forget(sequence.snapshot)
            sequence.snapshot = page_hash
        if self._make_room():
            self.ref_counts[row] += 1
            self._snapshots[page_hash] = row

    def _forget(self, page_hash: bytes) -> None:
        self.release(self._snapshots.pop(page_hash))

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise `InferError` unless every row is free or held by exactly these sequences and the snapshots."""
        held = Counter(self._snapshots.values())
        for sequence in running:
            held.update(
                row for row in (sequence.state_row, *(r for _, r in sequence.written_rows)) if row >= 0
            )
            if sequence.state_row < 0 < sequence.num_computed_tokens:
                raise InferError("a sequence has computed tokens but no state")
        wrong = [row for row, count in enumerate(self.ref_counts) if count != held[row]]
        if wrong:
            raise InferError(
                f"row {wrong[0]} of the state cache has {self.ref_counts[wrong[0]]} references but "
                f"{held[wrong[0]]} holders"
            )
        if sorted([*self._free, *held]) != list(range(len(self.ref_counts))):
            raise InferError(
                "a row of the state cache is missing from, or twice among, the free and held ones"
            )
