"""Log probabilities of given texts, in windows where a text is longer than the context."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InputError
from ..llm.completion import Score, merge_logprobs, scoring_windows
from ..llm.engine.requests import Request
from ..llm.engine.sampling.sampling_options import Sampling
from ..llm.llm import LanguageModel
from ..llm.request_streams import complete, new_id

Prompt = str | Sequence[int]


def score_texts(
    language_model: LanguageModel, texts: Sequence[Prompt], *, special: bool = True
) -> list[Score]:
    """Score texts or token ids, all windows together; see `TextGeneration.score`.

    Raises `InputError` for a text without tokens.
    """
    ids = [
        language_model.encode(r, special) if isinstance(r, str) else language_model.prompt_ids(r)
        for r in texts
    ]
    for index, row in enumerate(ids):
        if not row:
            raise InputError("expected at least one token", where=f"texts[{index}]")
    cuts = [scoring_windows(len(row), language_model.context) for row in ids]
    sampling = Sampling(max_tokens=0, prompt_logprobs=0)
    requests = [
        Request(id=new_id(), prompt=row[start:stop], sampling=sampling)
        for row, cut in zip(ids, cuts, strict=True)
        for start, stop, _ in cut
    ]
    read = iter(complete(language_model.engine_client, requests))
    scores = []
    for row, cut, text in zip(ids, cuts, texts, strict=True):
        parts = []
        for start, _, first in cut:
            logprobs = next(read)[0].prompt_logprobs or []
            parts.append((first, logprobs[first - start :]))
        size = len(text.encode()) if isinstance(text, str) else None
        scores.append(
            Score(token_ids=row, logprobs=merge_logprobs(row, parts), windows=len(cut), text_bytes=size)
        )
    return scores
