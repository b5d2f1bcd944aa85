"""Drafts of a second, smaller language model of the same vocabulary.

(Leviathan et al., "Fast inference from transformers via speculative decoding", 2023.) The engine verifies drafts, and
its samples depend on seed and position alone, so the output equals the one without drafts. The draft model draws its
tokens with the numbers of the same positions, by the request's own temperature and cuts: where both models agree, the
draws do. It has a cache of its own, in which the beginning that a sequence shares with its last draft is kept, and
computes the drafts of all sequences in common steps. Drafts are as long as is worth their time (`acceptance`), which
here includes the steps of the draft model; a prompt is read only where what is left to write can repay it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple, cast

import torch

from ..step.step_shape import StepShape
from .acceptance import AcceptanceRate, DraftStats, StepCosts, averaged
from .cache.block_manager import BlockManager, default_budget, new_cache, pages_for
from .requests import Request
from .sampling.sampler import Sampler
from .scheduling.engine_limits import EngineLimits
from .sequence import Sequence
from .step_inputs import PagedTokens, StepInputs, StepRunner

MOST = 8  # tokens of a draft
PRIOR = 0.6  # acceptance before any was seen
PLAIN_EVERY = 32  # steps, of which one has no drafts and is timed
TRY_EVERY = (
    128  # steps in which no draft seemed worth its time, after which one token is drafted all the same
)
PRIOR_COST = 0.3  # of one drafted token, in steps, before any was timed


class DraftSequence:
    """State of one completion in the draft model; implements `sequence.Speculator` and `step_inputs.PagedTokens`.

    `tokens`: those of the completion and behind them the last draft; `shared`: how many were the completion's.
    """

    __slots__ = (
        "all_rate", "draft_tokens", "num_computed_tokens", "num_synced_pages", "pages", "rate", "shared", "stats",
        "table_row", "tokens",
    )  # fmt: skip

    def __init__(self, rate: AcceptanceRate, all_rate: AcceptanceRate, stats: DraftStats) -> None:
        self.rate, self.all_rate, self.stats = rate, all_rate, stats
        self.tokens: list[int] = []
        self.draft_tokens: list[int] = []  # none: drafts are tokens here
        self.shared = self.num_computed_tokens = 0
        self.pages: list[int] = []
        self.table_row, self.num_synced_pages = -1, 0

    @property
    def num_new(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.num_computed_tokens

    def observe(self, drafted: int, accepted: int) -> None:
        self.rate.add(drafted, accepted)
        self.all_rate.add(drafted, accepted)
        self.stats.add(drafted, accepted)

    def unread(self, tokens: Many[int]) -> int:
        """Return how many of a completion's tokens its last draft did not read, at least the last one."""
        place, known = self.shared, min(self.num_computed_tokens, len(tokens) - 1)
        while place < known and self.tokens[place] == tokens[place]:
            place += 1
        return len(tokens) - min(place, known)

    def follow(self, tokens: Many[int]) -> None:
        """Take over the completion's tokens; what the last draft had besides them is forgotten."""
        self.num_computed_tokens = len(tokens) - self.unread(tokens)
        self.tokens[self.num_computed_tokens :] = tokens[self.num_computed_tokens :]
        self.shared = len(tokens)


class Wanted(NamedTuple):
    """A draft of `length` tokens to make for a completion."""

    draft: DraftSequence
    sequence: Sequence
    length: int


