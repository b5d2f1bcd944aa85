"""Logits → tokens, many sequences at once.

Each row takes one random number, made from the seed of its request, the number of the completion and the place of
the token, and finds its token by the inverse of the cumulative distribution. So what a sequence draws depends on
nothing but itself: not on the batch, not on preemption, not on drafts. A draft holds where the draw is the drafted
token, which is rejection sampling (Leviathan et al. 2023) for a draft that is certain of itself, and the outcome is the
very one that would have come without it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .logprobs import score
from .penalties import Counts
from .requests import TokenLogprob
from .sequence import Sequence
from .truncation import choose_all, choose_cut

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class Pick(NamedTuple):
    """A token is wanted for `sequence` from this row of the logits, after `ahead` of its drafts."""

    sequence: Sequence
    row: int
    ahead: int = 0


class Picked(NamedTuple):
    token: int  # -1: no token, since the logits are not finite or none is allowed
    logprob: TokenLogprob | None = None


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
        self._words = -(-vocab_size // 32)
        self._bitmask = torch.zeros((1, self._words), dtype=torch.int32)

    def __call__(self, logits: Tensor, picks: Many[Pick]) -> list[Picked]:
        """`logits` float32 [rows, vocab], overwritten. A sequence's picks stand together, in order of `ahead`."""
        if any(pick.row != i for i, pick in enumerate(picks)) or len(picks) != len(logits):
            logits = logits[[pick.row for pick in picks]]
        if all(pick.sequence.plain for pick in picks):
            return [
                Picked(token) if value - value == 0 else Picked(-1)
                for token, value in zip(*_best(logits), strict=True)
            ]
        wanted = [i for i, pick in enumerate(picks) if pick.sequence.job.sampling.logprobs is not None]
        raw = logits[wanted] if wanted else None
        self._shape(logits, picks)
        tokens = self._draw(logits, picks)
        scores: dict[int, TokenLogprob] = {}
        if raw is not None:
            numbers = [picks[i].sequence.job.sampling.logprobs or 0 for i in wanted]
            found = score(raw, [max(tokens[i], 0) for i in wanted], numbers)
            scores = dict(zip(wanted, found, strict=True))
        return [Picked(token, scores.get(i)) for i, token in enumerate(tokens)]

    def _shape(self, logits: Tensor, picks: Many[Pick]) -> None:
        """Bias, penalties, forbidden ends and grammar, in place."""
        for i, pick in enumerate(picks):
            sequence, row = pick.sequence, logits[i]
            job = sequence.job
            sampling = job.sampling
            if sampling.logit_bias:
                row[list(sampling.logit_bias)] += torch.tensor(
                    list(sampling.logit_bias.values()), device=row.device, dtype=row.dtype
                )
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
                self._constrain(logits, i, picks)

    def _constrain(self, logits: Tensor, first: int, picks: Many[Pick]) -> None:
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
            logits[i].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)
        if accepted:
            grammar.rollback(accepted)

    def _draw(self, logits: Tensor, picks: Many[Pick]) -> list[int]:
        samplings = [pick.sequence.job.sampling for pick in picks]
        tokens = [-1] * len(picks)
        greedy = [i for i, s in enumerate(samplings) if s.temperature == 0]
        cut = [
            i
            for i, s in enumerate(samplings)
            if s.temperature > 0 and (0 < s.top_k < self.vocab_size or s.top_p < 1 or s.min_p > 0)
        ]
        rest = sorted(set(range(len(picks))) - set(greedy) - set(cut))
        best, top = _best(logits)
        for i in greedy:
            tokens[i] = best[i]
        for rows, choose in ((cut, choose_cut), (rest, choose_all)):
            if not rows:
                continue
            named = [picks[i] for i in rows]
            draws = [
                uniform(p.sequence.job.seed, p.sequence.index, p.sequence.outputs + p.ahead) for p in named
            ]
            values = logits if len(rows) == len(logits) else logits[rows]
            for i, token in zip(rows, choose(values, [samplings[i] for i in rows], draws), strict=True):
                tokens[i] = token
        return [token if value - value == 0 else -1 for token, value in zip(tokens, top, strict=True)]


def _best(logits: Tensor) -> tuple[list[int], list[float]]:
    """Of each row the most likely token and its logit; a row with NaN gives NaN."""
    if logits.device.type != "cpu":
        top, ids = logits.max(-1)
        return ids.tolist(), top.tolist()
    rows = logits.numpy()  # whose argmax is twenty times as fast as torch's on a CPU
    best = rows.argmax(-1)
    return best.tolist(), rows[np.arange(len(rows)), best].tolist()
