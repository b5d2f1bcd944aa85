"""Drafts by prompt lookup: the tokens that followed the last ones when they occurred before, in prompt or output.

(Saxena, "Prompt lookup decoding", 2023.) The engine verifies drafts, and its samples depend on seed and position alone,
so the output equals the one without drafts. This file decides if a draft is worth its time: the k-th token of a draft
is accepted with about p^k, p counted per sequence and per length of match, and costs what one more token in a step was
measured to cost. On a CPU, where few rows already fill the machine, that is a lot.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from .requests import Request

WINDOW = 1 << 15  # tokens of the prompt's end that are searched
MAX_MATCH = 8  # tokens compared: beyond, matches do not get better
MAX_CANDIDATES = 16  # earlier places looked at for the longest match
MATCH_CLASSES = 3  # lengths of match that are counted apart: 1, 2, 3 and more


class LookupStats(msgspec.Struct):
    """Totals over all sequences; a step yields 1 + accepted / checks tokens for a sequence with drafts."""

    checks: int = 0
    drafted: int = 0
    accepted: int = 0
    declined: int = 0  # times there was a match that was not worth trying
    token_cost: float = 0.0  # of one more token, in steps of one token

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


class StepCosts:
    """Moving averages of a step's time: one token for each of `sequences`, and each token beyond."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._plain: dict[int, float] = {}  # seconds, by number of sequences
        self._more: dict[int, float] = {}  # of one more token

    def add(self, tokens: int, sequences: int, seconds: float) -> None:
        more = tokens - sequences
        if more <= 0:
            _average(self._plain, sequences, seconds)
        elif sequences in self._plain:
            plain = self._plain[sequences]
            # A step that was disturbed from outside says nothing: at most what a step of its own would cost.
            _average(self._more, sequences, min(max((seconds - plain) / more, 0.0), plain))

    def ratio(self, sequences: int) -> float:
        """Return the cost of one more token relative to one token of one sequence; at 1 drafts can't pay."""
        plain, more = self._plain.get(sequences), self._more.get(sequences)
        if not plain or more is None:
            return self._prior
        return min(more * sequences / plain, 1.0)


class AcceptanceRate:
    """Recent share of accepted draft tokens; `prior` weighs as much as two tokens."""

    def __init__(self, prior: float, patience: int, retry: int) -> None:
        self._hits, self._tried, self._prior = 0.0, 0.0, prior
        self._patience, self._first, self._retry = patience, retry, retry
        self.checks, self._wait = 0, 0

    @property
    def rate(self) -> float:
        return (self._hits + 2 * self._prior) / (self._tried + 2)

    def add(self, drafted: int, accepted: int) -> None:
        self.checks += 1
        tried = min(accepted + 1, drafted)  # those behind the first that failed were not tried
        self._hits, self._tried = 0.9 * self._hits + accepted, 0.9 * self._tried + tried
        if accepted:
            self._retry = self._first

    def length(self, most: int, cost: float, floor: float) -> int:
        """Return how many tokens are worth drafting; after a while without any, one is tried again."""
        rate, count, chance = self.rate, 0, self.rate
        while count < most and chance > cost:
            count, chance = count + 1, chance * rate
        if self.checks >= self._patience and rate < floor:
            count = 0
        if count or self.checks < self._patience:
            return max(count, 1)
        self._wait += 1
        if self._wait < self._retry:
            return 0
        self._wait, self._retry = 0, min(2 * self._retry, 512)
        return 1


class PromptLookup:
    """Prompt lookup decoding: makes the speculator of each completion, and knows what drafts cost.

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
        self.costs, self.stats = StepCosts(prior_cost), LookupStats(token_cost=prior_cost)
        self._sequences = 1

    def open(self, request: Request) -> SequenceLookup | None:
        """Return a speculator, or None for one or two tokens, where drafts can't pay."""
        return SequenceLookup(self) if request.sampling.max_tokens > 2 else None

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

    def draft(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
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
        stats = self._owner.stats
        stats.checks += 1
        stats.drafted += drafted
        stats.accepted += accepted

    def _match(self, tokens: Sequence[int]) -> tuple[int, int]:
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

    def _index(self, tokens: Sequence[int]) -> None:
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


def _average(table: dict[int, float], key: int, value: float) -> None:
    table[key] = value if key not in table else 0.9 * table[key] + 0.1 * value
