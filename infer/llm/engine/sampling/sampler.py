"""Sampler: logits of many sequences to tokens.

Each row takes one random number, made from the seed of its request, the number of the completion and the position of
the token, and finds its token by the inverse of the cumulative distribution. So the tokens of a sequence depend on
nothing but itself: not on the batch, not on preemption, not on drafts. A draft token is accepted if it equals the
sampled one, which is rejection sampling (Leviathan et al. 2023) for a deterministic draft; the output is the one
without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....errors import GrammarError, InputError
from ....kernels import cpu
from ..requests import TokenLogprob
from ..sequence import Sequence
from . import sampler_cpu, sampler_device
from .logprobs import score
from .penalties import TokenCounts, penalize
from .whisper_timestamp_rules import TranscriptionRules

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class SampleRow(NamedTuple):
    """Row of the logits from which a token of `sequence` is sampled, after `num_drafts` of its draft tokens."""

    sequence: Sequence
    row: int
    num_drafts: int = 0


class SampledTokens(NamedTuple):
    """A token per `SampleRow`, -1 where logits are not finite or no token is allowed; logprobs by index of the row."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprob]


def splitmix64(value: int) -> int:
    """Mix 64 bits (Steele et al. 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int, place: int) -> float:
    """Return a number in [0, 1), a multiple of 2**-53, that is a function of the arguments."""
    return (splitmix64(splitmix64(splitmix64(seed & _MASK) ^ index) ^ place) >> 11) * 2.0**-53


class Sampler:
    """Samples tokens for all sequences of a step. `end_ids`: end tokens, masked until `min_tokens`."""

    def __init__(self, vocab_size: int, end_ids: Many[int]) -> None:
        self.vocab_size, self.end_ids = vocab_size, tuple(end_ids)
        self._native = cpu.built() and cpu.why_not() is None
        self._words = -(-vocab_size // 32)
        self._bitmask = torch.zeros((1, self._words), dtype=torch.int32)

    def __call__(self, logits: Tensor, sample_rows: Many[SampleRow]) -> SampledTokens:
        """Sample a token for each row. `logits`: float32 [rows, vocab], overwritten.

        Rows of one sequence follow each other, in order of `num_drafts`.
        """
        rows = [row_spec.row for row_spec in sample_rows]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        with_logprobs = [
            i
            for i, row_spec in enumerate(sample_rows)
            if row_spec.sequence.state.sampling.logprobs is not None
        ]
        raw = logits[with_logprobs] if with_logprobs else None
        self._process_logits(logits, sample_rows)
        tokens = self.draw(
            logits,
            [row_spec.sequence for row_spec in sample_rows],
            [row_spec.num_drafts for row_spec in sample_rows],
        )
        if raw is None:
            return SampledTokens(tokens, {})
        numbers = [sample_rows[i].sequence.state.sampling.logprobs or 0 for i in with_logprobs]
        found = score(raw, [max(tokens[i], 0) for i in with_logprobs], numbers)
        return SampledTokens(tokens, dict(zip(with_logprobs, found, strict=True)))

    def draw(
        self, logits: Tensor, sequences: Many[Sequence], nums_drafts: Many[int] | None = None
    ) -> list[int]:
        """Sample a token of each row by temperature, top_k, top_p and min_p alone."""
        columns = sampling_columns(sequences, nums_drafts)
        if logits.device.type != "cpu":
            return sampler_device.choose(logits, columns)
        return (cpu.sample if self._native else sampler_cpu.choose)(logits, columns)

    def _process_logits(self, logits: Tensor, sample_rows: Many[SampleRow]) -> None:
        """Apply bias, penalties, masked end tokens, grammars and tokens left out, in place."""
        rows: Any = logits.numpy() if logits.device.type == "cpu" else logits
        for i, row_spec in enumerate(sample_rows):
            for token, bias in row_spec.sequence.state.sampling.logit_bias.items():
                rows[i][token] += bias
        _apply_penalties(logits, sample_rows)
        for i, row_spec in enumerate(sample_rows):
            sequence, row = row_spec.sequence, rows[i]
            state = sequence.state
            sampling = state.sampling
            if ends := forbidden_ends(sequence, self.end_ids, row_spec.num_drafts):
                row[ends] = -torch.inf
            if state.request.transcription is not None:
                _apply_transcription(state.request.transcription, row, row_spec)
            if sequence.grammar is not None and not row_spec.num_drafts:
                self._apply_grammar(rows, i, sample_rows)
            if sampling.allowed_token_ids or state.bad_words:
                _leave_out_tokens(row, row_spec)

    def _apply_grammar(self, rows: Any, first: int, sample_rows: Many[SampleRow]) -> None:
        """Mask the row `first` of a sequence, and those of its drafts as far as the grammar accepts them."""
        sequence, accepted = sample_rows[first].sequence, 0
        grammar = sequence.grammar
        if grammar is None:
            return
        for i in range(first, len(sample_rows)):
            row_spec = sample_rows[i]
            if row_spec.sequence is not sequence:
                break
            if row_spec.num_drafts and not grammar.accept(sequence.draft_tokens[row_spec.num_drafts - 1]):
                break
            accepted = row_spec.num_drafts
            if grammar.finished:
                break
            self._bitmask.fill_(-1)
            grammar.fill(self._bitmask, 0)
            ends = forbidden_ends(sequence, self.end_ids, row_spec.num_drafts)
            bits = allowed_bits(self._bitmask[0], self.vocab_size, ends)
            rows[i][torch.from_numpy(bits == 0) if isinstance(rows, Tensor) else bits == 0] = -torch.inf
        if accepted:
            grammar.rollback(accepted)


def forbidden_ends(sequence: Sequence, end_ids: Many[int], ahead: int) -> list[int]:
    """Return the tokens that would end a completion before its `min_tokens`, `ahead` tokens behind its output."""
    sampling = sequence.state.sampling
    is_short = sequence.num_output_tokens + ahead < sampling.min_tokens
    return [*end_ids, *sampling.stop_token_ids] if is_short else []


def allowed_bits(mask: Tensor, vocab_size: int, forbidden: Many[int]) -> np.ndarray:
    """Return which tokens a mask of a grammar allows, uint8 [vocab]; `GrammarError` where there is none."""
    bits = np.unpackbits(mask.numpy().view(np.uint8), count=vocab_size, bitorder="little")
    bits[list(forbidden)] = 0
    if not bits.any():
        raise GrammarError("no token of this model fits the grammar, or its end comes before min_tokens")
    return bits


def _apply_penalties(logits: Tensor, sample_rows: Many[SampleRow]) -> None:
    """Apply the penalties of all rows to logits float32 [rows, vocab], in place, on any device.

    A row after drafts counts these too; nothing of them is left behind.
    """
    columns: list[tuple[float, ...]] = []  # of each row: its number, and its three penalties
    known: list[tuple[np.ndarray, np.ndarray]] = []
    for i, (sequence, _, num_drafts) in enumerate(sample_rows):
        state, s, counts = sequence.state, sequence.state.sampling, sequence.token_counts
        if not state.has_penalties:
            continue
        if counts is None:  # its output so far was sampled on a device
            counts = sequence.token_counts = TokenCounts(state.prompt, sequence.tokens[state.prompt_length :])
        if num_drafts:
            counts.add(sequence.draft_tokens[num_drafts - 1])
        columns.append((i, s.repetition_penalty, s.frequency_penalty, s.presence_penalty))
        known.append(counts.read())
        if num_drafts and (i + 1 == len(sample_rows) or sample_rows[i + 1].sequence is not sequence):
            counts.remove(sequence.draft_tokens[:num_drafts])
    if not known:
        return
    tokens, seen = (np.concatenate(parts) for parts in zip(*known, strict=True))
    each = np.array(columns, np.float32).repeat([len(ids) for ids, _ in known], axis=0).T
    parts: Any = tokens, each[0].astype(np.int64), seen, *each[1:]
    values: Any = logits
    if logits.device.type == "cpu":
        values = logits.numpy()
    else:
        parts = [torch.from_numpy(np.ascontiguousarray(part)).to(logits.device) for part in parts]
    token, row, count, *penalties = parts
    values[row, token] = penalize(values[row, token], count, *penalties)


def _leave_out_tokens(row: Any, row_spec: SampleRow) -> None:
    """Mask the tokens of a row that `allowed_token_ids` lacks, and those that would complete a bad word, in place."""
    sequence, num_drafts = row_spec.sequence, row_spec.num_drafts
    state = sequence.state
    if len(state.allowed_tokens):
        allowed: Any = state.allowed_tokens
        if isinstance(row, Tensor):
            allowed = torch.from_numpy(allowed).to(row.device)
        kept = row[allowed]
        row[:] = -torch.inf
        row[allowed] = kept
    output = sequence.last_output(max(map(len, state.bad_words), default=0), num_drafts)
    for *before, last in state.bad_words:
        if not before or output[-len(before) :] == before:
            row[last] = -torch.inf
    if not num_drafts and bool((row == -torch.inf).all()):
        said = "no token is left by allowed_token_ids, bad_words and the other constraints"
        raise InputError(said, where="allowed_token_ids" if len(state.allowed_tokens) else "bad_words")


def _apply_transcription(rules: TranscriptionRules, row: Any, row_spec: SampleRow) -> None:
    """Apply the rules of a transcript to one row of logits, in place."""
    sequence = row_spec.sequence
    output = sequence.last_output(len(sequence.tokens), row_spec.num_drafts)
    if isinstance(row, Tensor):
        values = row.float().cpu().numpy()
        rules.apply(values, output)
        row.copy_(torch.from_numpy(values))
    else:
        rules.apply(row, output)


def sampling_columns(
    sequences: Many[Sequence], nums_drafts: Many[int] | None = None, ahead: int = 0
) -> np.ndarray:
    """Return float64 [rows, 5]: temperature, top_k, top_p, min_p, and the number in [0, 1) of the token's position.

    A row of zeros takes the most likely token. `ahead`: tokens that are sampled, but not read.
    """
    columns = np.zeros((len(sequences), 5))
    for i, sequence in enumerate(sequences):
        s = sequence.state.sampling
        if s.temperature > 0:
            place = sequence.num_output_tokens + ahead + (nums_drafts[i] if nums_drafts else 0)
            number = uniform(sequence.state.seed, sequence.index, place)
            columns[i] = s.temperature, max(s.top_k, 0), s.top_p, s.min_p, number
    return columns
