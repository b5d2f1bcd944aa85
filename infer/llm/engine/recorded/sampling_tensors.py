"""Parameters, penalties, biases and grammar masks of the sequences that decode, at fixed addresses on the device.

Parameters are staged for each step, in one copy. Sequences with penalties, `logit_bias`, `allowed_token_ids`,
`min_tokens` or a grammar hold a row of `bias` and `counts`, written when they begin; the recorded call counts each
token that it samples.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from ...step.cuda_recorder import Recorder
from ..sampling.penalties import penalize
from ..sampling.sampler import allowed_bits, forbidden_ends
from ..sampling.sampler_device import COLUMNS
from ..sequence import Sequence

CONSTRAINED = 64  # sequences at a time that hold a row; each takes 8 bytes for each token of the vocabulary
_WIDTH = COLUMNS + 5  # then rows of `last_tokens` and of the constraints, and three penalties


class SamplingTensors:
    """Tensors of up to `rows` sequences. Row `slots` of `last_tokens`, and the last of `bias`, belong to padding."""

    def __init__(
        self, rows: int, slots: int, vocab_size: int, end_ids: Many[int], device: str, recorder: Recorder
    ) -> None:
        self.vocab_size, self.end_ids, self.device, self._recorder = (
            vocab_size,
            tuple(end_ids),
            device,
            recorder,
        )
        self.words = -(-vocab_size // 32)
        self._padding = slots
        pinned = device.startswith("cuda")
        self._host_numbers = torch.zeros((rows, _WIDTH), dtype=torch.float64, pin_memory=pinned)
        self._host_mask = torch.full((rows, self.words), -1, dtype=torch.int32, pin_memory=pinned)
        self.numbers = torch.zeros(self._host_numbers.shape, dtype=torch.float64, device=device)
        self.mask = torch.full(self._host_mask.shape, -1, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.neutral = min(rows, CONSTRAINED)  # the row of sequences without constraints
        shape = (self.neutral + 1, vocab_size)
        self.bias = torch.zeros(shape, device=device)
        self.counts = torch.zeros(
            shape, dtype=torch.int32, device=device
        )  # 1 of the prompt, 2 for each of the output
        self._free = list(range(self.neutral))
        self._held: dict[Sequence, _Row] = {}
        self._masked = 0  # first rows whose mask on the device is that of a grammar
        self._copied = recorder.new_event()

    def stage(self, sequences: Many[Sequence], columns: np.ndarray, batch: int, ahead: int) -> bool:
        """Stage a step of `sequences`, padded to `batch`; False if they can't be sampled on the device now.

        `columns`: see `sampling_columns`. `ahead`: number of tokens of each that are sampled, but not read. Raises
        `GrammarError` where none is allowed.
        """
        for finished in [sequence for sequence in self._held if sequence.finished]:
            self._free.append(self._held.pop(finished).index)
        rows = [self._row_of(sequence, ahead) for sequence in sequences]
        if None in rows:
            return False
        self._copied.synchronize()
        masks = self._fill_masks(sequences, ahead)
        numbers = self._host_numbers.numpy()
        self._clear(numbers, batch)
        numbers[: len(sequences), :COLUMNS] = columns
        for i, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
            s = sequence.state.sampling
            penalties = s.repetition_penalty, s.frequency_penalty, s.presence_penalty
            numbers[i, COLUMNS:] = sequence.table_row, row, *penalties
            if row != self.neutral:  # the step counts what it samples
                self._held[sequence].counted = len(sequence.tokens) + ahead + 1
        self._recorder.enqueue(lambda: self.numbers.copy_(self._host_numbers, non_blocking=True))
        if masks:
            self._recorder.enqueue(
                lambda: self.mask[:masks].copy_(self._host_mask[:masks], non_blocking=True)
            )
        self._copied.record()
        return True

    def clear(self) -> None:
        """Make all rows padding, so that a call on them changes nothing."""
        self._copied.synchronize()
        self._clear(self._host_numbers.numpy(), len(self._host_numbers))
        self._recorder.enqueue(lambda: self.numbers.copy_(self._host_numbers, non_blocking=True))
        self._copied.record()

    def _clear(self, numbers: np.ndarray, batch: int) -> None:
        numbers[:batch] = 0
        numbers[:batch, COLUMNS], numbers[:batch, COLUMNS + 1] = self._padding, self.neutral

    def forget(self, sequence: Sequence) -> None:
        """Recount a sequence's tokens before the next step, because a token sampled on the device was discarded."""
        if sequence in self._held:
            self._held[sequence].counted = -1

    def parameters(self, batch: int) -> Tensor:
        """Return the sampling parameters of the first rows, as `sampler_device.sample` takes them."""
        return self.numbers[:batch, :COLUMNS]

    def place(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return the rows of `last_tokens` and of the constraints for the first rows, int64 [batch] each."""
        slots, rows = self.numbers[:batch, COLUMNS : COLUMNS + 2].long().unbind(1)
        return slots, rows

    def constrained(self, logits: Tensor) -> Tensor:
        """Apply biases, penalties and masks to logits float32 [batch, vocab], in the order of `Sampler`."""
        batch, vocab = logits.shape
        rows = self.place(batch)[1]
        repetition, frequency, presence = self.numbers[:batch, COLUMNS + 2 :, None].float().unbind(1)
        x = logits + self.bias[rows]
        x = penalize(x, self.counts[rows].float(), repetition.clamp_min(1e-3), frequency, presence)
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (self.mask[:batch, :, None] >> bits & 1).flatten(1)[:, :vocab]
        return torch.where(allowed > 0, x, -torch.inf)

    def count(self, tokens: Tensor) -> None:
        """Count sampled tokens, int64 [batch], -1 or less for none."""
        rows = self.place(len(tokens))[1]
        more = torch.where((tokens >= 0) & (rows < self.neutral), 2, 0).int()
        self.counts.view(-1).scatter_add_(0, rows * self.vocab_size + tokens.clamp_min(0), more)

    def _row_of(self, sequence: Sequence, ahead: int) -> int | None:
        """Return the device row of a sequence's sampling constraints, updated; None if no row is free."""
        state = sequence.state
        if not is_constrained(sequence):
            return self.neutral
        row = self._held.get(sequence)
        if row is None:
            if not self._free:
                return None
            row = self._held[sequence] = _Row(self._free.pop())
        ends = forbidden_ends(sequence, self.end_ids, ahead)
        if row.forbids_end is not bool(ends):
            row.forbids_end = bool(ends)
            self._write(self.bias, row.index, self._bias(sequence, ends))
        if row.counted != len(sequence.tokens) + ahead and state.has_penalties:
            if ahead:
                return None  # the token to count is not known yet
            self._write(self.counts, row.index, self._counts(sequence))
            row.counted = len(sequence.tokens)
        return row.index

    def _write(self, table: Tensor, row: int, values: np.ndarray) -> None:
        host = torch.from_numpy(values)
        self._recorder.enqueue(lambda: table[row].copy_(host))

    def _bias(self, sequence: Sequence, forbidden: list[int]) -> np.ndarray:
        sampling, values = sequence.state.sampling, np.zeros(self.vocab_size, np.float32)
        if sampling.allowed_token_ids:
            values.fill(-np.inf)
            values[sequence.state.allowed_tokens] = 0
        for token, bias in sampling.logit_bias.items():
            values[token] += bias
        values[forbidden] = -np.inf
        return values

    def _counts(self, sequence: Sequence) -> np.ndarray:
        values, start = np.zeros(self.vocab_size, np.int32), sequence.state.prompt_length
        values[sequence.tokens[:start]] = 1
        np.add.at(values, sequence.tokens[start:], 2)
        return values

    def _fill_masks(self, sequences: Many[Sequence], ahead: int) -> int:
        """Stage the masks of grammars; returns how many rows are to be copied."""
        count = len(sequences) if any(sequence.grammar is not None for sequence in sequences) else 0
        rows = self._masked = max(count, self._masked)
        self._host_mask[:rows] = -1
        for i, sequence in enumerate(sequences[:count]):
            if sequence.grammar is not None:
                sequence.grammar.fill(self._host_mask, i)
                ends = forbidden_ends(sequence, self.end_ids, ahead)
                allowed_bits(self._host_mask[i], self.vocab_size, ends)  # raises where none is
        self._masked = count
        return rows


class _Row:
    """Row of the constraints of a sequence, and the part of it that is on the device."""

    def __init__(self, index: int) -> None:
        self.index, self.counted = index, -1
        self.forbids_end: bool | None = None


def is_constrained(sequence: Sequence) -> bool:
    """Return True if sampling needs more than its parameters: penalties, biases, tokens left out or a grammar."""
    state = sequence.state
    return (
        state.has_penalties
        or bool(state.sampling.logit_bias or state.sampling.allowed_token_ids)
        or sequence.grammar is not None
        or sequence.num_output_tokens < state.sampling.min_tokens
    )
