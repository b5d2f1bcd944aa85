"""Admission control of the engine: requests that can't run are refused, and requests beyond the queue limits."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

from ....errors import InputError, OverloadedError
from ...step.step_shape import SourceShape, StepShape
from ..requests import Request
from ..sampling.sampling_options import check_range
from ..sequence import Sequence
from .engine_limits import EngineLimits, is_beyond_share

MAX_RETRY_SECONDS = 60.0  # seconds


def decoder_start(source: SourceShape, request: Request) -> tuple[int, ...]:
    """Return the start tokens of the decoder; () where that is the prompt, because the encoder reads no text."""
    if not source.reads_text:
        return ()
    forced = request.forced_bos_token_id
    return source.start_ids if forced is None else (source.start_ids[0], forced)


class Admission:
    """Checks requests before they are queued.

    `context`: tokens of one sequence for which model and cache have room. `texts`: True if there is a tokenizer.
    `pages`: of the KV cache.
    """

    def __init__(
        self, limits: EngineLimits, shape: StepShape, context: int, *, texts: bool, pages: int = 0
    ) -> None:
        self.limits, self.shape, self.context, self.texts = limits, shape, context, texts
        self.pages = pages

    def check(self, request: Request, waiting: Many[Sequence], tokens_per_second: float) -> None:
        """Raise `InputError` or `OverloadedError`."""
        sampling, prompt = request.sampling, request.prompt
        check_range("priority", request.priority)
        sampling.check(self.shape.vocab_size)
        if not prompt:
            raise InputError("expected a prompt of at least one token", where="prompt")
        words, source = self.shape.vocab_size, self.shape.source
        if (forced := request.forced_bos_token_id) is not None:
            self._check_forced(forced)
        if source is not None:
            words = self._check_source(source, request) or words
        if min(prompt) < 0 or max(prompt) >= words:
            raise InputError(f"expected token ids between 0 and {words - 1}", where="prompt")
        if sampling.stop and not self.texts:
            raise InputError("stop strings need a tokenizer; use stop_token_ids", where="stop")
        if sampling.bad_words and not self.texts:
            raise InputError("bad words need a tokenizer; use logit_bias", where="bad_words")
        decoded = len((decoder_start(source, request) if source is not None else ()) or prompt)
        asked = decoded + sampling.max_tokens
        if asked > self.context:
            by_model = self.context == self.shape.max_positions
            raise InputError(
                f"a prompt of {decoded} tokens and max_tokens {sampling.max_tokens} need {asked} tokens; "
                + f"{'the model has positions for' if by_model else 'the KV cache has pages for'} {self.context}",
                where="prompt" if decoded >= self.context else "max_tokens",
                hint="Shorten the prompt or lower max_tokens"
                + ("" if by_model else ", or give more KV memory"),
            )
        if source is not None:
            self._check_pages(source.rows(len(prompt)), asked)
        self._queue(request, waiting, tokens_per_second)

    def _check_forced(self, token: int) -> None:
        source = self.shape.source
        if source is None or source.features:
            raise InputError(
                "only an encoder-decoder that reads text translates into a language that a request names",
                where="tgt_lang",
            )
        if not 0 <= token < self.shape.vocab_size:
            raise InputError(
                f"expected a token id between 0 and {self.shape.vocab_size - 1}", where="tgt_lang"
            )

    def _check_source(self, source: SourceShape, request: Request) -> int:
        """Refuse a source that the encoder can't read; returns the size of its vocabulary."""
        if request.sampling.prompt_logprobs is not None:
            why = "an encoder-decoder gives no log probabilities of its prompt, which the encoder reads as a whole"
            raise InputError(why, where="prompt_logprobs")
        if source.features:
            wanted = 4 * math.prod(source.features)
            if request.features is None:
                image = source.name == "pixel_values"
                raise InputError(
                    "expected an image with the prompt: this model writes text about images"
                    if image
                    else "expected a recording with the prompt: this is a speech-to-text model",
                    where="prompt",
                    hint="Send it to /predict, or as image_url to /v1/chat/completions" if image else "",
                )
            if len(request.features) not in (0, wanted):
                sizes = "x".join(map(str, source.features))
                got = f"got {len(request.features)} bytes, expected {wanted}"
                raise InputError(f"expected {source.name} float32 [{sizes}]: {got}", where=source.name)
        if source.reads_text and len(request.prompt) > source.max_tokens:
            raise InputError(
                f"the prompt has {len(request.prompt)} tokens, the encoder reads at most {source.max_tokens}",
                where="prompt",
                hint="Shorten the prompt",
            )
        return source.vocab_size

    def _check_pages(self, rows: int, asked: int) -> None:
        page = self.shape.page
        needed = -(-rows // page) + -(-asked // page)
        if needed > self.pages:
            raise InputError(
                f"a source of {rows} and {asked} tokens need {needed} pages of the KV cache, which has {self.pages}",
                where="prompt",
                hint="Shorten the prompt, lower max_tokens, or give more KV memory",
            )

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
