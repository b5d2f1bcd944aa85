"""Admission control of the engine: requests that can't run are refused, and requests beyond the queue limits."""

from __future__ import annotations

from collections.abc import Sequence as Many

from ...errors import InputError, OverloadedError
from ..step.step_shape import StepShape
from .limits import EngineLimits
from .quota import is_beyond_share
from .requests import Request
from .sampling_options import check_range
from .sequence import Sequence

MAX_RETRY_SECONDS = 60.0  # seconds


class Admission:
    """Checks requests before they are queued.

    `context`: tokens of one sequence for which model and cache have room. `texts`: True if there is a tokenizer.
    """

    def __init__(self, limits: EngineLimits, shape: StepShape, context: int, *, texts: bool) -> None:
        self.limits, self.shape, self.context, self.texts = limits, shape, context, texts

    def check(self, request: Request, waiting: Many[Sequence], tokens_per_second: float) -> None:
        """Raise `InputError` or `OverloadedError`."""
        sampling, prompt = request.sampling, request.prompt
        check_range("priority", request.priority)
        sampling.check(self.shape.vocab_size)
        if not prompt:
            raise InputError("expected a prompt of at least one token", where="prompt")
        if min(prompt) < 0 or max(prompt) >= self.shape.vocab_size:
            raise InputError(f"expected token ids between 0 and {self.shape.vocab_size - 1}", where="prompt")
        if sampling.stop and not self.texts:
            raise InputError("stop strings need a tokenizer; use stop_token_ids", where="stop")
        asked = len(prompt) + sampling.max_tokens
        if asked > self.context:
            by_model = self.context == self.shape.max_positions
            raise InputError(
                f"a prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} need {asked} tokens; "
                + f"{'the model has positions for' if by_model else 'the KV cache has pages for'} {self.context}",
                where="prompt" if len(prompt) >= self.context else "max_tokens",
                hint="Shorten the prompt or lower max_tokens"
                + ("" if by_model else ", or give more KV memory"),
            )
        self._queue(request, waiting, tokens_per_second)

    def _queue(self, request: Request, waiting: Many[Sequence], rate: float) -> None:
        waiting, limits, size = tuple(waiting), self.limits, len(request.prompt)
        own = [len(sequence.tokens) for sequence in waiting if sequence.tenant == request.tenant]
        tokens = sum([len(sequence.tokens) for sequence in waiting])
        tenants = len({request.tenant, *(sequence.tenant for sequence in waiting)})
        many = is_beyond_share(len(own) + 1, len(waiting) + 1, tenants, limits.max_queued)
        most = limits.max_queued_tokens
        if not many and (not own or not is_beyond_share(sum(own) + size, tokens + size, tenants, most)):
            return
        full = f"{len(waiting)} requests" if many else f"{tokens} tokens of prompts"
        seconds = min(max(tokens / rate, 1.0), MAX_RETRY_SECONDS) if rate > 0 else 1.0
        raise OverloadedError(f"{full} are waiting already", retry_after=round(seconds, 1))
