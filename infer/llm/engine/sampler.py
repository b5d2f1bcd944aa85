"""Logits → tokens, many sequences at once.

Each row takes one random number, made from the seed of its request, the number of the completion and the place of
the token, and finds its token by the inverse of the cumulative distribution. So what a sequence draws depends on
nothing but itself: not on the batch, not on preemption, not on drafts. A draft holds where the draw is the drafted
token, which is rejection sampling (Leviathan et al. 2023) for a draft that is certain of itself, and the outcome is the
very one that would have come without it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import GrammarError
from ...kernels import cpu
from .logprobs import score
from .penalties import Counts
from .requests import TokenLogprob
from .sampler_cpu import draw
from .sampler_device import choose
from .sequence import Sequence

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class Pick(NamedTuple):
    """A token is wanted for `sequence` from this row of the logits, after `ahead` of its drafts."""

    sequence: Sequence
    row: int
    ahead: int = 0


class Drawn(NamedTuple):
    """A token for each pick, -1 where logits are not finite or none is allowed; logprobs by number of the pick."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprob]


def mix(value: int) -> int:
    """splitmix64 (Steele et al. 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int, place: int) -> float:
    """In [0, 1), a multiple of 2**-53."""
    return (mix(mix(mix(seed & _MASK) ^ index) ^ place) >> 11) * 2.0**-53


class Sampler:
    """`ends`: tokens that end a completion, forbidden until `min_tokens`."""

    def __init__(self, vocab_size: int, ends: Many[int]) -> None:
        self.vocab_size, self.ends = vocab_size, tuple(ends)
        self._native = cpu.built() and cpu.why_not() is None
        self._words = -(-vocab_size // 32)
        self._bitmask = torch.zeros((1, self._words), dtype=torch.int32)

    def __call__(self, logits: Tensor, picks: Many[Pick]) -> Drawn:
        """`logits` float32 [rows, vocab], overwritten. A sequence's picks stand together, in order of `ahead`."""
        rows = [pick.row for pick in picks]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        wanted = [i for i, pick in enumerate(picks) if pick.sequence.job.sampling.logprobs is not None]
        raw = logits[wanted] if wanted else None
        self._shape(logits, picks)
        tokens = self.draw(logits, [pick.sequence for pick in picks], [pick.ahead for pick in picks])
        if raw is None:
            return Drawn(tokens, {})
        numbers = [picks[i].sequence.job.sampling.logprobs or 0 for i in wanted]
        found = score(raw, [max(tokens[i], 0) for i in wanted], numbers)
        return Drawn(tokens, dict(zip(wanted, found, strict=True)))

    def draw(self, logits: Tensor, sequences: Many[Sequence], aheads: Many[int] | None = None) -> list[int]:
        """A token of each row by temperature and cuts alone."""
        if self._native and logits.device.type == "cpu":
            return cpu.sample(logits, _wishes(sequences, aheads))
        tokens, top = _best(logits)
        hot = [i for i, sequence in enumerate(sequences) if sequence.job.sampling.temperature > 0]
        if hot:
            samplings = [sequences[i].job.sampling for i in hot]
            places = [_place(sequences[i], aheads[i] if aheads else 0) for i in hot]
            if logits.device.type == "cpu":
                rows = logits.numpy()
                for i, sampling, place in zip(hot, samplings, places, strict=True):
                    if top[i] - top[i] == 0:
                        tokens[i] = draw(rows[i], top[i], sampling, place)
            else:
                values = logits if len(hot) == len(logits) else logits[hot]
                for i, token in zip(hot, choose(values, samplings, places), strict=True):
                    tokens[i] = token
        return [token if value - value == 0 else -1 for token, value in zip(tokens, top, strict=True)]

    def _shape(self, logits: Tensor, picks: Many[Pick]) -> None:
        """Bias, penalties, forbidden ends and grammar, in place."""
        rows: Any = logits.numpy() if logits.device.type == "cpu" else logits
        for i, pick in enumerate(picks):
            sequence, row = pick.sequence, rows[i]
            job = sequence.job
            sampling = job.sampling
            if sampling.logit_bias:
                for token, bias in sampling.logit_bias.items():
                    row[token] += bias
            if job.penalised:
                if sequence.counts is None:
                    sequence.counts = Counts(job.request.prompt)
                if pick.ahead:
                    sequence.counts.add(sequence.draft[pick.ahead - 1])
                sequence.counts.apply(row, sampling)
                if pick.ahead and (i + 1 == len(picks) or picks[i + 1].sequence is not sequence):
                    sequence.counts.take_back(sequence.draft[: pick.ahead])
            if sequence.outputs + pick.ahead < sampling.min_tokens:
                row[[*self.ends, *sampling.stop_token_ids]] = -torch.inf
            if sequence.grammar is not None and not pick.ahead:
                self._constrain(rows, i, picks)

    def _constrain(self, rows: Any, first: int, picks: Many[Pick]) -> None:
        """The row `first` of a sequence, and those of its drafts as far as the grammar goes along."""
        sequence, accepted = picks[first].sequence, 0
        grammar = sequence.grammar
        if grammar is None:
            return
        for i in range(first, len(picks)):
            pick = picks[i]
            if pick.sequence is not sequence:
                break
            if pick.ahead and not grammar.accept(sequence.draft[pick.ahead - 1]):
                break
            accepted = pick.ahead
            if grammar.finished:
                break
            self._bitmask.fill_(-1)
            grammar.fill(self._bitmask, 0)
            bits = np.unpackbits(
                self._bitmask[0].numpy().view(np.uint8), count=self.vocab_size, bitorder="little"
            )
            if sequence.outputs + pick.ahead < sequence.job.sampling.min_tokens:
                bits[[*self.ends, *sequence.job.sampling.stop_token_ids]] = 0
            if not bits.any():
                raise GrammarError(
                    "no token of this model fits the grammar, or its end comes before min_tokens"
                )
            rows[i][torch.from_numpy(bits == 0) if isinstance(rows, Tensor) else bits == 0] = -torch.inf
        if accepted:
            grammar.rollback(accepted)


def _wishes(sequences: Many[Sequence], aheads: Many[int] | None) -> np.ndarray:
    """What the native sampler is asked for each row, float64 [rows, 5]; all 0: the most likely token."""
    asked = np.zeros((len(sequences), 5))
    for i, sequence in enumerate(sequences):
        s = sequence.job.sampling
        if s.temperature > 0:
            place = _place(sequence, aheads[i] if aheads else 0)
            asked[i] = s.temperature, s.top_k, s.top_p, s.min_p, place
    return asked


def _place(sequence: Sequence, ahead: int) -> float:
    return uniform(sequence.job.seed, sequence.index, sequence.outputs + ahead)


def _best(logits: Tensor) -> tuple[list[int], list[float]]:
    """Of each row the most likely token and its logit; a row with NaN gives NaN."""
    if logits.device.type != "cpu":
        top, ids = logits.max(-1)
        return ids.tolist(), top.tolist()
    rows = logits.numpy()  # whose argmax is twenty times as fast as torch's on a CPU
    best = rows.argmax(-1)
    return best.tolist(), rows[np.arange(len(rows)), best].tolist()
