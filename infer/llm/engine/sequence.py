"""A request in flight and its completions: what the scheduler, the sampler and the engine know of each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .block_manager import chain, root
from .interfaces import Grammar, Speculator
from .requests import Request, TokenLogprob

if TYPE_CHECKING:
    from ..text.stop_strings import TextStream
    from .penalties import Counts

Rank = tuple[float, int, int]


class Job:
    """One request. `rank` orders requests for good: a step of priority is worth `aging` seconds of waiting."""

    def __init__(self, request: Request, number: int, arrival: float, aging: float) -> None:
        self.request, self.sampling = request, request.sampling
        self.rank = (arrival + request.priority * aging, number)
        self.arrival = arrival
        self.begun: float | None = None  # when a step first read of its prompt
        self.prompt_length = len(request.prompt)
        self.adapter = 0  # its slot
        self.root = root(request.adapter or "", request.salt)
        sampling = request.sampling
        self.seed = int.from_bytes(os.urandom(8)) if sampling.seed is None else sampling.seed
        self.sequences: list[Sequence] = []
        self.forked = sampling.n == 1
        self.unfinished = sampling.n
        self.scores: list[TokenLogprob | None] | None = None if sampling.prompt_logprobs is None else [None]
        self.cached_tokens = 0
        self.penalised = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )
        # Whether temperature and cuts are all that shapes its tokens, and nothing but tokens and text is told.
        self.simple = (
            not self.penalised
            and not sampling.logit_bias
            and sampling.logprobs is None
            and sampling.min_tokens == 0
            and request.grammar is None
        )

    def use_adapter(self, slot: int, key: str) -> None:
        self.adapter, self.root = slot, root(key, self.request.salt)

    @property
    def scoring(self) -> bool:
        """Whether logits of prompt tokens are still wanted."""
        return self.scores is not None and len(self.scores) < self.prompt_length

    def add_scores(self, values: list[TokenLogprob]) -> None:
        if self.scores is not None:
            self.scores += values


class Sequence:
    """One completion. `tokens`: prompt and output; the first `computed` are in `pages`, in the cache."""

    __slots__ = (
        "cached", "computed", "counts", "draft", "finished", "grammar", "index", "job", "names", "outputs", "pages",
        "rank", "simple", "slot", "speculator", "synced", "tenant", "text", "tokens",
    )  # fmt: skip

    def __init__(self, job: Job, index: int) -> None:
        self.job, self.index = job, index
        self.rank: Rank = (*job.rank, index)
        self.simple = job.simple
        self.tenant = job.request.tenant
        self.tokens = list(job.request.prompt)
        self.outputs = 0  # how many of the tokens are output
        self.computed = 0
        self.cached = 0  # how many of those were found in the prefix cache, when it last started
        self.pages: list[int] = []
        self.names: list[bytes] = []  # of full pages, as far as asked for
        self.slot = -1  # its row among the running ones
        self.synced = 0  # how many of its pages stand in that row
        self.draft: list[int] = []
        self.finished = False
        self.grammar: Grammar | None = None
        self.speculator: Speculator | None = None
        self.text: TextStream | None = None
        self.counts: Counts | None = None

    def page_name(self, block: int, page: int) -> bytes:
        """Of a full page; the tokens up to its end must be there."""
        while len(self.names) <= block:
            start = len(self.names) * page
            parent = self.names[-1] if self.names else self.job.root
            self.names.append(chain(parent, self.tokens[start : start + page]))
        return self.names[block]
