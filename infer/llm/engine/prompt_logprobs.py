"""Logprobs of the tokens of prompts, from the logits of the tokens before them, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from torch import Tensor

from .logprobs import score
from .requests import TokenLogprob
from .scheduler import Work
from .sequence import Job


class Scored(NamedTuple):
    """Rows `start:stop` of the logits say how likely these tokens of the job's prompt were."""

    job: Job
    start: int
    stop: int
    tokens: list[int]


def rows_to_score(work: Many[Work], rows: list[int]) -> list[Scored]:
    """Append to `rows` the tokens whose logits are wanted. A sequence that starts anew is not scored twice."""
    found, at = [], 0
    for sequence, count in work:
        job = sequence.job
        if job.scoring and job.scores is not None:
            first = max(len(job.scores) - 1, sequence.computed)
            last = min(sequence.computed + count, job.prompt_length - 1)
            if first < last:
                start, offset = len(rows), at - sequence.computed
                rows += range(offset + first, offset + last)
                found.append(Scored(job, start, len(rows), sequence.tokens[first + 1 : last + 1]))
        at += count
    return found


def score_prompts(found: Many[Scored], logits: Tensor) -> list[tuple[Job, list[TokenLogprob]]]:
    answers = []
    for job, start, stop, tokens in found:
        number = job.sampling.prompt_logprobs or 0
        answers.append((job, score(logits[start:stop], tokens, [number] * len(tokens))))
    return answers
