"""Counters and times of an engine."""

from __future__ import annotations

import msgspec

SMOOTHING = 0.05  # weight of the newest step in the measured rate


class EngineStats(msgspec.Struct):
    """Counts since the start, of tokens, pages and seconds; `prefix_*` count prompt tokens."""

    pages_total: int = 0
    page: int = 0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    cached_tokens: int = 0  # in the prefix cache now, held or not
    preemptions: int = 0
    evictions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefill_tokens: int = 0  # read by the model, recomputed ones included
    decode_tokens: int = 0  # chosen
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of the drafts
    steps: int = 0
    finished: int = 0  # requests
    cancelled: int = 0
    failed: int = 0
    scheduling_seconds: float = 0.0  # planning and the inputs of the steps
    step_seconds: float = 0.0  # the model
    sampling_seconds: float = 0.0
    output_seconds: float = 0.0  # text, ends, bookkeeping
    tokens_per_second: float = 0.0  # lately, read and chosen together
    step_tokens: list[int] = []  # steps of at most 1, 2, 4, … tokens and more than those before

    def count(self, prefill: int, decoded: int, times: tuple[float, float, float, float]) -> None:
        """Add one step. `times`: seconds of building inputs, of the model, of sampling, of outputs."""
        place = max(prefill + decoded - 1, 0).bit_length()
        while len(self.step_tokens) <= place:
            self.step_tokens.append(0)
        self.step_tokens[place] += 1
        self.prefill_tokens += prefill
        self.decode_tokens += decoded
        built, ran, sampled, applied = times
        self.scheduling_seconds += built
        self.step_seconds += ran
        self.sampling_seconds += sampled
        self.output_seconds += applied
        rate = (prefill + decoded) / max(sum(times), 1e-9)
        before = self.tokens_per_second or rate
        self.tokens_per_second = before + SMOOTHING * (rate - before)
