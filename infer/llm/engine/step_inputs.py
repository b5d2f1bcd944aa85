"""The inputs of one step, written into arrays that are kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from .scheduler import Work
from .sequence import Sequence


class Batch:
    """Room for `tokens` tokens of `sequences` sequences of at most `blocks` pages of `page` tokens.

    What `build` returns are views; they hold until the next call.
    """

    def __init__(self, tokens: int, sequences: int, blocks: int, page: int) -> None:
        self.page = page
        self.tables = np.zeros((sequences, blocks), dtype=np.int32)  # by slot of the running sequence
        self._ids, self._positions, self._slots, self._rows = (
            np.zeros(tokens, dtype=np.int64) for _ in range(4)
        )
        self._starts = np.zeros(sequences + 1, dtype=np.int32)
        self._lengths = np.zeros(sequences, dtype=np.int32)
        self._range = np.arange(max(tokens, blocks * page), dtype=np.int64)
        self._each, self._all = torch.arange(sequences + 1, dtype=torch.int32), torch.arange(sequences)

    def decode(self, sequences: Many[Sequence]) -> dict[str, Tensor]:
        """What `build` gives for the next token of each, and its logits."""
        page, count = self.page, len(sequences)
        for sequence in sequences:
            if sequence.synced < len(sequence.pages):
                self._sync(sequence)
        positions = self._positions[:count]
        positions[:] = [s.computed for s in sequences]
        self._ids[:count] = [s.tokens[s.computed] for s in sequences]
        table = self.tables[[s.slot for s in sequences], : max([len(s.pages) for s in sequences])]
        blocks, places = np.divmod(positions, page)
        self._slots[:count] = table[self._range[:count], blocks] * np.int64(page) + places
        self._lengths[:count] = positions
        self._lengths[:count] += 1
        return {
            "token_ids": torch.from_numpy(self._ids[:count]),
            "positions": torch.from_numpy(positions),
            "slot_mapping": torch.from_numpy(self._slots[:count]),
            "block_table": torch.from_numpy(table),
            "query_start": self._each[: count + 1],
            "seq_lens": torch.from_numpy(self._lengths[:count]),
            "logit_rows": self._all[:count],
        }

    def build(self, work: Many[Work], rows: Many[int]) -> dict[str, Tensor]:
        """Inputs but for the cache; `rows`: of which tokens logits are wanted, the last one's if of none."""
        page, at = self.page, 0
        starts, lengths, slots, widest = [0], [], [], 1
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for sequence, count in work:
            done, pages = sequence.computed, sequence.pages
            self._sync(sequence)
            if count == 1:
                if not ids:
                    flush = at
                ids.append(sequence.tokens[done])
                positions.append(done)
                places.append(pages[done // page] * page + done % page)
            else:
                if ids:
                    self._put(flush, ids, positions, places)
                    ids, positions, places = [], [], []
                self._piece(at, sequence, count)
            at += count
            starts.append(at)
            lengths.append(done + count)
            slots.append(sequence.slot)
            if len(pages) > widest:
                widest = len(pages)
        if ids:
            self._put(flush, ids, positions, places)
        count = len(slots)
        self._starts[: count + 1] = starts
        self._lengths[:count] = lengths
        wanted = len(rows) or 1
        self._rows[:wanted] = rows or at - 1
        return {
            "token_ids": torch.from_numpy(self._ids[:at]),
            "positions": torch.from_numpy(self._positions[:at]),
            "slot_mapping": torch.from_numpy(self._slots[:at]),
            "block_table": torch.from_numpy(self.tables[:, :widest][slots]),
            "query_start": torch.from_numpy(self._starts[: count + 1]),
            "seq_lens": torch.from_numpy(self._lengths[:count]),
            "logit_rows": torch.from_numpy(self._rows[:wanted]),
        }

    def _put(self, at: int, ids: list[int], positions: list[int], places: list[int]) -> None:
        stop = at + len(ids)
        self._ids[at:stop], self._positions[at:stop], self._slots[at:stop] = ids, positions, places

    def _piece(self, at: int, sequence: Sequence, count: int) -> None:
        """Several tokens of one sequence, drafts behind its own."""
        done, stop, page = sequence.computed, at + count, self.page
        own = sequence.tokens[done : done + count]
        self._ids[at:stop] = own + sequence.draft[: count - len(own)] if len(own) < count else own
        where = self._range[done : done + count]
        self._positions[at:stop] = where
        pages = self.tables[sequence.slot, where // page].astype(np.int64)
        self._slots[at:stop] = pages * page + where % page

    def _sync(self, sequence: Sequence) -> None:
        have = len(sequence.pages)
        if sequence.synced < have:
            self.tables[sequence.slot, sequence.synced : have] = sequence.pages[sequence.synced :]
            sequence.synced = have
