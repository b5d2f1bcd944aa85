"""Worth of drafts: how often their tokens are accepted, and what one more token in a step costs.

The k-th token of a draft is accepted with about p^k, p counted for each sequence, and costs what one more token in a
step was measured to cost, and what it takes to draft it. On a CPU, where few rows already fill the machine, that is a
lot.
"""

from __future__ import annotations

import msgspec

MUCH_FASTER = 0.7  # a step of one token, against what was believed


class DraftStats(msgspec.Struct):
    """Totals over all sequences; a step yields 1 + accepted / checks tokens for a sequence with drafts."""

    checks: int = 0
    drafted: int = 0
    accepted: int = 0
    declined: int = 0  # times that a draft was at hand, or could be made, and was not worth trying
    token_cost: float = 0.0  # of one drafted token, in steps of one token

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft that was verified."""
        self.checks += 1
        self.drafted += drafted
        self.accepted += accepted

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
            before = self._plain.get(sequences)
            # Other work makes a step slower, and nothing makes it faster: what was so much too long is forgotten.
            is_wrong = before is not None and seconds < MUCH_FASTER * before
            self._plain[sequences] = seconds if is_wrong else averaged(before, seconds)
        elif sequences in self._plain:
            plain = self._plain[sequences]
            # A step that was disturbed from outside says nothing: at most what a step of its own would cost.
            each = min(max((seconds - plain) / more, 0.0), plain)
            self._more[sequences] = averaged(self._more.get(sequences), each)

    def plain(self, sequences: int) -> float | None:
        """Return the seconds of a step of one token for each of `sequences`; None before it was measured."""
        return self._plain.get(sequences)

    def ratio(self, sequences: int) -> float:
        """Return the cost of one more token relative to one token of one sequence; at 1 drafts can't pay."""
        plain, more = self._plain.get(sequences), self._more.get(sequences)
        if not plain or more is None:
            return self._prior
        return min(more * sequences / plain, 1.0)


class AcceptanceRate:
    """Recent share of accepted draft tokens; `prior` weighs as much as two tokens.

    `patience`, `retry`: of `length`, checks before drafts may end, and chances until one is tried again.
    """

    def __init__(self, prior: float, patience: int = 0, retry: int = 0) -> None:
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

    def best_length(self, most: int, cost: float) -> int:
        """Return how many tokens are worth drafting, at most `most`.

        One more is worth it while what it adds, `chance` tokens for `cost` steps, is above what the step brings
        without it, `tokens` for `steps`.
        """
        count, chance, tokens, steps = 0, self.rate, 1.0, 1.0
        while count < most and chance * steps > cost * tokens:
            count, tokens, steps, chance = count + 1, tokens + chance, steps + cost, chance * self.rate
        return count

    def length(self, most: int, cost: float, floor: float) -> int:
        """Return `best_length`, 0 below a rate of `floor`; after a while without any, one token is tried again."""
        count = self.best_length(most, cost)
        if self.checks >= self._patience and self.rate < floor:
            count = 0
        if count or self.checks < self._patience:
            return max(count, 1)
        self._wait += 1
        if self._wait < self._retry:
            return 0
        self._wait, self._retry = 0, min(2 * self._retry, 512)
        return 1


def averaged(before: float | None, value: float) -> float:
    """Return a moving average after one more value; `before` None: there was none."""
    return value if before is None else 0.9 * before + 0.1 * value
