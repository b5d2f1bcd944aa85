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

from ....errors import GrammarError
from ....kernels import cpu
from ..requests import TokenLogprob
from ..sequence import Sequence
from .logprobs import score
from .penalties import TokenCounts
from .sampler_cpu import draw
from .sampler_device import choose, most_likely
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
        if self._native and logits.device.type == "cpu":
            return cpu.sample(logits, _native_params(sequences, nums_drafts))
        tokens, top = _argmax(logits)
        sampled = [i for i, sequence in enumerate(sequences) if sequence.state.sampling.temperature > 0]
        if sampled:
            samplings = [sequences[i].state.sampling for i in sampled]
            places = [_place(sequences[i], nums_drafts[i] if nums_drafts else 0) for i in sampled]
            if logits.device.type == "cpu":
                rows = logits.numpy()
                for i, sampling, place in zip(sampled, samplings, places, strict=True):
                    if top[i] - top[i] == 0:
                        tokens[i] = draw(rows[i], top[i], sampling, place)
            else:
                values = logits if len(sampled) == len(logits) else logits[sampled]
                for i, token in zip(sampled, choose(values, samplings, places), strict=True):
                    tokens[i] = token
        return [token if value - value == 0 else -1 for token, value in zip(tokens, top, strict=True)]

    def _process_logits(self, logits: Tensor, sample_rows: Many[SampleRow]) -> None:
        """Apply bias, penalties, masked end tokens and grammars, in place."""
        rows: Any = logits.numpy() if logits.device.type == "cpu" else logits
        for i, row_spec in enumerate(sample_rows):
            sequence, row = row_spec.sequence, rows[i]
            state = sequence.state
            sampling = state.sampling
            if sampling.logit_bias:
                for token, bias in sampling.logit_bias.items():
                    row[token] += bias
            if state.has_penalties:
                if sequence.token_counts is None:
                    sequence.token_counts = TokenCounts(state.prompt)
                    for token in sequence.tokens[state.prompt_length :]:  # sampled on a device
                        sequence.token_counts.add(token)
                if row_spec.num_drafts:
                    sequence.token_counts.add(sequence.draft_tokens[row_spec.num_drafts - 1])
                sequence.token_counts.apply(row, sampling)
                if row_spec.num_drafts and (
                    i + 1 == len(sample_rows) or sample_rows[i + 1].sequence is not sequence
                ):
                    sequence.token_counts.remove(sequence.draft_tokens[: row_spec.num_drafts])
            if sequence.num_output_tokens + row_spec.num_drafts < sampling.min_tokens:
                row[[*self.end_ids, *sampling.stop_token_ids]] = -torch.inf
            if state.request.transcription is not None:
                _apply_transcription(state.request.transcription, row, row_spec)
            if sequence.grammar is not None and not row_spec.num_drafts:
                self._apply_grammar(rows, i, sample_rows)

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
            bits = np.unpackbits(
                self._bitmask[0].numpy().view(np.uint8), count=self.vocab_size, bitorder="little"
            )
            if sequence.num_output_tokens + row_spec.num_drafts < sequence.state.sampling.min_tokens:
                bits[[*self.end_ids, *sequence.state.sampling.stop_token_ids]] = 0
            if not bits.any():
                raise GrammarError(
                    "no token of this model fits the grammar, or its end comes before min_tokens"
                )
            rows[i][torch.from_numpy(bits == 0) if isinstance(rows, Tensor) else bits == 0] = -torch.inf
        if accepted:
            grammar.rollback(accepted)


def _apply_transcription(rules: TranscriptionRules, row: Any, row_spec: SampleRow) -> None:
    """Apply the rules of a transcript to one row of logits, in place."""
    sequence = row_spec.sequence
    output = [*sequence.tokens[sequence.state.prompt_length :], *sequence.draft_tokens[: row_spec.num_drafts]]
    if isinstance(row, Tensor):
        values = row.float().cpu().numpy()
        rules.apply(values, output)
        row.copy_(torch.from_numpy(values))
    else:
        rules.apply(row, output)


def _native_params(sequences: Many[Sequence], nums_drafts: Many[int] | None) -> np.ndarray:
    """Return the parameters of the native sampler, float64 [rows, 5]; a row of zeros takes the most likely token."""
    asked = np.zeros((len(sequences), 5))
    for i, sequence in enumerate(sequences):
        s = sequence.state.sampling
        if s.temperature > 0:
            place = _place(sequence, nums_drafts[i] if nums_drafts else 0)
            asked[i] = s.temperature, s.top_k, s.top_p, s.min_p, place
    return asked


def number_of(sequence: Sequence, num_unread: int) -> float:
    """Return the random number of a sequence's next token but `num_unread`; 0 where it takes the most likely one."""
    return _place(sequence, num_unread) if sequence.state.sampling.temperature > 0 else 0.0


def _place(sequence: Sequence, num_drafts: int) -> float:
    return uniform(sequence.state.seed, sequence.index, sequence.num_output_tokens + num_drafts)


def _argmax(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the most likely token of each row and its logit; NaN for a row with NaN."""
    if logits.device.type != "cpu":
        return most_likely(logits)
    rows = logits.numpy()  # whose argmax is twenty times as fast as torch's on a CPU
    best = rows.argmax(-1)
    return best.tolist(), rows[np.arange(len(rows)), best].tolist()
