"""Drafts by prompt lookup: the tokens that followed the last ones when they occurred before, in prompt or output.

(Saxena, "Prompt lookup decoding", 2023.) The engine verifies drafts, and its samples depend on seed and position alone,
so the output equals the one without drafts. A draft is as long as is worth its time (`acceptance`), its acceptance
counted for each sequence and length of match.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from typing import cast

from .acceptance import AcceptanceRate, DraftStats, StepCosts
from .requests import Request
from .sequence import Sequence

WINDOW = 1 << 15  # tokens of the prompt's end that are searched
MAX_MATCH = 8  # tokens compared: beyond, matches do not get better
MAX_CANDIDATES = 16  # earlier places looked at for the longest match
MATCH_CLASSES = 3  # lengths of match that are counted apart: 1, 2, 3 and more


class PromptLookup:
    """Prompt lookup decoding; implements `drafts.Speculation`.

    `most`: tokens of a draft; `floor`: the acceptance below which drafting stops after `patience` checks, to be tried
    again after `retry` chances, then twice as many, and so on.
    """

    def __init__(
        self,
        most: int = 4,
        *,
        floor: float = 0.15,
        patience: int = 8,
        retry: int = 32,
        prior_cost: float = 0.3,
    ) -> None:
        self.most, self.floor, self.patience, self.retry = most, floor, patience, retry
        self.costs, self.stats = StepCosts(prior_cost), DraftStats(token_cost=prior_cost)
        self._sequences = 1

    def open(self, request: Request) -> SequenceLookup | None:
        """Return a speculator, or None for one or two tokens, where drafts can't pay."""
        return SequenceLookup(self) if request.sampling.max_tokens > 2 else None

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        return [
            list(cast("SequenceLookup", sequence.speculator).draft(sequence.tokens, limit))
            for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def would_draft(self, sequence: Sequence, limit: int) -> bool:
        return len(cast("SequenceLookup", sequence.speculator).draft(sequence.tokens, limit)) > 1

    def measured(self, tokens: int, sequences: int, seconds: float) -> None:
        """Count the seconds of a step without prefill: `tokens` (drafts included) of `sequences` sequences."""
        self._sequences = sequences
        self.costs.add(tokens, sequences, seconds)
        self.stats.token_cost = self.cost

    @property
    def cost(self) -> float:
        return self.costs.ratio(self._sequences)


class SequenceLookup:
    """Index of one sequence's tokens, from which its drafts come.

    Positions of equal pairs of tokens are chained, the last one first, so that a token is added in constant time and
    the longest match among the last `MAX_CANDIDATES` positions is found by comparing.
    """

    def __init__(self, owner: PromptLookup) -> None:
        self._owner = owner
        self._start = -1  # of what is indexed
        self._next = 0  # first token that is not
        self._pairs: dict[tuple[int, int], int] = {}  # → place of the second token, last seen
        self._singles: dict[int, int] = {}
        self._before = array("i")  # place of the same pair before this one, -1: none
        self._rates = [
            AcceptanceRate(prior, owner.patience, owner.retry) for prior in (0.2, 0.4, 0.6)
        ]  # by length of match
        self._used = 0

    def draft(self, tokens: Many[int], limit: int) -> Many[int]:
        """Return at most `limit` tokens that may follow prompt and output; none when drafting would not pay."""
        place, length = self._match(tokens)
        if not length:
            return ()
        owner, self._used = self._owner, min(length, MATCH_CLASSES) - 1
        count = self._rates[self._used].length(min(limit, owner.most), owner.cost, owner.floor)
        if not count:
            owner.stats.declined += 1
            return ()
        period = len(tokens) - place  # a match that reaches the end goes on with what it drafts
        return [tokens[place + i % period] for i in range(min(count, limit))]

    def observe(self, drafted: int, accepted: int) -> None:
        """Count how many tokens of the last draft that ran were accepted; the draft may have been cut."""
        self._rates[self._used].add(drafted, accepted)
        self._owner.stats.add(drafted, accepted)

    def _match(self, tokens: Many[int]) -> tuple[int, int]:
        """Find the longest earlier match of the end of `tokens`: (position after it, length), (0, 0) for none."""
        self._index(tokens)
        last = len(tokens) - 1
        best, length = 0, 0
        place = self._pairs.get((tokens[last - 1], tokens[last]), -1) if last > self._start else -1
        for _ in range(MAX_CANDIDATES):
            if place < 0 or length >= MAX_MATCH:
                break
            size = 2
            while (
                size < MAX_MATCH
                and place - size >= self._start
                and tokens[place - size] == tokens[last - size]
            ):
                size += 1
            if size > length:
                best, length = place + 1, size
            place = self._before[place - self._start]
        if not length and tokens[last] in self._singles:
            best, length = self._singles[tokens[last]] + 1, 1
        return best, length

    def _index(self, tokens: Many[int]) -> None:
        """Add all tokens but the last, which is the one to match."""
        if self._start < 0:
            self._start = self._next = max(len(tokens) - WINDOW, 0)
        pairs, singles, before = self._pairs, self._singles, self._before
        for place in range(self._next, len(tokens) - 1):
            token = tokens[place]
            pair = (tokens[place - 1], token)
            if place > self._start:
                before.append(pairs.get(pair, -1))
                pairs[pair] = place
            else:
                before.append(-1)
            singles[token] = place
        self._next = max(self._next, len(tokens) - 1)