class DraftModel:
    """Speculation by a step over a cache of its own; implements `drafts.Speculation`.

    `vocab_size`: of the model that verifies; a token beyond it ends a draft. `kv_bytes` None: a share of what is free.
    """

    def __init__(
        self,
        step: StepRunner,
        shape: StepShape,
        *,
        vocab_size: int,
        limits: EngineLimits,
        kv_bytes: int | None = None,
        device: str = "cpu",
        most: int = MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        page_bytes = shape.layers * shape.page_bytes
        budget = kv_bytes
        if budget is None:
            budget = default_budget(page_bytes, shape.page, shape.max_positions, device)
        self._step, self._clock, self.most = step, clock, most
        self._vocab_size, self._step_tokens = vocab_size, limits.step_tokens
        self._cache = new_cache(shape.layers, pages_for(budget, page_bytes), shape.page_bytes, device)
        self._pages = BlockManager(self._cache, shape.page, prefix_caching=False)
        self.context = min(shape.max_positions, self._pages.num_pages * shape.page)
        blocks = -(-self.context // shape.page)
        self._inputs = StepInputs(limits.step_tokens, limits.max_running, blocks, shape.page)
        self._free_rows = list(range(limits.max_running))
        self._held: OrderedDict[DraftSequence, None] = OrderedDict()  # those with pages, the last used last
        self._sampler = Sampler(shape.vocab_size, ())
        self.costs, self.stats = StepCosts(PRIOR_COST), DraftStats(token_cost=PRIOR_COST)
        self._seconds: dict[
            int, float
        ] = {}  # of one more token of a draft, by number of sequences that draft
        self._reading: float | None = None  # seconds of a token of a prompt
        self.rate = AcceptanceRate(PRIOR)  # of all sequences: where a new one begins
        self._sequences, self._steps, self._idle = 1, 0, 0

    def open(self, request: Request) -> DraftSequence | None:
        if request.sampling.max_tokens <= 2:  # noqa: PLR2004 - the first comes from the prompt, the last needs no draft
            return None
        return DraftSequence(AcceptanceRate(self.rate.rate), self.rate, self.stats)

    def measured(self, tokens: int, sequences: int, seconds: float) -> None:
        self._sequences = sequences
        self.costs.add(tokens, sequences, seconds)
        self.stats.token_cost = self.cost

    @property
    def cost(self) -> float:
        """Cost of a drafted token, drafting and verifying, relative to a step of one token."""
        plain = self.costs.plain(self._sequences)
        own = self._seconds.get(self._sequences) or max(self._seconds.values(), default=0.0)
        return min(self.costs.ratio(self._sequences) + (own / plain if plain else 0.0), 1.0)

    def would_draft(self, sequence: Sequence, limit: int) -> bool:
        return self._count(sequence, limit) > 0

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        self._steps += 1
        if self._steps % PLAIN_EVERY == 0:
            return [[] for _ in sequences]
        wanted: list[Wanted] = []
        counts = [self._count(sequence, limit) for sequence, limit in zip(sequences, limits, strict=True)]
        self._idle = 0 if any(counts) else self._idle + 1
        if self._idle == TRY_EVERY and self._room(sequences[0], limits[0]) > 0:
            counts[0] = 1
        for sequence, count in zip(sequences, counts, strict=True):
            if count:
                own = cast("DraftSequence", sequence.speculator)
                own.follow(sequence.tokens)
                wanted.append(Wanted(own, sequence, count))
            else:
                self.stats.declined += 1
        self._idle %= TRY_EVERY
        wanted = self._with_pages(wanted)
        try:
            with torch.inference_mode():
                drafts = self._run(wanted) if wanted else {}
        except BaseException:
            for own, _, _ in wanted:  # nobody knows how much of them was written
                self._drop(own)
            raise
        return [drafts.get(id(sequence), []) for sequence in sequences]

    def _count(self, sequence: Sequence, limit: int) -> int:
        """Return how many tokens are worth drafting, with what has to be read for it; none before a step was timed."""
        own = cast("DraftSequence", sequence.speculator)
        if self.costs.plain(self._sequences) is None:
            return 0
        count, unread = (
            own.rate.best_length(self._room(sequence, limit), self.cost),
            own.unread(sequence.tokens),
        )
        is_prompt = unread > self._step_tokens // 2
        return count if not is_prompt or self._repays(unread, sequence, count, own.rate.rate) else 0

    def _room(self, sequence: Sequence, limit: int) -> int:
        """Return the largest length of a draft."""
        return min(limit, self.most, self.context - len(sequence.tokens))

    def _repays(self, unread: int, sequence: Sequence, count: int, rate: float) -> bool:
        """Return True unless reading costs more than drafts can save in the tokens that are left to write."""
        left = sequence.state.sampling.max_tokens - sequence.num_output_tokens
        plain = self.costs.plain(self._sequences)
        if plain is None or self._reading is None:
            return True
        tokens = sum(rate**i for i in range(count + 1))
        saved = plain / self._sequences * (1 - (1 + count * self.cost) / tokens)
        return unread * self._reading < left * saved

    def _with_pages(self, wanted: list[Wanted]) -> list[Wanted]:
        """Give each a row and pages, taking those of sequences that drafted longest ago; without room, no draft."""
        page, busy = self._pages.page_size, {id(own) for own, _, _ in wanted}
        fitting = []
        for item in wanted:
            own = item.draft
            blocks = -(-(len(own.tokens) + item.length) // page) - len(own.pages)
            idle = (other for other in list(self._held) if id(other) not in busy)
            while not self._fits(own, blocks) and (longest := next(idle, None)) is not None:
                self._drop(longest)
            if not self._fits(own, blocks):
                self._drop(own)
                continue
            if own.table_row < 0:
                own.table_row = self._free_rows.pop()
            own.pages += [self._pages.allocate() for _ in range(blocks)]
            self._held[own] = None
            self._held.move_to_end(own)
            fitting.append(item)
        return fitting

    def _fits(self, own: DraftSequence, blocks: int) -> bool:
        """Return True if there are so many pages, and a row."""
        return blocks <= self._pages.num_available and (own.table_row >= 0 or bool(self._free_rows))

    def _drop(self, own: DraftSequence) -> None:
        """Forget what the cache has of a sequence."""
        self._pages.release_all(own.pages)
        if own.table_row >= 0:
            self._free_rows.append(own.table_row)
        own.table_row, own.num_synced_pages = -1, 0
        own.shared = own.num_computed_tokens = 0
        own.tokens.clear()
        self._held.pop(own, None)

    def _run(self, wanted: list[Wanted]) -> dict[int, list[int]]:
        """Return the drafts by id of the sequence; those whose tokens are not read in one step get none yet."""
        started = self._clock()
        going, logits, read = self._read(wanted)
        begun, rounds = self._clock(), 0
        drafts = {id(item.sequence): list[int]() for item in going}
        many = len(going)
        while going:
            tokens = self._sampler.draw(logits, [item.sequence for item in going], [rounds] * len(going))
            going = [
                item for item, token in zip(going, tokens, strict=True) if self._add(item, token, drafts)
            ]
            if going:
                rounds += 1
                inputs = self._inputs.decode([item.draft for item in going])
                logits = self._step.run(inputs | {"kv_cache": self._cache})["logits"]
                for item in going:
                    item.draft.num_computed_tokens += 1
        if read > self.most * len(wanted):
            self._reading = averaged(self._reading, (begun - started) / read)
        else:
            seconds = (self._clock() - started) / (rounds + 1)
            self._seconds[many] = averaged(self._seconds.get(many), seconds)
        return drafts

    def _read(self, wanted: list[Wanted]) -> tuple[list[Wanted], torch.Tensor, int]:
        """Read what is new of the sequences, the shortest first, as much as fits one step.

        Returns those that were read to their end, the logits of their next tokens, and how many tokens were read.
        """
        left, work = self._step_tokens, list[tuple[PagedTokens, int]]()
        ready: list[Wanted] = []
        rows: list[int] = []
        for item in sorted(wanted, key=lambda item: item.draft.num_new):
            own = item.draft
            size = min(own.num_new, left)
            if size < 1:
                break
            work.append((own, size))
            left -= size
            if size == own.num_new:
                ready.append(item)
                rows.append(self._step_tokens - left - 1)
        inputs = self._inputs.build(work, rows)
        logits = self._step.run(inputs | {"kv_cache": self._cache})["logits"]
        for tokens, size in work:
            tokens.num_computed_tokens += size
        return ready, logits, self._step_tokens - left

    def _add(self, item: Wanted, token: int, drafts: dict[int, list[int]]) -> bool:
        """Add a token to a draft; return True if it is to go on."""
        if not 0 <= token < self._vocab_size:
            return False
        drafts[id(item.sequence)].append(token)
        item.draft.tokens.append(token)
        return len(drafts[id(item.sequence)]) < item.length

    def check_integrity(self) -> None:
        """Raise `InferError` when pages and the sequences that hold them do not agree."""
        self._pages.check_integrity(own.pages for own in self._held)
