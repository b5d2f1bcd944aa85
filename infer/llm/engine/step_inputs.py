"""Step of a language model, and its inputs, written into arrays that are reused from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class StepRunner(Protocol):
    """A step of a language model as a backend opens it."""

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the step on the inputs of `llm.step.paged_step`: {"logits": float32 [rows, vocab]}; writes the cache."""


class PagedTokens(Protocol):
    """Tokens over pages of a cache; `num_computed_tokens` of them are there."""

    tokens: list[int]
    draft_tokens: list[int]  # behind them
    num_computed_tokens: int
    pages: list[int]
    table_row: int  # of the table of pages that a step reads
    num_synced_pages: int  # how many pages stand in it


class StepInputs:
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

    def decode(self, sequences: Many[PagedTokens], ahead: int = 0) -> dict[str, Tensor]:
        """Build the inputs of a step of one next token for each sequence, with its logits.

        `ahead` 1: of the token after the next, which a launched step samples; its id is then -1 - row of the sequence.
        """
        page, count = self.page, len(sequences)
        for sequence in sequences:
            if sequence.num_synced_pages < len(sequence.pages):
                self._sync(sequence)
        positions = self._positions[:count]
        positions[:] = [s.num_computed_tokens + ahead for s in sequences]
        self._ids[:count] = [
            -1 - s.table_row if ahead else s.tokens[s.num_computed_tokens] for s in sequences
        ]
        table = self.tables[[s.table_row for s in sequences], : max([len(s.pages) for s in sequences])]
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

    def build(self, work: Many[tuple[PagedTokens, int]], rows: Many[int]) -> dict[str, Tensor]:
        """Build all inputs but the cache. `rows`: tokens whose logits are wanted; if empty, the last token's."""
        page, at = self.page, 0
        starts, lengths, slots, widest = [0], [], [], 1
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for sequence, count in work:
            done, pages = sequence.num_computed_tokens, sequence.pages
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
            slots.append(sequence.table_row)
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

    def _piece(self, at: int, sequence: PagedTokens, count: int) -> None:
        """Write the inputs of several tokens of one sequence, prompt or draft, into the step's buffers."""
        done, stop, page = sequence.num_computed_tokens, at + count, self.page
        own = sequence.tokens[done : done + count]
        self._ids[at:stop] = own + sequence.draft_tokens[: count - len(own)] if len(own) < count else own
        where = self._range[done : done + count]
        self._positions[at:stop] = where
        pages = self.tables[sequence.table_row, where // page].astype(np.int64)
        self._slots[at:stop] = pages * page + where % page

    def _sync(self, sequence: PagedTokens) -> None:
        have = len(sequence.pages)
        if sequence.num_synced_pages < have:
            self.tables[sequence.table_row, sequence.num_synced_pages : have] = sequence.pages[
                sequence.num_synced_pages :
            ]
            sequence.num_synced_pages = have
